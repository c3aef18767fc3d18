"""Scans a record in blocks of lines: measurements become columns, other lines stay events. A long record is read by
one process per core."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from instar.config.files import open_regular
from instar.logs.read.columns import (
    CELLS,
    Column,
    MetricTable,
    TableBuilder,
    decode_measurements,
    is_measured,
    join_tables,
    tables_of,
)
from instar.logs.read.lines import describe_line, line_blocks
from instar.processes.cores import usable_cores
from instar.processes.pool import WorkerLost, Workers
from instar.record.events import (
    NOT_AN_EVENT,
    Event,
    RecordError,
    decode_event,
)
from instar.record.progress import Advance, progress

MAX_FAULTS = 5
WORTH_BYTES = 1 << 28
"""size from which worker processes save more time than starting them takes"""
PIECE_BYTES = 1 << 25
AT_ONCE_BYTES = 1 << 28
"""size of a piece where a single process reads"""
MOST_WORKERS = 8
"""more would wait for the process that joins their results"""
_AHEAD = 2
"""pieces queued per worker"""


@dataclass(frozen=True)
class Content:
    """The parsed content of a record, or of its beginning."""

    tables: Mapping[str, MetricTable] = field(default_factory=dict)
    events: tuple[bytes, ...] = ()
    """the lines of all events that are not measurements"""
    end: int = 0
    """the byte offset after the last line read"""
    lines: int = 0
    faults: tuple[tuple[int, str], ...] = ()
    """number and reason of the first skipped lines"""
    passed_over: int = 0
    """number of skipped lines"""
    inode: int = 0

    def extended_by(self, *more: Content) -> Content:
        """Concatenate this content and the parts that follow it in the file."""
        parts = (self, *more)
        tables: dict[str, list[MetricTable]] = {}
        for part in parts:
            for name, table in part.tables.items():
                tables.setdefault(name, []).append(table)
        return Content(
            {name: join_tables(parts) for name, parts in tables.items()},
            tuple(line for part in parts for line in part.events),
            parts[-1].end,
            parts[-1].lines,
            tuple(fault for part in parts for fault in part.faults)[:MAX_FAULTS],
            sum(part.passed_over for part in parts),
            parts[-1].inode,
        )


def scan(
    path: Path,
    after: Content | None = None,
    most_bytes: int | None = None,
    until: int | None = None,
    advance: Advance = lambda _: None,
) -> Content:
    """Read about `most_bytes` of a record after `after`, and nothing past the byte `until`;
    `advance` counts the bytes.

    Raises:
        RecordError: the file cannot be read.
    """
    start = after or Content()
    reading = _Reading(start.lines)
    try:
        with open_regular(path) as file:
            inode = os.fstat(file.fileno()).st_ino
            file.seek(start.end)
            end = start.end
            for block, end in line_blocks(file, start.end, until):
                reading.take(block, CELLS + end - start.end)
                advance(len(block))
                if most_bytes is not None and end - start.end >= most_bytes:
                    break
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from error
    tables = {name: builder.table() for name, builder in reading.tables.items()}
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
        self.tables: dict[str, TableBuilder] = {}
        self.events: list[bytes] = []
        self.lines = lines
        self.faults: list[tuple[int, str]] = []
        self.passed_over = 0

    def take(self, block: bytes, max_cells: int) -> None:
        """Add whole lines, decoded together if all are valid, else one by one; `max_cells`: cells that a
        table may have."""
        text = np.frombuffer(block, "u1")
        ends = np.flatnonzero(text == ord("\n"))
        try:
            events = decode_measurements(block)
        except NOT_AN_EVENT:
            events = []
        if len(events) == len(ends) and _each_holds_one(text, ends):
            if not all(map(is_measured, set(map(type, events)))):
                starts = np.concatenate([[0], ends + 1])
                other_rows = [n for n, event in enumerate(events) if not is_measured(type(event))]
                self.events += [block[starts[n] : ends[n]] for n in other_rows]
        else:
            events = list(self._one_by_one(block))
        for name, measurements in tables_of(events).items():
            self.tables.setdefault(name, TableBuilder()).add(measurements, max_cells)
        self.lines += len(ends)

    def _one_by_one(self, block: bytes) -> Iterator[Event]:
        for number, line in enumerate(block.split(b"\n")[:-1], self.lines + 1):
            if not line.strip():
                continue
            try:
                event = decode_event(line)
            except NOT_AN_EVENT as error:
                self.passed_over += 1
                if len(self.faults) < MAX_FAULTS:
                    self.faults.append((number, describe_line(line, error)))
                continue
            if not is_measured(type(event)):
                self.events.append(line)
            yield event


def _each_holds_one(text: Column, ends: Column) -> bool:
    """Return whether each line holds exactly one object, given as many objects as lines."""
    begins_with_brace, ends_with_brace = text[ends[:-1] + 1] == ord("{"), text[ends - 1] == ord("}")
    return bool(begins_with_brace.all() and ends_with_brace.all())


class LineRange:
    """Reads ranges of lines of a record in a worker process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, begin: int, end: int) -> Content:
        """Read the lines between two offsets at which lines begin; lines are numbered from 1."""
        return scan(self.path, Content(end=begin), until=end)


def pieces(
    path: Path, after: Content | None = None, workers: int | None = None, until: int | None = None
) -> Iterator[Content]:
    """Yield the record after `after` as consecutive contents, at least one.

    Args:
        workers: maximum number of processes, by default one per core. Short records are read in
            this process.
        until: the byte offset at which reading ends.

    Raises:
        RecordError: the file cannot be read.
    """
    last = after or Content()
    with progress(f"reading {path}") as advance:
        try:
            count = usable_cores() if workers is None else workers
            for more in _spread(path, last, count, until):
                yield more
                advance(more.end - last.end)
                last = more
        except OSError:
            pass  # the rest is read here
        while True:
            more = scan(path, last, AT_ONCE_BYTES, until, advance)
            yield more
            if more.end - last.end < AT_ONCE_BYTES:
                return
            last = more


def _spread(path: Path, after: Content, max_workers: int, until: int | None) -> Iterator[Content]:
    """Yield what worker processes read; nothing for a short record, and less if one is lost."""
    size = path.stat().st_size if until is None else until
    count = min(max_workers, MOST_WORKERS, (size - after.end) // PIECE_BYTES)
    if count < 2 or size - after.end < WORTH_BYTES:
        return

    lines, begin = after.lines, after.end
    pending: deque[tuple[int, Future[Content]]] = deque()
    try:
        with Workers(partial(LineRange, path), count) as workers:
            for number, end in enumerate(_borders(path, begin, size)):
                pending.append((end, workers.call(number % count, "read", begin, end)))
                begin = end
                while len(pending) == _AHEAD * count or (pending and end == size):
                    expected, answer = pending.popleft()
                    more = answer.result()
                    faults = tuple((lines + line, reason) for line, reason in more.faults)
                    lines += more.lines
                    yield replace(more, lines=lines, faults=faults)
                    if more.end != expected:  # a torn last line, or the file was cut
                        return
    except WorkerLost:
        return


def _borders(path: Path, begin: int, size: int) -> Iterator[int]:
    """Yield offsets after `begin` at which lines begin, about every `PIECE_BYTES`; last, `size`."""
    with open_regular(path) as file:
        for place in range(begin + PIECE_BYTES, size, PIECE_BYTES):
            if place < begin:  # within a very long line
                continue
            begin = file.seek(place)
            while line := file.readline(PIECE_BYTES):
                begin += len(line)
                if line.endswith(b"\n"):
                    break
            if begin < size:
                yield begin
    yield size
