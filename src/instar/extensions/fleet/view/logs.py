"""The logs of a fleet's processes: their last lines, and what is appended while the fleet runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from instar.config.errors import visible
from instar.extensions.fleet.lock import seen_launcher
from instar.logs.query.tail import LineFollower, last_lines

POLL_S = 0.2
SHARE = 0.01
"""largest share of the time spent on looking for new lines"""
LIST_S = 1.0
"""time between two looks for new logs"""
MAX_BYTES = 1 << 20
"""read of one log at a time"""
MAX_TAIL_BYTES = 1 << 22
"""in which the last lines of a log are looked for"""
MAX_LINE_BYTES = 1 << 14
"""shown of the end of a line"""


@dataclass(frozen=True)
class ProcessLog:
    """A log: the instance's name, the process's, and its file."""

    instance: str
    process: str
    path: Path


def process_logs(folder: Path) -> list[ProcessLog]:
    """Return the logs of a fleet, by instance and process."""
    paths = sorted((folder / "logs").glob("*/*.log"))
    return [ProcessLog(path.parent.name, path.stem, path) for path in paths]


def tail_logs(
    folder: Path, is_selected: Callable[[ProcessLog], bool], count: int, *, follow: bool
) -> Iterator[tuple[ProcessLog, str]]:
    """Yield the last `count` lines of each wanted log; with `follow`, also lines that are appended,
    until the fleet has ended.

    Raises:
        OSError: a log cannot be read.
    """
    logs: dict[ProcessLog, LineFollower] = {}
    for log in filter(is_selected, process_logs(folder)):
        lines, end = last_lines(log.path, count, MAX_TAIL_BYTES)
        logs[log] = LineFollower(log.path, end)
        yield from _visible_lines(log, lines)
    listed_at = time.monotonic()
    runs = True
    while runs:
        began = time.monotonic()
        runs = follow and seen_launcher(folder) is not None  # first: then all is written
        if began - listed_at >= LIST_S or not runs:
            listed_at = began
            for log in filter(is_selected, process_logs(folder) if follow else ()):
                logs.setdefault(log, LineFollower(log.path))
        is_announced = False
        for log, follower in logs.items():
            while lines := follower.lines(MAX_BYTES, partial=not runs):
                is_announced = True
                yield from _visible_lines(log, lines)
        taken_s = time.monotonic() - began
        if runs and not is_announced:
            time.sleep(max(POLL_S, taken_s / SHARE))


def _visible_lines(log: ProcessLog, lines: list[bytes]) -> Iterator[tuple[ProcessLog, str]]:
    for line in lines:
        # of a progress bar that returns to the beginning of its line, only its last state
        last = line.rstrip(b"\r").rpartition(b"\r")[2]
        yield log, visible(last[-MAX_LINE_BYTES:].decode("utf-8", "replace"))
