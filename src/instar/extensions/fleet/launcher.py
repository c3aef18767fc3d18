"""The launcher of a fleet: starts instances as resources become free, with the pauses of `stagger`, until all
have ended."""

from __future__ import annotations

import asyncio
import fcntl
import heapq
import math
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from instar.config.errors import InstarError, printable_text
from instar.distributed.failure import Interrupted
from instar.extensions.fleet.engines.nodes import Nodes
from instar.extensions.fleet.engines.spawner import Spawner
from instar.extensions.fleet.instance import FleetContext, InstanceFailed, InstanceRunner
from instar.extensions.fleet.placement import Gpu, Taken, acquire_lease, holder_text
from instar.extensions.fleet.plan import FleetPlan, Instance, Machine
from instar.extensions.fleet.state import (
    CONTROL,
    DONE,
    ENDED,
    STATE_FILE,
    Ended,
    FleetStatus,
    InstanceChanged,
    Phase,
    Started,
    StateLog,
    boot_id,
    now,
    part_name,
    process_log_path,
    read_result,
    result_path,
)
from instar.extensions.fleet.trials import Trials
from instar.processes.cores import usable_cores
from instar.record.lock import open_lock, try_flock

LAST_LINES = 15
_TAIL_BYTES = 1 << 14
_POLL_S = 0.5
_TURN_POLL_S = 0.2
_RETRY_S = 1.0
_FREED_S = 3.0
"""in which a GPU's driver may still list a process that has ended"""
_SIGNALLED_S = 0.2
"""how long after a failure a stop signal explains it: SLURM may signal all processes of a host"""
_LOOK_S = 0.2
"""between looks at the evaluations of trials"""
_SAVE_S = 120.0
"""in which a pruned run must have saved and ended"""
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def this_machine(gpus: Sequence[Gpu]) -> Machine:
    """Return what this machine has to share."""
    return Machine(len(gpus), usable_cores(), psutil.virtual_memory().total)


@dataclass
class Launcher:
    """Runs the instances of a plan.

    The first stop signal stops jobs, then services, with their grace; a second SIGINT kills all.
    """

    plan: FleetPlan
    folder: Path
    trees: int
    """see `FolderLock`"""
    gpus: Sequence[Gpu]
    configs: Mapping[str, str]
    config_keys: tuple[str, ...]
    say: Callable[[str], None]
    wait_for_gpus: bool = False
    """wait for GPUs that other launchers hold, instead of failing"""
    part: int | None = None
    """the only instance that it runs, on a host of an engine; the fleet has one more launcher"""
    nodes: Nodes | None = None
    """the other hosts of this instance"""
    trials: Trials | None = None
    """of a search"""
    requested: str = ""
    """the stop signal"""
    _waits: bool = False
    _freed_at: float = -math.inf
    _waiting: list[Instance] = field(default_factory=list)
    """the next is the last"""
    _running: dict[int, tuple[asyncio.Task[None], InstanceRunner]] = field(default_factory=dict)

    def run(self, todo: Sequence[Instance], before: FleetStatus) -> int:
        """Run these instances and return the exit code: 0 if all have succeeded or were pruned, 4 if
        one failed, 75 if they were stopped.

        Args:
            before: the state that earlier launchers left.
        """
        _raise_file_limit()
        self._log = StateLog(self.folder, self.part)
        if self.trials is not None:
            self.trials.log = self._log
        self._spawner = Spawner()
        self._before = before
        self._outcomes: dict[int, Phase] = {}
        try:
            if self.part is None:
                self._log.write(started_now(todo), durable=True)
            asyncio.run(self._run(todo))
            code = self._code(todo)
            if self.part is None:
                self._log.write(Ended(now(), code), durable=True)
            return code
        finally:
            self._spawner.close()
            self._log.close()
            if self.trials is not None:
                self.trials.close()

    def _code(self, todo: Sequence[Instance]) -> int:
        if all(self._outcomes.get(instance.index) in DONE for instance in todo):
            return 0
        if self.requested:
            return Interrupted.exit_code
        return InstarError.exit_code

    async def _run(self, todo: Sequence[Instance]) -> None:
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            # of these only SIGHUP stays ignored (nohup): `fleet down` sends SIGINT, which `&` in a script ignores
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal, number)
        self._stopping = asyncio.Event()
        self._turns = {name: asyncio.Lock() for name in ("services", "jobs")}
        self._context = self._fleet_context()
        control = [asyncio.create_task(self._obey())]
        if self.trials is not None:
            control.append(asyncio.create_task(self._prune(self.trials)))
        places = list(range(self.plan.parallel))
        self._waiting = list(reversed(todo))
        try:
            while self._waiting or self._running:
                self._begin_waiting(places)
                if self._stopping.is_set() and not self._running:
                    break
                await self._wait_for_a_change(_RETRY_S if self._waiting and places else None)
                for task in control:
                    if task.done():
                        task.result()  # raises
                if self._stopping.is_set():
                    await self._cancel_all()
        finally:
            for task in control:
                task.cancel()
        for instance in self._waiting:
            self._conclude(instance, "stopped", "not started")

    def _fleet_context(self) -> FleetContext:
        processes = self.plan.parallel * max(1, len(self.plan.spec.processes))
        return FleetContext(
            self.plan,
            self.folder,
            self._spawner,
            self.trees,
            self._log,
            max(1, usable_cores() // processes),
            self.configs,
            self.config_keys,
            self._pause,
            self.part,
            self.nodes,
        )

    def _begin_waiting(self, places: list[int]) -> None:
        """Start instances that wait while there is room for them."""
        while self._waiting and places and not self._stopping.is_set():
            if not self._begin(self._waiting[-1], heapq.heappop(places), places):
                break
            self._waiting.pop()

    async def _wait_for_a_change(self, timeout_s: float | None) -> None:
        """Wait until an instance has ended or all are to stop."""
        tasks = [task for task, _ in self._running.values()]
        stop = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait([*tasks, stop], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()

    async def _cancel_all(self) -> None:
        """Stop all instances, each once, and wait until they have ended."""
        tasks = [task for task, _ in self._running.values()]
        for task in tasks:
            if not task.cancelling():
                task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _begin(self, instance: Instance, place: int, places: list[int]) -> bool:
        """Start an instance; False if the GPUs it needs are held or used elsewhere and are waited for."""
        if self.trials is not None and self.trials.is_given_up(instance.index):
            heapq.heappush(places, place)
            self._conclude(instance, "pruned", "")  # the launcher that decided it was killed
            return True
        holder = holder_text(self.plan.spec.name, instance.run_name)
        try:
            lease = acquire_lease(self.plan.slot(place), self.gpus, holder, self.say)
        except Taken as error:
            heapq.heappush(places, place)
            is_freeing = self._running or time.monotonic() < self._freed_at + _FREED_S
            if self.wait_for_gpus or is_freeing:  # by instances of this fleet
                if not self._waits:
                    self._waits = True
                    self.say(f"waiting: {error}")
                return False
            self._conclude(instance, "failed", str(error))
            return True
        self._waits = False
        if self.trials is not None:
            instance = self.trials.begin(instance)
        was = self._before.instances.get(instance.index)
        attempts = {name: process.attempt for name, process in was.processes.items()} if was else {}
        completed = completed_jobs(self.folder, instance, self.plan, attempts)
        runner = InstanceRunner(self._context, instance, lease, holder, attempts, completed)
        self._write(instance, "starting")

        async def run() -> None:
            phase: Phase = "failed"
            reason = process = ""
            try:
                await runner.run()
                phase = "succeeded"
            except asyncio.CancelledError:
                phase = "stopped"
            except InstanceFailed as error:
                reason, process = str(error), error.process
                if self.part is not None:
                    with suppress(asyncio.CancelledError):
                        await asyncio.sleep(_SIGNALLED_S)
                    phase = "stopped" if self.requested else phase
            except Exception as error:  # the others go on
                reason = f"{type(error).__name__}: {error}"
            finally:
                if runner.given_up and phase != "succeeded":
                    phase, reason, process = "pruned", "", ""
                lease.close()
                self._freed_at = time.monotonic()
                del self._running[instance.index]
                heapq.heappush(places, place)
                self._conclude(instance, phase, reason, process)

        self._running[instance.index] = asyncio.create_task(run()), runner
        self._write(instance, "running")
        return True

    async def _pause(self, role: str) -> None:
        if gap_s := getattr(self.plan.spec.stagger, role):
            async with self._turns[role]:  # in order
                await wait_for_turn(self.folder, role, gap_s)

    def _conclude(self, instance: Instance, phase: Phase, reason: str, process: str = "") -> None:
        if self.trials is not None:
            phase, reason = self.trials.end(instance, phase, reason)
        self._outcomes[instance.index] = phase
        if phase == "failed" and is_full(self.folder):
            reason += f"; the disk of {self.folder} is full"
        self._write(instance, phase, reason, process)
        if phase == "pruned" and self.trials is not None:
            # only now: a run that is given up at its last evaluation may have succeeded
            self.say(f"{instance.run_name} is pruned: {self.trials.last_value(instance)}")
        if phase == "failed":
            for line in failure_text(self.folder, instance, reason, process):
                self.say(line)
            n_failed = sum(phase == "failed" for phase in self._outcomes.values())
            if (why := too_many_failed(self.plan, n_failed)) and not self._stopping.is_set():
                self.say(why)
                self._stopping.set()

    def _write(self, instance: Instance, phase: Phase, reason: str = "", process: str = "") -> None:
        host = "" if self.part is None else socket.gethostname()
        event = InstanceChanged(now(), instance.index, phase, reason, process, host)
        self._log.write(event, durable=phase in ENDED)

    def _on_signal(self, number: signal.Signals) -> None:
        if not self.requested:
            self.requested = number.name
            repeat_note = "; press again to kill everything" if number == signal.SIGINT else ""
            self.say(f"{number.name}: stopping jobs, then services{repeat_note}")
            self._stopping.set()
        elif number == signal.SIGINT:
            self.say("killing everything")
            for _, runner in self._running.values():
                runner.kill()

    async def _prune(self, trials: Trials) -> None:
        """Stop runs that the pruner gives up: they save, and end as pruned."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for task, runner in list(self._running.values()):
                if not runner.given_up and trials.look(runner.instance):
                    runner.given_up = True
                    is_saving = runner.running and trials.ask_to_stop(runner.instance)
                    asyncio.get_running_loop().call_later(_SAVE_S if is_saving else 0, task.cancel)

    async def _obey(self) -> None:
        """Carry out requests to stop an instance, but those of before the start."""
        self._requests()
        last_refusal = ""
        while True:
            await asyncio.sleep(_POLL_S)
            if self._log.refused != last_refusal:
                last_refusal = self._log.refused
                refusal = f"cannot be written: {last_refusal}; its lines are held in memory"
                file = self.folder / part_name(STATE_FILE, self.part)
                self.say(f"{file} {refusal if last_refusal else 'is written again'}")
            for index in self._requests():
                self._stop_instance(index)

    def _stop_instance(self, index: int) -> None:
        waiting = [instance for instance in self._waiting if instance.index == index]
        if index in self._running:
            task, runner = self._running[index]
            self.say(f"stopping {runner.instance.run_name}, as requested")
            task.cancel()
        elif waiting:
            self.say(f"{waiting[0].run_name} is not started, as requested")
            self._waiting.remove(waiting[0])
            self._conclude(waiting[0], "stopped", "not started")
        else:
            self.say(f"instance {index} cannot be stopped: it neither runs nor waits")

    def _requests(self) -> set[int]:
        """Take the requests to stop an instance: files INDEX.stop in the folder `control`."""
        indices = set()
        with suppress(OSError):
            for path in (self.folder / CONTROL).glob("*.stop"):
                if path.stem.isdecimal() and self.part in (None, int(path.stem)):
                    path.unlink()
                    indices.add(int(path.stem))
        return indices


def started_now(todo: Sequence[Instance]) -> Started:
    """Return the event that this process begins to run instances."""
    indices = tuple(instance.index for instance in todo)
    return Started(now(), os.getpid(), socket.gethostname(), boot_id(), indices)


def too_many_failed(plan: FleetPlan, n_failed: int) -> str:
    """Return why the others are stopped after this number of failures; "" if they go on."""
    policy, count = plan.spec.failure.policy, len(plan.instances)
    limit = policy * count if isinstance(policy, float) else {"continue": count}.get(policy, 0)
    text = f"{n_failed} failed: stopping the others (failure.policy: {policy})"
    return text if n_failed > limit else ""


def failure_text(folder: Path, instance: Instance, reason: str, process: str) -> Iterator[str]:
    """Yield why an instance failed, and the last lines of the process at fault."""
    yield f"{instance.run_name} failed: {reason}"
    if process:
        path = process_log_path(folder, instance.run_name, process)
        with suppress(OSError), path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()[-LAST_LINES:]
            yield f"  last lines of {path}:"
            yield from (f"    {printable_text(line)}" for line in lines)


def completed_jobs(
    folder: Path, instance: Instance, plan: FleetPlan, attempts: Mapping[str, int]
) -> frozenset[str]:
    """Return the jobs that have succeeded in an earlier attempt, also if their launcher was gone."""
    names = set()
    for name in plan.spec.jobs:
        for attempt in range(1, attempts.get(name, 0) + 1):
            end = read_result(result_path(folder, instance.run_name, name, attempt))
            if end is not None and end.status == 0 and not end.was_stopped:
                names.add(name)
    return frozenset(names)


def is_full(folder: Path) -> bool:
    """Return whether a folder's disk has no room for another page."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < resource.getpagesize()


def _raise_file_limit() -> None:
    """Allow as many open files as the system permits: each process needs a socket."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def wait_for_turn(folder: Path, role: str, gap_s: float) -> None:
    """Wait until the last start of this role in the fleet is `gap_s` seconds ago; this is the last then.

    The file `ROLE.started` in the fleet's folder has its time. Its lock is held while a host waits, so
    that launchers on other hosts take their turns after it.

    Raises:
        OSError: the file cannot be opened or locked.
    """
    descriptor = open_lock(folder / f"{role}.started")
    try:
        while not try_flock(descriptor, fcntl.LOCK_EX):
            await asyncio.sleep(min(gap_s, _TURN_POLL_S))
        await asyncio.sleep(stagger_pause_s(os.pread(descriptor, 64, 0), gap_s, now()))
        with suppress(OSError):  # on a full disk the next start does not wait
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, repr(now()).encode(), 0)
    finally:
        os.close(descriptor)


def stagger_pause_s(last_start: bytes, gap_s: float, now_s: float) -> float:
    """Return how long to wait after a start at the time written in a file; 0 if there is none.

    No longer than `gap_s`, whatever the file says: clocks are set, and files are damaged.
    """
    with suppress(ValueError):
        return min(max(0.0, float(last_start) + gap_s - now_s), gap_s)
    return 0.0
