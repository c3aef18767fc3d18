"""The schedule's entries: an operation, what makes it fire, and what guards it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from instar.config.budget import parse_budget
from instar.config.operation import Operation
from instar.config.schedule import ScheduledOperation, When
from instar.config.schema import RunConfig
from instar.growth.operators import is_growth
from instar.models.mask import mask_of
from instar.models.shape import Growable, count_parameters
from instar.record.amounts import count_text
from instar.schedule.operations import History, State
from instar.schedule.triggers import (
    AllOf,
    AnyOf,
    AtFraction,
    AtStep,
    AtTokens,
    LossBelow,
    Moment,
    Plateau,
    Trigger,
    Waited,
    fires,
)


@dataclass(frozen=True)
class Entry:
    """One operation of a schedule."""

    number: int
    """its place in the schedule, counted from 0: entries are carried out in their order"""
    operation: Operation
    trigger: Trigger
    reevaluate: bool = False
    """evaluate at once afterwards"""
    min_steps: int = 0
    """steps since the last operation before which it does not fire"""
    max_params: int | None = None
    on_failure: Literal["stop", "skip"] = "stop"
    allow_inexact: bool = False
    """go on although an exact operation is measured to be otherwise"""

    @property
    def place(self) -> str:
        """What the config calls it."""
        return f"schedule[{self.number}]"


def entries(config: RunConfig) -> tuple[Entry, ...]:
    """The schedule that a config asks for, whose mistakes `checks.mistakes` has found."""
    return tuple(_entry(number, given) for number, given in enumerate(config.schedule))


def _entry(number: int, given: ScheduledOperation) -> Entry:
    return Entry(
        number,
        operation(given),
        trigger(given),
        reevaluate=given.reevaluate,
        min_steps=given.min_steps or 0,
        max_params=given.max_params,
        on_failure=given.on_failure,
        allow_inexact=given.allow_inexact,
    )


def operation(given: ScheduledOperation) -> Operation:
    """What an entry does; keys that are not the schedule's are the operation's options."""
    return Operation(given.name, given.value, given.model_extra or {})


def trigger(given: ScheduledOperation) -> Trigger:
    """What makes an entry fire: `when`, or the loss or the wait beside it, whichever comes first."""
    if given.when is not None:
        return _when(given.when)
    first: list[Trigger] = []
    if given.trigger_loss is not None:
        first.append(LossBelow(given.trigger_loss))
    if given.max_wait_iters is not None:
        first.append(Waited(given.max_wait_iters))
    return first[0] if len(first) == 1 else AnyOf(tuple(first))


def _when(when: When) -> Trigger:
    parts: list[Trigger] = []
    if when.loss_below is not None:
        parts.append(LossBelow(when.loss_below))
    if when.waited is not None:
        parts.append(Waited(when.waited))
    if when.at_step is not None:
        parts.append(AtStep(when.at_step))
    if when.at_tokens is not None:
        parts.append(AtTokens(tokens(when.at_tokens)))
    if when.at_fraction is not None:
        parts.append(AtFraction(when.at_fraction))
    if (flat := when.plateau) is not None:
        parts.append(Plateau(flat.window, flat.slope, flat.patience))
    if when.any is not None:
        parts.append(AnyOf(tuple(map(_when, when.any))))
    if when.all is not None:
        parts.append(AllOf(tuple(map(_when, when.all))))
    return parts[0] if len(parts) == 1 else AllOf(tuple(parts))


def tokens(given: int | str) -> int:
    """A number of tokens, also as text such as "50Mtok". Raises ValueError for other text."""
    if isinstance(given, int):
        return given
    budget = parse_budget(given)
    if budget.kind != "tokens":
        raise ValueError(f"{given!r} counts {budget.kind}; write tokens, such as 50Mtok")
    return int(budget.amount)


def next_entry(schedule: Sequence[Entry], history: History) -> Entry | None:
    """The first entry that was neither carried out nor skipped."""
    done = sum(change.entry is not None for change in history)
    return schedule[done] if done < len(schedule) else None


def last_step(history: History) -> int:
    """The step of the schedule's last operation, from which waiting counts; 0 before the first."""
    return max((change.step for change in history if change.entry is not None), default=0)


def due(entry: Entry, moment: Moment, state: State) -> str | None:
    """Why the entry is to be carried out now; None: not yet.

    Growth waits while a mask is open, which the run folds away by itself.
    """
    if moment.since_last < entry.min_steps:
        return None
    if is_growth(entry.operation.name) and mask_of(state.architecture) is not None:
        return None
    return fires(entry.trigger, moment)


def too_large(entry: Entry, architecture: Growable) -> str:
    """How the model that an entry makes exceeds what it allows; empty if it does not."""
    count = count_parameters(architecture).total
    if entry.max_params is None or count <= entry.max_params:
        return ""
    return f"{count_text(count)} parameters, more than max_params {count_text(entry.max_params)}"
