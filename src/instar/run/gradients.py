"""How the gradients of micro-batches become the gradient of the global batch.

It is left in the parameters, the same on every rank. The rest of a step knows nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from instar.data.reader import MicroBatch, StepBatch
from instar.distributed.parallel import meets_in_forward, sync
from instar.distributed.tree import Tree
from instar.distributed.world import World


class Gradients(Protocol):
    """One way of adding up gradients."""

    def accumulate(
        self,
        batch: StepBatch,
        forward: Callable[[MicroBatch], Tensor],
        backward: Callable[[Tensor], None],
        before_sync: Callable[[], None],
    ) -> Tensor:
        """Run this rank's micro-batches, and meet the other ranks once.

        Args:
            forward: gives a micro-batch's loss sum.
            backward: adds a loss's gradients to those of the parameters.
            before_sync: called as late as leaving is still safe.

        Returns:
            this rank's summed loss, a float64 scalar on the device.
        """
        ...


class DataParallel:
    """Each rank has one slice; DDP adds while the last micro-batch's backward pass runs."""

    def __init__(self, world: World, model: Module) -> None:
        """`model`: as `wrap` gave it."""
        self.world, self.model = world, model

    def accumulate(
        self,
        batch: StepBatch,
        forward: Callable[[MicroBatch], Tensor],
        backward: Callable[[Tensor], None],
        before_sync: Callable[[], None],
    ) -> Tensor:
        # DDP averages over ranks; the sum is wanted
        scale = self.world.size / batch.weight
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        last = len(batch.micro_batches) - 1
        for index, micro in enumerate(batch.micro_batches):
            meeting = index == last
            early = meeting and meets_in_forward(self.model)
            if early:
                before_sync()
            # no_sync must be in force before the forward pass, where DDP decides
            with sync(self.model, enabled=meeting):
                loss = forward(micro)
                if meeting and not early:
                    before_sync()
                backward(loss * (scale if micro.samples else 0.0))
            if micro.samples:
                total += loss.detach()
        return total


class VirtualRanks:
    """A fixed number of slices, whatever the world size: `reproducible: elastic`.

    Each slice is run and its gradient added up alone, then the gradients of all slices in a fixed
    tree, so that no bit depends on how many ranks there are.
    """

    def __init__(self, world: World, parameters: Iterable[Parameter], number: int) -> None:
        self.world = world
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.tree = Tree(world, number, sum(self.sizes), self.parameters[0].dtype)

    def accumulate(
        self,
        batch: StepBatch,
        forward: Callable[[MicroBatch], Tensor],
        backward: Callable[[Tensor], None],
        before_sync: Callable[[], None],
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for _, micro_batches in groupby(batch.micro_batches, lambda micro: micro.rank):
            gradient = self.tree.leaf()
            self._point_to(gradient)
            for micro in micro_batches:
                if micro.samples:
                    loss = forward(micro)
                    backward(loss / batch.weight)
                    total += loss.detach()
            self.tree.add(gradient)
        before_sync()
        self._point_to(self.tree.root())
        return total

    def _point_to(self, flat: Tensor) -> None:
        """Let the parameters' gradients be pieces of a flat tensor."""
        for parameter, piece in zip(self.parameters, torch.split(flat, self.sizes), strict=True):
            parameter.grad = piece.view_as(parameter)
