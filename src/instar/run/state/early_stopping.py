"""Early stopping, and the learning rate's decay on a plateau.

Evaluations are numbered e = 1, 2, 3 … A value is *better* if it improves on the best so far by more
than `delta` in the rule's direction, which is set (`with_direction`); until there is a best, it must improve on `start` in the same
way, and without a start any finite value is better. The best so far is the last value that was
better, so gains too small to count add up. NaN and ±inf are never better.

The first `grace` evaluations can set the best, but do not count against the patience. The metric is
on a plateau when each of the last `patience` evaluations, all after the grace, was not better.

Pure functions of frozen states; `msgspec` converts a state to JSON for the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from instar.checkpoint.listing import BEST, best_pointer
from instar.config.schema import Direction, PlateauConfig, RunConfig, Watch


def rule_key(rule: Watch) -> str:
    """Return everything that a `RuleState` depends on: all fields but the patience."""
    delta, grace, start = rule.delta, rule.grace, rule.start
    return f"{rule.metric} {rule.direction} delta {delta!r} grace {grace} start {start!r}"


def with_direction(rule: Watch, directions: Mapping[str, Direction]) -> Watch:
    """Return a rule that has a direction: by default the better one of its metric."""
    return rule.model_copy(update={"direction": rule.direction or directions[rule.metric]})


@dataclass(frozen=True)
class RuleState:
    """State of a rule after the evaluations so far."""

    best: float | None = None
    """None: no finite value so far, or none better than the rule's start"""
    best_step: int | None = None
    seen: int = 0
    """number of evaluations so far"""
    since: int = 0
    """number of last evaluations that count against the patience"""


def update_rule(rule: Watch, state: RuleState, value: float, step: int) -> RuleState:
    """Return the state after one more evaluation, at `step`."""
    number = state.seen + 1
    if is_better(rule, state, value):
        return RuleState(best=value, best_step=step, seen=number)
    return replace(state, seen=number, since=state.since + (number > rule.grace))


def is_better(rule: Watch, state: RuleState, value: float) -> bool:
    """Return whether a value is better than the best so far."""
    to_beat = rule.start if state.best is None else state.best
    if not math.isfinite(value) or to_beat is None:
        return math.isfinite(value)
    gain = value - to_beat if rule.direction == "max" else to_beat - value
    return gain > rule.delta


def is_on_plateau(rule: Watch, state: RuleState) -> bool:
    return state.since >= rule.patience


def plateau_text(rule: Watch, state: RuleState) -> str:
    """Describe for how long a metric has not been better, and than what."""
    times = f"for {state.since} evaluation{'s' * (state.since != 1)}"
    better = f"better by more than {rule.delta:g}" if rule.delta else "better"
    if state.best is not None:
        return f"{rule.metric} has not been {better} than {state.best:g} (step {state.best_step}) {times}"
    if rule.start is not None:
        return f"{rule.metric} has not been {better} than {rule.start:g} (the start) {times}"
    return f"{rule.metric} has not been finite {times}"


def stop_reason(
    rules: Sequence[Watch], states: Sequence[RuleState], stop_when: Literal["any", "all"]
) -> str | None:
    """Return the reason for early stopping, or None.

    Args:
        stop_when: stop when any metric is on a plateau, or only when all are. Without rules: never.
    """
    pairs = list(zip(rules, states, strict=True))
    reasons = [plateau_text(rule, state) for rule, state in pairs if is_on_plateau(rule, state)]
    enough = bool(reasons) and (stop_when == "any" or len(reasons) == len(pairs))
    return " and ".join(reasons) if enough else None


def lower(
    rule: Watch, state: RuleState, plateau: PlateauConfig, lr: float, first_lr: float
) -> tuple[RuleState, float | None]:
    """Lower the peak learning rate on a plateau.

    On a plateau the peak becomes `lr` × the plateau's factor, at least `min_lr_ratio` × `first_lr`;
    the count of evaluations restarts and the best is kept.

    Returns:
        the new state, and the new peak, or None if it is not lowered.
    """
    if plateau.factor is None or not is_on_plateau(rule, state):
        return state, None
    lower_lr = max(lr * plateau.factor, plateau.min_lr_ratio * first_lr)
    return replace(state, since=0), lower_lr if lower_lr < lr else None


LOSS = "loss"


@dataclass(frozen=True)
class MetricState:
    """States of all rules after the evaluations so far."""

    best: Mapping[str, RuleState] = field(default_factory=dict)
    """by metric: the loss, and every metric of `checkpoint.best_of`"""
    stopping: Mapping[str, RuleState] = field(default_factory=dict)
    """early stopping, by the rule's key: a changed rule starts without state"""
    plateau: Mapping[str, RuleState] = field(default_factory=dict)
    """learning rate on a plateau, by the rule's key"""


class MetricTracker:
    """The rules of a config: best values, early stopping, learning rate on a plateau."""

    def __init__(self, config: RunConfig) -> None:
        directions = config.metrics
        self._stopping, self._plateau = config.early_stopping, config.learning_rate.plateau
        self._first_lr = config.optimizer.lr
        tracked_metrics = dict.fromkeys((LOSS, *config.checkpoint.best_of))
        self.best = {
            name: Watch(metric=name, direction=directions[name]) for name in tracked_metrics
        }
        self.rules = tuple(with_direction(rule, directions) for rule in self._stopping.rules)
        self.plateau = with_direction(self._plateau, directions)
        self.pointers = {
            name: BEST if number == 0 else best_pointer(name)
            for number, name in enumerate(config.checkpoint.best_of)
        }
        """pointer to the best checkpoint of each metric"""

    def update(
        self,
        metric_state: MetricState,
        metrics: Mapping[str, float],
        step: int,
        *,
        only_best: bool = False,
    ) -> MetricState:
        """Return the states after one more evaluation, at `step`.

        Args:
            metrics: those that were measured; others stay as they are.
            only_best: it does not count for early stopping and the plateau.
        """

        def updated(rule: Watch, rule_state: RuleState) -> RuleState:
            if rule.metric not in metrics:
                return rule_state
            return update_rule(rule, rule_state, metrics[rule.metric], step)

        best = {
            name: updated(rule, metric_state.best.get(name, RuleState()))
            for name, rule in self.best.items()
        }
        if only_best:
            return replace(metric_state, best=best)
        return MetricState(
            best=best,
            stopping={
                rule_key(rule): updated(rule, _state_of(rule, metric_state.stopping))
                for rule in self.rules
            },
            plateau={
                rule_key(self.plateau): updated(self.plateau, self._plateau_state(metric_state))
            },
        )

    def stop_reason(self, metric_state: MetricState) -> str | None:
        """Return the reason for early stopping, or None."""
        states = [_state_of(rule, metric_state.stopping) for rule in self.rules]
        return stop_reason(self.rules, states, self._stopping.stop_when)

    def lower_lr(self, metric_state: MetricState, lr: float) -> tuple[MetricState, float | None]:
        """Return the states, and the new peak learning rate, or None if it is not lowered."""
        before = self._plateau_state(metric_state)
        state, new_lr = lower(self.plateau, before, self._plateau, lr, self._first_lr)
        if state == before:
            return metric_state, None
        return replace(metric_state, plateau={rule_key(self.plateau): state}), new_lr

    def plateau_reason(self, metric_state: MetricState) -> str:
        """Describe for how long the metric of `learning_rate.plateau` has not been better."""
        return plateau_text(self.plateau, self._plateau_state(metric_state))

    def best_at(self, metric_state: MetricState, step: int) -> tuple[str, ...]:
        """Return the metrics whose best value is that of this step."""
        return tuple(
            name
            for name in self.pointers
            if name in metric_state.best and metric_state.best[name].best_step == step
        )

    def _plateau_state(self, metric_state: MetricState) -> RuleState:
        return _state_of(self.plateau, metric_state.plateau)


def _state_of(rule: Watch, states: Mapping[str, RuleState]) -> RuleState:
    return states.get(rule_key(rule), RuleState())
