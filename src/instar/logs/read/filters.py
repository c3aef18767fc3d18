"""Events of a record by kind and step, line by line: a record of any size needs no memory."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import get_args

from instar.config.errors import ConfigError
from instar.config.files import open_regular
from instar.logs.read.lineage import EVERYTHING, Lineage
from instar.record.events import (
    NOT_AN_EVENT,
    AnyEvent,
    Event,
    Placed,
    RecordError,
    RunStarted,
    Unrecognised,
    decode,
)
from instar.record.rundir import RunDir

KINDS = tuple(str(kind.__struct_config__.tag) for kind in get_args(AnyEvent))
_KIND = re.compile(rb'\{"v":\d+,"kind":"([^"\\]*)"')
_OF_LINEAGE = (b"run_started", b"checkpoint")


@dataclass(frozen=True)
class FilteredEvent:
    """One event that was asked for."""

    line: bytes
    """as it was written"""
    event: Event
    superseded: bool
    """the run has gone on from before it"""


def filter_events(
    run: RunDir,
    kinds: Collection[str] = (),
    *,
    from_step: int | None = None,
    to_step: int | None = None,
    superseded: bool = False,
) -> Iterator[FilteredEvent]:
    """The events of these kinds (none: all) at these steps, both included, in their order.

    An event without a step is asked for only without steps. `superseded`: also what is.

    Raises:
        RecordError: the record cannot be read.
    """
    lineage = Lineage()
    for _, event in _events(run, _OF_LINEAGE):
        lineage.take(event)
    limits = lineage.limits()
    for line, event in _events(run, [kind.encode() for kind in kinds]):
        if kinds and kind_of(event) not in kinds:
            continue
        step = (
            event.step if isinstance(event, Placed | RunStarted) else getattr(event, "step", None)
        )
        if from_step is not None and (step is None or step < from_step):
            continue
        if to_step is not None and (step is None or step > to_step):
            continue
        placed = isinstance(event, Placed)
        gone = placed and step is not None and step > limits.get(event.segment, EVERYTHING)
        if superseded or not gone:
            yield FilteredEvent(line, event, gone)


def kind_of(event: Event) -> str:
    """`train`, `eval`, …; of one that a newer Instar wrote, what that calls it."""
    return event.name if isinstance(event, Unrecognised) else str(event.__struct_config__.tag)


def check_kinds(kinds: Collection[str], there: Collection[str] = ()) -> None:
    """`there`: kinds that were found beyond those that are known.

    Raises:
        ConfigError: there is no such kind; suggests one.
    """
    for kind in kinds:
        if kind not in KINDS and kind not in there:
            near = get_close_matches(kind, KINDS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(KINDS)}"
            raise ConfigError.one(f"there is no kind of event {kind!r}", "--kind", hint)


def _events(run: RunDir, kinds: Collection[bytes]) -> Iterator[tuple[bytes, Event]]:
    """Every line that is an event, of these kinds as far as that can be seen without reading it."""
    try:
        with open_regular(run.events) as file:
            for line in file:
                begins = _KIND.match(line)
                if kinds and begins and begins[1] not in kinds:
                    continue
                try:
                    yield line.rstrip(b"\n"), decode(line)
                except NOT_AN_EVENT:
                    continue
    except OSError as error:
        raise RecordError(f"cannot read {run.events}: {error.strerror}") from error
