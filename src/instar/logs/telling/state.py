"""Whether a run goes on, has ended, and how, from its record, its lock and its logs."""

from __future__ import annotations

import fcntl
import math
import os
import platform
import re
import shlex
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from instar.checkpoint.manifest import MANIFEST
from instar.record.events import Event, Failed, RunFinished, RunStarted, Stop
from instar.record.rundir import RunDir, holder

State = Literal["running", "finished", "stopped", "crashed"]
STATES: tuple[State, ...] = ("running", "finished", "stopped", "crashed")

QUIET_S = 60.0
"""After so long without a word a run counts as ended, where its lock cannot be asked."""

WITHOUT_A_WORD = "ended without a word: killed, or the machine went down"

_LOG_TAIL_BYTES = 1 << 16
_ERROR = re.compile(r"\[RANK \d+\] (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:ERROR|CRITICAL): (.+)")
_FATAL = re.compile(r"Fatal Python error: .+")
_SECONDARY = re.compile(r"\b(?:PeerLost|PeerError|RankMissing)\b")


@dataclass(frozen=True)
class Standing:
    """How a run stands."""

    state: State
    reason: str
    """why it ended; empty while it runs"""
    resumable: bool
    """whether `checkpoints/latest` names a checkpoint that is whole, as far as a look tells"""
    go_on: str
    """the command that goes on with a run that was stopped or has crashed; empty: nothing would"""
    process: int | None
    """that trains in the folder on this machine; 0: one that cannot be told"""


def stand(run: RunDir, events: Sequence[Event], seen: float, now: float | None = None) -> Standing:
    """How `run` stands whose last segment has these starts and ends among its `events`.

    An end is the last that a run says, after its last save and its final test: it holds as soon as
    it is written, also while the process that wrote it still puts things away. A process that has
    taken the folder since goes on with the run.

    `seen`: when the last line was written, and `now`, Unix seconds.
    """
    process = holder(run)
    started = next((e for e in reversed(events) if isinstance(e, RunStarted)), None)
    ends = [
        event
        for event in events
        if isinstance(event, Stop | RunFinished | Failed)
        and (started is None or event.segment >= started.segment)
    ]
    resumable = _whole_latest(run)
    state, reason = _told(ends)
    held = process is not None and not (ends and _taken(run) < ends[-1].time)
    if held or (
        not ends
        and not _can_ask(run, started)
        and abs((time.time() if now is None else now) - seen) < QUIET_S
    ):
        return Standing("running", "", resumable, "", process)
    if state == "crashed" and not reason:
        reason = last_error(run, started.time if started else 0.0) or WITHOUT_A_WORD
    to_go_on = resumable and state in ("stopped", "crashed")
    return Standing(state, reason, resumable, _resume(run) if to_go_on else "", None)


def last_error(run: RunDir, since: float = 0.0) -> str:
    """The error that the ranks' logs end with, the first rank's to tell one; empty: there is none.

    What another rank's end made a rank say counts only if no rank says anything else. `since`:
    Unix seconds; what was said before is passed over.
    """
    found = [
        error
        for path in sorted(run.logs.glob("rank_*.log"))
        if (error := _error_of(path)) is not None and error[0] >= since - 1
    ]
    found.sort(key=lambda error: (bool(_SECONDARY.search(error[1])), error[0]))
    return found[0][1] if found else ""


def _told(ends: Sequence[Event]) -> tuple[State, str]:
    """What the record itself says of the end."""
    last = ends[-1] if ends else None
    if isinstance(last, Failed):
        at = "" if last.step is None else f" at step {last.step:,}"
        who = "" if last.message.startswith("rank ") else f"rank {last.rank} failed{at}: "
        return "crashed", who + last.message
    stop = next((end for end in reversed(ends) if isinstance(end, Stop)), None)
    if stop is not None:
        return ("stopped" if stop.resumable else "finished"), stop.reason
    return ("finished", "") if last is not None else ("crashed", "")


def _taken(run: RunDir) -> float:
    """When its holder took the lock, Unix seconds."""
    try:
        return run.lock.stat().st_mtime
    except OSError:
        return math.inf


def _can_ask(run: RunDir, started: RunStarted | None) -> bool:
    """Whether a lock that nobody holds means that nobody trains there."""
    if started is not None and started.machine.get("host", platform.node()) != platform.node():
        return False
    try:
        descriptor = os.open(run.lock, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)


def _whole_latest(run: RunDir) -> bool:
    try:
        name = (run.checkpoints / "latest").read_text(encoding="utf-8", errors="replace").strip()
        return bool(name) and (run.checkpoints / name / MANIFEST).is_file()
    except (OSError, ValueError):
        return False


def _resume(run: RunDir) -> str:
    return f"instar resume {shlex.quote(str(run.path))}"


def _error_of(path: Path) -> tuple[float, str] | None:
    """When the last error in a rank's log was told, and what it says."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
        written = path.stat().st_mtime
    except OSError:
        return None
    for line in reversed(lines):
        if match := _ERROR.match(line):
            with suppress(ValueError, OverflowError):  # a time that is none
                written = datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S").timestamp()
            return written, match[2].strip()
        if match := _FATAL.match(line):
            return written, match[0]
    return None
