"""Instances that hosts elsewhere run: submitting them to a scheduler, and following them to their end."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from instar.config.errors import InstarError
from instar.distributed.failure import Interrupted
from instar.distributed.signals import StopSignal
from instar.extensions.fleet.engines.work import Work
from instar.extensions.fleet.launcher import failure_text, started_now, too_many_failed
from instar.extensions.fleet.plan import Instance
from instar.extensions.fleet.state import (
    ENDED,
    STATE_FILE,
    Ended,
    InstanceChanged,
    InstanceStatus,
    Phase,
    StateLog,
    fold_events,
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
    loss: str = ""
    """why its last host was lost, if it runs again on another"""
    is_cancelled: bool = False
    """whether somebody has cancelled it"""


class Scheduler(Protocol):
    """Runs `host_command` of each instance on a host that has what the instance needs.

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
    with closing(StateLog(work.fleet_folder.path)) as log:
        log.write(started_now(work.todo), durable=True)
        for instance in instances:
            log.write(InstanceChanged(now(), instance.index, "waiting"))
        try:
            scheduler.submit(instances)
        except BaseException:
            log.write(Ended(now(), InstarError.exit_code), durable=True)
            raise


def follow_hosts(work: Work, scheduler: Scheduler, say: Callable[[str], None]) -> int:
    """Submit what there is to do, wait until all of it has ended, and return the exit code."""
    with stop_signal() as stop:
        sizes = part_sizes(work)
        submit(work, scheduler, work.todo)
        return wait_for_hosts(work, scheduler, say, sizes, stop)


def stop_signal() -> StopSignal:
    """Return what `wait_for_hosts` needs to hear of stop signals."""
    return StopSignal(on_repeat=lambda: None)


def part_sizes(work: Work) -> dict[int, int]:
    """Return how much hosts have written of each instance that there is to do."""
    return {instance.index: _size(_part(work, instance.index)) for instance in work.todo}


def wait_for_hosts(
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
    with closing(StateLog(work.fleet_folder.path)) as log:
        return _Waiting(work, scheduler, say, sizes, stop, log).exit_code()


@dataclass
class _Waiting:
    """The submitted instances, and how those have ended that have."""

    work: Work
    scheduler: Scheduler
    say: Callable[[str], None]
    sizes: Mapping[int, int]
    stop: StopSignal
    log: StateLog
    outcomes: dict[int, Phase] = field(default_factory=dict)
    losses: dict[int, str] = field(default_factory=dict)
    stopping: bool = False
    killing: bool = False
    is_cancelled: bool = False

    def exit_code(self) -> int:
        """Return the exit code when all instances have ended, or the waiting for them."""
        self.running = {instance.index: instance for instance in self.work.todo}
        while self.running:
            if self.stop.wait(_POLL_S):
                if self.scheduler.survives:
                    return Interrupted.exit_code
                if self.stopping:  # the signal stays set
                    time.sleep(_POLL_S)
            self._pass_on_signals()
            hosts = self.scheduler.hosts()
            for instance in list(self.running.values()):
                host = hosts.get(instance.index, HostStatus(False, "not known to the scheduler"))
                if host.alive:
                    self._note_loss(instance, host)
                else:
                    self._conclude(instance, host)
            self._stop_after_failures()
        is_success = all(phase == "succeeded" for phase in self.outcomes.values())
        is_stopped = self.stop.requested or self.is_cancelled
        code = Interrupted.exit_code if is_stopped else InstarError.exit_code
        code = 0 if is_success else code
        self.log.write(Ended(now(), code), durable=True)
        return code

    def _pass_on_signals(self) -> None:
        stop = self.stop
        if (stop.requested and not self.stopping) or (stop.insisted and not self.killing):
            self.say(f"{stop.requested}: {'killing' if stop.insisted else 'stopping'} everything")
            self.stopping, self.killing = True, stop.insisted
            self.scheduler.stop(list(self.running), kill=self.killing)

    def _note_loss(self, instance: Instance, host: HostStatus) -> None:
        """Record once that the host of an instance was lost, which runs again on another."""
        if host.loss != self.losses.get(instance.index, ""):
            self.losses[instance.index] = host.loss
            event = InstanceChanged(now(), instance.index, "waiting", host.loss)
            self.log.write(event, durable=True)
            self.say(f"{instance.run_name}: {host.loss}")

    def _conclude(self, instance: Instance, host: HostStatus) -> None:
        """Take how an instance has ended from its host's record, or from the scheduler if it says nothing."""
        index, folder = instance.index, self.work.fleet_folder.path
        status = _status(_part(self.work, index), self.sizes[index], index)
        phase, reason = status.phase, status.reason
        self.is_cancelled |= host.is_cancelled
        if phase not in ENDED:
            phase = "stopped" if self.stopping or host.is_cancelled else "failed"
            reason = _loss_text(host, status, folder)
            self.log.write(InstanceChanged(now(), index, phase, reason), durable=True)
        del self.running[index]
        self.outcomes[index] = phase
        if phase == "failed":
            for line in failure_text(folder, instance, reason, status.process):
                self.say(line)

    def _stop_after_failures(self) -> None:
        n_failed = sum(phase == "failed" for phase in self.outcomes.values())
        why = too_many_failed(self.work.plan, n_failed)
        if why and self.running and not self.stopping:
            self.say(why)
            self.stopping = True
            self.scheduler.stop(list(self.running), kill=False)


def _status(path: Path, offset: int, index: int) -> InstanceStatus:
    """Return what a host has written of its instance since it was submitted."""
    with suppress(OSError):
        return fold_events(read_file(path, offset)).instances.get(index, InstanceStatus())
    return InstanceStatus()


def _loss_text(host: HostStatus, status: InstanceStatus, folder: Path) -> str:
    """Return why an instance has ended whose host did not say so."""
    if host.is_cancelled:
        return host.text
    if status.phase == "waiting":
        silence = f"its host wrote nothing to {folder}, which all hosts must see"
        return f"{silence} ({host.text})"
    return f"its host {status.host} ended before it ({host.text})"


def _part(work: Work, index: int) -> Path:
    return work.fleet_folder.path / part_name(STATE_FILE, index)


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0
