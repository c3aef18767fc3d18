"""Summarizes a run: state, progress, cost, best and last values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from instar.checkpoint.manifest import MANIFEST
from instar.config.files import read_regular
from instar.logs.query.runs import RunTreeMember, run_tree
from instar.logs.query.stages import architecture_text
from instar.logs.query.state import State, run_status
from instar.logs.read.record import RunRecord, Series
from instar.record.events import (
    Alert,
    BeginsAnew,
    Branched,
    Eval,
    Event,
    OperationEvent,
    Placed,
    RunStarted,
    Skip,
    Warn,
    to_words,
)

_CHECKPOINT = re.compile(r"step-(\d+)(?:\.\d+)?")
_OF_ERRORS = ":error"


@dataclass(frozen=True)
class MetricValue:
    """A metric's value, and the step it was measured at."""

    value: float
    step: int
    error: float | None = None
    """standard error, if measured"""


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint on disk."""

    name: str
    step: int
    pointers: tuple[str, ...]
    """pointers to it: `latest`, `best`, `best-…`"""


@dataclass(frozen=True)
class Summary:
    """A summary of a run; superseded steps count only for the peak memory."""

    path: str
    id: str
    name: str
    state: State
    reason: str
    """why it ended; empty while it runs"""
    resumable: bool
    go_on: str
    """command that resumes it; empty if it cannot be resumed"""
    process: int | None
    """id of the process that trains it on this machine"""
    started: float
    """Unix seconds; 0: never"""
    seen: float
    """when the last line was written, in Unix seconds"""
    segments: int
    """number of starts and resumes"""
    step: int
    samples: int
    tokens: int
    unit: str
    """what `tokens` counts"""
    epoch: float
    flops: float
    wall_s: float
    active_s: float
    tokens_per_s: float | None
    """over the whole active time"""
    last: dict[str, MetricValue]
    best: dict[str, MetricValue]
    """of metrics that have a direction (lower or higher is better)"""
    best_metric: str
    """the metric that `checkpoints/best` follows"""
    drawn: dict[str, int]
    """training samples of each part of a mixture at the last evaluation"""
    anew: tuple[str, ...]
    """since when evaluations are comparable with the last one, and what changed before each time"""
    operations: tuple[OperationEvent, ...]
    skipped_steps: int
    checkpoints: tuple[CheckpointEntry, ...]
    memory_peak_bytes: int | None
    model: str
    """short form of the current shape"""
    parameters: int
    devices: str
    world_size: int
    warnings: tuple[str, ...]
    alerts: tuple[str, ...]
    faults: tuple[str, ...]
    """lines of its record that could not be read"""
    imported_from: str | None = None
    """what another tool recorded of it; None: Instar trained it"""
    family: tuple[RunTreeMember, ...] = ()
    """its trunk and all branches of that, if it has any"""


def summary_to_json(summary: Summary) -> dict[str, Any]:
    """Return a summary as JSON-ready data."""
    as_json: dict[str, Any] = to_words(msgspec.to_builtins(summary))
    return as_json


def _rate(
    at: Placed, first: RunStarted | None, losses: Series | None, events: Iterable[Event]
) -> float | None:
    """Return tokens per second of training; of a run that goes on from steps without a record, since its own first."""
    tokens, seconds = at.tokens, at.active_s
    goes_on = first is not None and first.step and not any(isinstance(e, Branched) for e in events)
    if goes_on and losses is not None and len(own := losses.current()) > 1:
        tokens, seconds = tokens - int(own.tokens[0]), seconds - float(own.active_s[0])
    return tokens / seconds if seconds > 0 else None


def summarize(record: RunRecord, now: float | None = None) -> Summary:
    """Summarize `record`; `now`: Unix seconds, to judge whether a run on another machine is alive."""
    run = record.run
    events: list[Event] = [entry.event for entry in record.events]
    current_events = [entry.event for entry in record.events if entry.is_current]
    starts = [event for event in events if isinstance(event, RunStarted)]
    first, current = (starts[0], starts[-1]) if starts else (None, None)
    operations = tuple(event for event in current_events if isinstance(event, OperationEvent))
    curves = {name: record.series(name) for name in record.metrics}
    ends = {name: end for name, series in curves.items() if (end := _end(series)) is not None}
    best_metric = current.best_metric if current else "loss"
    at = _furthest(current_events, curves, ends)
    last_seen = _last_time(events, curves)
    status = run_status(run, events, last_seen, now)
    model, parameters = _shape(current, operations)
    return Summary(
        path=str(run.path),
        id=run.id,
        name=run.name,
        state=status.state,
        reason=status.reason,
        resumable=status.resumable,
        go_on=status.go_on,
        process=status.process,
        started=first.time if first else 0.0,
        seen=last_seen,
        segments=len(starts),
        step=at.step,
        samples=at.samples,
        tokens=at.tokens,
        unit=current.unit if current else "token",
        epoch=at.epoch,
        flops=at.flops,
        wall_s=at.wall_s,
        active_s=at.active_s,
        tokens_per_s=_rate(at, first, curves.get("loss"), current_events),
        last=_last_values(curves, ends),
        best=_best_values(curves),
        best_metric=best_metric
        if "/" in best_metric and best_metric in curves
        else f"val/{best_metric}",
        drawn=next(
            (e.drawn for e in reversed(current_events) if isinstance(e, Eval) and e.drawn), {}
        ),
        anew=tuple(_messages(current_events, BeginsAnew)),
        operations=operations,
        skipped_steps=sum(isinstance(event, Skip) for event in current_events),
        checkpoints=tuple(_checkpoints(run.checkpoints)),
        memory_peak_bytes=_peak(curves.get("memory_bytes")),
        model=model,
        parameters=parameters,
        devices=current.devices if current else "",
        world_size=current.world_size if current else 1,
        warnings=tuple(_messages(current_events, Warn)),
        alerts=tuple(_messages(current_events, Alert)),
        faults=record.faults,
        imported_from=current.imported_from if current else None,
        family=run_tree(run),
    )


def _last_time(events: Sequence[Event], curves: Mapping[str, Series]) -> float:
    """Return when the last line was written, in Unix seconds; 0: there is none."""
    times = [event.time for event in events]
    return max(times + [float(s.time.max()) for s in curves.values() if len(s)], default=0.0)


def _messages(
    events: Sequence[Event], kind: type[Warn] | type[Alert] | type[BeginsAnew]
) -> Iterator[str]:
    """Yield the events of one kind as text."""
    for event in events:
        if not isinstance(event, kind):
            continue
        match event:
            case Warn(message=message):
                yield message
            case Alert(step=step, name=name, message=message):
                yield f"step {step:,}: {name}: {message}"
            case BeginsAnew(step=step, reasons=reasons):
                yield f"since step {step:,}: {', '.join(reasons)}"


def _last_values(curves: dict[str, Series], ends: dict[str, int]) -> dict[str, MetricValue]:
    return {
        name: _value(curves, name, end)
        for name, end in ends.items()
        if not name.endswith(_OF_ERRORS)
    }


def _best_values(curves: dict[str, Series]) -> dict[str, MetricValue]:
    return {
        name: _value(curves, name, index)
        for name, series in curves.items()
        if (index := series.best(series.is_current & np.isfinite(series.value))) is not None
    }


def _end(series: Series) -> int | None:
    current = np.flatnonzero(series.is_current)
    return int(current[-1]) if len(current) else None


def _value(curves: dict[str, Series], name: str, index: int) -> MetricValue:
    series, error = curves[name], None
    errors = curves.get(name + _OF_ERRORS)
    if errors is not None:
        same = np.flatnonzero(errors.is_current & (errors.step == series.step[index]))
        error = float(errors.value[same[-1]]) if len(same) else None
    return MetricValue(float(series.value[index]), int(series.step[index]), error)


def _furthest(events: list[Event], curves: dict[str, Series], ends: dict[str, int]) -> Placed:
    """Return the last place of the run, ignoring the final test, which may be of an earlier step."""
    places = [event for event in events if isinstance(event, Placed)]
    for name, end in ends.items():
        if not name.startswith("test/"):
            s = curves[name]
            places.append(
                Placed(
                    step=int(s.step[end]),
                    samples=int(s.samples[end]),
                    tokens=int(s.tokens[end]),
                    epoch=float(s.epoch[end]),
                    flops=float(s.flops[end]),
                    wall_s=float(s.wall_s[end]),
                    active_s=float(s.active_s[end]),
                )
            )
    return max(places, key=lambda place: (place.step, place.wall_s), default=Placed(step=0))


def _shape(current: RunStarted | None, operations: tuple[OperationEvent, ...]) -> tuple[str, int]:
    """Return the model's short form and parameter count, including growth since the last start."""
    if current is None:
        return "", 0
    growths = [o for o in operations if o.segment >= current.segment and o.architecture]
    sizes = [o.proof.get("parameters_after", nan) for o in growths]
    parameters = next((int(size) for size in reversed(sizes) if isfinite(size)), current.parameters)
    if not growths:
        return current.model, parameters
    return architecture_text(growths[-1].architecture) or current.model, parameters


def _peak(memory: Series | None) -> int | None:
    if memory is None or not np.isfinite(memory.value).any():
        return None
    return int(memory.value[np.isfinite(memory.value)].max())


def _checkpoints(folder: Path) -> Iterator[CheckpointEntry]:
    """Yield the published checkpoints by step; no tensor is read."""
    pointers: dict[str, list[str]] = {}
    for path in sorted([*folder.glob("latest"), *folder.glob("best*")], reverse=True):
        try:
            text = read_regular(path).decode("utf-8", "replace").strip()
        except OSError:
            continue
        pointers.setdefault(text, []).append(path.name)
    checkpoints = [
        (int(match[1]), path)
        for path in folder.glob("step-*")
        if (match := _CHECKPOINT.fullmatch(path.name)) and (path / MANIFEST).is_file()
    ]
    for step, path in sorted(checkpoints, key=lambda entry: (entry[0], entry[1].stat().st_mtime)):
        yield CheckpointEntry(path.name, step, tuple(pointers.get(path.name, ())))
