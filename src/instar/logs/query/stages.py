"""What changed in a run, and where: its stages, one for each architecture, and its marked events."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from instar.config.errors import shorten_text
from instar.logs.read.record import AXES, RecordedEvent, RunRecord, Series
from instar.record.events import (
    Alert,
    Asked,
    Event,
    Failed,
    OperationEvent,
    Placed,
    RunStarted,
    Saved,
    Stop,
)
from instar.record.format import bytes_text, encodable

Place = dict[str, float]
"""a place in a run: its value on each of `AXES`"""
WHOLE_AXES = ("step", "samples", "tokens")
"""axes whose values are integers"""


@dataclass(frozen=True)
class RunStage:
    """The part of a run between two changes of architecture; the first starts with the run."""

    from_step: int
    to_step: int
    model: str
    """short form of the shape, e.g. `12L/768d`"""
    parameters: int | None
    architecture: Mapping[str, Any]
    operation: str
    """name and change, e.g. `widen_mlp 192→352`; empty for the first stage"""
    reason: str
    """why the operation's trigger fired"""
    tokens: int
    flops: float
    wall_s: float
    active_s: float
    """these four count within the stage"""
    loss: float | None
    """at its last training step"""
    val_loss: float | None

    @property
    def steps(self) -> int:
        return self.to_step - self.from_step


def stages(record: RunRecord) -> list[RunStage]:
    """Return the stages of a run, superseded steps excluded; empty if the run has not started."""
    starts = record.of(RunStarted)
    if not starts:
        return []
    first = starts[0].event
    operations = [entry.event for entry in record.of(OperationEvent) if entry.is_current]
    growths = [operation for operation in operations if operation.architecture]
    places = [place_at(record, first.step), *map(event_place, growths), last_place(record)]
    model, parameters, architecture = first.model, first.parameters or None, first.architecture
    run_stages = []
    # what is measured at the step of a growth is of the model that was there then
    times = [-math.inf, *(growth.time for growth in growths), math.inf]
    for number, (begin, end) in enumerate(pairwise(places)):
        growth, begun, ended = growths[number - 1] if number else None, *times[number : number + 2]
        if growth is not None:
            model = architecture_text(growth.architecture) or model
            after = growth.proof.get("parameters_after", math.nan)
            parameters = int(after) if math.isfinite(after) else None
            architecture = growth.architecture
        run_stages.append(
            RunStage(
                from_step=int(begin["step"]),
                to_step=int(end["step"]),
                model=model,
                parameters=parameters,
                architecture=architecture,
                operation=operation_text(growth) if growth else "",
                reason=growth.reason if growth else "",
                tokens=int(end["tokens"] - begin["tokens"]),
                flops=end["flops"] - begin["flops"],
                wall_s=end["wall_s"] - begin["wall_s"],
                active_s=end["active_s"] - begin["active_s"],
                loss=_last(record, "loss", (begin["step"], begun), (end["step"], ended)),
                val_loss=_last(record, "val/loss", (begin["step"], begun), (end["step"], ended)),
            )
        )
    return run_stages


def operation_text(operation: OperationEvent) -> str:
    """Return name and change, e.g. `widen_mlp 192→352`."""
    change = operation.change or ("" if operation.value is None else str(operation.value))
    return f"{operation.name} {change}".strip()


def architecture_text(architecture: Mapping[str, Any]) -> str:
    """Return layers and width, e.g. `12L/768d`; empty for an architecture without these."""
    layers, width = ("n_layer", "layers", "num_hidden_layers"), ("n_embd", "width", "hidden_size")
    parts = [
        (next((architecture[name] for name in names if name in architecture), None), unit)
        for names, unit in ((layers, "L"), (width, "d"))
    ]
    return "/".join(f"{size}{unit}" for size, unit in parts if isinstance(size, int))


def event_place(event: Placed) -> Place:
    """Return the place of an event on all axes."""
    return {axis: float(getattr(event, axis)) for axis in AXES}


def place_at(record: RunRecord, step: int) -> Place:
    """Return the place of a step on all axes, interpolated between measurements; 0 is the start."""
    ruler = _ruler(record)
    if ruler is None or not len(ruler):
        return dict.fromkeys(AXES, 0.0) | {"step": float(step), "time": _began(record)}

    at, place = ruler.axis("step"), dict[str, float]()
    for axis in AXES:
        before = _began(record) if axis == "time" else 0.0
        axis_values = np.concatenate([[before], ruler.axis(axis)])
        place[axis] = float(np.interp(step, np.concatenate([[0.0], at]), axis_values))
    return place | {"step": float(step)}


def last_place(record: RunRecord) -> Place:
    """Return the last place that is not superseded."""
    events = [
        entry.event
        for entry in record.events
        if entry.is_current and isinstance(entry.event, Placed)
    ]
    places = [event_place(event) for event in events]
    ruler = _ruler(record)
    if ruler is not None and len(ruler):
        places.append({axis: float(ruler.axis(axis)[-1]) for axis in AXES})
    if not places:
        return place_at(record, 0)
    return max(places, key=lambda place: (place["step"], place["wall_s"]))


def _ruler(record: RunRecord) -> Series | None:
    """Return the series with the most measurements."""
    return record.series("loss").current() if "loss" in record else None


def _began(record: RunRecord) -> float:
    starts = record.of(RunStarted)
    return starts[0].event.time if starts else 0.0


def _last(
    record: RunRecord, metric: str, begin: tuple[float, float], end: tuple[float, float]
) -> float | None:
    """Return the last value after `begin` and until `end`, each a step and Unix seconds within it."""
    if metric not in record:
        return None
    series = record.series(metric).current()
    is_late, is_early = series.step > begin[0], series.step < end[0]
    is_late |= (series.step == begin[0]) & (series.time > begin[1]) & (begin[1] > -math.inf)
    is_early |= (series.step == end[0]) & (series.time <= end[1])
    inside = series.value[is_late & is_early]
    return float(inside[-1]) if len(inside) else None


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
        case Asked():
            lines = [f"asked for by {event.by}" if event.by else "", event.reason]
            return "asked", "", f"{event.operation} {event.outcome}".strip(), lines
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
