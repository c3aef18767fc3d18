"""Simulation of a run through its schedule: the step at which each entry fires.

The clock counts steps, samples and tokens as a run does, and `due` decides whether an entry fires,
as in a run. Losses are unknown, so there are two cases: at the earliest, every condition on the
loss holds at the first evaluation; at the latest, none ever holds. In both, an entry that is due
stays due, so its first step is found by bisection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any

from instar.config.budget import Budget, Counters, fraction_used
from instar.growth.plan import GrowthPlan, source_of
from instar.models.cost import FrozenParameters
from instar.models.shape import mask_of
from instar.schedule.branches import BRANCH
from instar.schedule.operations import State, when_due
from instar.schedule.settings import AVERAGE, is_frozen
from instar.schedule.triggers import Entry, Moment, due, losses_needed

FAR = 1 << 62
"""A step that no run reaches."""


@dataclass(frozen=True)
class Pace:
    """What every step consumes and costs."""

    global_batch: int
    """Samples per step; the last step of an epoch takes the rest, or leaves it out."""
    weight: float
    """The weight of a sample: its targets, on the mean."""
    samples_per_epoch: int | None
    """None: unknown, assumed infinite."""
    flops_per_token: int
    drop_last: bool = False
    """Whether the rest of an epoch is left out that is less than a global batch."""
    basis: tuple[int | None, ...] = ()
    """What an evaluation depends on beside the weights: losses on two bases are not compared."""
    order: tuple[float, ...] = ()
    """Of what the order of the samples depends: where it changes, another order begins."""

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of an epoch that begins with a step; None: unknown."""
        if self.samples_per_epoch is None:
            return None
        return -(-(self.samples_per_epoch - self.left_out) // self.global_batch)

    @property
    def left_out(self) -> int:
        """Samples of such an epoch that are left out."""
        return (self.samples_per_epoch or 0) % self.global_batch if self.drop_last else 0

    @property
    def flops_per_step(self) -> int:
        """FLOPs of a step with a whole global batch."""
        return round(self.global_batch * self.weight * self.flops_per_token)


@dataclass(frozen=True)
class Clock(Counters):
    """The counters of a simulated run, all of them exact, and its place in the data."""

    flops: int = 0
    in_order: int = 0
    """Samples consumed since the current order began; samples of another length begin a new one."""
    epochs_before: Fraction = Fraction(0)
    """Passes through the data in earlier orders."""

    def after(self, pace: Pace, steps: int) -> Clock:
        """Return the clock after a number of steps."""
        samples = _samples_passed(self.in_order, steps, pace)
        samples_trained = steps * pace.global_batch if pace.drop_last else samples
        tokens = round(samples_trained * pace.weight)
        return replace(
            self,
            step=self.step + steps,
            samples=self.samples + samples,
            tokens=self.tokens + tokens,
            flops=self.flops + tokens * pace.flops_per_token,
            in_order=self.in_order + samples,
        )

    def epochs(self, pace: Pace) -> Fraction:
        """Return the passes through the data so far."""
        if pace.samples_per_epoch is None:
            return self.epochs_before
        return self.epochs_before + Fraction(self.in_order, pace.samples_per_epoch)

    def new_order(self, pace: Pace) -> Clock:
        """Return the clock when samples of another length begin; `pace` is the one before."""
        return replace(self, in_order=0, epochs_before=self.epochs(pace))

    def used(self, pace: Pace, budgets: Sequence[Budget]) -> Fraction | None:
        """Return the largest used share of the counted budgets; None without one."""
        return fraction_used(budgets, self, self.epochs(pace))

    def end(self, pace: Pace, budgets: Sequence[Budget]) -> int | None:
        """Return the first step, this one at the earliest, after which a budget is used up; None
        without a counted budget, or if epochs have unknown length."""

        def over(step: int) -> bool:
            used = self.after(pace, step - self.step).used(pace, budgets)
            return used is not None and used >= 1

        return _first(over, self.step)


def _samples_passed(begin: int, steps: int, pace: Pace) -> int:
    """Return by how much `steps` steps move the cursor from position `begin`."""
    size, batch, in_epoch = pace.samples_per_epoch, pace.global_batch, pace.steps_per_epoch
    if not size or not in_epoch:
        return steps * batch
    remaining = size - begin % size
    to_end = remaining // batch if pace.drop_last else -(-remaining // batch)
    if steps < to_end or not steps:
        return steps * batch
    epochs, remainder = divmod(steps - to_end, in_epoch)
    return remaining + epochs * size + remainder * batch


def _first(holds: Callable[[int], bool], begin: int) -> int | None:
    """Return the first number from `begin` on for which a monotone predicate holds."""
    if holds(begin):
        return begin
    if not holds(FAR):
        return None
    low, stride = begin, 1
    while not holds(low + stride):
        low, stride = low + stride, 2 * stride
    high = low + stride
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


@dataclass(frozen=True)
class Leg:
    """The run between two operations."""

    entry: Entry | None
    """The entry at its beginning; None for the first leg."""
    state: State
    pace: Pace
    plan: GrowthPlan | None = None
    """The growth of the model at its beginning, if any."""
    skip_reason: str = ""
    """The reason for skipping the operation."""
    config_changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Keys of the config that the operation changes, with their values before and after."""
    is_idle: bool = False
    """Whether the operation changes nothing."""

    @property
    def label(self) -> str:
        """exact, bounded or lossy if the weights change, otherwise empty"""
        if self.entry is not None and self.entry.operation.name == AVERAGE and not self.skip_reason:
            return "lossy"
        return "" if self.plan is None else self.plan.label


@dataclass(frozen=True)
class Timeline:
    """The result of simulating a run through its legs."""

    starts: tuple[Clock, ...]
    """The clock at the first step of each leg that is reached."""
    end: Clock | None
    """The end by budgets; None: only the wall clock or the loss ends the run."""
    end_pace: Pace

    @property
    def steps(self) -> tuple[int, ...]:
        """First step of each leg that is reached."""
        return tuple(clock.step for clock in self.starts)


@dataclass(frozen=True)
class Beginning:
    """Where a simulation begins."""

    clock: Clock = field(default_factory=Clock)
    is_evaluated: bool = False
    """Whether there is a validation loss before its first step."""
    since: int = 0
    """Step of the last operation before it that is no branch; 0: there was none."""
    has_changed: bool = False
    """Whether there was such an operation."""
    masked_until: int = 0
    """The step at which the last mask is open."""


@dataclass(frozen=True)
class PartialStep:
    """A last step of an epoch, which has fewer samples than a global batch."""

    samples: int
    global_batch: int
    batch_size: int
    """The most samples of a micro-batch."""


def partial_steps(line: Timeline, legs: Sequence[Leg]) -> Iterator[PartialStep]:
    """Yield the partial steps that a run comes to, alike ones at most twice for each leg."""
    ends = [*line.steps[1:], FAR if line.end is None else line.end.step]
    for clock, end, leg in zip(line.starts, ends, legs, strict=False):
        size, batch = leg.pace.samples_per_epoch, leg.pace.global_batch
        if not size or leg.pace.drop_last:
            continue
        step, remaining = clock.step, size - clock.in_order % size
        for _ in range(2):  # the rest of the epoch in which the leg begins, and a whole one
            step += -(-remaining // batch)
            if step <= end and remaining % batch:
                yield PartialStep(remaining % batch, batch, leg.state.settings.batch_size)
            remaining = size


@dataclass(frozen=True)
class _Ending:
    """A leg, from its first step on, and the entry that ends it."""

    leg: Leg
    entry: Entry
    clock: Clock
    budgets: Sequence[Budget]
    interval: int
    """Steps between evaluations."""
    is_evaluated_at_start: bool
    """Whether there is an evaluation at the first step."""
    since: int
    """Step of the last operation that is no branch, or of the beginning."""
    has_changed: bool
    """Whether there was such an operation."""
    masked_until: int
    optimistic: bool
    """Whether conditions on the loss hold at once, instead of never."""

    def step(self) -> int | None:
        """Return the first step at which the entry fires; None: never."""
        begin = self.clock.step
        if self.is_due(begin):
            return begin
        if not self.entry.at_evaluations:
            return _first(self.is_due, begin + 1)
        number = _first(lambda n: self.is_due(n * self.interval), begin // self.interval + 1)
        return None if number is None else number * self.interval

    @cached_property
    def folded(self) -> State:
        """The state when all masks are folded."""
        return when_due(self.leg.state, self.entry.operation)

    def is_evaluated(self, step: int) -> bool:
        return self.is_evaluated_at_start if step == self.clock.step else step % self.interval == 0

    def is_due(self, step: int) -> bool:
        begin, state = self.clock.step, self.leg.state
        clock = self.clock.after(self.leg.pace, step - begin)
        used, is_evaluated = clock.used(self.leg.pace, self.budgets), self.is_evaluated(step)
        moment = Moment(
            counters=clock,
            fraction=None if used is None else float(used),
            since_last=step - self.since,
            loss=(-math.inf if self.optimistic else math.inf) if is_evaluated else None,
            losses=self._losses(step),
            has_changed=self.has_changed and step == self.since,
            noise=math.inf if self.optimistic else None,
            flops_per_step=self.leg.pace.flops_per_step,
        )
        if step >= self.masked_until:
            state = self.folded
        return due(self.entry, moment, state) is not None

    def _losses(self, step: int) -> tuple[tuple[int, float], ...]:
        """Return losses for triggers on a slope that never fall, or that never stop falling."""
        last, slope = step // self.interval, 1e30 if self.optimistic else -1e30
        first = max(self.since // self.interval, last - losses_needed(self.entry.trigger))
        steps = (number * self.interval for number in range(first + 1, last + 1))
        return tuple((evaluation, slope * evaluation) for evaluation in steps)


def timeline(
    legs: Sequence[Leg],
    budgets: Sequence[Budget],
    beginning: Beginning,
    *,
    optimistic: bool,
    eval_epochs: int | None = None,
) -> Timeline:
    """Simulate the run through `legs`, the first of which has no entry.

    Args:
        optimistic: whether conditions on the loss hold at once, instead of never.
        eval_epochs: the epochs between evaluations, instead of an interval of steps.
    """
    clock, clocks = beginning.clock, [beginning.clock]
    since, has_changed = beginning.since, beginning.has_changed
    masked_until, is_evaluated = beginning.masked_until, beginning.is_evaluated
    for before, leg in pairwise(legs):
        assert leg.entry is not None
        ending = _Ending(
            before,
            leg.entry,
            clock,
            budgets,
            _interval(before, eval_epochs),
            is_evaluated,
            since,
            has_changed,
            masked_until,
            optimistic,
        )
        step, end = ending.step(), clock.end(before.pace, budgets)
        if step is None or (end is not None and step >= end):
            break
        clock = clock.after(before.pace, step - clock.step)
        if leg.pace.order != before.pace.order:
            clock = clock.new_order(before.pace)
        is_comparable = ending.is_evaluated(step) and before.pace.basis == leg.pace.basis
        is_evaluated = is_comparable or leg.entry.reevaluate
        mask = mask_of(leg.state.architecture)
        if mask is not None and mask is not mask_of(before.state.architecture):
            masked_until = step + mask.steps
        clocks.append(clock)
        if leg.entry.operation.name != BRANCH:
            since, has_changed = step, True
    pace = legs[len(clocks) - 1].pace
    end = clock.end(pace, budgets)
    end_clock = None if end is None else clock.after(pace, end - clock.step)
    return Timeline(tuple(clocks), end_clock, pace)


def _interval(leg: Leg, epochs: int | None) -> int:
    """Return the steps between evaluations; approximate if a changed batch size cuts an epoch."""
    steps = leg.pace.steps_per_epoch
    return leg.state.settings.eval_interval if epochs is None or not steps else epochs * steps


def frozen_parameters(
    legs: Sequence[Leg], number: int, with_steps: Collection[int]
) -> FrozenParameters:
    """Return the frozen parameters of a leg, and those of them that were frozen in all `with_steps`
    legs before it, under whatever name."""
    state = legs[number].state
    frozen = [n for n in state.architecture.parameters() if is_frozen(state.settings.frozen, n)]
    frozen_throughout = {
        name for name in frozen if not _is_trained(legs[: number + 1], name, with_steps)
    }
    return FrozenParameters(frozenset(frozen), frozenset(frozen_throughout))


def _is_trained(legs: Sequence[Leg], name: str, with_steps: Collection[int]) -> bool:
    """Return whether a parameter of the last leg, or its source, was trained in an earlier leg."""
    for number in range(len(legs) - 1, 0, -1):
        plan = legs[number].plan
        source = name if plan is None else source_of(plan.tensors[name])
        if source is None:
            return False
        name = source
        before = legs[number - 1].state.settings
        if number - 1 in with_steps and not is_frozen(before.frozen, name):
            return True
    return False
