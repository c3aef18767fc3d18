"""Computes the stages of a run: its architectures in order, with the cost and losses of each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from instar.logs.read.record import AXES, RunRecord, Series
from instar.record.events import OperationEvent, Placed, RunStarted

Place = dict[str, float]
"""a place in a run: its value on each of `AXES`"""


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
    for number, (begin, end) in enumerate(pairwise(places)):
        growth = growths[number - 1] if number else None
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
                loss=_last(record, "loss", begin["step"], end["step"]),
                val_loss=_last(record, "val/loss", begin["step"], end["step"]),
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


def _last(record: RunRecord, metric: str, after: float, until: float) -> float | None:
    if metric not in record:
        return None
    series = record.series(metric).current()
    inside = series.value[(series.step > after) & (series.step <= until)]
    return float(inside[-1]) if len(inside) else None
