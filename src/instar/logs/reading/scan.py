"""The lines of a record, read in blocks: measurements into columns, everything else as it stands.

Whatever is no event is passed over and told of. A last line without an end is being written, or
was when its writer died: it is left alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from instar.logs.reading.columns import Growing, Table, is_measured, join, tables_of
from instar.logs.reading.lines import blocks, what_it_is
from instar.logs.reading.steps import decode_lines
from instar.record.events import NOT_AN_EVENT, Event, RecordError, decode

if TYPE_CHECKING:
    from instar.logs.reading.columns import Column

FAULTS_TOLD = 5


@dataclass(frozen=True)
class Content:
    """A record, or its beginning."""

    tables: Mapping[str, Table] = field(default_factory=dict)
    events: tuple[bytes, ...] = ()
    """the lines of all events that are no measurements"""
    end: int = 0
    """the byte behind the last line that was read"""
    lines: int = 0
    faults: tuple[tuple[int, str], ...] = ()
    """of the first lines that were passed over, number and reason"""
    passed_over: int = 0
    """how many lines were"""
    inode: int = 0
    """of the file"""

    def then(self, *more: Content) -> Content:
        """This, and what follows it in the file, part after part."""
        parts = (self, *more)
        tables: dict[str, list[Table]] = {}
        for part in parts:
            for name, table in part.tables.items():
                tables.setdefault(name, []).append(table)
        return Content(
            {name: join(found) for name, found in tables.items()},
            tuple(line for part in parts for line in part.events),
            parts[-1].end,
            parts[-1].lines,
            tuple(fault for part in parts for fault in part.faults)[:FAULTS_TOLD],
            sum(part.passed_over for part in parts),
            parts[-1].inode,
        )


def scan(
    path: Path,
    after: Content | None = None,
    most_bytes: int | None = None,
    until: int | None = None,
) -> Content:
    """What stands in a record behind `after`, at least about `most_bytes` of it if there is more,
    and nothing behind the byte `until`.

    Raises:
        RecordError: the file cannot be read.
    """
    start = after or Content()
    reading = _Reading(start.lines)
    try:
        with path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            file.seek(start.end)
            end = start.end
            for block, end in blocks(file, start.end, until):
                reading.take(block)
                if most_bytes is not None and end - start.end >= most_bytes:
                    break
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from error
    tables = {name: growing.table() for name, growing in reading.tables.items()}
    return Content(
        tables,
        tuple(reading.events),
        end,
        reading.lines,
        tuple(reading.faults),
        reading.passed_over,
        inode,
    )


class _Reading:
    def __init__(self, lines: int) -> None:
        self.tables: dict[str, Growing] = {}
        self.events: list[bytes] = []
        self.lines = lines
        self.faults: list[tuple[int, str]] = []
        self.passed_over = 0

    def take(self, block: bytes) -> None:
        """Whole lines, all at once if they are all sound, or else one by one."""
        text = np.frombuffer(block, "u1")
        ends = np.flatnonzero(text == ord("\n"))
        try:
            events = decode_lines(block)
        except NOT_AN_EVENT:
            events = []
        if len(events) == len(ends) and _each_holds_one(text, ends):
            if not all(map(is_measured, set(map(type, events)))):
                starts = np.concatenate([[0], ends + 1])
                others = [n for n, event in enumerate(events) if not is_measured(type(event))]
                self.events += [block[starts[n] : ends[n]] for n in others]
        else:
            events = list(self._one_by_one(block))
        for name, found in tables_of(events).items():
            self.tables.setdefault(name, Growing()).add(found)
        self.lines += len(ends)

    def _one_by_one(self, block: bytes) -> Iterator[Event]:
        for number, line in enumerate(block.split(b"\n")[:-1], self.lines + 1):
            if not line.strip():
                continue
            try:
                event = decode(line)
            except NOT_AN_EVENT as error:
                self.passed_over += 1
                if len(self.faults) < FAULTS_TOLD:
                    self.faults.append((number, what_it_is(line, error)))
                continue
            if not is_measured(type(event)):
                self.events.append(line)
            yield event


def _each_holds_one(text: Column, ends: Column) -> bool:
    """Of as many objects as lines, whether none spans lines or shares its line with another."""
    opened, closed = text[ends[:-1] + 1] == ord("{"), text[ends - 1] == ord("}")
    return bool(opened.all() and closed.all())
