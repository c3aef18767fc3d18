"""Whether a metric stands still: what ends a run early, and what lowers its learning rate.

Evaluations are numbered e = 1, 2, 3 … A value is *better* if it beats the best so far by more than
`delta` in the rule's direction; until there is a best, it must so beat `start`, and without a start
any finite value is better. The best so far is the value that was better last, so that gains too
small to count add up. NaN and ±inf are never better.

The first `grace` evaluations can set the best, but are not counted against it. The metric stands
still when the last `patience` evaluations, all of them after those, were not better.

Pure functions of frozen states; a state is JSON by `msgspec`, as all that a checkpoint keeps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from instar.config.schema import Direction, PlateauConfig, Watch


@dataclass(frozen=True)
class Watching:
    """A metric, and when it counts as standing still: `Watch` with nothing left open."""

    metric: str
    direction: Direction
    delta: float = 0.0
    patience: int = 5
    grace: int = 0
    start: float | None = None

    @property
    def key(self) -> str:
        """What a standing hangs on, which is all but the patience."""
        delta, grace, start = self.delta, self.grace, self.start
        return f"{self.metric} {self.direction} delta {delta!r} grace {grace} start {start!r}"

    @classmethod
    def of(cls, watch: Watch, direction: Direction) -> Watching:
        """What a config says; `direction` counts where it says none."""
        return cls(
            metric=watch.metric,
            direction=watch.direction or direction,
            delta=watch.delta,
            patience=watch.patience,
            grace=watch.grace,
            start=watch.start,
        )


@dataclass(frozen=True)
class Standing:
    """What is known of a metric after the evaluations so far."""

    best: float | None = None
    """None: no value was better than none, or than the rule's start"""
    best_step: int | None = None
    seen: int = 0
    """evaluations so far"""
    since: int = 0
    """the last so many of them count against it"""


def see(rule: Watching, state: Standing, value: float, step: int) -> Standing:
    """The state after one more evaluation, made at `step`."""
    seen = state.seen + 1
    if is_better(rule, state, value):
        return Standing(best=value, best_step=step, seen=seen)
    return replace(state, seen=seen, since=state.since + (seen > rule.grace))


def is_better(rule: Watching, state: Standing, value: float) -> bool:
    """Whether a value would become the best."""
    to_beat = rule.start if state.best is None else state.best
    if not math.isfinite(value) or to_beat is None:
        return math.isfinite(value)
    gain = value - to_beat if rule.direction == "max" else to_beat - value
    return gain > rule.delta


def stands_still(rule: Watching, state: Standing) -> bool:
    return state.since >= rule.patience


def why(rule: Watching, state: Standing) -> str:
    """How long a metric has not been better, and than what, in words for the record."""
    times = f"for {state.since} evaluation{'s' * (state.since != 1)}"
    better = f"better by more than {rule.delta:g}" if rule.delta else "better"
    if state.best is not None:
        return f"{rule.metric} has not been {better} than {state.best:g} (step {state.best_step}) {times}"
    if rule.start is not None:
        return f"{rule.metric} has not been {better} than {rule.start:g} (the start) {times}"
    return f"{rule.metric} has not been finite {times}"


def give_up(
    rules: Sequence[Watching], states: Sequence[Standing], mode: Literal["any", "all"]
) -> str | None:
    """Why a run should end, if any of its metrics stands still, or all do at once; else None.

    Without rules it never should.
    """
    pairs = list(zip(rules, states, strict=True))
    still = [why(rule, state) for rule, state in pairs if stands_still(rule, state)]
    enough = bool(still) and (mode == "any" or len(still) == len(pairs))
    return " and ".join(still) if enough else None


def lower(
    rule: Watching, state: Standing, plateau: PlateauConfig, lr: float, first_lr: float
) -> tuple[Standing, float | None]:
    """The learning rate's fall on a plateau: the state, and the new peak if it falls.

    Where the metric stands still, the peak falls from `lr` by the plateau's factor, but not below
    `min_lr_ratio` × `first_lr`, and evaluations are counted anew, while the best stays.
    """
    if plateau.factor is None or not stands_still(rule, state):
        return state, None
    fallen = max(lr * plateau.factor, plateau.min_lr_ratio * first_lr)
    return replace(state, since=0), fallen if fallen < lr else None
