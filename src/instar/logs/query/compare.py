"""Compares runs: metrics at equal places, where each run reaches a loss, differences of configs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import msgspec
import numpy as np

from instar.config.errors import ConfigError
from instar.config.fields import differing_keys
from instar.logs.query.alignment import (
    PLACED_BY,
    AxisValue,
    LossReached,
    Saving,
    at_loss,
    decays_after,
    even_places,
    saving,
    values_at,
)
from instar.logs.query.groups import (
    SAME_DATA,
    Comparability,
    RunGroup,
    check_same_data,
    comparability,
    warnings_on_data,
)
from instar.logs.read.columns import Floats
from instar.logs.read.record import RunRecord, losses_of_parts, metrics_of, unknown_metric
from instar.record.events import BeginsAnew, RunStarted, to_words
from instar.record.rundir import RunDir

COMPARED = ("val/loss", "val/bits_per_byte", "loss")
"""default metrics, as far as a run has them; with them `losses_of_parts`"""
_LR = "lr"


@dataclass(frozen=True)
class Cell:
    """The values of the runs of a group at one place."""

    mean: float | None
    """over the runs whose value is finite; None: no run has a finite value"""
    deviation: float | None
    """standard deviation over runs; None for fewer than two"""
    error: float | None
    """standard error of the mean"""
    low: float | None
    """of the band from the lowest to the highest run"""
    high: float | None
    runs: int
    """number of runs with a finite value"""
    not_finite: int
    """number of runs that reached the place with NaN or infinity"""


@dataclass(frozen=True)
class ToLoss:
    """Where each run first reaches a value of a metric."""

    metric: str
    target: float
    reached: tuple[tuple[LossReached | None, ...], ...]
    """by group and run"""
    savings: tuple[Mapping[str, Saving | None], ...]
    """of each group but the first, relative to the first, by axis"""


@dataclass(frozen=True)
class Comparison:
    """A comparison; tuples are in the order of `groups`."""

    groups: tuple[RunGroup, ...]
    unit: str
    """what `tokens` counts, in the first run"""
    places: tuple[AxisValue, ...]
    metrics: Mapping[str, tuple[tuple[Cell, ...], ...]]
    """by metric, group and place"""
    results: Mapping[str, tuple[Cell, ...]]
    """by metric and group: the best value of each run in its evaluations, as `best val/loss`, and the last of its
    tests, wherever the runs ended"""
    config: Mapping[str, tuple[Any, ...]]
    """keys that differ between groups, with a value per group"""
    warnings: tuple[str, ...]
    """why losses are not comparable"""
    to_loss: ToLoss | None


@dataclass(frozen=True)
class _Curves:
    """The part of a run that stays in memory while others are read."""

    unit: str
    metrics: Mapping[str, Mapping[str, tuple[Floats, Floats]]]
    """by metric and axis: places and values, shapes [n]"""
    reached: LossReached | None
    results: Mapping[str, float]
    """the best value of metrics of evaluations, and the last one of tests"""


def compare_groups(
    groups: Sequence[RunGroup],
    records: Sequence[RunRecord],
    *,
    metrics: Sequence[str] = (),
    places: Sequence[AxisValue] = (),
    axis: str = "step",
    target: float | None = None,
    target_metric: str = "val/loss",
) -> Comparison:
    """Compare two or more groups of runs.

    Args:
        records: the records of all runs of the groups.
        metrics: names or patterns; default `COMPARED` and the losses of parts.
        places: places to compare at; default five places along `axis`, up to the furthest one that
            all runs have reached with all metrics.
        target: a value of `target_metric` for which to report where each run first reaches it.

    Raises:
        ConfigError: no run has such a metric, nothing has been measured yet, or a run has nothing on the axis.
    """
    goal, *metrics = metrics_of((target_metric, *metrics), records)
    patterns = metrics or _default_metrics(records)
    by_run = {record.run: record for record in records}
    axes = {place.axis for place in places} or {axis, "step"}
    curves = [
        [_curves(by_run[run], patterns, axes, target, goal) for run in group.runs]
        for group in groups
    ]
    _check_metrics([*metrics, *([goal] if target is not None else [])], groups, by_run)
    configs = [config for group in groups for config in group.configs]
    new_bases = tuple(text for record in records if (text := _anew(record)))
    evaluations = comparability(groups)
    if target is not None:
        _check_goal(goal, evaluations, configs, new_bases)
    all_runs = [run for group in curves for run in group]
    names = _measured_metrics(all_runs, groups)
    at = tuple(places or _even_places(axis, groups, curves))
    return Comparison(
        groups=tuple(groups),
        unit=all_runs[0].unit,
        places=at,
        metrics={
            name: tuple(
                _cells([run.metrics.get(name, {}) for run in group], at) for group in curves
            )
            for name in sorted(names, key=_rank(patterns))
        },
        results=_results(curves),
        config=differing_keys([group.config() or None for group in groups]),
        warnings=(
            *evaluations.differing,
            *warnings_on_data(configs, held_out=not evaluations.is_known),
            *new_bases,
            *_of_unknown_data(records),
        ),
        to_loss=None if target is None else _to_loss(groups, curves, goal, target),
    )


def comparison_to_json(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as JSON-ready data, groups by name."""
    names = [group.name for group in comparison.groups]
    data: dict[str, Any] = {
        "arms": [
            {
                "name": group.name,
                "runs": [str(run.path) for run in group.runs],
                "seeds": group.seeds,
                "folds": group.folds,
            }
            for group in comparison.groups
        ],
        "warnings": comparison.warnings,
        "places": comparison.places,
        "metrics": {
            metric: dict(zip(names, cells, strict=True))
            for metric, cells in comparison.metrics.items()
        },
        "results": {
            name: dict(zip(names, cells, strict=True)) for name, cells in comparison.results.items()
        },
        "config": {
            key: dict(zip(names, values, strict=True)) for key, values in comparison.config.items()
        },
    }
    if comparison.to_loss is not None:
        goal = comparison.to_loss
        data["to_loss"] = {
            "metric": goal.metric,
            "target": goal.target,
            "reached": dict(zip(names, goal.reached, strict=True)),
            "savings": dict(zip(names[1:], goal.savings, strict=True)),
            "against": names[0],
        }
    as_json: dict[str, Any] = to_words(msgspec.to_builtins(data, str_keys=True))
    return as_json


def _check_metrics(
    patterns: Iterable[str], groups: Sequence[RunGroup], by_run: Mapping[RunDir, RunRecord]
) -> None:
    """Raise ConfigError if no run has a metric that matches a pattern."""
    available = dict.fromkeys(
        metric for group in groups for run in group.runs for metric in by_run[run].metrics
    )
    for pattern in patterns:
        if not any(fnmatchcase(metric, pattern) for metric in available):
            raise unknown_metric(pattern, tuple(available), _names(groups))


def _check_goal(
    goal: str,
    evaluations: Comparability,
    configs: Sequence[Mapping[str, Any]],
    new_bases: Sequence[str],
) -> None:
    """Raise ConfigError if it means nothing to compare where the runs reach a value of a metric."""
    is_held_out = goal.startswith("val/")
    if is_held_out and evaluations.differing:
        raise ConfigError.of(evaluations.differing[0], where="--at-loss", hint=SAME_DATA)
    if not (is_held_out and evaluations.is_known):
        check_same_data(configs, goal)
    if is_held_out and new_bases:
        raise ConfigError.of(new_bases[0], where="--at-loss", hint="leave --at-loss out")


def _default_metrics(records: Sequence[RunRecord]) -> list[str]:
    more = dict.fromkeys(name for record in records for name in losses_of_parts(record.metrics))
    return [COMPARED[0], *more, *COMPARED[1:]]


def _measured_metrics(runs: Sequence[_Curves], groups: Sequence[RunGroup]) -> list[str]:
    """Return the metrics that are compared, in the order of recording; raise ConfigError if there are none."""
    names = [*dict.fromkeys(name for run in runs for name in run.metrics)]
    if not names:
        raise ConfigError.of(f"nothing has been measured yet in {_names(groups)}")
    return names


def _names(groups: Sequence[RunGroup]) -> str:
    return ", ".join(group.name for group in groups)


def _curves(
    record: RunRecord, patterns: Iterable[str], axes: Iterable[str], target: float | None, goal: str
) -> _Curves:
    starts = record.of(RunStarted)
    metrics = {}
    for name in record.metrics:
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            series = record.series(name)
            values = series.value[series.is_current]
            metrics[name] = {axis: (series.axis(axis)[series.is_current], values) for axis in axes}
    return _Curves(
        unit=starts[0].event.unit if starts else "token",
        metrics=metrics,
        reached=_reached(record, goal, target) if target is not None and goal in record else None,
        results=dict(_results_of(record)),
    )


def _results_of(record: RunRecord) -> Iterator[tuple[str, float]]:
    """Yield the best value of each metric of a run's evaluations, and the last one of its tests."""
    for name in record.metrics:
        split = name.partition("/")[0]
        if split not in ("val", "test"):
            continue
        series = record.series(name)
        usable = series.is_current & np.isfinite(series.value)
        if split == "val" and (index := series.best(usable)) is not None:
            yield f"best {name}", float(series.value[index])
        elif split == "test" and series.better is not None and series.is_current.any():
            yield name, float(series.value[series.is_current][-1])


def _results(curves: Sequence[Sequence[_Curves]]) -> dict[str, tuple[Cell, ...]]:
    """Return the results of the runs of each group, by metric."""
    names = dict.fromkeys(name for group in curves for run in group for name in run.results)
    cells: dict[str, tuple[Cell, ...]] = {}
    for name in names:
        values = [
            np.array([run.results[name] for run in group if name in run.results])
            for group in curves
        ]
        finite = [column[np.isfinite(column)] for column in values]
        cells[name] = tuple(
            _cell(column, len(every) - len(column))
            for column, every in zip(finite, values, strict=True)
        )
    return cells


def _anew(record: RunRecord) -> str:
    """Return since when a run's evaluations are comparable with its last one; empty: from the start."""
    events = [entry.event for entry in record.of(BeginsAnew) if entry.is_current]
    if not events:
        return ""
    event = events[-1]
    return (
        f"{record.run.path.name}: evaluations before and after step {event.step:,} are not comparable: "
        f"{', '.join(event.reasons)}"
    )


def _of_unknown_data(records: Sequence[RunRecord]) -> list[str]:
    """Return a line that names the imported runs, if there are any; of their data nothing is recorded."""
    names = [
        record.run.path.name
        for record in records
        if any(entry.event.imported_from for entry in record.of(RunStarted))
    ]
    what = "what their losses were measured on is not recorded"
    return [f"{', '.join(names)}: imported from other tools, {what}"] if names else []


def _reached(record: RunRecord, goal: str, target: float) -> LossReached | None:
    loss_reached = at_loss(record.series(goal), target)
    if loss_reached is None or _LR not in record:
        return loss_reached
    return replace(
        loss_reached, decays_for=decays_after(record.series(_LR), loss_reached.at["step"])
    )


def _check_axis(axis: str, groups: Sequence[RunGroup], curves: Sequence[Sequence[_Curves]]) -> None:
    """Raise ConfigError if the record of a run, of another tool perhaps, has nothing on the axis."""
    for group, of_group in zip(groups, curves, strict=True):
        for run, of_run in zip(group.runs, of_group, strict=True):
            measured = list(of_run.metrics.values())
            has_steps, has_axis = (
                any((by_axis[name][0] > 0).any() for by_axis in measured) for name in ("step", axis)
            )
            if has_steps and not has_axis:
                raise ConfigError.of(
                    f"the record of {run.path} has no {axis}",
                    "--x",
                    "give another axis, such as step",
                )


def _even_places(
    axis: str, groups: Sequence[RunGroup], curves: Sequence[Sequence[_Curves]]
) -> list[AxisValue]:
    """Return places on an axis up to where all runs have got. Raises ConfigError as `_check_axis`."""
    _check_axis(axis, groups, curves)
    return even_places(axis, _furthest([run for of_group in curves for run in of_group], axis))


def _furthest(runs: Sequence[_Curves], axis: str) -> float:
    """Return the furthest place that every run has reached with all of its metrics."""
    ends = [
        float(by_axis[axis][0].max())
        for run in runs
        for by_axis in run.metrics.values()
        if len(by_axis[axis][0])
    ]
    return min(ends, default=0.0)


def _cells(
    curves: Sequence[Mapping[str, tuple[Floats, Floats]]], places: Sequence[AxisValue]
) -> tuple[Cell, ...]:
    at_places = np.full((len(curves), len(places)), np.nan)
    is_covered = np.zeros_like(at_places, bool)
    for axis in {place.axis for place in places}:
        columns = [number for number, place in enumerate(places) if place.axis == axis]
        amounts = np.array([places[number].amount for number in columns])
        for row, by_axis in enumerate(curves):
            if axis in by_axis:
                x, values = by_axis[axis]
                at_places[row, columns] = values_at(x, values, amounts)
                if len(x):
                    is_covered[row, columns] = (x.min() <= amounts) & (amounts <= x.max())
    return tuple(
        _cell(column[np.isfinite(column)], int((is_reached & ~np.isfinite(column)).sum()))
        for column, is_reached in zip(at_places.T, is_covered.T, strict=True)
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
    groups: Sequence[RunGroup], curves: Sequence[Sequence[_Curves]], metric: str, target: float
) -> ToLoss:
    losses_reached = tuple(tuple(run.reached for run in group) for group in curves)
    by_key: list[dict[object, LossReached | None]] = [
        dict(zip(group.keys, run_reached, strict=True))
        for group, run_reached in zip(groups, losses_reached, strict=True)
    ]
    base = by_key[0]
    savings = []
    for other in by_key[1:]:
        if len(base) == len(other) == 1:  # a pair even if their seeds or folds differ
            other = dict(zip(base, other.values(), strict=True))
        savings.append({axis: saving(base, other, axis) for axis in PLACED_BY})
    return ToLoss(metric, target, losses_reached, tuple(savings))


def _rank(patterns: Sequence[str]) -> Any:
    """Sort key: the order in which metrics were requested."""
    return lambda name: next(n for n, pattern in enumerate(patterns) if fnmatchcase(name, pattern))
