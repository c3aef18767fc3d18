"""Runs side by side: metrics at equal places, where each comes to a loss, what differs in config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from instar.config.differing import differing
from instar.config.errors import ConfigError
from instar.logs.comparing.arms import Arm
from instar.logs.comparing.places import PLACED_BY, Place, even_places, values_at
from instar.logs.comparing.reach import Reached, Saving, reach, saving
from instar.logs.reading.record import ALIASES, RunRecord, unknown_metric
from instar.record.events import RunStarted, to_words

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

COMPARED = ("val/loss", "loss")
"""metrics compared where none is named, as far as a run has them"""


@dataclass(frozen=True)
class Cell:
    """What the runs of an arm have at one place."""

    mean: float | None
    """over those runs whose value is finite; None: there are none"""
    deviation: float | None
    """standard deviation over runs; None of fewer than two"""
    error: float | None
    """standard error of the mean"""
    low: float | None
    """of the band from the lowest to the highest run"""
    high: float | None
    runs: int
    """whose value is finite"""
    not_finite: int
    """runs that have been there, but whose value is no number, or infinite"""


@dataclass(frozen=True)
class ToLoss:
    """Where each run first comes to a value of a metric."""

    metric: str
    target: float
    reached: tuple[tuple[Reached | None, ...], ...]
    """of each run of each arm"""
    savings: tuple[Mapping[str, Saving | None], ...]
    """of each arm but the first, against the first: by axis"""


@dataclass(frozen=True)
class Comparison:
    """All of it; tuples are in the order of `arms`."""

    arms: tuple[Arm, ...]
    unit: str
    """what `tokens` counts, in the first run"""
    places: tuple[Place, ...]
    metrics: Mapping[str, tuple[tuple[Cell, ...], ...]]
    """of each metric, of each arm, of each place"""
    config: Mapping[str, tuple[Any, ...]]
    """the keys that differ between arms"""
    to_loss: ToLoss | None


@dataclass(frozen=True)
class _Curves:
    """What is kept of a run while others are read."""

    unit: str
    metrics: Mapping[str, Mapping[str, tuple[Floats, Floats]]]
    """by metric and axis: places and values, shapes [n]"""
    reached: Reached | None


def compare(
    arms: Sequence[Arm],
    records: Sequence[RunRecord],
    *,
    metrics: Sequence[str] = (),
    places: Sequence[Place] = (),
    axis: str = "step",
    target: float | None = None,
    target_metric: str = "val/loss",
) -> Comparison:
    """Compare two or more arms.

    Args:
        records: of all their runs.
        metrics: names or patterns; none: `COMPARED`.
        places: where; none: five places along `axis`, up to the furthest that all have reached
            with all metrics.
        target: the value of `target_metric` that is looked for; None: none is.

    Raises:
        ConfigError: no run has such a metric, or there is nothing to be compared.
    """
    axes = {place.axis for place in places} or {axis}
    wanted = tuple(ALIASES.get(metric, metric) for metric in metrics)
    goal = ALIASES.get(target_metric, target_metric)
    known: dict[str, None] = {}
    curves: list[list[_Curves]] = []
    of = {record.run: record for record in records}
    for arm in arms:
        known |= {metric: None for run in arm.runs for metric in of[run].metrics}
        curves.append(
            [_curves(of[run], wanted or COMPARED, axes, target, goal) for run in arm.runs]
        )
    where = ", ".join(arm.name for arm in arms)
    for name in (*wanted, *([goal] if target is not None else [])):
        if not any(fnmatchcase(metric, name) for metric in known):
            raise unknown_metric(name, tuple(known), where)
    every = [run for arm in curves for run in arm]
    names = list(dict.fromkeys(name for run in every for name in run.metrics))
    if not names:
        raise ConfigError.one(f"nothing has been measured yet in {where}")
    names.sort(key=_rank(wanted or COMPARED))
    at = tuple(places or even_places(axis, _furthest(every, axis)))
    return Comparison(
        arms=tuple(arms),
        unit=every[0].unit,
        places=at,
        metrics={
            name: tuple(_cells([run.metrics.get(name, {}) for run in arm], at) for arm in curves)
            for name in names
        },
        config=differing([arm.config() or None for arm in arms]),
        to_loss=None if target is None else _to_loss(arms, curves, goal, target),
    )


def to_json(comparison: Comparison) -> dict[str, Any]:
    """All of it in what JSON can say, arms by name."""
    names = [arm.name for arm in comparison.arms]
    found: dict[str, Any] = {
        "arms": [
            {"name": arm.name, "runs": [str(run.path) for run in arm.runs], "seeds": arm.seeds}
            for arm in comparison.arms
        ],
        "places": comparison.places,
        "metrics": {
            metric: dict(zip(names, cells, strict=True))
            for metric, cells in comparison.metrics.items()
        },
        "config": {
            key: dict(zip(names, values, strict=True)) for key, values in comparison.config.items()
        },
    }
    if comparison.to_loss is not None:
        goal = comparison.to_loss
        found["to_loss"] = {
            "metric": goal.metric,
            "target": goal.target,
            "reached": dict(zip(names, goal.reached, strict=True)),
            "savings": dict(zip(names[1:], goal.savings, strict=True)),
            "against": names[0],
        }
    said: dict[str, Any] = to_words(msgspec.to_builtins(found, str_keys=True))
    return said


def _curves(
    record: RunRecord, wanted: Iterable[str], axes: Iterable[str], target: float | None, goal: str
) -> _Curves:
    started = next((s.event for s in record.of(RunStarted)), None)
    metrics = {}
    for name in record.metrics:
        if any(fnmatchcase(name, pattern) for pattern in wanted):
            series = record.series(name)
            values = series.value[series.kept]
            metrics[name] = {axis: (series.axis(axis)[series.kept], values) for axis in axes}
    return _Curves(
        unit=started.unit if isinstance(started, RunStarted) else "token",
        metrics=metrics,
        reached=reach(record.series(goal), target)
        if target is not None and goal in record
        else None,
    )


def _furthest(runs: Sequence[_Curves], axis: str) -> float:
    """The furthest place that every run has reached with each of its metrics."""
    ends = [
        float(by_axis[axis][0].max())
        for run in runs
        for by_axis in run.metrics.values()
        if len(by_axis[axis][0])
    ]
    return min(ends, default=0.0)


def _cells(
    curves: Sequence[Mapping[str, tuple[Floats, Floats]]], places: Sequence[Place]
) -> tuple[Cell, ...]:
    found = np.full((len(curves), len(places)), np.nan)
    been = np.zeros_like(found, bool)
    for axis in {place.axis for place in places}:
        columns = [number for number, place in enumerate(places) if place.axis == axis]
        wanted = np.array([places[number].amount for number in columns])
        for row, by_axis in enumerate(curves):
            if axis in by_axis:
                x, values = by_axis[axis]
                found[row, columns] = values_at(x, values, wanted)
                if len(x):
                    been[row, columns] = (x.min() <= wanted) & (wanted <= x.max())
    return tuple(
        _cell(column[np.isfinite(column)], int((there & ~np.isfinite(column)).sum()))
        for column, there in zip(found.T, been.T, strict=True)
    )


def _cell(values: Floats, not_finite: int) -> Cell:
    count = len(values)
    if not count:
        return Cell(None, None, None, None, None, 0, not_finite)
    deviation = float(values.std(ddof=1)) if count > 1 else None
    return Cell(
        mean=float(values.mean()),
        deviation=deviation,
        error=None if deviation is None else deviation / count**0.5,
        low=float(values.min()),
        high=float(values.max()),
        runs=count,
        not_finite=not_finite,
    )


def _to_loss(
    arms: Sequence[Arm], curves: Sequence[Sequence[_Curves]], metric: str, target: float
) -> ToLoss:
    reached = tuple(tuple(run.reached for run in arm) for arm in curves)
    keyed: list[dict[object, Reached | None]] = [
        dict(zip(arm.keys, found, strict=True)) for arm, found in zip(arms, reached, strict=True)
    ]
    base = keyed[0]
    savings = []
    for other in keyed[1:]:
        if len(base) == len(other) == 1:  # one run against one: a pair, whatever their seeds
            other = dict(zip(base, other.values(), strict=True))
        savings.append({axis: saving(base, other, axis) for axis in PLACED_BY})
    return ToLoss(metric, target, reached, tuple(savings))


def _rank(wanted: Sequence[str]) -> Any:
    """Metrics in the order in which they were asked for."""
    return lambda name: next(n for n, pattern in enumerate(wanted) if fnmatchcase(name, pattern))
