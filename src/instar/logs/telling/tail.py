"""The end of a run's record or of a rank's log, and what is added while one looks on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from instar.logs.reading.follow import Follower
from instar.logs.telling.state import stand
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

WAIT_S = 0.1
_BLOCK_BYTES = 1 << 16


def last_lines(path: Path, count: int) -> tuple[list[bytes], int]:
    """The last `count` whole lines of a file, and the byte behind them; only these are read.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
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
    """The last `count` events of a record, and the byte where a `Follower` goes on.

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
    """What the run of a record counts, as its first line says."""
    try:
        with path.open("rb") as file:
            event = _event(file.readline())
    except OSError:
        return "token"
    return event.unit if isinstance(event, RunStarted) else "token"


def follow(run: RunDir, seen: Sequence[Event], offset: int) -> Iterator[list[Event]]:
    """What is added to a run's record behind `offset`, until the run ends.

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
    """The lines that are added to a rank's log behind `offset`, until the run ends."""
    last, at = last_events(run.events, 8) if run.events.exists() else ([], 0)
    watch = follow(run, last, at)
    for _ in watch:
        lines, offset = _added(path, offset)
        yield lines
    yield _added(path, offset)[0]


def _added(path: Path, offset: int) -> tuple[list[bytes], int]:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            text = file.read()
    except OSError:
        return [], offset
    whole = text[: text.rfind(b"\n") + 1]
    return whole.split(b"\n")[:-1], offset + len(whole)


def _goes_on(run: RunDir, about: Sequence[Event], seen: float) -> bool:
    return stand(run, tuple(about), seen).state == "running"


def _remember(about: deque[Event], events: Sequence[Event]) -> float:
    """Keep what tells a run's start and end; the time of the last event, 0 if there is none."""
    about.extend(e for e in events if isinstance(e, RunStarted | Stop | RunFinished | Failed))
    return events[-1].time if events else 0.0


def _event(line: bytes) -> Event | None:
    try:
        return decode(line)
    except NOT_AN_EVENT:
        return None
