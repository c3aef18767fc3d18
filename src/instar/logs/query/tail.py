"""Reads the end of a record or of a rank's log, and follows what is appended."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from instar.config.files import open_regular
from instar.logs.query.state import run_status
from instar.record.events import Event, Failed, RunFinished, RunStarted, Stop, events_in
from instar.record.rundir import RunDir

WAIT_S = 0.1
_BLOCK_BYTES = 1 << 16
MAX_TAIL_BYTES = 1 << 26


class LineFollower:
    """Reads the lines appended to a file after an offset.

    Only whole lines are read. A file that has become shorter or has been replaced is read again from
    its beginning. A missing file counts as empty.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset
        """bytes read so far, always at the beginning of a line"""
        self.restarts = 0
        """number of times the file was replaced and read again"""
        self._inode: int | None = None

    def lines(self, most_bytes: int = -1, *, partial: bool = False) -> list[bytes]:
        """Return the lines added since the last call.

        Args:
            most_bytes: bytes to read at most; a line that is longer is returned in pieces.
            partial: also an incomplete last line.
        """
        try:
            with open_regular(self.path) as file:
                status = os.fstat(file.fileno())
                if status.st_size < self.offset or self._inode not in (None, status.st_ino):
                    self.offset = 0
                    self.restarts += 1
                self._inode = status.st_ino
                if status.st_size == self.offset:
                    return []
                file.seek(self.offset)
                block = file.read(most_bytes)
        except OSError:
            return []
        end = block.rfind(b"\n") + 1
        if partial or (end == 0 and len(block) == most_bytes):
            end = len(block)
        self.offset += end
        lines = block[:end].split(b"\n")
        return lines if lines[-1] else lines[:-1]


class Follower(LineFollower):
    """Reads the events appended to a record after an offset; lines that are not events are skipped."""

    def poll(self) -> list[Event]:
        """Return the events added since the last call, in order."""
        return [event for _, event in events_in(self.lines())]


def last_lines(path: Path, count: int, most_bytes: int = MAX_TAIL_BYTES) -> tuple[list[bytes], int]:
    """Return the last `count` whole lines of a file, and the offset after them; read only these, and
    fewer if they are longer than about `most_bytes` together.

    Raises:
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        begin = end = file.seek(0, 2)
        text = b""
        while begin > 0 and text.count(b"\n") <= count and len(text) < most_bytes:
            step = min(begin, max(_BLOCK_BYTES, len(text)))
            begin -= step
            file.seek(begin)
            text = file.read(step) + text
    complete = text[: text.rfind(b"\n") + 1]
    lines = complete.split(b"\n")[:-1]
    if begin > 0:
        lines = lines[1:]  # its beginning was not read
    return lines[len(lines) - count :] if count < len(lines) else lines, end - (
        len(text) - len(complete)
    )


def last_events(path: Path, count: int) -> tuple[list[Event], int]:
    """Return the last `count` events of a record, and the byte where a `Follower` continues.

    Raises:
        OSError: it cannot be read.
    """
    line_count = count
    while True:
        lines, end = last_lines(path, line_count)
        events = [event for _, event in events_in(lines)]
        if len(events) >= count or len(lines) < line_count:
            return events[max(0, len(events) - count) :], end
        line_count *= 2


def unit_of(path: Path) -> str:
    """Return the unit of a run's tokens, from the first line of its record."""
    try:
        with open_regular(path) as file:
            event = next((event for _, event in events_in([file.readline()])), None)
    except OSError:
        return "token"
    return event.unit if isinstance(event, RunStarted) else "token"


def follow_record(run: RunDir, past_events: Sequence[Event], offset: int) -> Iterator[list[Event]]:
    """Yield the events appended to a run's record after `offset`, until the run ends.

    `past_events`: events before `offset` that the caller has read.
    """
    follower = Follower(run.events, offset)
    lifecycle: deque[Event] = deque(maxlen=8)
    at = _remember(lifecycle, past_events)
    while True:
        before = run_status(run, tuple(lifecycle), at).state == "running"
        new = follower.poll()
        at = _remember(lifecycle, new) or at
        yield new
        if not before and not new:
            return
        if not new:
            time.sleep(WAIT_S)


def follow_log(run: RunDir, path: Path, offset: int) -> Iterator[list[bytes]]:
    """Yield the lines appended to a rank's log after `offset`, until the run ends."""
    last, at = last_events(run.events, 8) if run.events.exists() else ([], 0)
    log = LineFollower(path, offset)
    for _ in follow_record(run, last, at):
        yield log.lines()
    yield log.lines()


def _remember(lifecycle: deque[Event], events: Sequence[Event]) -> float:
    """Collect events of a run's start and end; return the time of the last event, or 0."""
    lifecycle.extend(e for e in events if isinstance(e, RunStarted | Stop | RunFinished | Failed))
    return events[-1].time if events else 0.0
