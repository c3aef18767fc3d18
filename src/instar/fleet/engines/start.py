"""Starting a fleet, or what is left of it, with the engine that its spec names."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import closing
from typing import Any

from instar.fleet.engines import local, ray, slurm
from instar.fleet.engines.work import left, patience_s
from instar.fleet.folder import FleetFolder, FolderLock
from instar.fleet.plan import FleetPlan
from instar.fleet.spec import FleetSpec
from instar.fleet.state import FLEETS


def check(spec: FleetSpec, gpus: str | None, say: Callable[[str], None]) -> None:
    """Refuse, before a folder is created, what the engine can never run.

    Raises:
        ConfigError: the engine cannot be reached, or has no host with what an instance needs.
    """
    if spec.engine == "ray":
        ray.join(spec, gpus, say)


def requested(plan: FleetPlan, gpus: str | None) -> dict[str, Any]:
    """Return what the engine's scheduler is asked for: for each instance, or by the batch script."""
    match plan.spec.engine:
        case "local":
            return {}
        case "ray":
            wanted = ray.bundles(plan.spec, gpus)
            return {"placement_group": {"strategy": ray.strategy(wanted), "bundles": wanted}}
        case "slurm":
            return {"batch_script": slurm.script(plan, FLEETS / plan.spec.name, gpus)}


def run(
    started: FleetFolder,
    only: Collection[int],
    say: Callable[[str], None],
    *,
    wait: bool,
    detach: bool = False,
) -> int:
    """Run the instances of a fleet that have not succeeded; return the exit code.

    Args:
        only: their indices; empty: all.
        wait: for GPUs that other launchers hold, instead of failing.
        detach: return when its jobs are in SLURM's queue.

    Raises:
        ConfigError: it is running already, or cannot be run.
    """
    os.chdir(started.cwd)
    with closing(FolderLock(started.path, patience_s(started))) as lock:
        work = left(started, only, lock.trees)
        if not work.todo:
            say(f"{started.path.name}: every instance has succeeded")
            return 0
        if work.plan.spec.engine == "local":
            return local.run(work, say, wait=wait)
        if work.plan.spec.engine == "ray":
            return ray.run(work, say)
        return slurm.run(work, say, detach=detach)
