"""At which step each entry of a schedule fires: at the earliest, and at the latest.

What a loss will be nobody knows. At the earliest, every condition on it holds at the first
evaluation that is asked; at the latest, none ever does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from instar.config.budget import Budget
from instar.growth.operators import is_growth
from instar.models.mask import mask_of
from instar.schedule.entries import Entry
from instar.schedule.operations import State
from instar.schedule.pace import Pace, Spot
from instar.schedule.triggers import (
    AllOf,
    AnyOf,
    AtFraction,
    AtStep,
    AtTokens,
    LossBelow,
    Plateau,
    Trigger,
    Waited,
    losses_needed,
    needs_loss,
)


@dataclass(frozen=True)
class Leg:
    """The run between two operations."""

    entry: Entry | None
    """what begins it; None: the run itself"""
    state: State
    pace: Pace
    label: str = ""
    """exact, bounded or lossy, where the model changed"""
    skipped: str = ""
    """why the operation is passed over"""


@dataclass(frozen=True)
class Timeline:
    """A run through its legs."""

    steps: tuple[int, ...]
    """first step of each leg, as far as they are reached"""
    end: Spot | None
    """where the budgets end it; None: only the clock or the loss does"""
    end_pace: Pace


@dataclass(frozen=True)
class _Asked:
    """Where the schedule is asked, and what it is told beside its state."""

    spot: Spot
    pace: Pace
    budgets: Sequence[Budget]
    last: int
    """step of the last operation"""
    evaluated: bool
    """there is a validation loss here"""
    interval: int
    hopeful: bool

    def evaluation(self, step: int) -> int:
        """The first evaluation at or after `step`, and not before here."""
        here = self.spot.step
        if step <= here and self.evaluated:
            return here
        return -(-max(step, here + 1) // self.interval) * self.interval

    def first(self, trigger: Trigger) -> int | None:
        """The first step at which the trigger would fire if it were asked there; None: never."""
        match trigger:
            case LossBelow():
                return self.spot.step if self.hopeful else None
            case Plateau():
                return self._plateau(losses_needed(trigger)) if self.hopeful else None
            case Waited(steps):
                return self.last + steps
            case AtStep(step):
                return step
            case AtTokens(tokens):
                return self.spot.step_of_tokens(self.pace, tokens)
            case AtFraction(fraction):
                return self.spot.step_of_first(self.pace, self.budgets, Fraction(str(fraction)))
            case AnyOf(triggers):
                return min(self._known(triggers), default=None)
            case AllOf(triggers):
                known = self._known(triggers)
                return max(known) if len(known) == len(triggers) else None

    def _known(self, triggers: Sequence[Trigger]) -> list[int]:
        return [step for each in triggers if (step := self.first(each)) is not None]

    def _plateau(self, evaluations: int) -> int:
        """The step of so many evaluations since the last operation."""
        begin = self.last // self.interval * self.interval
        return begin + evaluations * self.interval


def timeline(
    legs: Sequence[Leg],
    budgets: Sequence[Budget],
    *,
    evaluated_at_start: bool,
    hopeful: bool,
    eval_epochs: int | None = None,
) -> Timeline:
    """The run through `legs`, whose first has no entry.

    Args:
        evaluated_at_start: there is a validation loss before the first step.
        eval_epochs: evaluations come after so many epochs each, in place of an interval of steps.
        hopeful: every condition on the loss holds as soon as it is asked, instead of never.
    """
    spot, last, masked_until, evaluated = Spot(), 0, 0, evaluated_at_start
    steps = [0]
    for before, leg in pairwise(legs):
        assert leg.entry is not None
        asked = _Asked(
            spot,
            before.pace,
            budgets,
            last,
            evaluated=evaluated,
            interval=_interval(before, eval_epochs),
            hopeful=hopeful,
        )
        step = _fires(asked, leg.entry, masked_until)
        end = spot.step_of_first(before.pace, budgets)
        if step is None or (end is not None and step >= end):
            break
        at_evaluation = (evaluated and step == spot.step) or (step and step % asked.interval == 0)
        spot = spot.after(before.pace, step - spot.step)
        if leg.pace.weight != before.pace.weight:
            spot = spot.new_order(before.pace)
        evaluated = bool(at_evaluation) or leg.entry.reevaluate
        mask = mask_of(leg.state.architecture)
        if mask is not None and mask is not mask_of(before.state.architecture):
            masked_until = step + mask.steps
        last = step
        steps.append(step)
    pace = legs[len(steps) - 1].pace
    end = spot.step_of_first(pace, budgets)
    reached = None if end is None else spot.after(pace, end - spot.step)
    return Timeline(tuple(steps), reached, pace)


def _fires(asked: _Asked, entry: Entry, masked_until: int) -> int | None:
    """The first step at which the entry is carried out; None: never."""
    first = asked.first(entry.trigger)
    if first is None:
        return None
    step = max(asked.spot.step, first)
    if entry.min_steps:
        step = max(step, asked.last + entry.min_steps)
    if is_growth(entry.operation.name):
        step = max(step, masked_until)
    return asked.evaluation(step) if needs_loss(entry.trigger) else step


def _interval(leg: Leg, epochs: int | None) -> int:
    """Steps between evaluations; of epochs that are cut by a change of the batch, about so many."""
    if epochs is None or leg.pace.samples_per_epoch is None:
        return leg.state.settings.eval_interval
    return epochs * -(-leg.pace.samples_per_epoch // leg.pace.global_batch)
