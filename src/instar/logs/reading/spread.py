"""A long record is read by a process for each core, piece by piece, and told in its order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path

from instar.data.workers import WorkerLost, Workers
from instar.distributed.cores import cores
from instar.logs.reading.scan import Content, scan

WORTH_BYTES = 1 << 28
"""From here on, starting processes takes less time than they save."""
PIECE_BYTES = 1 << 25
AT_ONCE_BYTES = 1 << 28
"""What one process that reads alone takes for a piece."""
MOST_WORKERS = 8
"""More would wait for the one that puts together what they have read."""
_AHEAD = 2
"""Pieces that each worker is given at a time."""


class Part:
    """A record, any part of which can be read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, begin: int, end: int) -> Content:
        """The lines between two bytes, at both of which a line begins; numbered from 1."""
        return scan(self.path, Content(end=begin), until=end)


def pieces(
    path: Path, after: Content | None = None, workers: int | None = None
) -> Iterator[Content]:
    """What stands in a record behind `after`: contents that follow each other, at least one.

    `workers`: how many processes may read it, instead of one for each core. What is short, or
    cannot be given to others, is read here.

    Raises:
        RecordError: the file cannot be read.
    """
    last = after or Content()
    try:
        for more in _spread(path, last, cores() if workers is None else workers):
            yield more
            last = more
    except (WorkerLost, OSError):
        pass  # the rest is read here
    while True:
        more = scan(path, last, AT_ONCE_BYTES)
        yield more
        if more.end - last.end < AT_ONCE_BYTES:
            return
        last = more


def _spread(path: Path, after: Content, most: int) -> Iterator[Content]:
    """What other processes have read; nothing if that is not worth it."""
    size = path.stat().st_size
    count = min(most, MOST_WORKERS, (size - after.end) // PIECE_BYTES)
    if count < 2 or size - after.end < WORTH_BYTES:
        return
    lines, begin = after.lines, after.end
    asked: deque[tuple[int, Future[Content]]] = deque()
    with Workers(partial(Part, path), count) as workers:
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
    with path.open("rb") as file:
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
