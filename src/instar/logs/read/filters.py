"""Filters the events of a record by kind and step, line by line, in constant memory."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from instar.config.errors import ConfigError, nearest_hint
from instar.config.files import open_regular
from instar.logs.read.scan import EVERYTHING, SegmentTree
from instar.record.events import (
    Event,
    Placed,
    RecordError,
    RunStarted,
    Unrecognised,
    event_kinds,
    events_in,
)
from instar.record.rundir import RunDir

_KIND = re.compile(rb'\{"v":\d+,"kind":"([^"\\]*)"')
_LINEAGE_KINDS = (b"run_started", b"checkpoint")


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


def event_kind(event: Event) -> str:
    """Return the kind's name, as `train` or `eval`, also for kinds that only a newer Instar knows."""
    return event.name if isinstance(event, Unrecognised) else str(event.__struct_config__.tag)


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
