"""The record of another tool as the events of a run: losses are steps and evaluations, with what was measured where they
were; the rest are events of its own."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from itertools import groupby, repeat
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np

from instar.config.errors import ConfigError
from instar.extensions.foreign.records.event import ForeignMetrics
from instar.extensions.foreign.records.names import LOSS, VAL_LOSS, Naming
from instar.extensions.foreign.records.table import LAST_TIME, RecordedCurve, RecordTable
from instar.logs.read.columns import CELLS
from instar.logs.read.record import direction
from instar.record.events import Eval, Event, Placed, RunFinished, RunStarted, Stop, Train

Curves = Mapping[str, RecordedCurve]
_FIELDS = ("grad_norm", "lr", "tokens_per_s", "mfu", "data_wait")
"""fields of `Train`; `memory_bytes`, which is an integer there, is not among them"""
_WHOLE_AXES = ("samples", "tokens")
_SPLITS = ("val", "test", "train")


class _Axes:
    """Where each step is on the axes that the tool recorded; 0 where it recorded none."""

    def __init__(self, curves: Curves, naming: Naming, began: float) -> None:
        self._curves = {axis: curves[name] for axis, name in naming.axes.items()}
        self._began = began

    def place(self, step: int, time: float) -> dict[str, Any]:
        """Return the fields of `Placed` and the time of an event; `time`: Unix seconds or NaN."""
        fields: dict[str, Any] = {"step": step, "time": time if math.isfinite(time) else 0.0}
        if math.isfinite(time - self._began):
            fields["wall_s"] = max(0.0, time - self._began)
        for axis, curve in self._curves.items():
            index = int(np.searchsorted(curve.step, step, "right")) - 1
            if index >= 0:
                value = float(curve.value[index])
                fields[axis] = int(value) if axis in _WHOLE_AXES else value
        return fields


def run_events(table: RecordTable, curves: Curves, naming: Naming, run_id: str) -> Iterator[Event]:
    """Yield the events of a run in the order of their steps.

    Raises:
        ConfigError: there are more metrics and steps than a record can hold.
    """
    by_name = {name: curves[source] for source, name in naming.metrics.items()}
    times = np.concatenate([curve.time for curve in curves.values()])
    known_times = times[np.isfinite(times)]
    began = float(known_times.min()) if len(known_times) else math.nan
    if table.start_time and 0 < table.start_time < LAST_TIME:
        began = table.start_time
    axes = _Axes(curves, naming, began)
    yield _start(table, by_name, naming, run_id, began)
    yield from heapq.merge(*_measurements(by_name, axes), key=attrgetter("step"))
    last_step = max(int(curve.step[-1]) for curve in curves.values())
    last_time = float(known_times.max()) if len(known_times) else math.nan
    place = axes.place(last_step, last_time) | table.totals
    if table.end_reason:
        yield Stop(reason=table.end_reason, **place)
    yield _finish(by_name, place)


def _start(
    table: RecordTable, by_name: Curves, naming: Naming, run_id: str, began: float
) -> RunStarted:
    told_directions = {naming.metrics.get(name, name): d for name, d in table.better.items()}
    better: dict[str, str] = {"loss": "min"}
    for name in by_name:
        split, _, metric = name.partition("/")
        if split == "val" and (d := told_directions.get(name) or direction(name)):
            better[metric] = d
    best_metric = naming.metrics.get(table.best_metric, "")
    has_tokens = "tokens" in naming.axes or "tokens" in table.totals
    return RunStarted(
        run_id=run_id,
        time=began if math.isfinite(began) else 0.0,
        unit="token" if has_tokens else "sample",
        better=better,
        best_metric=best_metric.removeprefix("val/") if best_metric.startswith("val/") else "loss",
        imported_from=table.origin,
        imported_config=table.config or None,
    )


def _measurements(by_name: Curves, axes: _Axes) -> Iterator[Iterator[Placed]]:
    """Yield the events of each table, in order: those with losses have the metrics that are only measured with them."""
    remaining = dict(by_name)
    groups = {
        split: _with_loss(remaining, f"{split}/")
        for split in _SPLITS
        if f"{split}/loss" in remaining
    }
    steps = _with_loss(remaining, "") if LOSS in remaining else {}
    if steps:
        yield (_train(values, axes.place(step, time)) for step, time, values in _rows(steps))
    if remaining:
        yield (
            ForeignMetrics(values=values, **axes.place(step, time))
            for step, time, values in _rows(remaining)
        )
    for split, curves in groups.items():
        yield _evaluations(split, curves, axes)


def _with_loss(remaining: dict[str, RecordedCurve], prefix: str) -> dict[str, RecordedCurve]:
    """Take from `remaining` a loss and the metrics of its split that are measured only where it is; return them without the
    prefix."""
    steps = remaining[f"{prefix}loss"].step
    names = [
        name
        for name, curve in remaining.items()
        if name.startswith(prefix) and name != "memory_bytes" and np.isin(curve.step, steps).all()
    ]
    return {name.removeprefix(prefix): remaining.pop(name) for name in names}


def _rows(curves: Curves) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Yield each step with its time and its values by name."""
    steps = np.unique(np.concatenate([curve.step for curve in curves.values()]))
    if len(curves) * len(steps) > CELLS:
        raise ConfigError.of(
            f"{len(curves):,} metrics at {len(steps):,} steps are more than a record can hold"
        )
    streams = (
        zip(c.step.data, repeat(name), c.value.data, c.time.data, strict=False)
        for name, c in curves.items()
    )
    for step, cells in groupby(heapq.merge(*streams), key=itemgetter(0)):
        row = list(cells)
        times = [time for *_, time in row if math.isfinite(time)]
        yield step, max(times, default=math.nan), {name: value for _, name, value, _ in row}


def _train(values: dict[str, float], place: dict[str, Any]) -> Train:
    fields: dict[str, Any] = {name: values.pop(name) for name in _FIELDS if name in values}
    return Train(loss=values.pop(LOSS), extra=values, **fields, **place)


def _evaluations(split: str, curves: Curves, axes: _Axes) -> Iterator[Eval]:
    for step, time, values in _rows(curves):
        yield Eval(split=split, loss=values.pop(LOSS), extra=values, **axes.place(step, time))


def _finish(by_name: Curves, place: dict[str, Any]) -> RunFinished:
    best: dict[str, Any] = {}
    if VAL_LOSS in by_name and np.isfinite((val := by_name[VAL_LOSS]).value).any():
        index = int(np.nanargmin(np.where(np.isfinite(val.value), val.value, np.nan)))
        best = {"best_loss": float(val.value[index]), "best_step": int(val.step[index])}
    loss = float(by_name[LOSS].value[-1]) if LOSS in by_name else None
    return RunFinished(loss=loss, **best, **place)
