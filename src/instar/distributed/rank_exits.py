"""How the ranks of a launch ended: whose failure caused those of the others, and what is said of it."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from instar.config.errors import ConfigError
from instar.distributed.failure import STOPPED, Failure, Interrupted, RunFailed, StoppedUnsaved
from instar.distributed.signals import StopSignal
from instar.processes.child import exit_text

LAST_LINES = 15


@dataclass(frozen=True)
class RankExit:
    """How one rank ended; `status` as in `Child`."""

    rank: int
    status: int
    is_killed: bool
    """whether the supervisor killed it"""
    failure: Failure | None
    output: tuple[Path, ...]
    """files with its last lines of output"""
    log: Path | None
    """its log in the run's folder, if it was opened"""


def conclude_launch(
    exits: Sequence[RankExit], stop: StopSignal, *, resumable: bool
) -> tuple[int, str]:
    """Return the exit code of the launch, and the error text."""
    late = [str(end.rank) for end in exits if end.is_killed and end.failure is None]
    cause = _first_failure(exits)
    if stop.requested and (cause is None or cause.failure is None or cause.failure.secondary):
        text = f"killed, because it did not stop in time: rank {', '.join(late)}"
        has_checkpoint = resumable or any(_has_checkpoint(end.log) for end in exits)
        exit_code = Interrupted.exit_code if has_checkpoint else StoppedUnsaved.exit_code
        if any(end.status in STOPPED for end in exits) and not late:
            exit_code = min(end.status for end in exits if end.status in STOPPED)
        code = exit_code if any(end.status for end in exits) else 0
        return code, text if late and not stop.insisted else ""
    if cause is None:
        return min((end.status for end in exits if end.status in STOPPED), default=0), ""
    code = _code(cause)
    if code == ConfigError.exit_code and any(e.rank == 0 and e.status == code for e in exits):
        # Rank 0 has printed it.
        return code, ""
    return code, describe_exits(exits)


def _has_checkpoint(log: Path | None) -> bool:
    """Return whether the run that this log belongs to has a checkpoint."""
    return log is not None and any((log.parents[1] / "checkpoints").glob("step-*"))


def _first_failure(exits: Sequence[RankExit]) -> RankExit | None:
    """Return the rank whose failure caused the others'; None if none failed."""
    bad = [
        end
        for end in exits
        if end.failure or (end.status not in (0, *STOPPED) and not end.is_killed)
    ]
    return min(bad, key=_suspicion, default=None)


def _suspicion(end: RankExit) -> tuple[int, float]:
    # A killed rank leaves no record, and the peers that fail because of it leave secondary ones.
    # SIGABRT is how NCCL's watchdog ends a process that has lost its peers.
    if end.failure is None:
        was_killed = end.status < 0 and end.status != -signal.SIGABRT
        return (0 if was_killed else 2, 0.0)
    return (3 if end.failure.secondary else 1, end.failure.time)


def _code(end: RankExit) -> int:
    if end.failure is not None:
        return end.failure.exit_code
    known_codes = (ConfigError.exit_code, 3, RunFailed.exit_code)
    return end.status if end.status in known_codes else RunFailed.exit_code


def describe_exits(exits: Sequence[RankExit]) -> str:
    end = _first_failure(exits)
    if end is None:
        return "the ranks ended without an error message"
    if end.failure is not None:
        text = end.failure.sentence()
    else:
        steps = [peer.failure.step for peer in exits if peer.failure and peer.failure.step]
        around = f" around step {max(steps)}" if steps and end.status < 0 else ""
        text = f"rank {end.rank} {exit_text(end.status)}{around}"
        if end.status == -signal.SIGKILL:
            text += " (the kernel does so when memory runs out)"
    at_fault = [other for other in exits if end.failure and other.rank in end.failure.ranks]
    return "\n".join([text, *_last_lines((at_fault or [end])[0].output)])


def _last_lines(files: Sequence[Path]) -> Iterator[str]:
    for file in files:
        with suppress(OSError):
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
            if lines:
                yield f"  last lines of {file}:"
                yield from (f"    {line}" for line in lines)
