"""Every rank holds the whole model, and no bit depends on how many ranks there are."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from instar.data.loader import StepBatch
from instar.distributed.all_reduce import DeterministicAllReduce, norms_of_rows, row_squares
from instar.distributed.world import World
from instar.models.module import held_buffers, load_buffers
from instar.run.parallel.replicated import Replicated
from instar.run.parallel.strategy import MicroBatchCalls, freeze, share_buffers


class VirtualRanks(Replicated):
    """`reproducible: elastic`: a fixed number of slices, independent of the world size.

    The gradient of each slice is accumulated separately; the gradients of all slices are added in a
    fixed tree, so that no bit depends on the number of ranks.
    """

    def __init__(self, world: World, bare: Module, number: int) -> None:
        """
        Args:
            number: number of slices.
        """
        super().__init__(world, bare)
        self.number = number
        self._plant()

    @property
    def model(self) -> Module:
        """See `Strategy`."""
        return self.bare

    def _plant(self) -> None:
        by_type: dict[torch.dtype, list[Parameter]] = {}
        for parameter in self.bare.parameters():
            if parameter.requires_grad:
                by_type.setdefault(parameter.dtype, []).append(parameter)
        self.parts = [
            (
                parameters,
                DeterministicAllReduce(
                    self.world, self.number, sum(p.numel() for p in parameters), dtype
                ),
            )
            for dtype, parameters in by_type.items()
        ]
        """per dtype: the parameters, and the all-reduce of their gradients"""

    def freeze(self, patterns: Sequence[str]) -> None:
        """See `Strategy`."""
        freeze(self.parameters, patterns)
        self._plant()

    def norms(self, groups: Sequence[Sequence[Tensor]]) -> Tensor:
        """See `Strategy`. The same bits as of sharded tensors."""
        return norms_of_rows([[row_squares(tensor) for tensor in group] for group in groups])

    def without_reduction(self) -> AbstractContextManager[None]:
        """See `Strategy`."""
        return nullcontext()

    def accumulate(self, batch: StepBatch, calls: MicroBatchCalls) -> Tensor:
        """See `Strategy`."""
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        # each slice starts with the buffers from before the step, and the model keeps those of the
        # first slice, as under DDP with one rank per slice
        before, after = held_buffers(self.bare), None
        for _, micro_batches in groupby(batch.micro_batches, lambda micro: micro.rank):
            if after is not None:
                load_buffers(self.bare, before)
            gradients = [tree.leaf() for _, tree in self.parts]
            self._point_to(gradients)
            for micro in micro_batches:
                if micro.samples:
                    loss = calls.forward(micro)
                    calls.backward(loss / batch.weight)
                    total += loss.detach()
            for (_, tree), gradient in zip(self.parts, gradients, strict=True):
                tree.add(gradient)
            if after is None:
                after = held_buffers(self.bare)
        calls.before_sync()
        self._point_to([tree.root() for _, tree in self.parts])
        load_buffers(self.bare, after or {})
        share_buffers(self.world, self.bare)
        return total

    def _point_to(self, flats: Sequence[Tensor]) -> None:
        """Make the parameters' gradients views of flat tensors, one per dtype."""
        for (parameters, _), flat in zip(self.parts, flats, strict=True):
            pieces = torch.split(flat, [parameter.numel() for parameter in parameters])
            for parameter, piece in zip(parameters, pieces, strict=True):
                # in the parameter's order, as autograd does: see `in_order_of`
                strides = torch.empty_like(parameter, device="meta").stride()
                parameter.grad = piece.as_strided(parameter.shape, strides)
