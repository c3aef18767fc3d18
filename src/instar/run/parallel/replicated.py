"""Every rank holds the whole model: one process, DDP, or virtual ranks, of which no bit depends on how many ranks there are."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import groupby
from typing import cast

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from instar.config.schema import RunConfig
from instar.data.loader import StepBatch
from instar.distributed.agree import gather
from instar.distributed.all_reduce import DeterministicAllReduce, norms_of_rows, row_squares
from instar.distributed.failure import RunFailed
from instar.distributed.parallel import ForwardCollectives, sync, wrap
from instar.distributed.world import World
from instar.models.module import copy_buffers, load_buffers
from instar.run.parallel.strategy import MicroBatchCalls, Rounds, freeze, share_buffers


class Replicated:
    """The part of a `Strategy` that follows from each rank holding all of every tensor."""

    forward_is_collective = False
    rounds: Rounds | None = None

    def __init__(self, world: World, bare: Module) -> None:
        """
        Args:
            bare: the model without wrappers, on this rank's device.
        """
        self.world, self.bare = world, bare
        self.parameters = dict(bare.named_parameters())

    def norms(self, groups: Sequence[Sequence[Tensor]]) -> Tensor:
        return whole_norms(groups)

    @contextmanager
    def evaluating(self, values: Mapping[str, Tensor] | None) -> Iterator[None]:
        if values is None:
            yield
            return
        parameters = {name: self.parameters[name] for name in values}
        trained_values = {name: parameter.data for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            parameter.data = values[name]
        try:
            yield
        finally:
            for name, parameter in parameters.items():
                parameter.data = trained_values[name]

    def in_double(self, shell: Module) -> Replicated:  # noqa: ARG002
        return Replicated(self.world, copy.deepcopy(self.bare).double())


def compiled(model: Module) -> Module:
    """Return a module of the same parameters whose forward pass is compiled."""
    # graphs of earlier shapes count against torch's recompile limit, and make sizes dynamic
    torch.compiler.reset()
    return cast(Module, torch.compile(model))


def whole_norms(groups: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the norm of each group of whole tensors; (groups,), float64."""
    return torch.stack([torch.nn.utils.get_total_norm(group).double() for group in groups])


class DataParallel(Replicated):
    """DDP: each rank runs one slice; the all-reduce overlaps the last backward pass."""

    def __init__(self, config: RunConfig, world: World, bare: Module) -> None:
        super().__init__(world, bare)
        self._config = config
        self._wrap()

    def _wrap(self) -> None:
        ddp = self._config.parallel.ddp
        model = compiled(self.bare) if self._config.compile else self.bare
        # wrap last: DDP must see the model on its device, and compiled
        self.model = wrap(model, self.world, ddp)
        self.collectives = ForwardCollectives(self.model, ddp)
        self._new_static_graph = self.world.size > 1 and ddp.static_graph

    def freeze(self, patterns: Sequence[str]) -> None:
        freeze(self.parameters, patterns)
        # DDP reads requires_grad only when it wraps the model
        self._wrap()

    def without_reduction(self) -> AbstractContextManager[None]:
        return sync(self.model, enabled=False)

    def accumulate(self, batch: StepBatch, calls: MicroBatchCalls) -> None:
        # DDP averages over ranks; undo that to get the sum
        scale = self.world.size / batch.weight
        # as late as possible, so that the exchange overlaps with forward and backward passes
        early = self.collectives.next_may_communicate()
        if early:
            calls.before_sync()
        passes = [*batch.micro_batches]
        # DDP records a static graph in its first backward pass, which must reduce. The averaged
        # gradients are the same on all ranks, so averaging them again changes nothing. All ranks
        # must reduce equally often, so a rank with a single micro-batch runs it twice.
        learns = self._new_static_graph and any(
            cast(int, number) > 1 for number in gather(self.world, len(passes))
        )
        if learns and len(passes) == 1:
            passes.insert(0, replace(passes[0], samples=0))
        self._new_static_graph = False
        for index, micro in enumerate(passes):
            last, counts = index == len(passes) - 1, micro.samples > 0
            # no_sync must be entered before the forward pass, in which DDP decides
            buffers = {} if counts else copy_buffers(self.bare)
            with sync(self.model, enabled=last or (learns and index == 0)):
                loss = calls.forward(micro)
                if last and not early:
                    calls.before_sync()
                calls.backward(loss * (scale if counts else 0.0))
            if not counts:
                # running statistics must not include stand-in samples, or a sample twice
                load_buffers(self.bare, buffers)
        self._check_all_used(batch)
        self.collectives.note_reduction()

    def _check_all_used(self, batch: StepBatch) -> None:
        """Raise RunFailed if DDP still waits for the gradient of a parameter on this rank. The others wait for it in a
        collective, which they leave when this rank does."""
        check = getattr(getattr(self.model, "reducer", None), "_check_reducer_finalized", None)
        if check is None:
            return
        try:
            check()
        except RuntimeError as error:
            # of the parameters that DDP reduces, in their order
            match = re.search(r"did not receive grad for rank \d+:([\d ]+)", str(error))
            trainable = [name for name, p in self.parameters.items() if p.requires_grad]
            unused_names = [trainable[int(number)] for number in match[1].split()] if match else []
            if not unused_names:
                raise
            samples = sum(micro.samples for micro in batch.micro_batches)
            raise RunFailed(
                f"{', '.join(unused_names[:5])}{f' and {len(unused_names) - 5} more' if unused_names[5:] else ''} took no part in the loss of "
                f"this rank's last micro-batch ({samples} samples in the step), and DDP waits for every parameter's "
                "gradient; where it depends on the samples which parameters are used, set "
                "parallel.ddp.find_unused_parameters: true, or let the loss depend on all of them, e.g. by adding 0 × "
                "their sum"
            ) from error


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
        freeze(self.parameters, patterns)
        self._plant()

    def norms(self, groups: Sequence[Sequence[Tensor]]) -> Tensor:
        """See `Strategy`. The same bits as of sharded tensors."""
        return norms_of_rows([[row_squares(tensor) for tensor in group] for group in groups])

    def without_reduction(self) -> AbstractContextManager[None]:
        return nullcontext()

    def accumulate(self, batch: StepBatch, calls: MicroBatchCalls) -> None:
        # each slice starts with the buffers from before the step, and the model keeps those of the
        # first slice, as under DDP with one rank per slice
        before, after = copy_buffers(self.bare), None
        for _, micro_batches in groupby(batch.micro_batches, lambda micro: micro.rank):
            if after is not None:
                load_buffers(self.bare, before)
            gradients = [tree.leaf() for _, tree in self.parts]
            self._point_to(gradients)
            for micro in micro_batches:
                if micro.samples:
                    calls.backward(calls.forward(micro) / batch.weight)
            for (_, tree), gradient in zip(self.parts, gradients, strict=True):
                tree.add(gradient)
            if after is None:
                after = copy_buffers(self.bare)
        calls.before_sync()
        self._point_to([tree.root() for _, tree in self.parts])
        load_buffers(self.bare, after or {})
        share_buffers(self.world, self.bare)

    def _point_to(self, flats: Sequence[Tensor]) -> None:
        """Make the parameters' gradients views of flat tensors, one per dtype."""
        for (parameters, _), flat in zip(self.parts, flats, strict=True):
            pieces = torch.split(flat, [parameter.numel() for parameter in parameters])
            for parameter, piece in zip(parameters, pieces, strict=True):
                # in the parameter's order, as autograd does: see `in_order_of`
                strides = torch.empty_like(parameter, device="meta").stride()
                parameter.grad = piece.as_strided(parameter.shape, strides)
