"""What a model computes for a batch, to compare it before and after growth."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from instar.growth.plan import GrowthError
from instar.growth.proof import Probe
from instar.models.hf.pretrained import PretrainedShape
from instar.models.module import evaluating

PROBE_TOKENS = 32
_ROUTERS = "output_router_logits"
"""key of configs with experts, and argument of their models"""


def draw_probe(*shapes: PretrainedShape) -> dict[str, Tensor | bool]:
    """Return a few drawn tokens, as arguments of models of transformers of any of these shapes. The loss is
    that of the tokens alone: the auxiliary one of routers changes with their number."""
    vocab, context = (min(shape.sizes()[axis] for shape in shapes) for axis in ("vocab", "context"))
    size = (2, min(PROBE_TOKENS, context))
    ids = torch.randint(0, vocab, size, generator=torch.Generator().manual_seed(0))
    has_routers = all(_ROUTERS in shape.config for shape in shapes)
    return {"input_ids": ids, "labels": ids} | ({_ROUTERS: False} if has_routers else {})


def to_device(batch: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Return a batch on another device, its floating point tensors in another dtype."""
    if isinstance(batch, Tensor):
        return batch.to(device=device, dtype=dtype if batch.is_floating_point() else None)
    if isinstance(batch, Mapping):
        return {name: to_device(value, device, dtype) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return [to_device(value, device, dtype) for value in batch]
    return batch


def run_probe(module: Module, batch: Any) -> Probe:
    """Run a model on a batch without dropout and autocast.

    Raises:
        GrowthError: it returns no logits.
    """
    device = next(module.parameters()).device.type
    with (
        evaluating(module),
        torch.no_grad(),
        torch.random.fork_rng(),
        torch.autocast(device, enabled=False),
    ):
        torch.manual_seed(0)
        if isinstance(batch, Mapping):
            output = module(**batch)
        else:
            output = module(*batch) if isinstance(batch, list) else module(batch)
    reshard(module)
    logits = (
        output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    )
    if isinstance(logits, tuple | list) and logits:
        logits = logits[0]
    if not isinstance(logits, Tensor):
        raise GrowthError(
            f"on the probe the model returned {type(output).__name__}; it must be a tensor, a tuple that begins "
            "with one, or have logits"
        )
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return Probe(logits, float(loss) if loss is not None else 0.0)


def reshard(model: Module) -> None:
    """Let go of parameters that `fully_shard` gathered, as it does not after a forward pass alone."""
    # importing the module takes a while, and without it there are no sharded modules
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for submodule in model.modules() if fsdp else ():
        if fsdp and isinstance(submodule, fsdp.FSDPModule):
            submodule.reshard()
