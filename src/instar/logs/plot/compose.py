"""Composes a chart from runs: selects curves, their range and annotations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import get_args

import numpy as np

from instar.config.errors import ConfigError, shorten_text
from instar.logs.plot.chart import (
    Annotation,
    Chart,
    Curve,
    Kind,
    Panel,
    Polyline,
    axis_label,
    check_axis,
    panel_label,
    subtitle,
)
from instar.logs.plot.transforms import band, smooth, thin
from instar.logs.query.groups import By, group_indices, notes_on_data
from instar.logs.query.stages import marks
from instar.logs.read.columns import Bools, Floats
from instar.logs.read.record import RunRecord, Series, losses_of_parts, metrics_of, unknown_metric
from instar.record.events import RunStarted
from instar.record.rundir import RunDir

_CLOCKS = ("wall_s", "time")
_LONGEST_TITLE = 60
_LARGEST, _FARTHEST, _LAST_TIME = 1e150, 1e30, 2e11
"""larger values come from a broken run or clock and would squeeze everything else"""
_MIN_POINTS, _ALL_POINTS = 200, 60_000
MAX_MARKED_RUNS = 7
"""number of runs up to which annotations are drawn"""
LOSS_CURVES = (("loss", "val/loss"),)
_LONGEST = 36


@dataclass(frozen=True)
class ChartRequest:
    """The options of a plot."""

    panels: tuple[tuple[str, ...], ...] = LOSS_CURVES
    """metrics of each panel; by default of one run also `losses_of_parts`"""
    axis: str = "step"
    weight: float = 0.0
    """weight of the exponential moving average; 0: no smoothing"""
    log: bool = False
    log_x: bool = False
    lr: bool = False
    clip: float | None = None
    """percentile at which the y axis ends; it starts at 100 - `clip`"""
    start: float | None = None
    end: float | None = None
    marks: bool = True
    by: By = "run"
    group_names: Mapping[RunDir, str] = field(default_factory=dict)
    """names of the groups of some runs, whatever `by`"""
    points: int = 2000
    """maximum points per curve; fewer if there are many curves"""


def compose(records: Sequence[RunRecord], request: ChartRequest) -> Chart:
    """Return the chart of these runs.

    Raises:
        ConfigError: no run has a metric, a run lacks the axis, or nothing is left to draw.
    """
    if not any(record.metrics for record in records):
        where = ", ".join(str(record.run.path) for record in records)
        raise ConfigError.of(f"nothing to draw: no metric has been recorded yet in {where}")
    _check_metrics(records, request)
    check_axis(request.axis, [record for record in records if record.metrics])
    if request.panels == LOSS_CURVES and len(records) == 1:
        losses = (*LOSS_CURVES[0], *losses_of_parts(records[0].metrics))
        request = replace(request, panels=(losses,))
    runs = [record.run for record in records]
    groups = group_indices(runs, request.by, request.group_names)
    metrics = sum(map(len, request.panels))
    room = max(_MIN_POINTS, _ALL_POINTS // (metrics * len(groups)))
    request = replace(request, points=min(request.points, room))
    members = [[records[n] for n in numbers] for numbers in groups.values()]
    panels = tuple(
        _panel(metrics, members, request, right=request.lr and number == 0)
        for number, metrics in enumerate(request.panels)
    )
    notes = [*_empty_note(request, panels)]
    panels = tuple(panel for panel in panels if panel.curves)
    if not panels:
        raise ConfigError.of(_why_nothing(records, request))
    notes += notes_on_data({k: [runs[n] for n in numbers] for k, numbers in groups.items()})
    panels = (replace(panels[0], notes=(*panels[0].notes, *notes)), *panels[1:])
    labels = [
        f"{name} ({len(numbers)} runs)" if len(numbers) > 1 else name
        for name, numbers in groups.items()
    ]
    is_single = len(records) == 1
    limits = _limits(panels, request)
    marks = (
        annotate(members, request.axis, limits)
        if request.marks and len(members) <= MAX_MARKED_RUNS
        else ()
    )
    return Chart(
        title=records[0].run.path.name if is_single else _title(labels, len(records)),
        subtitle=subtitle(records),
        axis=request.axis,
        label=axis_label(request.axis, _units(records), 0.0 if request.log_x else limits[1]),
        runs=tuple(labels),
        panels=panels,
        marks=marks,
        log_x=request.log_x,
        limits=limits,
    )


def _empty_note(request: ChartRequest, panels: Sequence[Panel]) -> Iterator[str]:
    """Yield which metrics have no curve, if there are any."""
    pairs = zip(request.panels, panels, strict=True)
    if empty := [metric for metrics, panel in pairs if not panel.curves for metric in metrics]:
        yield f"nothing to draw of {', '.join(empty)}"


def _check_metrics(records: Sequence[RunRecord], request: ChartRequest) -> None:
    available = list(dict.fromkeys(name for record in records for name in record.metrics))
    where = str(records[0].run.path) if len(records) == 1 else f"these {len(records)} runs"
    metrics_asked_for = [metric for metrics in request.panels for metric in metrics]
    missing = [
        unknown_metric(metric, available, where).problems[0]
        for metric in (*metrics_asked_for, *(["lr"] if request.lr else []))
        if not any(metric in record for record in records)
    ]
    if missing and (request.panels != LOSS_CURVES or len(missing) == len(metrics_asked_for)):
        raise ConfigError(*missing)


def _panel(
    metrics: Sequence[str],
    members: Sequence[Sequence[RunRecord]],
    request: ChartRequest,
    *,
    right: bool,
) -> Panel:
    curves = [
        _curve(metric, run, [record for record in group if metric in record], request)
        for metric in metrics_of(metrics, chain.from_iterable(members))
        for run, group in enumerate(members)
        if any(metric in record for record in group)
    ]
    drawn_curves = tuple(curve for curve in curves if curve is not None)
    lr_curves = [
        _curve(
            "lr", run, [record for record in group if "lr" in record], replace(request, weight=0)
        )
        for run, group in enumerate(members)
        if right and any("lr" in record for record in group)
    ]
    left_out = sum(curve.left_out for curve in drawn_curves)
    notes = [f"{left_out} point{'' if left_out == 1 else 's'} cannot be drawn"] if left_out else []
    for run, group in enumerate(members):
        for metric in dict.fromkeys(curve.metric for curve in drawn_curves if curve.run == run):
            count = sum(metric in record for record in group)
            if count < len(group):
                notes.append(f"{metric}: {count} of {len(group)} runs have values")
    limits = None
    if request.clip is not None and (clip_result := _clip(drawn_curves, request.clip)) is not None:
        limits, cut = clip_result
        notes = [*cut, *notes]
    units = _units([record for group in members for record in group])
    return Panel(
        label=panel_label([curve.metric for curve in drawn_curves] or list(metrics), units),
        curves=drawn_curves,
        right=tuple(curve for curve in lr_curves if curve is not None),
        log=request.log,
        limits=limits,
        notes=tuple(notes),
    )


def _curve(
    metric: str, run: int, records: Sequence[RunRecord], request: ChartRequest
) -> Curve | None:
    """Return a metric of one run, or the mean of several; None if nothing can be drawn."""
    all_series = [_within(record.series(metric), request) for record in records]
    current = [s if s.is_current.all() else s.current() for s in all_series]
    drawable = [_drawable(series, request) for series in current]
    left_out = sum(int((~mask).sum()) for mask in drawable)
    if not any(mask.any() for mask in drawable):
        return None
    split = metric.partition("/")[0]
    held_out = split in ("val", "test")
    if len(current) > 1:
        weight = 0.0 if held_out else request.weight
        lines = [
            (series.axis(request.axis), smooth(np.where(mask, series.value, np.nan), weight))
            for series, mask in zip(current, drawable, strict=True)
        ]
        if (mean := band(lines)) is None:
            return None
        indices = thin(mean.mean, request.points)
        low, high = mean.mean - mean.deviation, mean.mean + mean.deviation
        if request.log:
            low = np.where(low > 0, low, mean.mean)
        limits = (low[indices], high[indices])
        line = Polyline(mean.x[indices], mean.mean[indices])
        return Curve(metric, run, line, band=limits, held_out=held_out, left_out=left_out)
    series, mask = current[0], drawable[0]
    values = series.value if mask.all() else np.where(mask, series.value, np.nan)
    weight = 0.0 if held_out else request.weight
    line = _line(series, smooth(values, weight) if weight else values, request)
    return Curve(
        metric,
        run,
        line,
        raw=_line(series, values, request) if weight else None,
        old_lines=tuple(
            _line(part, np.where(_drawable(part, request), part.value, np.nan), request)
            for part in _superseded_stretches(all_series[0])
        ),
        best=_best(series, mask, request) if held_out else None,
        held_out=held_out,
        left_out=left_out,
    )


def _within(series: Series, request: ChartRequest) -> Series:
    places = series.axis(request.axis)
    inside = np.abs(places) < (_LAST_TIME if request.axis == "time" else _FARTHEST)
    if request.start is not None:
        inside &= places >= request.start
    if request.end is not None:
        inside &= places <= request.end
    if request.log_x:
        inside &= places > 0
    return series if inside.all() else series.take(inside)


def _drawable(series: Series, request: ChartRequest) -> Bools:
    mask: Bools = np.abs(series.value) < _LARGEST
    return mask & (series.value > 1 / _LARGEST) if request.log else mask


def _line(series: Series, values: Floats, request: ChartRequest) -> Polyline:
    """Return the thinned line, on a logarithmic axis thinned per decade; on time axes, the line is
    broken between segments."""
    places = series.axis(request.axis)
    if request.log_x and len(places) > request.points:
        edges = np.flatnonzero(np.diff(np.floor(np.log10(places)))) + 1
        parts = np.split(np.arange(len(places)), edges)
        indices = np.concatenate([part[thin(values[part], request.points)] for part in parts])
    else:
        indices = thin(values, request.points)
    x, y = places[indices], values[indices]
    if request.axis in _CLOCKS:
        pauses = np.flatnonzero(np.diff(series.segment[indices])) + 1
        x, y = np.insert(x, pauses, x[pauses]), np.insert(y, pauses, np.nan)
    return Polyline(x, y)


def _superseded_stretches(series: Series) -> Iterator[Series]:
    """Yield the superseded part of each segment, starting at the last point that was not."""
    for segment in np.unique(series.segment[~series.is_current]):
        part = series.take(series.segment == segment)
        first = int(part.is_current.argmin())
        yield part.take(np.arange(max(0, first - 1), len(part)))


def _best(series: Series, mask: Bools, request: ChartRequest) -> tuple[float, float] | None:
    at = series.best(mask) if mask.sum() > 1 else None
    return None if at is None else (float(series.axis(request.axis)[at]), float(series.value[at]))


def _clip(
    curves: Sequence[Curve], percentile: float
) -> tuple[tuple[float, float], list[str]] | None:
    """Return the y range between the percentiles, 5 % wider at each end, and notes of points outside."""
    values = np.concatenate([(curve.raw or curve.line).y for curve in curves] or [np.zeros(0)])
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    low, high = np.percentile(values, [100 - percentile, percentile])
    margin = max((high - low) / 20, abs(high) / 1e6) or 1.0
    low, high = float(low - margin), float(high + margin)
    if values.min() > 0:
        low = max(low, float(values.min()) * 0.99)
    counts = (int((values > high).sum()), "above"), (int((values < low).sum()), "below")
    notes = [f"{n} point{'' if n == 1 else 's'} {where}" for n, where in counts if n]
    return (low, high), notes


def _limits(panels: Sequence[Panel], request: ChartRequest) -> tuple[float, float]:
    lines = [
        line
        for panel in panels
        for curve in (*panel.curves, *panel.right)
        for line in (curve.line, *curve.old_lines)
        if len(line)
    ]
    low = min(float(line.x.min()) for line in lines)
    high = max(float(line.x.max()) for line in lines)
    if request.start is None and not request.log_x and request.axis != "time" and low < high / 4:
        low = min(0.0, low)
    if high - low > 1e-6 * abs(high) or (request.axis == "time" and high > low):
        return low, high
    room = 30.0 if request.axis == "time" else abs(high) / 2 or 0.5
    return low - room, high + room


def _title(labels: Sequence[str], runs: int) -> str:
    if len(labels) == 1:
        return labels[0]
    title = ", ".join(labels)
    return title if len(title) <= _LONGEST_TITLE else f"{runs} runs"


def _why_nothing(records: Sequence[RunRecord], request: ChartRequest) -> str:
    metrics_text = ", ".join(metric for metrics in request.panels for metric in metrics)
    where = str(records[0].run.path) if len(records) == 1 else f"{len(records)} runs"
    series_in_range = [
        _within(record.series(metric), request).current()
        for record in records
        for metrics in request.panels
        for metric in metrics
        if metric in record
    ]
    values = np.concatenate([series.value for series in series_in_range] or [np.zeros(0)])
    if not len(values):
        return f"nothing to draw: {metrics_text} of {where} has no point between --from and --to"
    if not np.isfinite(values).any():
        return f"nothing to draw: none of the {len(values)} values of {metrics_text} in {where} is finite"
    if request.log and not (values > 0).any():
        return f"nothing to draw: no value of {metrics_text} in {where} is above 0, as --log needs"
    return f"nothing to draw: the runs of {where} have no common range of {metrics_text}"


def _units(records: Sequence[RunRecord]) -> list[str]:
    starts = [start_entry for record in records for start_entry in record.of(RunStarted)[:1]]
    return [start_entry.event.unit for start_entry in starts] or ["token"]


def annotate(
    members: Sequence[Sequence[RunRecord]], axis: str, limits: tuple[float, float]
) -> tuple[Annotation, ...]:
    """Return operations, checkpoints, resumes, alerts and failures that are not superseded, within
    the limits, in order. Overrides are left out: the resume that set them is annotated."""
    annotations = [
        Annotation(
            mark["kind"],
            mark["x"][axis],
            run,
            shorten_text(mark["title"], _LONGEST),
            shorten_text(mark["name"] or mark["title"], _LONGEST),
            mark["sign"],
        )
        for run, group in enumerate(members)
        for record in group
        for mark in marks(record, (axis,))
        if mark["kind"] in get_args(Kind)
        and not mark["superseded"]
        and not mark["title"].startswith("override ")
        and mark["x"][axis] is not None
        and limits[0] <= mark["x"][axis] <= limits[1]
    ]
    return tuple(sorted(dict.fromkeys(annotations), key=lambda mark: mark.x))
