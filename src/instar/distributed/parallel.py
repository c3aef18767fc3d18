"""The model on all ranks: DDP around it, off it, and proof that replicas are equal."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from instar.config.schema import DDPConfig
from instar.distributed.agree import gather
from instar.distributed.failure import RunFailed
from instar.distributed.world import World

# torch 2.13 has given `broadcast_buffers` this name, and warns at the old one
_NEW_NAME = "forward_sync_buffers"
_KNOWN = inspect.signature(DistributedDataParallel.__init__).parameters
_FORWARD_SYNC = _NEW_NAME if _NEW_NAME in _KNOWN else "broadcast_buffers"


def wrap(model: nn.Module, world: World, ddp: DDPConfig) -> nn.Module:
    """`model` under DDP if there is more than one rank; it must already be on its device.

    Raises ValueError naming a parameter that is elsewhere.
    """
    for name, parameter in model.named_parameters():
        if parameter.device != world.device:
            raise ValueError(
                f"{name} is on {parameter.device}, but rank {world.rank} works on {world.device}: "
                "move the model before it is wrapped"
            )
    if world.size == 1:
        return model
    forward_sync: dict[str, Any] = {_FORWARD_SYNC: ddp.broadcast_buffers}
    return DistributedDataParallel(
        model,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        bucket_cap_mb=ddp.bucket_cap_mb,
        find_unused_parameters=ddp.find_unused_parameters,
        static_graph=ddp.static_graph,
        gradient_as_bucket_view=ddp.gradient_as_bucket_view,
        **forward_sync,
    )


def unwrap(model: nn.Module) -> nn.Module:
    """The model itself, without DDP and torch.compile around it."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def meets_in_forward(model: nn.Module) -> bool:
    """Whether DDP's next forward pass is a collective already, so that leaving it hangs the others.

    It is where buffers are sent along, and once where DDP lays out its buckets anew, after the
    first backward pass.
    """
    if not isinstance(model, DistributedDataParallel):
        return False
    return bool(model.forward_sync_buffers) or not model._has_rebuilt_buckets


def sync(model: nn.Module, enabled: bool) -> AbstractContextManager[None]:
    """Around forward *and* backward of a micro-batch: reduce gradients only where `enabled`."""
    if enabled or not isinstance(model, DistributedDataParallel):
        return nullcontext()
    return cast(AbstractContextManager[None], model.no_sync())


def same_everywhere(world: World, tensors: Mapping[str, Tensor]) -> None:
    """Raise RunFailed on all ranks, naming tensors and ranks, unless all bytes are equal.

    Type and shape count too. One short exchange if nothing differs.
    """
    if world.size == 1:
        return
    hashes = {name: _hash(tensor) for name, tensor in sorted(tensors.items())}
    whole = xxhash.xxh3_128_hexdigest("\n".join(f"{n}\t{h}" for n, h in hashes.items()).encode())
    if len(set(cast(list[str], gather(world, whole)))) == 1:
        return
    everyones = cast(list[dict[str, str]], gather(world, hashes))
    names = sorted(set().union(*everyones))
    first = everyones[0]
    drifted = {
        name: [rank for rank, one in enumerate(everyones) if one.get(name) != first.get(name)]
        for name in names
    }
    told = [
        f"{name} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        for name, ranks in drifted.items()
        if ranks
    ]
    more = f" and {len(told) - 8} more" if len(told) > 8 else ""
    raise RunFailed(f"differs from rank 0's: {'; '.join(told[:8])}{more}")


def _hash(tensor: Tensor) -> str:
    plain = tensor.detach().to("cpu").contiguous()
    digest = xxhash.xxh3_128(f"{plain.dtype} {tuple(plain.shape)}".encode())
    digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
