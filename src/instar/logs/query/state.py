"""Determines the state of a run from its record, its lock and its logs."""

from __future__ import annotations

import math
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
from instar.config.files import open_regular
from instar.processes.identity import running_process
from instar.record.events import Branched, Event, Failed, RunFinished, RunStarted, Stop
from instar.record.lock import lock_owner, lock_readable
from instar.record.rundir import RunDir

State = Literal["running", "finished", "stopped", "crashed"]
STATES: tuple[State, ...] = ("running", "finished", "stopped", "crashed")

QUIET_S = 60.0
"""seconds without a new line after which a run counts as ended, if its lock cannot be read"""

NO_REASON = "ended without a message: killed, or the machine went down"

_LOG_TAIL_BYTES = 1 << 16
_ERROR = re.compile(
    r"\[RANK \d+\] (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)([+-]\d{4})? (?:ERROR|CRITICAL): (.+)"
)
_FATAL = re.compile(r"Fatal Python error: .+")
_SECONDARY = re.compile(r"\b(?:PeerLost|PeerError|RankMissing)\b")


@dataclass(frozen=True)
class RunStatus:
    """The state of a run."""

    state: State
    reason: str
    """why it ended; empty while it runs"""
    resumable: bool
    """whether `checkpoints/latest` names a checkpoint with a manifest; its files are not verified"""
    go_on: str
    """command that resumes a stopped or crashed run, or begins it again if nothing was saved; empty:
    neither is possible"""
    process: int | None
    """id of the process that trains in the folder on this machine; 0: unknown"""


def run_status(
    run: RunDir, events: Sequence[Event], last_seen: float, now: float | None = None
) -> RunStatus:
    """Return the state of `run`.

    The end event is the last line that a run writes, after its last save and its final test. It
    counts as soon as it is written, even if the process has not exited yet. A process that locked the
    folder after that is a resume.

    Args:
        events: contain the start and end events of the last segment.
        last_seen: when the last line was written, in Unix seconds.
        now: Unix seconds.
    """
    process = lock_owner(run.lock)
    last_start = next((e for e in reversed(events) if isinstance(e, RunStarted)), None)
    ends = [
        event
        for event in events
        if isinstance(event, Stop | RunFinished | Failed)
        and (last_start is None or event.segment >= last_start.segment)
    ]
    latest = run.latest_checkpoint()
    resumable = latest is not None and (latest / MANIFEST).is_file()
    if process is None and last_start is None:
        if any(isinstance(event, Branched) for event in events):
            reason = "a branch that has not begun"
            return RunStatus("stopped", reason, resumable, _resume(run), None)
        if run.awaits_start():
            reason = "nothing trained in it yet"
            return RunStatus("stopped", reason, resumable, _resume(run), None)
    state, reason = _recorded_state(ends)
    is_quiet = abs((time.time() if now is None else now) - last_seen) >= QUIET_S
    if process is None and not ends and not _lock_is_reliable(run, last_start):
        # the lock may belong to another user, whose processes may be hidden too
        process = running_process(last_start.machine) if last_start is not None else None
        if process is None and not is_quiet:
            return RunStatus("running", "", resumable, "", None)
    if process is not None and not (ends and _locked_since(run) < ends[-1].time):
        return RunStatus("running", "", resumable, "", process)
    if state == "crashed" and not reason:
        reason = last_error(run, last_start.time if last_start else 0.0) or NO_REASON
    # a run of which nothing was saved begins again in its folder
    can_begin = resumable or (run.config.exists() and not any(run.checkpoints.glob("step-*")))
    can_resume = can_begin and state in ("stopped", "crashed")
    return RunStatus(state, reason, resumable, _resume(run) if can_resume else "", None)


def last_error(run: RunDir, since: float = 0.0) -> str:
    """Return the error at the end of the ranks' logs, of the first rank to fail; else "".

    Errors caused by another rank's failure count only if there is no other. `since`: Unix seconds;
    earlier errors are ignored.
    """
    errors = [
        error
        for path in sorted(run.logs.glob("rank_*.log"))
        if (error := _error_of(path)) is not None and error[0] >= since - 1
    ]
    errors.sort(key=lambda error: (bool(_SECONDARY.search(error[1])), error[0]))
    return errors[0][1] if errors else ""


def _recorded_state(ends: Sequence[Event]) -> tuple[State, str]:
    """Return the state and the reason according to the record."""
    last = ends[-1] if ends else None
    if isinstance(last, Failed):
        at = "" if last.step is None else f" at step {last.step:,}"
        prefix = "" if last.message.startswith("rank ") else f"rank {last.rank} failed{at}: "
        return "crashed", prefix + last.message
    stop = next((end for end in reversed(ends) if isinstance(end, Stop)), None)
    if stop is not None:
        return ("stopped" if stop.resumable else "finished"), stop.reason
    return ("finished", "") if last is not None else ("crashed", "")


def _locked_since(run: RunDir) -> float:
    """Return when the lock was taken, in Unix seconds."""
    try:
        return run.lock.stat().st_mtime
    except OSError:
        return math.inf


def _lock_is_reliable(run: RunDir, last_start: RunStarted | None) -> bool:
    """Return whether a free lock means that no process trains in the folder."""
    if (
        last_start is not None
        and last_start.machine.get("host", platform.node()) != platform.node()
    ):
        return False
    return lock_readable(run.lock)


def _resume(run: RunDir) -> str:
    return f"instar resume {shlex.quote(str(run.path))}"


def _error_of(path: Path) -> tuple[float, str] | None:
    """Time and message of the last error in a rank's log."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, path.stat().st_size - _LOG_TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
        written_at = path.stat().st_mtime
    except OSError:
        return None
    for line in reversed(lines):
        if match := _ERROR.match(line):
            with suppress(ValueError, OverflowError):  # not a valid time
                form = "%Y-%m-%d %H:%M:%S" + ("%z" if match[2] else "")
                written_at = datetime.strptime(match[1] + (match[2] or ""), form).timestamp()
            return written_at, match[3].strip()
        if match := _FATAL.match(line):
            return written_at, match[0]
    return None
