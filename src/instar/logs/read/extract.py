"""What is taken out of a record: its events by kind and step, line by line in constant memory; and its metrics as
one table, with a row for each step and a column for each metric."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from instar.config.errors import ConfigError, nearest_hint
from instar.config.files import open_regular
from instar.logs.read.columns import Bools, Column, Ints
from instar.logs.read.record import Series
from instar.logs.read.segments import EVERYTHING, SegmentTree
from instar.record.events import (
    Event,
    Placed,
    RecordError,
    RunStarted,
    event_kind,
    event_kinds,
    events_in,
)
from instar.record.rundir import RunDir

PLACES = ("step", "samples", "tokens", "epoch", "flops", "wall_s", "active_s", "time", "segment")
_TIMES_BITS, _STEP_BITS = 10, 40
_KIND = re.compile(rb'\{"v":\d+,"kind":"([^"\\]*)"')
_LINEAGE_KINDS = (b"run_started", b"checkpoint")


@dataclass(frozen=True)
class Rows:
    """Places and metrics by name; `is_measured` masks the rows in which each metric has a value."""

    values: dict[str, Column]
    is_measured: dict[str, Bools]

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.values)

    def __len__(self) -> int:
        return len(self.values["step"])

    def texts(self, name: str) -> list[str]:
        """Return a column as text: the shortest that reads back equal; empty where not measured."""
        values = self.values[name].tolist()
        if name not in self.is_measured:
            return [_text(value) for value in values]
        column_measured = self.is_measured[name].tolist()
        return [
            _text(value) if is_measured else ""
            for value, is_measured in zip(values, column_measured, strict=True)
        ]


def rows_of(series: Sequence[Series]) -> Rows:
    """Return one table of several metrics of one run, sorted by segment, then by step.

    A metric measured more than once at a step, as before and after an operation, adds rows for that
    step. The place of a row is that of its first metric.
    """
    keys = [_keys(metric) for metric in series]
    all_keys, inverse = np.unique(
        np.concatenate([*keys, np.empty(0, np.int64)]), return_inverse=True
    )
    positions = (
        np.split(inverse, np.cumsum([len(metric_keys) for metric_keys in keys])[:-1])
        if keys
        else []
    )
    values: dict[str, Column] = {}
    for place in PLACES:
        kind = np.int64 if place in ("step", "samples", "tokens", "segment") else np.float64
        values[place] = np.zeros(len(all_keys), kind)
        for curve, rows in zip(reversed(series), reversed(positions), strict=True):
            values[place][rows] = getattr(curve, place)
    is_measured: dict[str, Bools] = {}
    for curve, rows in zip(series, positions, strict=True):
        name = curve.name if curve.name not in PLACES else f"{curve.name} (measured)"
        values[name] = np.full(len(all_keys), np.nan)
        values[name][rows] = curve.value
        is_measured[name] = np.zeros(len(all_keys), np.bool_)
        is_measured[name][rows] = True
    return Rows(values, is_measured)


def _keys(series: Series) -> Ints:
    """Return sort keys: segment, step and count of earlier measurements there, packed in one int."""
    place = (series.segment << _STEP_BITS) | series.step
    order = np.argsort(place, kind="stable")
    ordered_places = place[order]
    first = np.searchsorted(ordered_places, ordered_places)
    times = np.empty(len(place), np.int64)
    times[order] = np.minimum(np.arange(len(place)) - first, (1 << _TIMES_BITS) - 1)
    return (place << _TIMES_BITS) | times


def _text(value: float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return repr(value)


@dataclass(frozen=True)
class FilteredEvent:
    """One event that matches the filters."""

    line: bytes
    """as it was written"""
    event: Event
    is_superseded: bool
    """the run was resumed from an earlier step"""


def filter_events(
    run: RunDir,
    kinds: Collection[str] = (),
    *,
    from_step: int | None = None,
    to_step: int | None = None,
    superseded: bool = False,
) -> Iterator[FilteredEvent]:
    """Yield the events of these kinds (none: all) from `from_step` to `to_step`, both included.

    Events without a step match only if neither bound is given. `superseded`: include superseded
    events.

    Raises:
        RecordError: the record cannot be read.
    """
    lineage = SegmentTree()
    for _, event in _events(run, _LINEAGE_KINDS):
        lineage.take(event)
    limits = lineage.limits()
    for line, event in _events(run, [kind.encode() for kind in kinds]):
        if kinds and event_kind(event) not in kinds:
            continue
        step = (
            event.step if isinstance(event, Placed | RunStarted) else getattr(event, "step", None)
        )
        if from_step is not None and (step is None or step < from_step):
            continue
        if to_step is not None and (step is None or step > to_step):
            continue
        has_place = isinstance(event, Placed)
        is_superseded = (
            has_place and step is not None and step > limits.get(event.segment, EVERYTHING)
        )
        if superseded or not is_superseded:
            yield FilteredEvent(line, event, is_superseded)


def check_kinds(kinds: Collection[str], recorded_kinds: Collection[str] = ()) -> None:
    """Check names of kinds; `recorded_kinds`: kinds of a newer Instar that occur in the record.

    Raises:
        ConfigError: a kind is unknown; suggests one.
    """
    known_kinds = event_kinds()
    for kind in kinds:
        if kind not in known_kinds and kind not in recorded_kinds:
            hint = nearest_hint(kind, known_kinds, f"expected one of {', '.join(known_kinds)}")
            raise ConfigError.of(f"unknown kind of event {kind!r}", "--kind", hint)


def _events(run: RunDir, kinds: Collection[bytes]) -> Iterator[tuple[bytes, Event]]:
    """Yield the lines that are events; skip other kinds where the line's prefix already shows it."""
    try:
        with open_regular(run.events) as file:
            matches = ((line, _KIND.match(line)) for line in file)
            lines = (
                line for line, kind in matches if not (kinds and kind and kind[1] not in kinds)
            )
            yield from ((line.rstrip(b"\n"), event) for line, event in events_in(lines))
    except OSError as error:
        raise RecordError(f"cannot read {run.events}: {error.strerror}") from error
