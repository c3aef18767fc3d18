"""Marks on curves: operations, checkpoints, resumes, alerts and ends, as data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from instar.config.errors import shorten_text
from instar.logs.query.stages import event_place, operation_text, place_at
from instar.logs.read.record import AXES, RecordedEvent, RunRecord
from instar.logs.text.encoding import encodable
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

WHOLE_AXES = ("step", "samples", "tokens")
"""axes whose values are integers"""


def marks(record: RunRecord, axes: Sequence[str] = AXES) -> list[dict[str, Any]]:
    """Return the marked events: `{kind, sign, name, x: {axis: number}, title, text, superseded}`.

    `sign` tells the growth of a model from a change of settings; `name` is short, and empty for kinds
    whose sign says it all.
    """
    all_marks = []
    for entry in record.events:
        mark = _mark(entry.event)
        if mark is not None:
            kind, name, title, lines = mark
            place = _place(record, entry)
            all_marks.append(
                {
                    "kind": kind,
                    "sign": _sign(entry.event) or kind,
                    "name": shorten_text(encodable(name), 40),
                    "x": {axis: _coordinate(axis, place[axis]) for axis in axes},
                    "title": shorten_text(encodable(title), 200),
                    "text": shorten_text(encodable("\n".join(filter(None, lines)))),
                    "superseded": not entry.is_current,
                }
            )
    return all_marks


def proof_text(operation: OperationEvent) -> str:
    """Return `exact, max |Δlogit| 2.1e-06, Δloss -1.2e-08`; empty without a proof."""
    proof = operation.proof
    parts = [operation.preserves]
    if "max_logit_diff" in proof:
        parts.append(f"max |Δlogit| {proof['max_logit_diff']:.2g}")
    if "delta_loss" in proof:
        parts.append(f"Δloss {proof['delta_loss']:.2g}")
    return ", ".join(filter(None, parts))


def _mark(event: Event) -> tuple[str, str, str, list[str]] | None:
    """Return kind, short name, title and lines of a marked event; None for other events."""
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


def _place(record: RunRecord, entry: RecordedEvent[Event]) -> dict[str, float]:
    """Return the place of an event on all axes: its own, or its step's place at its own time."""
    event = entry.event
    if isinstance(event, Placed):
        return event_place(event)
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


def _coordinate(axis: str, value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if axis in WHOLE_AXES else float(f"{value:.12g}")
