"""One instance: its services are started and kept healthy while its jobs run."""

from __future__ import annotations

import asyncio
import os
import shlex
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from instar.distributed.placement import child_environment
from instar.extensions.fleet.engines.nodes import NodeCommand, Nodes, on_all, program_path
from instar.extensions.fleet.engines.spawner import Command, RunningProcess, Spawner
from instar.extensions.fleet.health import Checker, Unhealthy
from instar.extensions.fleet.placement import Lease
from instar.extensions.fleet.plan import (
    NODE_VARIABLES,
    FleetPlan,
    Instance,
    argv_of,
    expand,
    variables_of,
)
from instar.extensions.fleet.spec import MASTER, Job, Process, Service
from instar.extensions.fleet.state import (
    ProcessChanged,
    ProcessPhase,
    StateLog,
    now,
    process_log_path,
    result_path,
)
from instar.processes.child import exit_text

FLEET_VARIABLE = "INSTAR_FLEET"
"""environment variable of every process of a fleet: the folder of its state"""
INSTANCE_VARIABLE = "INSTAR_FLEET_INSTANCE"
PART_VARIABLE = "INSTAR_FLEET_PART"
"""the instance's number if a host of an engine runs it; empty if the fleet's launcher does"""
_FIRST_CHECK_S = 0.1
_LATE_NEWS_S = 1.0
"""how long after a job's failure the loss of its server may become known"""
_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT")


class InstanceFailed(Exception):  # noqa: N818
    """An instance cannot succeed; `process` is the one that failed."""

    def __init__(self, process: str, message: str) -> None:
        super().__init__(message)
        self.process = process


@dataclass(frozen=True)
class FleetContext:
    """What all instances of a fleet share."""

    plan: FleetPlan
    folder: Path
    spawner: Spawner
    trees: int
    """descriptor that every process tree inherits"""
    log: StateLog
    threads: int
    """OMP_NUM_THREADS of a process that reserves no cores"""
    configs: Mapping[str, str]
    """path of the run config of each job with `run`"""
    config_keys: tuple[str, ...]
    pause: Callable[[str], Awaitable[None]]
    """waits until a "services" or "jobs" process may start (`stagger`)"""
    part: int | None = None
    """see `Launcher`"""
    nodes: Nodes | None = None


@dataclass
class _ServiceState:
    has_started: bool = False
    healthy: bool = False
    loss: str = ""
    """why it is down, after it was healthy or has failed to become so"""
    has_failed: bool = False
    """whether it will not be restarted"""


@dataclass
class InstanceRunner:
    """Runs one instance once."""

    context: FleetContext
    instance: Instance
    lease: Lease
    holder: str
    attempts: dict[str, int]
    """of each process before this start"""
    completed_jobs: frozenset[str]
    """jobs that have succeeded before"""
    running: dict[str, RunningProcess] = field(default_factory=dict)
    given_up: bool = False
    """a job that ends is not retried"""

    def __post_init__(self) -> None:
        spec = self.context.plan.spec
        self._services = {name: _ServiceState() for name in spec.services}
        self._done = set(self.completed_jobs)
        self._change_event = asyncio.Event()

    async def run(self) -> None:
        """Run until all jobs have succeeded. On cancellation, stop jobs, then services.

        Raises:
            InstanceFailed: a job failed for good, or a service that jobs need.
        """
        spec = self.context.plan.spec
        services = [asyncio.create_task(self._serve(n, s)) for n, s in spec.services.items()]
        remaining = {
            name: job for name, job in spec.jobs.items() if name not in self.completed_jobs
        }
        jobs = [asyncio.create_task(self._work(name, job)) for name, job in remaining.items()]
        try:
            # a fleet without jobs serves until it is stopped
            tasks = jobs or ([] if spec.jobs else services)
            if tasks:
                ended_tasks, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
                for task in ended_tasks:
                    task.result()
        finally:
            for tasks in (jobs, services):
                with suppress(asyncio.CancelledError):  # it ends already
                    await _cancel_all(tasks)

    def kill(self) -> None:
        """Kill every process at once."""
        for process in self.running.values():
            process.kill()

    async def _serve(self, name: str, service: Service) -> None:
        state = self._services[name]
        try:
            await self._keep_up(name, service, state)
        except Exception as error:
            state.loss, state.has_failed = state.loss or str(error), True
            self._notify()
            raise

    async def _keep_up(self, name: str, service: Service, state: _ServiceState) -> None:
        restarts, pause_s = 0, service.restart.backoff
        while True:
            await self._dependencies(name, service)
            await self.context.pause("services")
            reason, has_failed = await self._watch(name, service, state)
            state.has_started = state.healthy = False
            state.loss = reason
            policy = service.restart.policy
            restarts_with_other = any(
                job.on_dependency_failure == "restart_pair" and name in job.depends_on
                for job in self.context.plan.spec.jobs.values()
            )
            is_restarted = policy == "always" or (
                (policy == "on-failure" or restarts_with_other) and has_failed
            )
            state.has_failed = not is_restarted or restarts >= service.restart.max
            self._notify()
            if state.has_failed:
                raise InstanceFailed(name, f"{name} {reason}")
            restarts += 1
            await asyncio.sleep(pause_s)
            pause_s *= 2

    async def _watch(self, name: str, service: Service, state: _ServiceState) -> tuple[str, bool]:
        """Run a service once; return why it has ended, and whether that is a failure."""
        process = self._start(name, service)
        health, checker = service.healthcheck, None
        state.has_started, state.loss = True, ""
        self._notify()
        try:
            if health is not None:
                numbers = {port: number for port, (number, _) in self.lease.ports[name].items()}
                port = numbers[health.port] if health.port else next(iter(numbers.values()), 0)
                checker = Checker(health, port, self._variables(name), self._env(name, service))
                if problem := await self._not_ready(process, checker, health.start_period):
                    if not process.exit_future.done():
                        self._write(name, "unhealthy", reason=problem)
                        await process.stop(service.stop.number, service.stop.grace)
                    return problem, True
            if not process.exit_future.done():
                state.healthy = True
                self._write(name, "healthy")
                self._notify()
                if health is None or checker is None:
                    await asyncio.wait([process.exit_future])
                elif problem := await self._unhealthy(process, checker, service):
                    state.healthy = False
                    state.loss = problem
                    self._write(name, "unhealthy", reason=problem)
                    self._notify()
                    return problem, True
            end = process.exit_future.result()
            return self._end_text(process), end.status != 0
        finally:
            if checker is not None:
                await checker.close()
            await self._stop(name, service, process)

    async def _not_ready(
        self, process: RunningProcess, checker: Checker, start_period_s: float
    ) -> str:
        """Wait until the service is ready; return why it is not, or ""."""
        deadline, pause_s = time.monotonic() + start_period_s, _FIRST_CHECK_S
        while True:
            left_s = deadline - time.monotonic()
            check = asyncio.ensure_future(checker.check(max(left_s, 0.1), probe=True))
            await _first(check, process.exit_future)
            if process.exit_future.done():
                await _cancel_all([check])
                return self._end_text(process) + " before it was ready"
            try:
                check.result()
                return ""
            except Unhealthy as error:
                if time.monotonic() >= deadline:
                    return f"was not ready after {start_period_s:g} s: {error}"
            await asyncio.wait([process.exit_future], timeout=min(pause_s, max(left_s, 0.0)))
            pause_s = min(pause_s * 1.5, 1.0)

    async def _unhealthy(self, process: RunningProcess, checker: Checker, service: Service) -> str:
        """Check a ready service until it is unhealthy; return how, or "" if it has exited."""
        health, failures = service.healthcheck, 0
        assert health is not None
        due = time.monotonic()
        while True:
            due += health.interval
            await asyncio.wait([process.exit_future], timeout=max(0.0, due - time.monotonic()))
            if process.exit_future.done():
                return ""
            due = max(due, time.monotonic())
            try:
                await checker.check(health.timeout, probe=False)
                failures = 0
            except Unhealthy as error:
                failures += 1
                if process.exit_future.done():
                    return ""
                if failures >= health.retries:
                    return f"is unhealthy: {failures} checks in a row failed: {error}"

    async def _work(self, name: str, job: Job) -> None:
        retries, pause_s = 0, job.retry.backoff
        while True:
            await self._dependencies(name, job)
            await self.context.pause("jobs")
            reason, lost_service = await self._attempt(name, job)
            if reason is None:
                self._done.add(name)
                self._notify()
                return
            if lost_service:
                if job.on_dependency_failure == "fail":
                    raise InstanceFailed(
                        self._lost_service(job), f"{name} was stopped: {lost_service}"
                    )
                continue
            if retries >= job.retry.max or self.given_up:
                raise InstanceFailed(name, f"{name} {reason}")
            retries += 1
            await asyncio.sleep(pause_s)
            pause_s *= 2

    async def _attempt(self, name: str, job: Job) -> tuple[str | None, str]:
        """Run a job once; return why it failed (None: it succeeded), and which service was lost."""
        process = self._start(name, job)
        try:
            while True:
                loss = asyncio.create_task(self._loss(job))
                await _first(process.exit_future, loss)
                if process.exit_future.done():
                    if process.exit_future.result().status == 0:
                        await _cancel_all([loss])
                        return None, ""
                    # it may have failed because of a server whose end is heard of a moment later
                    await asyncio.wait([loss], timeout=_LATE_NEWS_S if job.depends_on else 0)
                    what = loss.result() if loss.done() else ""
                    await _cancel_all([loss])
                    return self._end_text(process), what
                if job.on_dependency_failure != "wait":
                    return f"was stopped: {loss.result()}", loss.result()
                back = asyncio.create_task(
                    self._until(lambda: not self._loss_text(job) or self._lost_for_good(job))
                )
                await _first(process.exit_future, back)
                await _cancel_all([back])
                if self._lost_for_good(job) and not process.exit_future.done():
                    raise InstanceFailed(
                        self._lost_service(job), f"{name} was stopped: {self._loss_text(job)}"
                    )
        finally:
            await self._stop(name, job, process)

    async def _loss(self, job: Job) -> str:
        """Wait until a service that the job depends on is down; return which, and why."""
        await self._until(lambda: self._loss_text(job) != "")
        return self._loss_text(job)

    def _loss_text(self, process: Process) -> str:
        name = self._lost_service(process)
        return f"{name} {self._services[name].loss or 'is not ready'}" if name else ""

    def _lost_service(self, process: Process) -> str:
        """Return the first service it depends on that is not there; "" if all are."""
        needs = process.depends_on.items()
        services = [name for name, condition in needs if not self._is_met(name, condition)]
        return next((name for name in services if name in self._services), "")

    def _lost_for_good(self, process: Process) -> bool:
        return any(n in self._services and self._services[n].has_failed for n in process.depends_on)

    async def _dependencies(self, name: str, process: Process) -> None:
        """Wait until a process may start.

        Raises:
            InstanceFailed: a service it depends on has failed for good.
        """
        needs = process.depends_on.items()
        await self._until(
            lambda: all(self._is_met(*need) for need in needs) or self._lost_for_good(process)
        )
        if self._lost_for_good(process):
            raise InstanceFailed(
                self._lost_service(process), f"{name} cannot run: {self._loss_text(process)}"
            )

    def _is_met(self, name: str, condition: str) -> bool:
        if name not in self._services:
            return name in self._done
        state = self._services[name]
        return state.has_started if condition == "service_started" else state.healthy

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._change_event.wait()

    def _notify(self) -> None:
        change_event, self._change_event = self._change_event, asyncio.Event()
        change_event.set()

    def _start(self, name: str, process: Process) -> RunningProcess:
        self.attempts[name] = attempt = self.attempts.get(name, 0) + 1
        self.lease.renew_ports(name, self.holder)
        around, run = self.context, self.instance.run_name
        variables = self._variables(name)
        argv = argv_of(name, process, variables, around.configs.get(name, ""))
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        result = result_path(around.folder, run, name, attempt)
        result.parent.mkdir(parents=True, exist_ok=True)
        if process.resources.nodes > 1:
            argv = self._on_nodes(name, process, result.with_suffix(".nodes"))
        command = Command(
            tuple(argv),
            self._env(name, process),
            self._cwd(process, variables),
            process_log_path(around.folder, run, name),
            result,
            f"--- attempt {attempt}, {stamp}: {shlex.join(argv)}\n",
            process.stop.number,
            process.stop.grace,
            scratch="TMPDIR" not in process.env,
        )
        self._write(name, "starting")
        locks = [lock.fileno() for lock in self.lease.locks(name)]
        tree = around.spawner.start(command, [around.trees, *locks])
        running = RunningProcess(tree, lambda pid: self._write(name, "running", pid=pid))
        self.running[name] = running
        return running

    async def _stop(self, name: str, process: Process, running: RunningProcess) -> None:
        if not running.gone_future.done() and not running.exit_future.done():
            self._write(name, "stopping")
        stop = running.stop(process.stop.number, process.stop.grace)
        try:
            await _wait_for_all([asyncio.ensure_future(stop)])
        finally:
            end = running.exit_future.result()
            self.running.pop(name, None)
            self._write(
                name,
                "exited",
                status=end.status,
                cpu_s=end.cpu_s,
                peak_bytes=end.peak_bytes,
                reason=running.error,
            )

    def _on_nodes(self, name: str, process: Process, file: Path) -> list[str]:
        """Return the command that starts a job on each of its nodes."""
        around, count, commands = self.context, process.resources.nodes, []
        assert around.nodes is not None, "refused by the plan of the engine local"
        for rank in range(count):
            variables = self._variables(name, rank)
            argv = argv_of(name, process, variables, around.configs.get(name, ""))
            env, cwd = self._own_env(name, process, rank), str(self._cwd(process, variables))
            if rank:
                env.pop("CUDA_VISIBLE_DEVICES", None)
            commands.append(NodeCommand(argv, env, cwd, process.resources.gpus))
        return on_all(around.nodes, commands, file)

    def _variables(self, name: str, node_rank: int = 0) -> dict[str, Any]:
        variables: dict[str, Any] = {
            f"ports.{p}": n for p, (n, _) in self.lease.ports[name].items()
        }
        process = self.context.plan.spec.processes[name]
        nodes = process.resources.nodes
        if nodes > 1 and self.context.nodes is not None:
            values = (nodes, node_rank, self.context.nodes.address, variables[f"ports.{MASTER}"])
            variables |= zip(NODE_VARIABLES, values, strict=True)
        return {
            **variables_of(self.instance, self.context.config_keys),
            **self.lease.variables(),
            **variables,
            "gpus": self.lease.visible_gpus(name),
            "attempt": self.attempts.get(name, 1),
            # a process of another working directory finds it too
            **({"output_dir": self.instance.output_dir.absolute()} if process.cwd else {}),
        }

    def _cwd(self, process: Process, variables: Mapping[str, Any]) -> Path:
        return Path(expand(process.cwd, variables)) if process.cwd else Path.cwd()

    def _env(self, name: str, process: Process) -> dict[str, str]:
        threads = str(process.resources.cpus or self.context.threads)
        environment = child_environment(os.environ)
        env = {"OMP_NUM_THREADS": threads, **environment, "PATH": program_path(environment)}
        return env | self._own_env(name, process)

    def _own_env(self, name: str, process: Process, node_rank: int = 0) -> dict[str, str]:
        """Return what is added to the launcher's environment."""
        around, run = self.context, self.instance.run_name
        cache = str((around.folder / "cache" / run / name).absolute())
        env = {
            **dict.fromkeys(_CACHES, cache),
            "CUDA_VISIBLE_DEVICES": self.lease.visible_gpus(name),
            FLEET_VARIABLE: str(around.folder.absolute()),
            INSTANCE_VARIABLE: run,
            PART_VARIABLE: "" if around.part is None else str(around.part),
        }
        if not around.plan.uses_gpus:
            env.pop("CUDA_VISIBLE_DEVICES")
        variables = self._variables(name, node_rank)
        if process.resources.nodes > 1:
            env |= {key: str(variables[variable]) for variable, key in NODE_VARIABLES.items()}
        return env | {key: expand(text, variables) for key, text in process.env.items()}

    def _write(self, name: str, phase: ProcessPhase, **values: Any) -> None:
        if phase == "starting":
            values["gpus"] = tuple(gpu.index for gpu, _ in self.lease.gpus[name])
            values["ports"] = {port: n for port, (n, _) in self.lease.ports[name].items()}
        event = ProcessChanged(
            now(), self.instance.index, name, phase, self.attempts[name], **values
        )
        self.context.log.write(event, durable=phase == "exited")

    def _end_text(self, process: RunningProcess) -> str:
        return process.error or exit_text(process.exit_future.result().status)


async def _first(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of them is done."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


async def _cancel_all(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait until all have ended."""
    for task in tasks:
        task.cancel()
    await _wait_for_all(tasks)


async def _wait_for_all(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Wait until tasks have ended. A cancellation meanwhile interrupts none of them; it is raised at the end."""
    is_cancelled = False
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError:
            is_cancelled = True
    await asyncio.gather(*tasks, return_exceptions=True)
    if is_cancelled:
        raise asyncio.CancelledError
