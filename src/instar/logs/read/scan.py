"""Scans a record in blocks of lines: measurements become columns, other lines stay events.

A long record is read by one process per core.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec
import numpy as np

from instar.config.files import open_regular
from instar.data.workers import WorkerLost, Workers
from instar.distributed.placement import usable_cores
from instar.logs.read.columns import (
    CELLS,
    MetricTable,
    TableBuilder,
    decode_lines,
    is_measured,
    join,
    tables_of,
)
from instar.record.events import NOT_AN_EVENT, VERSION, Event, RecordError, decode

if TYPE_CHECKING:
    from instar.logs.read.columns import Column


BLOCK_BYTES = 1 << 18
"""small enough that the events of a block stay in the processor's cache"""
LONGEST_LINE_BYTES = 1 << 24
_HEAD_BYTES = 4096
_FIRST = b'{"v":%d,"kind":"' % VERSION


def blocks(file: BinaryIO, place: int, until: int | None = None) -> Iterator[tuple[bytes, int]]:
    """Blocks of whole lines, and the byte behind each; of a line without measure only a part.

    `place`: the byte at which the file stands; nothing behind `until` is read.
    """
    rest = b""
    while chunk := file.read(BLOCK_BYTES if until is None else min(BLOCK_BYTES, until - place)):
        place += len(chunk)
        cut = chunk.rfind(b"\n") + 1
        if cut:
            yield rest + chunk[:cut], place - len(chunk) + cut
            rest = chunk[cut:]
        else:
            rest += chunk
            if len(rest) > LONGEST_LINE_BYTES:
                rest = rest[:BLOCK_BYTES]


def what_it_is(line: bytes, error: BaseException) -> str:
    """Describes a line that is not an event."""
    if nuls := line.count(b"\0"):
        return f"{nuls} NUL byte{'s' if nuls > 1 else ''}: a write that was lost"
    try:
        line.decode()
    except UnicodeDecodeError:
        return "not text in UTF-8"
    try:
        value = msgspec.json.decode(line)
    except NOT_AN_EVENT:
        return f"not a whole line of JSON: {error}"
    if not isinstance(value, dict):
        return "JSON, but no event of a run"
    version = value.get("v")
    if isinstance(version, int) and version > VERSION:
        return f"written by a newer Instar: version {version}, this one reads {VERSION}"
    if version != VERSION or not isinstance(value.get("kind"), str):
        return "JSON, but no event of a run"
    return f"not an event of a run: {error}"


def no_record(path: Path) -> str:
    """Describes a file without any event: why it is not a record.

    Empty for a record that has no complete line yet.
    """
    with open_regular(path) as file:
        head = file.read(_HEAD_BYTES)
    if not head or (b"\n" not in head and head.startswith(_FIRST[: len(head)])):
        return ""
    return f"{path} is not the record of a run: it looks like {_likeness(head)}"


def _likeness(head: bytes) -> str:
    if not head.strip():
        return "blank lines"
    if not head.strip(b"\0"):
        return "NUL bytes, as a lost write leaves them behind"
    if head.startswith(b"\x1f\x8b"):
        return "a compressed file"
    if b"\0" in head or _undecodable(head):
        return "a binary file"
    try:
        value = msgspec.json.decode(head.lstrip().partition(b"\n")[0])
    except NOT_AN_EVENT:
        return "text"
    if not isinstance(value, dict):
        return "JSON lines of something else"
    version = value.get("v")
    if isinstance(version, int) and version > VERSION and "kind" in value:
        return f"that of a newer Instar: version {version}, this one reads {VERSION}"
    keys = ", ".join(key[:40] for key in list(value)[:4])
    return f"JSON lines of something else, with {keys or 'nothing'} in them"


def _undecodable(head: bytes) -> bool:
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return error.end < len(head)  # a letter may be cut at the very end
    return False


FAULTS_TOLD = 5


@dataclass(frozen=True)
class Content:
    """A record, or its beginning."""

    tables: Mapping[str, MetricTable] = field(default_factory=dict)
    events: tuple[bytes, ...] = ()
    """the lines of all events that are no measurements"""
    end: int = 0
    """the byte behind the last line that was read"""
    lines: int = 0
    faults: tuple[tuple[int, str], ...] = ()
    """number and reason of the first lines that were skipped"""
    passed_over: int = 0
    """how many lines were"""
    inode: int = 0
    """of the file"""

    def then(self, *more: Content) -> Content:
        """This, and what follows it in the file, part after part."""
        parts = (self, *more)
        tables: dict[str, list[MetricTable]] = {}
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
    """Reads a record behind `after`: about `most_bytes` of it, and nothing behind the byte `until`.

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
            for block, end in blocks(file, start.end, until):
                reading.take(block, CELLS + end - start.end)
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

    def take(self, block: bytes, most: int) -> None:
        """Whole lines, all at once if they are all sound, or else one by one; `most`: numbers that
        a table may have."""
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
            self.tables.setdefault(name, TableBuilder()).add(found, most)
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
    """Whether each line holds exactly one object, given that there are as many objects as lines."""
    opened, closed = text[ends[:-1] + 1] == ord("{"), text[ends - 1] == ord("}")
    return bool(opened.all() and closed.all())


WORTH_BYTES = 1 << 28
"""From here on, starting processes takes less time than they save."""
PIECE_BYTES = 1 << 25
AT_ONCE_BYTES = 1 << 28
"""What one process that reads alone takes for a piece."""
MOST_WORKERS = 8
"""More would wait for the one that puts together what they have read."""
_AHEAD = 2
"""Pieces that each worker is given at a time."""


class LineRange:
    """A record of which worker processes read ranges of lines."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, begin: int, end: int) -> Content:
        """Reads the lines between two bytes, at both of which a line begins; numbered from 1."""
        return scan(self.path, Content(end=begin), until=end)


def pieces(
    path: Path,
    after: Content | None = None,
    workers: int | None = None,
    until: int | None = None,
) -> Iterator[Content]:
    """Yields what a record holds behind `after`, as contents that follow each other, at least one.

    Args:
        workers: how many processes may read it, instead of one for each core. What is short, or
            cannot be given to others, is read here.
        until: the byte behind which nothing is read.

    Raises:
        RecordError: the file cannot be read.
    """
    last = after or Content()
    try:
        count = usable_cores() if workers is None else workers
        for more in _spread(path, last, count, until):
            yield more
            last = more
    except (WorkerLost, OSError):
        pass  # the rest is read here
    while True:
        more = scan(path, last, AT_ONCE_BYTES, until)
        yield more
        if more.end - last.end < AT_ONCE_BYTES:
            return
        last = more


def _spread(path: Path, after: Content, most: int, until: int | None) -> Iterator[Content]:
    """Yields what worker processes have read; nothing for a short record."""
    size = path.stat().st_size if until is None else until
    count = min(most, MOST_WORKERS, (size - after.end) // PIECE_BYTES)
    if count < 2 or size - after.end < WORTH_BYTES:
        return
    lines, begin = after.lines, after.end
    asked: deque[tuple[int, Future[Content]]] = deque()
    with Workers(partial(LineRange, path), count) as workers:
        for number, end in enumerate(_borders(path, begin, size)):
            asked.append((end, workers.call(number % count, "read", begin, end)))
            begin = end
            while len(asked) == _AHEAD * count or (asked and end == size):
                expected, answer = asked.popleft()
                more = answer.result()
                faults = tuple((lines + line, reason) for line, reason in more.faults)
                lines += more.lines
                yield replace(more, lines=lines, faults=faults)
                if more.end != expected:  # a torn last line, or the file was cut
                    return


def _borders(path: Path, begin: int, size: int) -> Iterator[int]:
    """Bytes behind `begin` at which lines begin, about every `PIECE_BYTES`; the last is `size`."""
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
