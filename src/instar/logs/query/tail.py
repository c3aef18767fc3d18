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
    """Reads on from a place in a record.

    Only whole lines are read, so a line that is being written comes with a later look. A line
    that is no event is passed over. A record that is shorter than what was read of it, or is
    another file now, is read anew from its beginning; one that is not there yet holds nothing.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset
        """bytes read so far, always at the beginning of a line"""
        self.restarts = 0
        """how often the record turned out to be another one, and was read anew"""
        self._inode: int | None = None

    def poll(self) -> list[Event]:
        """The events that were added since the last look, in their order."""
        events = []
        for line in self._new_lines():
            try:
                events.append(decode(line))
            except NOT_AN_EVENT:
                continue
        return events

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
    """Returns the last `count` whole lines of a file, and the byte behind them; reads only these.

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
    asked = count
    while True:
        lines, end = last_lines(path, asked)
        events = [event for line in lines if (event := _event(line)) is not None]
        if len(events) >= count or len(lines) < asked:
            return events[max(0, len(events) - count) :], end
        asked *= 2


def unit_of(path: Path) -> str:
    """Returns the unit of a run's tokens, from the first line of its record."""
    try:
        with open_regular(path) as file:
            event = _event(file.readline())
    except OSError:
        return "token"
    return event.unit if isinstance(event, RunStarted) else "token"


def follow(run: RunDir, seen: Sequence[Event], offset: int) -> Iterator[list[Event]]:
    """Yields the events that are appended to a run's record behind `offset`, until the run ends.

    `seen`: the events up to there, as far as they were looked at.
    """
    follower = Follower(run.events, offset)
    about: deque[Event] = deque(maxlen=8)
    at = _remember(about, seen)
    while True:
        before = _goes_on(run, about, at)
        new = follower.poll()
        at = _remember(about, new) or at
        yield new
        if not before and not new:
            return
        if not new:
            time.sleep(WAIT_S)


def follow_log(run: RunDir, path: Path, offset: int) -> Iterator[list[bytes]]:
    """Yields the lines that are appended to a rank's log behind `offset`, until the run ends."""
    last, at = last_events(run.events, 8) if run.events.exists() else ([], 0)
    watch = follow(run, last, at)
    for _ in watch:
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


def _goes_on(run: RunDir, about: Sequence[Event], seen: float) -> bool:
    return run_status(run, tuple(about), seen).state == "running"


def _remember(about: deque[Event], events: Sequence[Event]) -> float:
    """Keeps the events of a run's start and end; returns the time of the last event, or 0."""
    about.extend(e for e in events if isinstance(e, RunStarted | Stop | RunFinished | Failed))
    return events[-1].time if events else 0.0


def _event(line: bytes) -> Event | None:
    try:
        return decode(line)
    except NOT_AN_EVENT:
        return None
