"""Gradient accumulation over micro-batches and ranks; gradient statistics per layer.

The gradient of the global batch is left in `Parameter.grad`, the same on every rank. The rest of a
step does not depend on ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from instar.config.schema import DDPConfig
from instar.data.loader import MicroBatch, StepBatch
from instar.distributed.agree import gather
from instar.distributed.all_reduce import DeterministicAllReduce
from instar.distributed.parallel import ForwardCollectives, broadcast_from_rank_0, sync, unwrap
from instar.distributed.world import World
from instar.models.module import (
    has_buffers,
    held_buffers,
    load_buffers,
    persistent_buffers,
)


class Gradients(Protocol):
    """Strategy of gradient accumulation: `DataParallel` or `VirtualRanks`."""

    def accumulate(
        self,
        batch: StepBatch,
        forward: Callable[[MicroBatch], Tensor],
        backward: Callable[[Tensor], None],
        before_sync: Callable[[], None],
    ) -> Tensor:
        """Run this rank's micro-batches and reduce their gradients. A collective.

        Args:
            forward: returns a micro-batch's summed loss.
            backward: adds a loss's gradients to those of the parameters.
            before_sync: called at the latest point where it is safe to leave by an exception: the
                ranks synchronize once, after it.

        Returns:
            this rank's summed loss, a float64 scalar on the device.
        """
        ...


class DataParallel:
    """DDP: each rank runs one slice; the all-reduce overlaps the last backward pass."""

    def __init__(self, world: World, model: Module, ddp: DDPConfig) -> None:
        """
        Args:
            model: newly wrapped by `wrap`.
        """
        self.world, self.model = world, model
        self.collectives = ForwardCollectives(model, ddp)
        self._new_static_graph = world.size > 1 and ddp.static_graph

    def accumulate(
        self,
        batch: StepBatch,
        forward: Callable[[MicroBatch], Tensor],
        backward: Callable[[Tensor], None],
        before_sync: Callable[[], None],
    ) -> Tensor:
        # DDP averages over ranks; undo that to get the sum
        scale = self.world.size / batch.weight
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        # as late as possible, so that the exchange overlaps with forward and backward passes
        early = self.collectives.next_may_communicate()
        if early:
            before_sync()
        passes = [(micro, micro.samples > 0) for micro in batch.micro_batches]
        # DDP records a static graph in its first backward pass, which must reduce. The averaged
        # gradients are the same on all ranks, so averaging them again changes nothing. All ranks
        # must reduce equally often, so a rank with a single micro-batch runs it twice.
        learns = self._new_static_graph and self._some_rank_accumulates(len(passes))
        if learns and len(passes) == 1:
            passes.insert(0, (passes[0][0], False))
        self._new_static_graph = False
        for index, (micro, counts) in enumerate(passes):
            last = index == len(passes) - 1
            # no_sync must be entered before the forward pass, in which DDP decides
            held = {} if counts else held_buffers(unwrap(self.model))
            with sync(self.model, enabled=last or (learns and index == 0)):
                loss = forward(micro)
                if last and not early:
                    before_sync()
                backward(loss * (scale if counts else 0.0))
            if counts:
                total += loss.detach()
            else:
                # running statistics must not include stand-in samples, or a sample twice
                load_buffers(unwrap(self.model), held)
        self.collectives.reduced()
        return total

    def _some_rank_accumulates(self, micro_batches: int) -> bool:
        return any(cast(int, number) > 1 for number in gather(self.world, micro_batches))


class VirtualRanks:
    """`reproducible: elastic`: a fixed number of slices, independent of the world size.

    The gradient of each slice is accumulated separately; the gradients of all slices are added in a
    fixed tree, so that no bit depends on the number of ranks.
    """

    def __init__(self, world: World, model: Module, number: int) -> None:
        """
        Args:
            model: without wrappers.
            number: number of slices.
        """
        self.world, self.model = world, model
        by_type: dict[torch.dtype, list[Parameter]] = {}
        for parameter in model.parameters():
            if parameter.requires_grad:
                by_type.setdefault(parameter.dtype, []).append(parameter)
        self.parts = [
            (
                parameters,
                DeterministicAllReduce(world, number, sum(p.numel() for p in parameters), dtype),
            )
            for dtype, parameters in by_type.items()
        ]
        """per dtype: the parameters, and the all-reduce of their gradients"""

    def accumulate(
        self,
        batch: StepBatch,
        forward: Callable[[MicroBatch], Tensor],
        backward: Callable[[Tensor], None],
        before_sync: Callable[[], None],
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        # each slice starts with the buffers from before the step, and the model keeps those of the
        # first slice, as under DDP with one rank per slice
        before, after = held_buffers(self.model), None
        for _, micro_batches in groupby(batch.micro_batches, lambda micro: micro.rank):
            if after is not None:
                load_buffers(self.model, before)
            gradients = [tree.leaf() for _, tree in self.parts]
            self._point_to(gradients)
            for micro in micro_batches:
                if micro.samples:
                    loss = forward(micro)
                    backward(loss / batch.weight)
                    total += loss.detach()
            for (_, tree), gradient in zip(self.parts, gradients, strict=True):
                tree.add(gradient)
            if after is None:
                after = held_buffers(self.model)
        before_sync()
        self._point_to([tree.root() for _, tree in self.parts])
        load_buffers(self.model, after or {})
        share_buffers(self.world, self.model)
        return total

    def _point_to(self, flats: Sequence[Tensor]) -> None:
        """Make the parameters' gradients views of flat tensors, one per dtype."""
        for (parameters, _), flat in zip(self.parts, flats, strict=True):
            pieces = torch.split(flat, [parameter.numel() for parameter in parameters])
            for parameter, piece in zip(parameters, pieces, strict=True):
                parameter.grad = piece.view_as(parameter)


def share_buffers(world: World, model: Module) -> None:
    """Broadcast rank 0's persistent buffers, as DDP does. A collective."""
    # every rank has built the same module, so either all ranks broadcast or none
    if world.size > 1 and has_buffers(model):
        buffers = broadcast_from_rank_0(world, persistent_buffers(model), "sharing buffers")
        if not world.is_main:
            load_buffers(model, buffers)


Norms = Mapping[str, float]


def group_of(name: str) -> str:
    """Return the layer of a parameter: `blocks.3` for `blocks.3.mlp.up.weight`, else the first part
    of its name.
    """
    first, *rest = name.split(".")
    return f"{first}.{rest[0]}" if rest and rest[0].isdigit() else first


class LayerStats:
    """Gradient norm and update ratio per layer, for one step.

    Call `before` before the update, with reduced gradients that are not clipped yet, and `after`
    after it. A copy of the weights is kept in between.
    """

    def __init__(self) -> None:
        self.grad_norm: Norms = {}
        self.update_ratio: Norms = {}
        """‖Δw‖ / ‖w‖ per layer"""
        self._weights: dict[str, Tensor] = {}

    def before(self, parameters: Mapping[str, Parameter]) -> None:
        gradients = {n: p.grad for n, p in parameters.items() if p.grad is not None}
        self.grad_norm = _norms(gradients)
        self._weights = {n: parameters[n].detach().clone() for n in gradients}

    def after(self, parameters: Mapping[str, Parameter]) -> None:
        sizes = _norms(self._weights)
        moved = _norms({n: parameters[n].detach() - old for n, old in self._weights.items()})
        self._weights = {}
        self.update_ratio = {g: moved[g] / size for g, size in sizes.items() if size > 0}


def _norms(tensors: Mapping[str, Tensor]) -> Norms:
    """Return the Euclidean norm per layer, with a single device synchronization."""
    groups: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(group_of(name), []).append(tensor)
    norms = [_together(group) for group in groups.values()]
    return dict(zip(groups, torch.stack(norms).tolist(), strict=True)) if norms else {}


def _together(tensors: Iterable[Tensor]) -> Tensor:
    return torch.nn.utils.get_total_norm(list(tensors)).float()
