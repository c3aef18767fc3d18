"""What a page draws of a run, as JSON: curves thinned, what was superseded, marks."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from instar.config.files import open_regular
from instar.logs.plot.transforms import thin
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


FIGURES = 6
"""that values and FLOPs keep"""
_DECIMALS = {"wall_s": 2, "active_s": 2, "time": 1}
_WHOLE = ("step", "samples", "tokens")


def chart_data(
    record: RunRecord,
    points: int = 2000,
    *,
    metrics: Sequence[str] | None = None,
    axes: Sequence[str] = AXES,
) -> dict[str, Any]:
    """What `charts.js` draws of one run; numbers that are not finite are null.

    Args:
        points: of one curve, at most; its spikes are among them.
        metrics: default: all but standard errors.
        axes: that it can be drawn over.
    """
    from instar.logs.query.summary import summarize

    summary = summarize(record)
    wanted = [m for m in record.metrics if not m.endswith(":error")] if metrics is None else metrics
    return {
        "id": printable(summary.id),
        "name": printable(summary.name),
        "state": summary.state,
        "unit": summary.unit,
        "series": chart_series(record, points, wanted, axes),
        "marks": marks(record, axes),
    }


def chart_series(
    record: RunRecord, points: int, metrics: Sequence[str], axes: Sequence[str] = AXES
) -> dict[str, Any]:
    """The curves of those of the metrics that the run has, by name: see `curve`."""
    there = [name for name in metrics if name in record]
    return {printable(name): curve(record.series(name), points, axes) for name in there}


def curve(series: Series, points: int, axes: Sequence[str] = AXES) -> dict[str, Any]:
    """`{x: {axis: […]}, value: […], superseded: [{segment, x, value}, …]}`."""
    lost = series.take(~series.kept)
    return _columns(series.current(), points, axes) | {
        "superseded": [
            {"segment": int(segment)} | _columns(lost.take(lost.segment == segment), points, axes)
            for segment in np.unique(lost.segment)
        ]
    }


def marks(record: RunRecord, axes: Sequence[str] = AXES) -> list[dict[str, Any]]:
    """What happened on the way: `{kind, x: {axis: number}, title, text, superseded}`, `text` in
    lines."""
    found = []
    for logged in record.events:
        told = _told(logged.event)
        if told is not None:
            kind, title, lines = told
            place = _place(record, logged)
            found.append(
                {
                    "kind": kind,
                    "x": {axis: _tidy(axis, place[axis]) for axis in axes},
                    "title": shortened(printable(title), 200),
                    "text": shortened(printable("\n".join(filter(None, lines)))),
                    "superseded": not logged.kept,
                }
            )
    return found


def proof_text(operation: OperationEvent) -> str:
    """`exact, max |Δlogit| 2.1e-06, Δloss -1.2e-08`; empty where nothing was to be proved."""
    proof = operation.proof
    parts = [operation.preserves]
    if "max_logit_diff" in proof:
        parts.append(f"max |Δlogit| {proof['max_logit_diff']:.2g}")
    if "delta_loss" in proof:
        parts.append(f"Δloss {proof['delta_loss']:.2g}")
    return ", ".join(filter(None, parts))


def printable(text: str) -> str:
    """Returns `text` encodable as UTF-8, which names of files need not be."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def shortened(text: str, length: int = 1000) -> str:
    """Returns at most `length` characters of a text, with an ellipsis where it is cut."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _told(event: Event) -> tuple[str, str, list[str]] | None:
    """Kind, title and lines of an event that is marked."""
    match event:
        case OperationEvent():
            took = f"took {event.seconds:.2g} s" if (event.seconds or 0) > 0.01 else ""
            lines = [f"because {event.reason}" if event.reason else "", ", ".join(event.notes)]
            return "operation", operation_text(event), [*lines, proof_text(event), took]
        case Saved():
            size = "" if event.size_bytes is None else bytes_text(event.size_bytes)
            return "checkpoint", f"checkpoint at step {event.step:,}", [event.reason, size]
        case RunStarted() if event.segment > 1:
            whence = f"from {event.resumed_from}" if event.resumed_from else ""
            title = f"resumed at step {event.step:,}"
            return "resume", title, [f"segment {event.segment} {whence}".strip(), event.devices]
        case Alert():
            return "alert", f"alert: {event.name}", [event.message]
        case Failed():
            return "failed", f"rank {event.rank} failed", [event.message]
        case Stop():
            go_on = "it can go on" if event.resumable else ""
            return "stop", f"ended at step {event.step:,}", [event.reason, go_on]
    return None


def _place(record: RunRecord, logged: RecordedEvent) -> dict[str, float]:
    """The place of an event on all axes: its own, or that of its step with its own clocks."""
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
        # clocks run alike within a segment
        first = 0 if isinstance(event, RunStarted) else -1
        place["wall_s"] = max(0.0, float(near.wall_s[first]) + event.time - float(near.time[first]))
    return place


def _columns(series: Series, points: int, axes: Sequence[str]) -> dict[str, Any]:
    chosen = series.take(thin(series.value, points))
    return {
        "x": {axis: _axis(chosen, axis) for axis in axes},
        "value": _numbers(_rounded(chosen.value)),
    }


def _axis(series: Series, axis: str) -> list[Any]:
    if axis in _WHOLE:
        whole: Ints = getattr(series, axis)
        return list(whole.tolist())
    values = series.axis(axis)
    if axis in _DECIMALS:
        return _numbers(np.round(values, _DECIMALS[axis]))
    return _numbers(_rounded(values))


def _numbers(values: Floats) -> list[float | None]:
    if np.isfinite(values).all():
        return list(values.tolist())
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _rounded(values: Floats) -> Floats:
    """To `FIGURES` figures."""
    known = np.isfinite(values) & (values != 0)
    size = np.floor(np.log10(np.abs(np.where(known, values, 1.0))))
    up = 10.0 ** np.clip(FIGURES - 1 - size, 0, 300)
    down = 10.0 ** np.clip(size - FIGURES + 1, 0, 300)
    return np.where(known, np.round(values / down * up) / up * down, values)


def _tidy(axis: str, value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if axis in _WHOLE else float(f"{value:.12g}")


KEPT_BYTES = 256 << 20
"""of all curves that are kept"""
POINTS = 2000
STALE_BYTES = 256 << 10
"""bytes by which a record may have grown since its curve was thinned"""


@dataclass(frozen=True)
class Drawn:
    """A run's curves as JSON, and the byte of its record up to which they go."""

    inode: int
    offset: int
    json: bytes

    def suits(self, inode: int, size: int) -> bool:
        return inode == self.inode and 0 <= size - self.offset <= STALE_BYTES


@dataclass
class Curves:
    """Caches the curves that were requested last; thread-safe."""

    _bytes: int = 0
    _kept: OrderedDict[tuple[str, tuple[str, ...], int], Drawn] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, key: str, run: RunDir, metrics: Sequence[str], points: int) -> bytes:
        """`{key, offset, names, series, marks}`; a metric that the run lacks is left out.

        No metric at all: what happened, as it is now.

        Raises:
            RecordError: the record cannot be read.
        """
        place = (key, tuple(metrics), points)
        status = run.events.stat()
        with self._lock:
            drawn = self._kept.get(place)
            if drawn is not None:
                self._kept.move_to_end(place)
        suits = drawn is not None and drawn.suits(status.st_ino, status.st_size)
        if metrics and drawn is not None and suits and not _begins_anew(run, drawn.offset):
            return drawn.json
        data, offset = draw(key, run, metrics, points)
        drawn = Drawn(status.st_ino, offset, msgspec.json.encode(data))
        if not metrics:
            return drawn.json
        with self._lock:
            self._bytes += len(drawn.json) - len(
                before.json if (before := self._kept.pop(place, None)) else b""
            )
            self._kept[place] = drawn
            while self._bytes > KEPT_BYTES:
                self._bytes -= len(self._kept.popitem(last=False)[1].json)
        return drawn.json


def draw(key: str, run: RunDir, metrics: Sequence[str], points: int) -> tuple[dict[str, Any], int]:
    """A run's curves and marks, and the byte up to which they were read."""
    record = read(run)
    there = [name for name in dict.fromkeys(metrics) if ALIASES.get(name, name) in record]
    found = {name: record.series(name) for name in there}
    data = {
        "key": key,
        "offset": record.end,
        "names": [name for name in record.metrics if not name.endswith(":error")],
        "series": {
            name: curve(_thinned(series, points), points) | {"segment": _last_segment(series)}
            for name, series in found.items()
        },
        "marks": marks(record),
    }
    return data, record.end


def _begins_anew(run: RunDir, offset: int) -> bool:
    """Whether a segment may have begun since: it may count what the curves do not."""
    with open_regular(run.events) as file:
        file.seek(offset)
        return b'"run_started"' in file.read(STALE_BYTES)


def _thinned(series: Series, points: int) -> Series:
    """The places that `curve` will choose, found before all the others are copied."""
    return series.take(thin(series.value, points)) if series.kept.all() else series


def _last_segment(series: Series) -> int:
    there = np.flatnonzero(series.kept)
    return int(series.segment[there[-1]]) if len(there) else 0
