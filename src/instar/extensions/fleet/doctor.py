"""Checks before a long run: what would fail hours later is found now."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from instar.config.errors import ConfigProblem
from instar.extensions.fleet.placement import Gpu, Taken, lock_gpus, lock_port, locks_folder
from instar.extensions.fleet.plan import FleetPlan

_LITTLE_DISK_BYTES = 20 << 30
_FILES_PER_PROCESS = 4
_KEYS = {"wandb": ("WANDB_API_KEY", "~/.netrc"), "mlflow": ("MLFLOW_TRACKING_URI", "")}


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    what: str
    ok: bool
    text: str


def diagnose_fleet(
    plan: FleetPlan, gpus: Sequence[Gpu], missing: Sequence[ConfigProblem]
) -> list[Finding]:
    """Check disk and keys of trackers, and what this machine has for the engine `local`: GPUs, ports,
    and limits of this user.

    Args:
        missing: commands that are not installed, see `checks.missing_commands`.
    """
    findings = [*_commands(missing), *_disk(plan), *_keys(plan)]
    if plan.spec.engine == "local":
        findings = [*_gpus(plan, gpus), *_ports(plan), *findings, *_limits(plan)]
    return findings


def _commands(missing: Sequence[ConfigProblem]) -> Iterator[Finding]:
    for problem in missing:
        yield Finding("command", False, f"{problem.message}; {problem.hint}")


def _gpus(plan: FleetPlan, gpus: Sequence[Gpu]) -> Iterator[Finding]:
    if not plan.uses_gpus:
        return
    count = plan.parallel * sum(
        len(gpus_of_process) for gpus_of_process in plan.slot(0).gpus.values()
    )
    try:
        locks = lock_gpus(gpus, count, (), "a check of instar fleet doctor")
    except Taken as error:
        yield Finding("GPUs", False, str(error))
        return
    for _, lock in locks:
        lock.close()
    names = sorted({gpu.name or "pretended" for gpu, _ in locks})
    yield Finding("GPUs", True, f"{count} free ({', '.join(names)})")


def _ports(plan: FleetPlan) -> Iterator[Finding]:
    numbers = [
        number
        for place in range(plan.parallel)
        for ports in plan.slot(place).ports.values()
        for number in ports.values()
    ]
    if not numbers:
        return
    moves: list[str] = []
    with ExitStack() as locks:
        for number in numbers:
            try:
                port, lock = lock_port(number, "a check of instar fleet doctor", moves.append)
            except Taken as error:
                yield Finding("ports", False, str(error))
                return
            locks.enter_context(closing(lock))
            if port != number:
                moves.append(f"{number} is taken, {port} would be used")
    yield Finding("ports", True, "; ".join(moves) or f"{len(numbers)} free from {min(numbers)}")


def _disk(plan: FleetPlan) -> Iterator[Finding]:
    outputs = {*(instance.output_dir for instance in plan.instances), Path("fleets")}
    disks: dict[int, list[Path]] = {}
    for folder in (
        *sorted(outputs),
        locks_folder(),
    ):  # which needs no room, but its disk may be theirs
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        on_disk = disks.setdefault(existing.stat().st_dev, [])
        on_disk += [existing] if existing not in on_disk else []
    for folders in disks.values():
        free = shutil.disk_usage(folders[0]).free
        enough = free >= _LITTLE_DISK_BYTES or folders == [locks_folder()]
        read_only = [str(folder) for folder in folders if not os.access(folder, os.W_OK)]
        text = f"{free / 1e9:.1f} GB free" + (
            f", not writable: {', '.join(read_only)}" * bool(read_only)
        )
        yield Finding(f"disk of {folders[0]}", enough and not read_only, text)


def _limits(plan: FleetPlan) -> Iterator[Finding]:
    processes = plan.parallel * len(plan.spec.processes)
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    n_files = 64 + _FILES_PER_PROCESS * processes
    enough = files == resource.RLIM_INFINITY or files >= n_files
    yield Finding("open files", enough, f"{_limit(files)} allowed, about {n_files} needed")
    _, tasks = resource.getrlimit(resource.RLIMIT_NPROC)
    enough = tasks == resource.RLIM_INFINITY or tasks >= 4 * processes
    yield Finding("processes", enough, f"{_limit(tasks)} allowed, at least {2 * processes} needed")


def _limit(value: int) -> str:
    return "any number" if value == resource.RLIM_INFINITY else f"{value:,}"


def _keys(plan: FleetPlan) -> Iterator[Finding]:
    """Look for the keys of trackers that a run's config or a command names."""
    text = plan.spec.model_dump_json()
    for job in plan.spec.jobs.values():
        if job.run is not None and Path(job.run).is_file():
            text += Path(job.run).read_text(encoding="utf-8", errors="replace")
    for tracker, (variable, file) in _KEYS.items():
        if tracker not in text:
            continue
        has_key = bool(os.environ.get(variable)) or (file and Path(file).expanduser().is_file())
        message = f"{variable} is set" if has_key else f"{variable} is not set"
        yield Finding(f"key of {tracker}", bool(has_key), message)
