"""What is computed to compare a model before and after growth: its outputs for a batch, or those of a twin.

A twin is a small model of the same config, on which operations are tried where the model itself is too large to be compared."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from instar.checkpoint.manifest import CheckpointError
from instar.checkpoint.tensor_file import Outline
from instar.config.sections import Operation
from instar.growth.operators import plan
from instar.growth.plan import GrowthError
from instar.growth.proof import Probe
from instar.models.hf import CONFIG, encode_json_file
from instar.models.hf.config import complete_config, explicit_config
from instar.models.hf.pretrained import PretrainedShape
from instar.models.hf.pretrained_folder import FilePart, file_parts
from instar.models.hf.rope import shorten_rope_factors
from instar.models.hf.weights import write_weights
from instar.models.module import evaluating
from instar.models.shape import ArchitectureError, Parameter

PROBE_TOKENS = 32
_ROUTERS = "output_router_logits"
"""key of configs with experts, and argument of their models"""

_SMALLEST: Mapping[str, int] = {"embed": 16, "mlp": 16, "head_dim": 8}
"""Axes that a twin has narrower, and how small at least."""

_AXES: Mapping[str, str] = {
    "widen_hidden": "embed",
    "widen_mlp": "mlp",
    "grow_head_dim": "head_dim",
}
"""axis that an operation widens"""

_TRIED = 64
"""widths of the residual stream, before a config is given up"""

_STD = 0.2
"""of gains around 1, and of biases"""


def draw_probe(*shapes: PretrainedShape) -> dict[str, Tensor | bool]:
    """Return a few drawn tokens, as arguments of models of transformers of any of these shapes. The loss is
    that of the tokens alone: the auxiliary one of routers changes with their number."""
    vocab, context = (min(shape.sizes()[axis] for shape in shapes) for axis in ("vocab", "context"))
    size = (2, min(PROBE_TOKENS, context))
    ids = torch.randint(0, vocab, size, generator=torch.Generator().manual_seed(0))
    has_routers = all(_ROUTERS in shape.config for shape in shapes)
    return {"input_ids": ids, "labels": ids} | ({_ROUTERS: False} if has_routers else {})


def batch_to_device(batch: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Return a batch on another device, its floating point tensors in another dtype."""
    if isinstance(batch, Tensor):
        return batch.to(device=device, dtype=dtype if batch.is_floating_point() else None)
    if isinstance(batch, Mapping):
        return {name: batch_to_device(value, device, dtype) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return [batch_to_device(value, device, dtype) for value in batch]
    return batch


def run_probe(module: Module, batch: Any) -> Probe:
    """Run a model on a batch without dropout and autocast.

    Raises:
        GrowthError: it returns no logits.
    """
    device = next(module.parameters()).device
    gpus = [device] if device.type == "cuda" else []
    with (
        evaluating(module),
        torch.no_grad(),
        # of all GPUs by default, each of which torch would initialize in every process
        torch.random.fork_rng(gpus, device_type="cuda"),
        torch.autocast(device.type, enabled=False),
    ):
        torch.default_generator.manual_seed(0)
        for gpu in gpus:
            torch.cuda.default_generators[gpu.index].manual_seed(0)
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


@dataclass(frozen=True)
class Twin:
    """A narrow model, and the operations that grow it by the ratios of the large one."""

    shape: PretrainedShape
    operations: tuple[Operation, ...]
    about: str
    """its size, in words"""


def twin_of(shapes: Sequence[PretrainedShape], operations: Sequence[Operation]) -> Twin:
    """Return the twin of a model: narrower, with as many layers, heads, experts and tokens.

    Args:
        shapes: of the model, and after each operation.

    Raises:
        CheckpointError: no small model of this config can be grown so.
    """
    sizes = [shape.sizes() for shape in shapes]
    axes = [axis for axis in _SMALLEST if axis in shapes[0].family.axes]
    units = {axis: math.gcd(*(size[axis] for size in sizes)) for axis in axes}
    why: Exception | None = None
    for times in range(1, _TRIED):
        ratio = {
            axis: (_narrow_unit(axis, unit, sizes[0][axis], times), unit)
            for axis, unit in units.items()
        }
        narrow = [
            {axis: size[axis] // ratio[axis][1] * ratio[axis][0] for axis in axes} for size in sizes
        ]
        try:
            shape = _shrunk(shapes[0], narrow[0])
            smaller = tuple(map(_narrow_operation, operations, narrow[1:]))
            _check_growth(shape, smaller)
        except (ArchitectureError, CheckpointError, GrowthError) as error:
            why = error
            continue
        widths = ", ".join(f"{axis} {narrow[0][axis]:,} for {sizes[0][axis]:,}" for axis in axes)
        return Twin(shape, smaller, widths)
    raise CheckpointError(f"no small model of this config can be grown so: {why}")


def write_twin(shape: PretrainedShape, folder: Path, *, single_experts: bool) -> None:
    """Write a model of this shape with drawn weights, as `save_pretrained` would."""
    table, generator = shape.parameters(), torch.Generator().manual_seed(0)
    tensors = {name: _draw_tensor(entry, generator) for name, entry in table.items()}
    parts = file_parts(shape, single_experts=single_experts)
    folder.mkdir()
    write_weights(
        folder,
        {name: Outline(torch.float32, part.shape) for name, part in parts.items()},
        {name: partial(_part, tensors, part) for name, part in parts.items()},
    )
    (folder / CONFIG).write_bytes(encode_json_file(explicit_config(shape.config)))


def _narrow_unit(axis: str, unit: int, size: int, times: int) -> int:
    """Return what takes the place of the common divisor of all sizes of an axis."""
    smallest = -(-_SMALLEST[axis] * unit // size) * (times if axis == "embed" else 1)
    return min(unit, smallest + smallest % 2)


def _shrunk(shape: PretrainedShape, sizes: Mapping[str, int]) -> PretrainedShape:
    keys = shape.family.axes
    config = {**shape.config, **{keys[axis]: size for axis, size in sizes.items()}}
    narrow = PretrainedShape({**config, "rope_parameters": None}).sizes()
    if "head_dim" in narrow and config.get("rope_parameters"):
        config |= shorten_rope_factors(config, shape.sizes()["head_dim"], narrow["head_dim"])
    return PretrainedShape(complete_config(explicit_config(config)))


def _narrow_operation(operation: Operation, sizes: Mapping[str, int]) -> Operation:
    if (axis := _AXES.get(operation.name)) in sizes:
        assert axis is not None
        return Operation(operation.name, sizes[axis], operation.options)
    if operation.name == "widen" and operation.value["axis"] in sizes:
        value = {**operation.value, "size": sizes[operation.value["axis"]]}
        return Operation(operation.name, value, operation.options)
    return operation


def _check_growth(shape: PretrainedShape, operations: Sequence[Operation]) -> None:
    for operation in operations:
        if not (isinstance(operation.value, Mapping) and "tokenizer" in operation.value):
            shape, _ = plan(shape, operation)


def _draw_tensor(entry: Parameter, generator: torch.Generator) -> Tensor:
    values = torch.randn(entry.shape, generator=generator)
    if len(entry.shape) > 1:
        return values / math.sqrt(entry.shape[-1])
    gain = 1 - entry.offset if entry.kind in ("norm", "post_norm") else 0.0
    return gain + _STD * values


def _part(tensors: Mapping[str, Tensor], part: FilePart) -> Tensor:
    return tensors[part.parameter][part.index].contiguous()
