"""The best trial of a search, and trials as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from instar.fleet.spec import Scalar, Search
from instar.fleet.state import FleetStatus, InstanceStatus


@dataclass(frozen=True)
class BestTrial:
    """The trial that has succeeded with the best value."""

    instance: int
    metric: str
    value: float
    values: Mapping[str, Scalar]

    @property
    def text(self) -> str:
        return f"best: trial {self.instance}, {_text(self.metric, self.value, self.values)}"


def best_trial(search: Search | None, status: FleetStatus) -> BestTrial | None:
    """Return the best trial; None if none has succeeded, or the fleet is no search."""
    if search is None:
        return None
    sign = 1 if search.direction == "minimize" else -1
    values = {
        index: each.metric
        for index, each in status.instances.items()
        if each.phase == "succeeded" and each.metric is not None
    }
    if not values:
        return None
    index = min(values, key=lambda index: (sign * values[index], index))
    return BestTrial(index, search.metric, values[index], status.instances[index].values)


def trial_text(search: Search | None, trial: InstanceStatus) -> str:
    """Return what a trial has reached, and its values; "" if it is none."""
    return "" if search is None else _text(search.metric, trial.metric, trial.values)


def _text(metric: str, value: float | None, values: Mapping[str, Scalar]) -> str:
    reached = {} if value is None else {metric: value}
    return ", ".join(
        f"{key} {each:.4g}" if isinstance(each, float) else f"{key} {each}"
        for key, each in {**reached, **values}.items()
    )
