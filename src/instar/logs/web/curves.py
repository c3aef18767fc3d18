"""Builds the JSON that a page draws of a run: thinned curves, superseded points, marks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from instar.config.errors import shortened
from instar.logs.plot.transforms import thin
from instar.logs.query.groups import By, given_values, grouped
from instar.logs.query.stages import operation_text, place_at, place_of
from instar.logs.read.record import ALIASES, AXES, RecordedEvent, Series, read
from instar.record.events import (
    Alert,
    Event,
    Failed,
    OperationEvent,
    Placed,
    RunStarted,
    Saved,
    Stop,
)
from instar.record.format import bytes_text
from instar.record.rundir import RunDir

if TYPE_CHECKING:
    from instar.logs.read.record import Floats, Ints, RunRecord, Series


SIGNIFICANT_FIGURES = 6
"""to which values and FLOPs are rounded"""
_DECIMALS = {"wall_s": 2, "active_s": 2, "time": 1}
_WHOLE = ("step", "samples", "tokens")


def chart_data(
    record: RunRecord,
    points: int = 2000,
    *,
    metrics: Sequence[str] | None = None,
    axes: Sequence[str] = AXES,
) -> dict[str, Any]:
    """Returns what `charts.js` draws of one run; non-finite numbers are null.

    Args:
        points: maximum number of points per curve; spikes are preserved.
        metrics: default all but standard errors.
        axes: x axes to include.
    """
    from instar.logs.query.summary import summarize

    summary = summarize(record)
    names = [m for m in record.metrics if not m.endswith(":error")] if metrics is None else metrics
    return {
        "id": printable(summary.id),
        "name": printable(summary.name),
        "state": summary.state,
        "unit": summary.unit,
        "series": chart_series(record, points, names, axes),
        "marks": marks(record, axes),
    }


def chart_series(
    record: RunRecord, points: int, metrics: Sequence[str], axes: Sequence[str] = AXES
) -> dict[str, Any]:
    """Returns the curves of those metrics that the run has, by name; see `curve`."""
    present = [name for name in metrics if name in record]
    return {printable(name): curve(record.series(name), points, axes) for name in present}


def curve(series: Series, points: int, axes: Sequence[str] = AXES) -> dict[str, Any]:
    """Returns `{x: {axis: […]}, value: […], superseded: [{segment, x, value}, …]}`, thinned.

    Of a thinned curve, up to a quarter of the points are evenly spaced, wherever its extremes are, and
    `even` has their positions: means over curves are made of these, as extremes would overstate the
    deviation. The spacing is a power of two, so that curves of different lengths have places in common.
    """
    superseded = series.take(~series.kept)
    current = series.current()
    indices = thin(current.value, points)
    even: dict[str, list[int]] = {}
    if len(indices) < len(current):
        stride = 1 << math.ceil(math.log2(len(current) / max(1, points // 4)))
        spaced = np.unique(np.append(np.arange(0, len(current), stride), len(current) - 1))
        indices = np.union1d(spaced, thin(current.value, points - len(spaced)))
        even = {"even": np.searchsorted(indices, spaced).tolist()}
    return (
        _columns(current.take(indices), axes)
        | even
        | {
            "superseded": [
                {"segment": int(segment)} | _columns(piece.take(thin(piece.value, points)), axes)
                for segment in np.unique(superseded.segment)
                for piece in [superseded.take(superseded.segment == segment)]
            ],
        }
    )


def marks(record: RunRecord, axes: Sequence[str] = AXES) -> list[dict[str, Any]]:
    """Returns the marked events: `{kind, sign, name, x: {axis: number}, title, text, superseded}`.

    `sign` tells the growth of a model from a change of settings; `name` is short, and empty for kinds
    whose sign says it all.
    """
    marked = []
    for logged in record.events:
        mark = _mark(logged.event)
        if mark is not None:
            kind, name, title, lines = mark
            place = _place(record, logged)
            marked.append(
                {
                    "kind": kind,
                    "sign": _sign(logged.event) or kind,
                    "name": shortened(printable(name), 40),
                    "x": {axis: _coordinate(axis, place[axis]) for axis in axes},
                    "title": shortened(printable(title), 200),
                    "text": shortened(printable("\n".join(filter(None, lines)))),
                    "superseded": not logged.kept,
                }
            )
    return marked


def chart_groups(
    runs: Mapping[str, RunDir], by: By, group_names: Mapping[RunDir, str] | None = None
) -> list[dict[str, Any]]:
    """Returns the groups of runs over which a page draws means: `{name, runs, of}`, see `grouped`.

    Args:
        runs: by the key that the page knows them by; `of` is "seeds" if no two runs of a group have
            the same one, else "runs".
    """
    keys, every = list(runs), list(runs.values())
    values = given_values(every)
    seeds = [run_values.get("seed") for run_values in values]
    return [
        {
            "name": printable(name),
            "runs": [keys[n] for n in group],
            "of": "seeds" if len({seeds[n] for n in group} - {None}) == len(group) else "runs",
        }
        for name, group in grouped(every, by, group_names, values=values).items()
    ]


def proof_text(operation: OperationEvent) -> str:
    """Returns `exact, max |Δlogit| 2.1e-06, Δloss -1.2e-08`; empty without a proof."""
    proof = operation.proof
    parts = [operation.preserves]
    if "max_logit_diff" in proof:
        parts.append(f"max |Δlogit| {proof['max_logit_diff']:.2g}")
    if "delta_loss" in proof:
        parts.append(f"Δloss {proof['delta_loss']:.2g}")
    return ", ".join(filter(None, parts))


def printable(text: str) -> str:
    """Returns `text` encodable as UTF-8, which file names need not be."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _mark(event: Event) -> tuple[str, str, str, list[str]] | None:
    """Returns kind, short name, title and lines of a marked event; None for other events."""
    match event:
        case OperationEvent():
            took = f"took {event.seconds:.2g} s" if (event.seconds or 0) > 0.01 else ""
            lines = [f"because {event.reason}" if event.reason else "", ", ".join(event.notes)]
            title = operation_text(event)
            name = title.removeprefix("change_")
            return "operation", name, title, [*lines, proof_text(event), took]
        case Saved():
            size = "" if event.size_bytes is None else bytes_text(event.size_bytes)
            return "checkpoint", "", f"checkpoint at step {event.step:,}", [event.reason, size]
        case RunStarted() if event.segment > 1:
            source = f"from {event.resumed_from}" if event.resumed_from else ""
            title = f"resumed at step {event.step:,}"
            lines = [f"segment {event.segment} {source}".strip(), event.devices]
            return "resume", "resume", title, lines
        case Alert():
            return "alert", event.name, f"alert: {event.name}", [event.message]
        case Failed():
            return "failed", "failure", f"rank {event.rank} failed", [event.message]
        case Stop():
            resumable = "resumable" if event.resumable else ""
            return "stop", "", f"ended at step {event.step:,}", [event.reason, resumable]
    return None


def _sign(event: Event) -> str:
    if not isinstance(event, OperationEvent):
        return ""
    return "growth" if event.architecture or event.verb == "GROW" else "setting"


def _place(record: RunRecord, logged: RecordedEvent[Event]) -> dict[str, float]:
    """Returns the place of an event on all axes: its own, or its step's place at its own time."""
    event = logged.event
    if isinstance(event, Placed):
        return place_of(event)
    loss = record.series("loss") if "loss" in record else None
    near = None if loss is None else loss.take(loss.segment == event.segment)
    step = getattr(event, "step", None)
    if step is None:
        step = 0 if near is None or not len(near) else int(near.step[-1])
    place = place_at(record, step) | {"time": event.time}
    if near is not None and len(near):
        # wall time advances with the clock within a segment
        first = 0 if isinstance(event, RunStarted) else -1
        place["wall_s"] = max(0.0, float(near.wall_s[first]) + event.time - float(near.time[first]))
    return place


def _columns(series: Series, axes: Sequence[str]) -> dict[str, Any]:
    return {
        "x": {axis: _axis(series, axis) for axis in axes},
        "value": _numbers(_rounded(series.value)),
    }


def _axis(series: Series, axis: str) -> list[Any]:
    if axis in _WHOLE:
        numbers: Ints = getattr(series, axis)
        return list(numbers.tolist())
    values = series.axis(axis)
    if axis in _DECIMALS:
        return _numbers(np.round(values, _DECIMALS[axis]))
    return _numbers(_rounded(values))


def _numbers(values: Floats) -> list[float | None]:
    if np.isfinite(values).all():
        return list(values.tolist())
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _rounded(values: Floats) -> Floats:
    """Rounds to `SIGNIFICANT_FIGURES`."""
    mask = np.isfinite(values) & (values != 0)
    size = np.floor(np.log10(np.abs(np.where(mask, values, 1.0))))
    up = 10.0 ** np.clip(SIGNIFICANT_FIGURES - 1 - size, 0, 300)
    down = 10.0 ** np.clip(size - SIGNIFICANT_FIGURES + 1, 0, 300)
    return np.where(mask, np.round(values / down * up) / up * down, values)


def _coordinate(axis: str, value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if axis in _WHOLE else float(f"{value:.12g}")


POINTS = 2000
"""most points of a curve that a page draws"""


def curves_of_run(
    key: str, run: RunDir, metrics: Sequence[str], points: int = POINTS
) -> dict[str, Any]:
    """Returns `{key, offset, names, series, marks}`, without metrics that the run lacks; `offset`: up to
    where its record was read.

    Raises:
        RecordError: the record cannot be read.
    """
    record = read(run)
    present = [name for name in dict.fromkeys(metrics) if ALIASES.get(name, name) in record]
    series_by_name = {name: record.series(name) for name in present}
    return {
        "key": key,
        "offset": record.end,
        "names": [name for name in record.metrics if not name.endswith(":error")],
        "series": {
            name: curve(series, points) | {"segment": _last_segment(series)}
            for name, series in series_by_name.items()
        },
        "marks": marks(record),
    }


def _last_segment(series: Series) -> int:
    current = np.flatnonzero(series.kept)
    return int(series.segment[current[-1]]) if len(current) else 0
