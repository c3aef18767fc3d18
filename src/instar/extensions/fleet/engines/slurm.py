"""The engine `slurm`: a job array, one task per instance, in which the launcher of its node runs."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from instar.config.errors import ConfigError, InstarError
from instar.config.files import of_bounded_depth, read_regular
from instar.extensions.fleet.engines.remote import (
    HostStatus,
    part_sizes,
    stop_signal,
    submit,
    wait_for_hosts,
)
from instar.extensions.fleet.engines.work import Work, host_command, remaining_work
from instar.extensions.fleet.folder import FleetFolder, FolderBusy, FolderLock, launcher_pid
from instar.extensions.fleet.plan import FleetPlan, Instance
from instar.extensions.fleet.state import JOBS, SLURM

_POLL_S = 2.0
_ANSWER_S = 60.0
_WARNING = "SIGUSR1"
_ENDED = re.compile(
    "BOOT_FAIL|CANCELLED|COMPLETED|DEADLINE|FAILED|NODE_FAIL|OUT_OF_MEMORY|PREEMPTED|REVOKED|TIMEOUT"
)


class SlurmFailed(InstarError):  # noqa: N818
    """A command of SLURM failed."""


def run_on_slurm(work: Work, say: Callable[[str], None], *, detach: bool) -> int:
    """Submit what there is to do and is not in the queue; follow all of it, unless `detach`.

    Raises:
        SlurmFailed: SLURM refuses it, or cannot be reached.
    """
    name = work.fleet_folder.path.name
    arrays = SlurmArrays(work.fleet_folder.path, work.plan, work.fleet_folder.gpus)
    queued_indices = {index for index, host in arrays.hosts().items() if host.alive}
    fresh = [instance for instance in work.todo if instance.index not in queued_indices]
    with stop_signal() as stop:
        sizes = part_sizes(work)
        if fresh:
            submit(work, arrays, fresh)
            job = arrays.jobs()[fresh[0].index]
            say(f"fleet {name}: {len(fresh)} instances submitted as job {job}")
        code = 0 if detach else wait_for_hosts(work, arrays, say, sizes, stop)
    if any(host.alive for host in arrays.hosts().values()):
        say(f"its jobs go on; `instar fleet down {name}` cancels them")
    return code


def cancel(fleet_folder: FleetFolder, say: Callable[[str], None], *, kill: bool) -> None:
    """Cancel all tasks of a fleet, and wait until they have ended, unless another process does.

    Raises:
        ConfigError: SLURM has none.
    """
    arrays = SlurmArrays(fleet_folder.path)
    alive = [index for index, host in arrays.hosts().items() if host.alive]
    if not alive:
        raise ConfigError.of("SLURM has no task of this fleet", where=str(fleet_folder.path))
    work = remaining_work(fleet_folder, alive, -1)
    sizes = part_sizes(work)
    arrays.stop(alive, kill=kill)
    try:
        with closing(FolderLock(fleet_folder.path, 0.0)), stop_signal() as stop:
            wait_for_hosts(work, arrays, say, sizes, stop)
    except FolderBusy:  # that process does so
        while launcher_pid(fleet_folder.path) is not None:
            time.sleep(_POLL_S)


class SlurmArrays:
    """The job arrays of a fleet, found again in its folder."""

    survives = True

    def __init__(
        self, folder: Path, plan: FleetPlan | None = None, gpus: str | None = None
    ) -> None:
        """`plan` and `gpus`: of what is submitted, see `batch_script`."""
        self._folder, self._plan, self._gpus = folder / SLURM, plan, gpus
        self._hosts: Mapping[int, HostStatus] = {}
        self._due = 0.0

    def submit(self, instances: Sequence[Instance]) -> None:
        assert self._plan is not None
        indices = [instance.index for instance in instances]
        self._folder.mkdir(exist_ok=True)
        file = self._folder / "batch.sh"
        file.write_text(batch_script(self._plan, self._folder.parent, self._gpus, indices))
        job = _slurm("sbatch", "--parsable", str(file)).partition(";")[0].strip()
        with (self._folder / JOBS).open("a") as jobs:
            jobs.write(json.dumps({"job": job, "instances": indices, **self._place()}) + "\n")
        self._due = 0.0

    def jobs(self) -> dict[int, str]:
        """Return the id of the latest job array of each instance; those in a copy of a fleet's folder are of the
        original."""
        jobs: dict[int, str] = {}
        with suppress(OSError):
            place = self._place().items()
            for line in read_regular(self._folder / JOBS).splitlines():
                with suppress(ValueError, KeyError, TypeError):
                    array = json.loads(of_bounded_depth(line))
                    if not any(array.get(key) == value for key, value in place):
                        continue
                    jobs |= {int(i): str(int(array["job"])) for i in array["instances"]}
        return jobs

    def _place(self) -> dict[str, str | int]:
        """Return what tells this folder from a copy: if it was moved, its number stays."""
        return {"folder": str(self._folder.resolve()), "inode": self._folder.stat().st_ino}

    def hosts(self) -> Mapping[int, HostStatus]:
        """Return what SLURM knows of the tasks, at most a few seconds old."""
        if time.monotonic() < self._due:
            return self._hosts
        jobs = self.jobs()
        states: dict[str, tuple[str, str]] = {}
        if jobs:
            ids = ",".join(sorted(set(jobs.values())))
            try:
                queue_text = _slurm("squeue", "-h", "-r", "-t", "all", "-o", "%i|%T|%r", "-j", ids)
            except SlurmFailed as error:
                if "Invalid job id" not in str(error):  # which it has forgotten
                    if self._hosts:
                        return self._hosts  # the controller restarts
                    raise
                queue_text = ""
            for line in queue_text.splitlines():
                task, state, reason = line.split("|", 2)
                states[task] = state, reason
        self._hosts = {i: self._status(states, f"{job}_{i}") for i, job in jobs.items()}
        self._due = time.monotonic() + _POLL_S
        return self._hosts

    def _status(self, states: Mapping[str, tuple[str, str]], task: str) -> HostStatus:
        # a task that was cancelled while it waited leaves no trace
        state, reason = states.get(task, ("CANCELLED", "no longer known to SLURM"))
        text = f"job {task}: {state}" + ("" if reason == "None" else f" ({reason})")
        if not _ENDED.fullmatch(state):
            return HostStatus(True, text)
        log = self._folder / f"{task}.log"
        text += f", see {log}" if log.exists() else ""
        return HostStatus(False, text, is_cancelled=state == "CANCELLED")

    def stop(self, indices: Collection[int], *, kill: bool) -> None:
        jobs, hosts = self.jobs(), self.hosts()
        tasks = [f"{jobs[i]}_{i}" for i in indices if i in hosts and hosts[i].alive]
        if tasks and kill:
            _slurm("scancel", "--full", "--signal=KILL", *tasks)
        if tasks:
            _slurm("scancel", *tasks)
        self._due = 0.0


def find_job_arrays(folder: Path) -> SlurmArrays | None:
    """Return the job arrays of a fleet; None if it was never submitted to SLURM."""
    return SlurmArrays(folder) if (folder / SLURM / JOBS).is_file() else None


def batch_script(
    plan: FleetPlan, folder: Path, gpus: str | None, indices: Collection[int] = ()
) -> str:
    """Return the batch script of a job array.

    Args:
        gpus: those that every host uses (`--gpus`); None: those that SLURM gives to it.
        indices: of the instances; empty: all.

    Raises:
        ConfigError: submitit is not installed.
    """
    indices = indices or [instance.index for instance in plan.instances]
    logs = (folder / SLURM).absolute()
    executor = _executor(logs)
    executor.update_parameters(**_resources(plan, gpus), **_job_options(plan, logs, indices))
    executor.parameters |= {"map_count": len(indices), "wckey": None}
    if not plan.spec.slurm.time:
        executor.parameters["time"] = None  # the partition's, not submitit's five minutes
    words = shlex.join(host_command(folder, "")[:-1])
    text: str = executor._make_submission_file_text(f'exec {words} "$SLURM_ARRAY_TASK_ID"', "")
    return text


def _executor(logs: Path) -> Any:
    """Return submitit's executor, with which a script can be shown where there is no SLURM."""
    try:
        from submitit import SlurmExecutor
    except ImportError:
        raise ConfigError.of(
            "the engine slurm needs submitit", hint="pip install 'instar[slurm]'"
        ) from None

    class Executor(SlurmExecutor):
        @classmethod
        def affinity(cls) -> int:
            return 2

    return Executor(logs)


def _resources(plan: FleetPlan, gpus: str | None) -> dict[str, Any]:
    """Return what SLURM is asked for: that of all processes of an instance together."""
    options = plan.spec.slurm
    needs = [process.resources for process in plan.spec.processes.values()]
    memory = sum(need.memory or 0 for need in needs)
    resources = {
        "partition": options.partition,
        "account": options.account,
        "constraint": options.constraint,
        "time": math.ceil(options.time / 60) if options.time else None,
        "gpus_per_node": (sum(need.gpus for need in needs) if gpus is None else 0) or None,
        "mem": f"{math.ceil(memory / (1 << 20))}M" if memory else None,
        "nodes": max(need.nodes for need in needs),
        "ntasks_per_node": 1,
        "cpus_per_task": sum(need.cpus or 1 for need in needs),
    }
    return {key: value for key, value in resources.items() if value is not None}


def _job_options(plan: FleetPlan, logs: Path, indices: Collection[int]) -> dict[str, Any]:
    options = plan.spec.slurm
    return {
        "job_name": plan.spec.name,
        "setup": list(options.setup),
        "stderr_to_stdout": True,
        "use_srun": False,
        "additional_parameters": {
            "requeue" if options.requeue else "no-requeue": True,
            # to the batch shell, which the launcher replaces
            "signal": f"B:{_WARNING.removeprefix('SIG')}@{math.ceil(options.warning)}",
            "output": logs / "%A_%a.log",
            **{key: value for key, value in options.sbatch.items() if value is not False},
            "array": f"{_ranges(indices)}%{plan.parallel}",
        },
    }


def requeue(stopped_by: str, say: Callable[[str], None]) -> None:
    """Put this task back into the queue if SLURM has stopped it before its time limit."""
    job = os.environ.get("SLURM_JOB_ID")
    if job and stopped_by == _WARNING:
        try:
            _slurm("scontrol", "requeue", job)
        except SlurmFailed as error:
            say(f"not queued again: {error}")


def _ranges(indices: Iterable[int]) -> str:
    """Return numbers as SLURM writes them, e.g. "0-3,7"."""
    numbers = sorted(indices)
    begins = [b for a, b in pairwise([-2, *numbers]) if b > a + 1]
    ends = [a for a, b in pairwise([*numbers, math.inf]) if b > a + 1]
    return ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in zip(begins, ends, strict=True))


def _slurm(*words: str) -> str:
    """Run a command of SLURM and return its output."""
    try:
        return subprocess.run(
            words, capture_output=True, text=True, check=True, timeout=_ANSWER_S
        ).stdout
    except FileNotFoundError:
        raise SlurmFailed(f"there is no command {words[0]}: SLURM is not installed here") from None
    except subprocess.TimeoutExpired:
        raise SlurmFailed(f"{words[0]}: no answer within {_ANSWER_S:g} s") from None
    except subprocess.CalledProcessError as error:
        raise SlurmFailed(f"{words[0]}: {error.stderr.strip() or error}") from None
