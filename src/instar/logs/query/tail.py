"""Reads the end of a record or of a rank's log, and follows what is appended."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from instar.config.files import open_regular
from instar.logs.query.state import run_status
from instar.record.events import (
    NOT_AN_EVENT,
    Event,
    Failed,
    RunFinished,
    RunStarted,
    Stop,
    decode,
)
from instar.record.rundir import RunDir


class Follower:
    """Reads the events appended to a record after an offset.

    Only whole lines are read; lines that are not events are skipped. A record that has become shorter
    or has been replaced is read again from its beginning. A missing file counts as empty.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset
        """bytes read so far, always at the beginning of a line"""
        self.restarts = 0
        """number of times the record was replaced and read again"""
        self._inode: int | None = None

    def poll(self) -> list[Event]:
        """Returns the events added since the last call, in order."""
        return [event for line in self._new_lines() if (event := _event(line)) is not None]

    def _new_lines(self) -> list[bytes]:
        try:
            with open_regular(self.path) as file:
                status = os.fstat(file.fileno())
                if status.st_size < self.offset or self._inode not in (None, status.st_ino):
                    self.offset = 0
                    self.restarts += 1
                self._inode = status.st_ino
                file.seek(self.offset)
                block = file.read()
        except OSError:
            return []
        whole = block[: block.rfind(b"\n") + 1]
        self.offset += len(whole)
        return whole.split(b"\n")[:-1]


WAIT_S = 0.1
_BLOCK_BYTES = 1 << 16


def last_lines(path: Path, count: int) -> tuple[list[bytes], int]:
    """Returns the last `count` whole lines of a file, and the offset after them; reads only these.

    Raises:
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        begin = end = file.seek(0, 2)
        text = b""
        while begin > 0 and text.count(b"\n") <= count:
            step = min(begin, max(_BLOCK_BYTES, len(text)))
            begin -= step
            file.seek(begin)
            text = file.read(step) + text
    whole = text[: text.rfind(b"\n") + 1]
    lines = whole.split(b"\n")[:-1]
    if begin > 0:
        lines = lines[1:]  # its beginning was not read
    return lines[len(lines) - count :] if count < len(lines) else lines, end - (
        len(text) - len(whole)
    )


def last_events(path: Path, count: int) -> tuple[list[Event], int]:
    """Returns the last `count` events of a record, and the byte where a `Follower` continues.

    Raises:
        OSError: it cannot be read.
    """
    wanted = count
    while True:
        lines, end = last_lines(path, wanted)
        events = [event for line in lines if (event := _event(line)) is not None]
        if len(events) >= count or len(lines) < wanted:
            return events[max(0, len(events) - count) :], end
        wanted *= 2


def unit_of(path: Path) -> str:
    """Returns the unit of a run's tokens, from the first line of its record."""
    try:
        with open_regular(path) as file:
            event = _event(file.readline())
    except OSError:
        return "token"
    return event.unit if isinstance(event, RunStarted) else "token"


def follow(run: RunDir, seen: Sequence[Event], offset: int) -> Iterator[list[Event]]:
    """Yields the events appended to a run's record after `offset`, until the run ends.

    `seen`: events before `offset` that the caller has read.
    """
    follower = Follower(run.events, offset)
    lifecycle: deque[Event] = deque(maxlen=8)
    at = _remember(lifecycle, seen)
    while True:
        before = _is_running(run, lifecycle, at)
        new = follower.poll()
        at = _remember(lifecycle, new) or at
        yield new
        if not before and not new:
            return
        if not new:
            time.sleep(WAIT_S)


def follow_log(run: RunDir, path: Path, offset: int) -> Iterator[list[bytes]]:
    """Yields the lines appended to a rank's log after `offset`, until the run ends."""
    last, at = last_events(run.events, 8) if run.events.exists() else ([], 0)
    for _ in follow(run, last, at):
        lines, offset = _added(path, offset)
        yield lines
    yield _added(path, offset)[0]


def _added(path: Path, offset: int) -> tuple[list[bytes], int]:
    try:
        with open_regular(path) as file:
            file.seek(offset)
            text = file.read()
    except OSError:
        return [], offset
    whole = text[: text.rfind(b"\n") + 1]
    return whole.split(b"\n")[:-1], offset + len(whole)


def _is_running(run: RunDir, lifecycle: Sequence[Event], seen: float) -> bool:
    return run_status(run, tuple(lifecycle), seen).state == "running"


def _remember(lifecycle: deque[Event], events: Sequence[Event]) -> float:
    """Collects events of a run's start and end; returns the time of the last event, or 0."""
    lifecycle.extend(e for e in events if isinstance(e, RunStarted | Stop | RunFinished | Failed))
    return events[-1].time if events else 0.0


def _event(line: bytes) -> Event | None:
    try:
        return decode(line)
    except NOT_AN_EVENT:
        return None
