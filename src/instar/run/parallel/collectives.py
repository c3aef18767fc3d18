"""Collectives of our own: for `fully_shard`, and the mean over all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from instar.distributed.agree import collective
from instar.distributed.all_reduce import tree_sum
from instar.distributed.world import World

BUCKET = 1 << 24
"""Number of elements after which `mean_over_ranks` begins another message."""


class _Allocates:
    """What `fully_shard` asks of a collective besides calling it."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return an uninitialized tensor."""
        return torch.empty(*size, dtype=dtype, device=device)


class TreeReduceScatter(_Allocates):
    """Reduce-scatter for `fully_shard` that adds the ranks' tensors in a binary tree, see `tree_sum`.

    The ranks of the group are the leaves in order. A rank receives the pieces that it adds in one
    all-to-all, which on gloo is also faster than its own reduce-scatter.
    """

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,  # noqa: ARG002
        async_op: bool = False,  # noqa: ARG002
    ) -> None:
        """Set `output_tensor` to the sum over all ranks of this rank's piece of `input_tensor`."""
        all_rows = torch.empty_like(input_tensor)
        dist.all_to_all_single(all_rows, input_tensor, group=group)
        output_tensor.copy_(tree_sum(all_rows.view(group.size(), -1)))


class RoundedAllGather(_Allocates):
    """All-gather for `fully_shard` that sends parameters as bfloat16.

    For parameters that autocast rounds to bfloat16 wherever they are used.
    """

    def __init__(self) -> None:
        self.rounds = True
        """False where there is no autocast"""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: ARG002
    ) -> None:
        """Set `output_tensor` to the `input_tensor` of all ranks, one after the other."""
        rounds = self.rounds and output_tensor.dtype == torch.float32  # else they are bytes
        kind = torch.bfloat16 if rounds else output_tensor.dtype
        output_bytes = torch.empty_like(output_tensor, dtype=kind)
        input_bytes = input_tensor.to(kind)
        dist.all_gather_into_tensor(
            output_bytes.view(torch.uint8), input_bytes.view(torch.uint8), group=group
        )
        output_tensor.copy_(output_bytes)


def mean_over_ranks(
    world: World, tensors: Sequence[Tensor], wire_dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Return the mean of each tensor over all ranks, in float32, the same bits on all. A collective.

    It takes two messages per rank and bucket, one after the other, however many ranks there are, where a
    ring takes 2 (W - 1): on a slow network, latency is what an exchange of a small model costs.

    Args:
        wire_dtype: the type in which values travel.
    """
    if world.size == 1:
        return [tensor.float() for tensor in tensors]
    means: list[Tensor] = []
    bucket: list[Tensor] = []
    for number, tensor in enumerate(tensors, start=1):
        bucket.append(tensor)
        if number == len(tensors) or sum(part.numel() for part in bucket) >= BUCKET:
            flat = torch.cat([part.detach().flatten().to(torch.float32) for part in bucket])
            pieces = torch.split(_mean(world, flat, wire_dtype), [part.numel() for part in bucket])
            means += [piece.view_as(part) for piece, part in zip(pieces, bucket, strict=True)]
            bucket = []
    return means


def _mean(world: World, flat: Tensor, wire_dtype: torch.dtype) -> Tensor:
    piece = -(-len(flat) // world.size)
    padded_flat = torch.nn.functional.pad(flat, (0, piece * world.size - len(flat))).to(wire_dtype)
    my_rows, everyones = torch.empty_like(padded_flat), torch.empty_like(padded_flat)
    with collective(world, "averaging the replicas"):
        # as bytes: backends do not send every type
        dist.all_to_all_single(my_rows.view(torch.uint8), padded_flat.view(torch.uint8))
        mean = tree_sum(my_rows.view(world.size, piece).float()).div_(world.size).to(wire_dtype)
        pieces = everyones.view(torch.uint8).view(world.size, -1).unbind()
        dist.all_gather(list(pieces), mean.view(torch.uint8))
    return everyones[: len(flat)].float()
