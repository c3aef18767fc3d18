"""The model on all ranks: DDP, broadcasts from rank 0, and the check that replicas are equal."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from instar.config.schema import DDPConfig
from instar.distributed.agree import Json, agree, collective, gather, raise_on_all_ranks
from instar.distributed.failure import RunFailed
from instar.distributed.world import World

# torch 2.13 renamed `broadcast_buffers` to this, and warns at the old name
_NEW_NAME = "forward_sync_buffers"
_KNOWN = inspect.signature(DistributedDataParallel.__init__).parameters
_FORWARD_SYNC = _NEW_NAME if _NEW_NAME in _KNOWN else "broadcast_buffers"
_REDUCTIONS_UNTIL_SETTLED = 4
"""DDP broadcasts a new layout of its buckets in the first forward pass after the first backward pass
that reduced; with `static_graph` up to two steps later. From then on only buffers are sent."""


def wrap(model: nn.Module, world: World, ddp: DDPConfig) -> nn.Module:
    """Wrap `model`, already on its device, in DDP if there is more than one rank.

    Does not communicate: replicas must be equal already (`copy_from_rank_0`).

    Raises:
        ValueError: a parameter is on another device.
    """
    for name, parameter in model.named_parameters():
        if parameter.device != world.device:
            raise ValueError(
                f"{name} is on {parameter.device}, but rank {world.rank} uses {world.device}: "
                "move the model before it is wrapped"
            )
    if world.size == 1:
        return model
    forward_sync: dict[str, Any] = {_FORWARD_SYNC: ddp.broadcast_buffers}
    replica = DistributedDataParallel(
        model,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        bucket_cap_mb=ddp.bucket_cap_mb,
        find_unused_parameters=ddp.find_unused_parameters,
        static_graph=ddp.static_graph,
        gradient_as_bucket_view=ddp.gradient_as_bucket_view,
        # init_sync is a collective: a rank that fails before it would leave the others waiting
        init_sync=False,
        **forward_sync,
    )
    if ddp.exchange == "bfloat16":
        # torch's own bf16_compress_hook refuses gloo
        replica.register_comm_hook(world, _mean_in_bfloat16)
    return replica


def _mean_in_bfloat16(world: World, bucket: Any) -> torch.futures.Future[Tensor]:
    """Communication hook of DDP: sets a bucket to its mean over all ranks, sent as bfloat16."""
    gradients: Tensor = bucket.buffer()
    mean = (gradients / world.size).to(torch.bfloat16)
    future = dist.all_reduce(mean, async_op=True).get_future()

    def widened(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        return gradients.copy_(future.value()[0])

    return cast(torch.futures.Future[Tensor], future.then(widened))


# DDP refuses annotations that are texts, as those of this file are
_mean_in_bfloat16.__annotations__ = {}


def copy_from_rank_0(world: World, model: nn.Module) -> None:
    """Overwrite the parameters and buffers of all ranks with those of rank 0. A collective.

    Raises:
        RunFailed: on all ranks, if names, shapes or types differ.
    """
    if world.size == 1:
        return
    tensors = check_same_layout(world, model)
    for name, value in broadcast_from_rank_0(world, tensors, "receiving the weights").items():
        if not world.is_main and value.data_ptr() != tensors[name].data_ptr():
            tensors[name].detach().copy_(value)


def check_same_layout(world: World, model: nn.Module) -> dict[str, Tensor]:
    """Check that all ranks have built the same model. A collective.

    Returns:
        its parameters and buffers by name.

    Raises:
        RunFailed: on all ranks, if names, shapes or types differ.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    layout = [f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in tensors.items()]
    digests = gather(world, xxhash.xxh3_128_hexdigest("\n".join(layout).encode()))
    if any(digest != digests[0] for digest in digests):
        everyones = [set(cast(list[str], layouts)) for layouts in gather(world, layout)]
        other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        differing = sorted(everyones[0] ^ everyones[other]) or ["their order"]
        raise RunFailed(
            f"rank {other} has built a different model than rank 0: {'; '.join(differing[:8])}"
        )
    return tensors


def broadcast_from_rank_0(
    world: World, tensors: Mapping[str, Tensor], what: str
) -> Mapping[str, Tensor]:
    """Broadcast rank 0's tensors to every rank. A collective.

    A rank's own tensor of the same name, shape and type is overwritten; otherwise a new one is
    allocated. Names and shapes may differ between ranks.
    """
    if world.size == 1:
        return tensors
    own_layout: dict[str, Json] = {n: [str(t.dtype), list(t.shape)] for n, t in tensors.items()}
    layout = cast(dict[str, tuple[str, list[int]]], agree(world, own_layout))
    values: dict[str, Tensor] = {}
    for name, (dtype, shape) in layout.items():
        if world.is_main:
            values[name] = tensors[name].detach().contiguous()
        elif own_layout.get(name) == [dtype, shape] and tensors[name].is_contiguous():
            values[name] = tensors[name].detach()
        else:
            kind = getattr(torch, dtype.partition(".")[2])
            values[name] = torch.empty(shape, dtype=kind, device=world.device)
    with collective(world, what):
        works = [
            # as bytes: gloo does not support every dtype
            dist.broadcast(_bytes(tensor), 0, group=world.group, async_op=True)
            for tensor in values.values()
            if tensor.numel()
        ]
        for work in works:
            work.wait()
    return values


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside DDP and torch.compile wrappers."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


class ForwardCollectives:
    """Tracks whether the next forward pass of a wrapped model may be a collective.

    Computed from the number of reductions so far, because DDP's own flags are private and differ
    between versions of torch.
    """

    def __init__(self, model: nn.Module, ddp: DDPConfig) -> None:
        """`model`: as returned by `wrap`, before its first forward pass."""
        bare = unwrap(model)
        self._wrapped = isinstance(model, DistributedDataParallel)
        # DDP broadcasts buffers in the first forward pass of every step, also inside no_sync
        broadcasts = ddp.broadcast_buffers and next(bare.buffers(), None) is not None
        statistics = any(isinstance(module, nn.SyncBatchNorm) for module in bare.modules())
        self._always = broadcasts or statistics
        self._reduced = 0

    def next_may_communicate(self) -> bool:
        """Return whether a rank that skips the next forward pass may leave the others waiting in it."""
        return self._wrapped and (self._always or self._reduced < _REDUCTIONS_UNTIL_SETTLED)

    def note_reduction(self) -> None:
        """Record that the gradients of a step were reduced."""
        self._reduced += 1


def sync(model: nn.Module, enabled: bool) -> AbstractContextManager[None]:
    """Context for forward *and* backward of a micro-batch: reduces gradients only if `enabled`."""
    if enabled or not isinstance(model, DistributedDataParallel):
        return nullcontext()
    return cast(AbstractContextManager[None], model.no_sync())


def check_replicas_equal(world: World, tensors: Mapping[str, Tensor], shard: int = 0) -> None:
    """Check that all replicas are equal in dtype, shape and every byte. A collective, and a short one
    if nothing differs.

    Args:
        shard: which part of a model the tensors are; ranks that hold the same one are compared.

    Raises:
        RunFailed: on all ranks, naming tensors and ranks that differ.
    """
    if world.size == 1:
        return
    with raise_on_all_ranks(world, "hashing the replicas"):
        hashes = _hashes(tensors)
    digest = xxhash.xxh3_128_hexdigest("\n".join(f"{n}\t{h}" for n, h in hashes.items()).encode())
    digests = cast(list[tuple[int, str]], gather(world, [shard, digest]))
    replicas: dict[int, list[int]] = {}
    for rank, (of_rank, _) in enumerate(digests):
        replicas.setdefault(of_rank, []).append(rank)
    if all(len({digests[rank][1] for rank in ranks}) == 1 for ranks in replicas.values()):
        return
    everyones = cast(list[dict[str, str]], gather(world, hashes))
    differing = (
        _differing(ranks[0], {rank: everyones[rank] for rank in ranks})
        for ranks in replicas.values()
    )
    raise RunFailed("; ".join(filter(None, differing)))


def _differing(first: int, hashes: Mapping[int, Mapping[str, str]]) -> str:
    """Return what differs from a rank's tensors, and on which ranks, of hashes by rank and tensor."""
    messages = []
    for name in sorted(set().union(*hashes.values())):
        ranks = [
            rank
            for rank, rank_hashes in hashes.items()
            if rank_hashes.get(name) != hashes[first].get(name)
        ]
        if ranks:
            messages.append(
                f"{name} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
            )
    more = f" and {len(messages) - 8} more" if len(messages) > 8 else ""
    return f"differs from rank {first}'s: {'; '.join(messages[:8])}{more}" if messages else ""


def _hashes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Hash tensors where they are; those on a GPU with a single synchronization."""
    sums = {name: checksum(tensor) for name, tensor in tensors.items() if tensor.is_cuda}
    words = torch.stack([*sums.values()]).tolist() if sums else []
    on_gpu = dict(zip(sums, words, strict=True))
    hashes = {}
    for name, tensor in sorted(tensors.items()):
        digest = xxhash.xxh3_128(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        content = str(on_gpu[name]).encode() if name in on_gpu else _bytes(tensor).numpy().data
        digest.update(content)
        hashes[name] = digest.hexdigest()
    return hashes


_CHUNK = 1 << 22
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def checksum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's words, each mixed with its place: int64, on the tensor's device.

    Different tensors of the same shape have the same sum with a probability of about 2⁻⁶⁴.
    """
    words = tensor.detach().contiguous().reshape(-1).view(_WORDS.get(tensor.itemsize, torch.int64))
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for begin in range(0, len(words), _CHUNK):
        chunk = words[begin : begin + _CHUNK]
        places = torch.arange(begin + 1, begin + 1 + len(chunk), device=tensor.device)
        mixed_words = chunk.to(torch.int64) + _ODD * places
        for shift, factor in _MIXING:
            mixed_words = (mixed_words ^ (mixed_words >> shift)) * factor
        total += (mixed_words ^ (mixed_words >> 32)).sum()
    return total


# the finalizer of SplitMix64 and its increment, as signed numbers
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
_MIXING = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))


def _bytes(tensor: Tensor) -> Tensor:
    """View a tensor as bytes, without a copy if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
