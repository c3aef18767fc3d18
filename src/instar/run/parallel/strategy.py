"""What a strategy of parallel training does for the rest of a run.

A strategy wraps the model, accumulates the gradients of a step over all ranks, and measures their
norms. The rest of `run/` does not know which one is in force. Single tensors, which ranks may hold in
parts, are gathered and divided by the functions of `instar.distributed.shards`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from torch import Tensor
from torch.nn import Module, Parameter

from instar.data.loader import MicroBatch, StepBatch
from instar.distributed.parallel import broadcast_from_rank_0
from instar.distributed.world import World
from instar.models.module import has_buffers, load_buffers, persistent_buffers
from instar.schedule.settings import is_frozen


class MicroBatchCalls(NamedTuple):
    """What accumulating the gradients of a step calls."""

    forward: Callable[[MicroBatch], Tensor]
    """returns a micro-batch's summed loss; of one without samples, which stands in, it does not count"""
    backward: Callable[[Tensor], None]
    """adds a loss's gradients to those of the parameters"""
    before_sync: Callable[[], None]
    """called at the latest point where it is safe to leave by an exception: the ranks synchronize
    once, after it"""


class Evaluable(Protocol):
    """A model that is whole on each rank, or in parts on all of them."""

    forward_is_collective: bool
    """Whether forward passes and norms are collectives, so that no rank can compute one alone."""
    bare: Module
    """The model without wrappers, to call in evaluations."""
    parameters: dict[str, Parameter]
    """By name; what optimizers hold."""

    def evaluating(self, values: Mapping[str, Tensor] | None) -> AbstractContextManager[None]:
        """Context for forward passes of `bare` without gradients.

        Args:
            values: used in place of the parameters' own, each laid out as its parameter.
        """
        ...

    def in_double(self, shell: Module) -> Evaluable:
        """Return a copy of the model in float64. A collective if `forward_is_collective`.

        Args:
            shell: a new module of the same shape, which the copy may use.
        """
        ...


class RoundEnd(NamedTuple):
    """What the ranks have agreed on at the end of a round."""

    n_skipped: Sequence[int]
    """by rank: steps of the round whose gradient was not finite"""
    in_a_row: int
    """largest number of them at the end, over all ranks"""
    finite: bool
    """False: all ranks have the weights of before the round"""
    states: Mapping[str, Tensor] | None
    """those to give the optimizers; None: they have them"""


class Rounds(Protocol):
    """How ranks that train apart come together again: after every round of steps."""

    sync_every: int
    """A round ends after each step that this divides."""
    momentum: dict[str, Tensor]
    """Of the outer optimizer, by parameter."""

    def end(self, states: Mapping[str, Tensor], n_skipped: int, in_a_row: int) -> RoundEnd:
        """Make the weights of all ranks the same. A collective.

        Args:
            states: of the optimizers, named as by `optimizer_tensors`; changed in place.
            n_skipped, in_a_row: steps of this rank whose gradient was not finite: of the round, and of its
                last steps.
        """
        ...


class Strategy(Evaluable, Protocol):
    """How the ranks train one model together."""

    rounds: Rounds | None
    """None: the gradients of all ranks are added at every step."""

    @property
    def model(self) -> Module:
        """The model to call in training."""
        ...

    def accumulate(self, batch: StepBatch, calls: MicroBatchCalls) -> None:
        """Leave the gradient of the global batch in the parameters' `grad`. A collective, unless there are
        `rounds`: then the gradient is that of this rank's share."""
        ...

    def norms(self, groups: Sequence[Sequence[Tensor]]) -> Tensor:
        """Return the Euclidean norm of each group of tensors, each laid out as a parameter: (groups,),
        float64, on the device; not read.

        A collective if `forward_is_collective`; the same on all ranks.
        """
        ...

    def freeze(self, patterns: Sequence[str]) -> None:
        """Change the frozen parameters, see `is_frozen`. Does not communicate."""
        ...

    def without_reduction(self) -> AbstractContextManager[None]:
        """Context for a forward and backward pass whose gradients are not used."""
        ...


def freeze(parameters: Mapping[str, Parameter], patterns: Sequence[str]) -> None:
    """Freeze exactly the parameters that match a pattern."""
    for name, parameter in parameters.items():
        parameter.requires_grad_(not is_frozen(patterns, name))


def share_buffers(world: World, model: Module) -> None:
    """Broadcast rank 0's persistent buffers, as DDP does. A collective."""
    # every rank has built the same module, so either all ranks broadcast or none
    if world.size > 1 and has_buffers(model):
        buffers = broadcast_from_rank_0(world, persistent_buffers(model), "sharing buffers")
        if not world.is_main:
            load_buffers(model, buffers)
