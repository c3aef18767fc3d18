"""Instances that hosts elsewhere run: submitting them to a scheduler, and following them to their end."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from instar.config.errors import InstarError
from instar.distributed.failure import Interrupted
from instar.distributed.signals import StopSignal
from instar.fleet.engines.work import Work
from instar.fleet.launcher import failure_text, started_now, too_many_failed
from instar.fleet.plan import Instance
from instar.fleet.state import (
    ENDED,
    STATE_FILE,
    Ended,
    InstanceChanged,
    InstanceStatus,
    Phase,
    StateLog,
    fold,
    now,
    part_name,
    read_file,
)

_POLL_S = 1.0


@dataclass(frozen=True)
class HostStatus:
    """What a scheduler knows of the host of an instance."""

    alive: bool
    """whether it waits for its turn, runs, or will run again"""
    text: str
    """in the scheduler's words, e.g. "NODE_FAIL" """
    lost: str = ""
    """why its last host was lost, if it runs again on another"""
    cancelled: bool = False
    """whether somebody has cancelled it"""


class Scheduler(Protocol):
    """Runs `host.command` of each instance on a host that has what the instance needs.

    Methods may take seconds, and raise an InstarError if the scheduler cannot be reached.
    """

    survives: bool
    """whether hosts go on without this process; a stop signal then only ends the following"""

    def submit(self, instances: Sequence[Instance]) -> None: ...

    def hosts(self) -> Mapping[int, HostStatus]:
        """Return what is known of the submitted instances."""

    def stop(self, indices: Collection[int], *, kill: bool) -> None:
        """Ask the hosts of instances to stop them with their grace, or end them at once."""


def submit(work: Work, scheduler: Scheduler, instances: Sequence[Instance]) -> None:
    """Submit the hosts of these instances."""
    with closing(StateLog(work.started.path)) as log:
        log.write(started_now(work.todo), durable=True)
        for each in instances:
            log.write(InstanceChanged(now(), each.index, "waiting"))
        try:
            scheduler.submit(instances)
        except BaseException:
            log.write(Ended(now(), InstarError.exit_code), durable=True)
            raise


def follow(work: Work, scheduler: Scheduler, say: Callable[[str], None]) -> int:
    """Submit what there is to do, wait until all of it has ended, and return the exit code."""
    with stop_signal() as stop:
        sizes = part_sizes(work)
        submit(work, scheduler, work.todo)
        return watch(work, scheduler, say, sizes, stop)


def stop_signal() -> StopSignal:
    """Return what `watch` needs to hear of stop signals."""
    return StopSignal(on_repeat=lambda: None)


def part_sizes(work: Work) -> dict[int, int]:
    """Return how much hosts have written of each instance that there is to do."""
    return {each.index: _size(_part(work, each.index)) for each in work.todo}


def watch(
    work: Work,
    scheduler: Scheduler,
    say: Callable[[str], None],
    sizes: Mapping[int, int],
    stop: StopSignal,
) -> int:
    """Wait until all that was submitted has ended, and return the exit code.

    The first stop signal asks all hosts to stop, a repeated one kills them; if they survive this
    process, it only ends the waiting.

    Args:
        sizes: see `part_sizes`, before the submission.
    """
    folder = work.started.path
    left = {each.index: each for each in work.todo}
    outcomes: dict[int, Phase] = {}
    lost: dict[int, str] = {}
    stopping = killing = cancelled = False
    with closing(StateLog(folder)) as log:
        while left:
            if stop.wait(_POLL_S):
                if scheduler.survives:
                    return Interrupted.exit_code
                if stopping:  # the signal stays set
                    time.sleep(_POLL_S)
            if (stop.requested and not stopping) or (stop.insisted and not killing):
                say(f"{stop.requested}: {'killing' if stop.insisted else 'stopping'} everything")
                stopping, killing = True, stop.insisted
                scheduler.stop(list(left), kill=killing)
            hosts = scheduler.hosts()
            for index, instance in list(left.items()):
                found = hosts.get(index, HostStatus(False, "not known to the scheduler"))
                if found.alive:
                    if found.lost != lost.get(index, ""):
                        lost[index] = found.lost
                        log.write(
                            InstanceChanged(now(), index, "waiting", found.lost), durable=True
                        )
                        say(f"{instance.run_name}: {found.lost}")
                    continue
                status = _status(_part(work, index), sizes[index], index)
                phase, reason = status.phase, status.reason
                cancelled |= found.cancelled
                if phase not in ENDED:
                    phase = "stopped" if stopping or found.cancelled else "failed"
                    reason = _lost(found, status, folder)
                    log.write(InstanceChanged(now(), index, phase, reason), durable=True)
                del left[index]
                outcomes[index] = phase
                if phase == "failed":
                    for line in failure_text(folder, instance, reason, status.process):
                        say(line)
            failed = sum(each == "failed" for each in outcomes.values())
            if left and not stopping and (why := too_many_failed(work.plan, failed)):
                say(why)
                stopping = True
                scheduler.stop(list(left), kill=False)
        succeeded = all(each == "succeeded" for each in outcomes.values())
        stopped = stop.requested or cancelled
        code = Interrupted.exit_code if stopped else InstarError.exit_code
        code = 0 if succeeded else code
        log.write(Ended(now(), code), durable=True)
        return code


def _status(path: Path, offset: int, index: int) -> InstanceStatus:
    """Return what a host has written of its instance since it was submitted."""
    with suppress(OSError):
        return fold(read_file(path, offset)).instances.get(index, InstanceStatus())
    return InstanceStatus()


def _lost(found: HostStatus, status: InstanceStatus, folder: Path) -> str:
    """Return why an instance has ended whose host did not say so."""
    if found.cancelled:
        return found.text
    if status.phase == "waiting":
        seen = f"its host wrote nothing to {folder}, which all hosts must see"
        return f"{seen} ({found.text})"
    return f"its host {status.host} ended before it ({found.text})"


def _part(work: Work, index: int) -> Path:
    return work.started.path / part_name(STATE_FILE, index)


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0
