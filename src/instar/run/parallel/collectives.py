"""Collectives of our own for `fully_shard`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from instar.distributed.all_reduce import tree_sum


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
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        output_tensor.copy_(tree_sum(received.view(group.size(), -1)))


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
        received = torch.empty_like(output_tensor, dtype=kind)
        sent = input_tensor.to(kind)
        dist.all_gather_into_tensor(received.view(torch.uint8), sent.view(torch.uint8), group=group)
        output_tensor.copy_(received)
