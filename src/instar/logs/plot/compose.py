"""Composes a chart from runs, or from short trainings: selects curves, their range and annotations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, get_args

import numpy as np

from instar.config.errors import ConfigError, shortened
from instar.logs.plot.axes import axis_label, check_axis
from instar.logs.plot.chart import (
    Annotation,
    Chart,
    Curve,
    Kind,
    Panel,
    Polyline,
    metric_text,
    panel_label,
    subtitle,
)
from instar.logs.plot.transforms import band, smooth, thin
from instar.logs.query.groups import By, grouped, notes_on_data
from instar.logs.read.record import ALIASES, RunRecord, Series, unknown_metric
from instar.logs.web.curves import marks
from instar.record.events import RunStarted
from instar.record.rundir import RunDir

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]


_CLOCKS = ("wall_s", "time")
_LONGEST_TITLE = 60
_LARGEST, _FARTHEST, _LAST_TIME = 1e150, 1e30, 2e11
"""larger values come from a broken run or clock and would squeeze everything else"""
_MIN_POINTS, _ALL_POINTS = 200, 60_000
MAX_MARKED_RUNS = 7
"""number of runs up to which annotations are drawn"""
_DIVERGED = 1.5
"""losses of short trainings above this multiple of the lowest one, and infinite ones, are beyond the picture"""
LOSS_CURVES = (("loss", "val/loss"),)


@dataclass(frozen=True)
class ChartRequest:
    """The options of a plot."""

    panels: tuple[tuple[str, ...], ...] = LOSS_CURVES
    """metrics of each panel"""
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
    given: Mapping[RunDir, str] = field(default_factory=dict)
    """names of the groups of some runs, whatever `by`"""
    points: int = 2000
    """maximum points per curve; fewer if there are many curves"""


def compose(records: Sequence[RunRecord], wanted: ChartRequest) -> Chart:
    """Returns the chart of these runs.

    Raises:
        ConfigError: no run has a metric, a run lacks the axis, or nothing is left to draw.
    """
    if not any(record.metrics for record in records):
        where = ", ".join(str(record.run.path) for record in records)
        raise ConfigError.one(f"nothing to draw: no metric has been recorded yet in {where}")
    _check_metrics(records, wanted)
    check_axis(wanted.axis, [record for record in records if record.metrics])
    runs = [record.run for record in records]
    groups = grouped(runs, wanted.by, wanted.given)
    metrics = sum(map(len, wanted.panels))
    room = max(_MIN_POINTS, _ALL_POINTS // (metrics * len(groups)))
    wanted = replace(wanted, points=min(wanted.points, room))
    members = [[records[n] for n in numbers] for numbers in groups.values()]
    panels = tuple(
        _panel(metrics, members, wanted, right=wanted.lr and number == 0)
        for number, metrics in enumerate(wanted.panels)
    )
    empty = [
        metric
        for each, panel in zip(wanted.panels, panels, strict=True)
        if not panel.curves
        for metric in each
    ]
    panels = tuple(panel for panel in panels if panel.curves)
    if not panels:
        raise ConfigError.one(_why_nothing(records, wanted))
    if empty:
        notes = (*panels[0].notes, f"nothing to draw of {', '.join(empty)}")
        panels = (replace(panels[0], notes=notes), *panels[1:])
    if data_notes := notes_on_data({k: [runs[n] for n in each] for k, each in groups.items()}):
        panels = (replace(panels[0], notes=(*panels[0].notes, *data_notes)), *panels[1:])
    labels = [
        f"{name} ({len(numbers)} runs)" if len(numbers) > 1 else name
        for name, numbers in groups.items()
    ]
    one = len(records) == 1
    limits = _limits(panels, wanted)
    found = (
        annotate(members, wanted.axis, limits)
        if wanted.marks and len(members) <= MAX_MARKED_RUNS
        else ()
    )
    return Chart(
        title=records[0].run.path.name if one else _title(labels, len(records)),
        subtitle=subtitle(records),
        axis=wanted.axis,
        label=axis_label(wanted.axis, _units(records), 0.0 if wanted.log_x else limits[1]),
        runs=tuple(labels),
        panels=panels,
        marks=found,
        log_x=wanted.log_x,
        limits=limits,
    )


def _check_metrics(records: Sequence[RunRecord], wanted: ChartRequest) -> None:
    known = list(dict.fromkeys(name for record in records for name in record.metrics))
    where = str(records[0].run.path) if len(records) == 1 else f"these {len(records)} runs"
    requested = [metric for metrics in wanted.panels for metric in metrics]
    missing = [
        unknown_metric(metric, known, where).problems[0]
        for metric in (*requested, *(["lr"] if wanted.lr else []))
        if not any(metric in record for record in records)
    ]
    if missing and (wanted.panels != LOSS_CURVES or len(missing) == len(requested)):
        raise ConfigError(*missing)


def _panel(
    metrics: Sequence[str],
    members: Sequence[Sequence[RunRecord]],
    wanted: ChartRequest,
    *,
    right: bool,
) -> Panel:
    curves = [
        _curve(metric, run, [record for record in group if metric in record], wanted)
        for metric in (ALIASES.get(name, name) for name in metrics)
        for run, group in enumerate(members)
        if any(metric in record for record in group)
    ]
    shown = tuple(curve for curve in curves if curve is not None)
    lr_curves = [
        _curve("lr", run, [record for record in group if "lr" in record], replace(wanted, weight=0))
        for run, group in enumerate(members)
        if right and any("lr" in record for record in group)
    ]
    lost = sum(curve.left_out for curve in shown)
    notes = [f"{lost} point{'' if lost == 1 else 's'} cannot be drawn"] if lost else []
    limits = None
    if wanted.clip is not None and (found := _clip(shown, wanted.clip)) is not None:
        limits, cut = found
        notes = [*cut, *notes]
    units = _units([record for group in members for record in group])
    return Panel(
        label=panel_label([curve.metric for curve in shown] or list(metrics), units),
        curves=shown,
        right=tuple(curve for curve in lr_curves if curve is not None),
        log=wanted.log,
        limits=limits,
        notes=tuple(notes),
    )


def _curve(
    metric: str, run: int, records: Sequence[RunRecord], wanted: ChartRequest
) -> Curve | None:
    """Returns a metric of one run, or the mean of several; None if nothing can be drawn."""
    everything = [_within(record.series(metric), wanted) for record in records]
    current = [s if s.kept.all() else s.current() for s in everything]
    drawable = [_drawable(series, wanted) for series in current]
    lost = sum(int((~known).sum()) for known in drawable)
    if not any(known.any() for known in drawable):
        return None
    split = metric.partition("/")[0]
    held_out = split in ("val", "test")
    if len(current) > 1:
        weight = 0.0 if held_out else wanted.weight
        lines = [
            (series.axis(wanted.axis), smooth(np.where(known, series.value, np.nan), weight))
            for series, known in zip(current, drawable, strict=True)
        ]
        if (mean := band(lines)) is None:
            return None
        indices = thin(mean.mean, wanted.points)
        low, high = mean.mean - mean.deviation, mean.mean + mean.deviation
        if wanted.log:
            low = np.where(low > 0, low, mean.mean)
        limits = (low[indices], high[indices])
        line = Polyline(mean.x[indices], mean.mean[indices])
        return Curve(metric, run, line, band=limits, held_out=held_out, left_out=lost)
    series, known = current[0], drawable[0]
    values = series.value if known.all() else np.where(known, series.value, np.nan)
    weight = 0.0 if held_out else wanted.weight
    line = _line(series, smooth(values, weight) if weight else values, wanted)
    return Curve(
        metric,
        run,
        line,
        raw=_line(series, values, wanted) if weight else None,
        superseded=tuple(
            _line(part, np.where(_drawable(part, wanted), part.value, np.nan), wanted)
            for part in _superseded(everything[0])
        ),
        best=_best(series, known, wanted) if held_out else None,
        held_out=held_out,
        left_out=lost,
    )


def _within(series: Series, wanted: ChartRequest) -> Series:
    places = series.axis(wanted.axis)
    inside = np.abs(places) < (_LAST_TIME if wanted.axis == "time" else _FARTHEST)
    if wanted.start is not None:
        inside &= places >= wanted.start
    if wanted.end is not None:
        inside &= places <= wanted.end
    if wanted.log_x:
        inside &= places > 0
    return series if inside.all() else series.take(inside)


def _drawable(series: Series, wanted: ChartRequest) -> npt.NDArray[np.bool_]:
    known: npt.NDArray[np.bool_] = np.abs(series.value) < _LARGEST
    return known & (series.value > 1 / _LARGEST) if wanted.log else known


def _line(series: Series, values: Floats, wanted: ChartRequest) -> Polyline:
    """Returns the thinned line, on a logarithmic axis thinned per decade; on time axes, the line is
    broken between segments."""
    places = series.axis(wanted.axis)
    if wanted.log_x and len(places) > wanted.points:
        edges = np.flatnonzero(np.diff(np.floor(np.log10(places)))) + 1
        parts = np.split(np.arange(len(places)), edges)
        chosen = np.concatenate([part[thin(values[part], wanted.points)] for part in parts])
    else:
        chosen = thin(values, wanted.points)
    x, y = places[chosen], values[chosen]
    if wanted.axis in _CLOCKS:
        pauses = np.flatnonzero(np.diff(series.segment[chosen])) + 1
        x, y = np.insert(x, pauses, x[pauses]), np.insert(y, pauses, np.nan)
    return Polyline(x, y)


def _superseded(series: Series) -> Iterator[Series]:
    """Yields the superseded part of each segment, starting at the last point that was not."""
    for segment in np.unique(series.segment[~series.kept]):
        part = series.take(series.segment == segment)
        first = int(part.kept.argmin())
        yield part.take(np.arange(max(0, first - 1), len(part)))


def _best(
    series: Series, known: npt.NDArray[np.bool_], wanted: ChartRequest
) -> tuple[float, float] | None:
    at = series.best(known) if known.sum() > 1 else None
    return None if at is None else (float(series.axis(wanted.axis)[at]), float(series.value[at]))


def _clip(
    curves: Sequence[Curve], percentile: float
) -> tuple[tuple[float, float], list[str]] | None:
    """Returns the y range between the percentiles, 5 % wider at each end, and notes of points outside."""
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


def _limits(panels: Sequence[Panel], wanted: ChartRequest) -> tuple[float, float]:
    lines = [
        line
        for panel in panels
        for curve in (*panel.curves, *panel.right)
        for line in (curve.line, *curve.superseded)
        if len(line)
    ]
    low = min(float(line.x.min()) for line in lines)
    high = max(float(line.x.max()) for line in lines)
    if wanted.start is None and not wanted.log_x and wanted.axis != "time" and low < high / 4:
        low = min(0.0, low)
    if high - low > 1e-6 * abs(high) or (wanted.axis == "time" and high > low):
        return low, high
    room = 30.0 if wanted.axis == "time" else abs(high) / 2 or 0.5
    return low - room, high + room


def _title(labels: Sequence[str], runs: int) -> str:
    if len(labels) == 1:
        return labels[0]
    title = ", ".join(labels)
    return title if len(title) <= _LONGEST_TITLE else f"{runs} runs"


def _why_nothing(records: Sequence[RunRecord], wanted: ChartRequest) -> str:
    metrics_text = ", ".join(metric for metrics in wanted.panels for metric in metrics)
    where = str(records[0].run.path) if len(records) == 1 else f"{len(records)} runs"
    series_in_range = [
        _within(record.series(metric), wanted).current()
        for record in records
        for metrics in wanted.panels
        for metric in metrics
        if metric in record
    ]
    values = np.concatenate([series.value for series in series_in_range] or [np.zeros(0)])
    if not len(values):
        return f"nothing to draw: {metrics_text} of {where} has no point between --from and --to"
    if not np.isfinite(values).any():
        return f"nothing to draw: none of the {len(values)} values of {metrics_text} in {where} is finite"
    if wanted.log and not (values > 0).any():
        return f"nothing to draw: no value of {metrics_text} in {where} is above 0, as --log needs"
    return f"nothing to draw: the runs of {where} have no common range of {metrics_text}"


def _units(records: Sequence[RunRecord]) -> list[str]:
    starts = [started for record in records for started in record.of(RunStarted)[:1]]
    return [started.event.unit for started in starts] or ["token"]


_LONGEST = 36


def annotate(
    members: Sequence[Sequence[RunRecord]], axis: str, limits: tuple[float, float]
) -> tuple[Annotation, ...]:
    """Returns operations, checkpoints, resumes, alerts and failures that are not superseded, within
    the limits, in order. Overrides are left out: the resume that set them is annotated."""
    found = [
        Annotation(
            mark["kind"],
            mark["x"][axis],
            run,
            shortened(mark["title"], _LONGEST),
            shortened(mark["name"] or mark["title"], _LONGEST),
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
    return tuple(sorted(dict.fromkeys(found), key=lambda mark: mark.x))


def rates_chart(rounds: Mapping[str, Sequence[tuple[float, float]]], chosen: float) -> Chart:
    """Returns a chart of the final losses of short trainings over their learning rates: a curve per round, and a
    mark at the chosen rate.

    Args:
        rounds: (learning rate, final loss) by label, in ascending order of the rate.
    """
    losses = [loss for points in rounds.values() for _, loss in points if np.isfinite(loss)]
    lowest, highest = min(losses), max(losses)
    top = min(highest, lowest + _DIVERGED * abs(lowest))
    room = 0.06 * (top - lowest) or 0.1
    curves = tuple(
        Curve("val/loss", run, Polyline(*_columns(points)), held_out=True)
        for run, points in enumerate(rounds.values())
    )
    panel = Panel(metric_text("val/loss"), curves, limits=(lowest - room, top + room))
    rates = [rate for points in rounds.values() for rate, _ in points]
    text = f"lr {chosen:.2g}"
    return Chart(
        title="Final loss by learning rate",
        subtitle="",
        axis="lr",
        label=metric_text("lr"),
        runs=tuple(rounds),
        panels=(panel,),
        marks=(Annotation("operation", chosen, len(rounds) - 1, text, text, "setting"),),
        log_x=True,
        limits=(min(rates), max(rates)),
    )


def _columns(points: Sequence[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.array(points, dtype=np.float64).T
    return x, np.where(np.isfinite(y), y, np.nan)
