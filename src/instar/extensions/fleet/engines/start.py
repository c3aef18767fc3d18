"""Starting a fleet, or what is left of it, with the engine that its spec names."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import closing
from typing import Any

from instar.extensions.fleet.engines import ray, slurm
from instar.extensions.fleet.engines.work import Work, events_before, patience_s, remaining_work
from instar.extensions.fleet.folder import FleetFolder, FolderLock
from instar.extensions.fleet.placement import close_all, lock_gpus
from instar.extensions.fleet.plan import FleetPlan
from instar.extensions.fleet.spec import FleetSpec
from instar.extensions.fleet.state import FLEETS
from instar.extensions.fleet.trials import Trials


def check_engine(spec: FleetSpec, gpus: str | None, say: Callable[[str], None]) -> None:
    """Refuse, before a folder is created, what the engine can never run.

    Raises:
        ConfigError: the engine cannot be reached, or has no host with what an instance needs.
    """
    if spec.engine == "ray":
        ray.join_cluster(spec, gpus, say)


def scheduler_request(plan: FleetPlan, gpus: str | None) -> dict[str, Any]:
    """Return what the engine's scheduler is asked for: for each instance, or by the batch script."""
    match plan.spec.engine:
        case "local":
            return {}
        case "ray":
            bundles = ray.bundles(plan.spec, gpus)
            return {"placement_group": {"strategy": ray.strategy(bundles), "bundles": bundles}}
        case "slurm":
            return {"batch_script": slurm.batch_script(plan, FLEETS / plan.spec.name, gpus)}


def run_fleet(
    fleet_folder: FleetFolder,
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
    os.chdir(fleet_folder.cwd)
    with closing(FolderLock(fleet_folder.path, patience_s(fleet_folder))) as lock:
        work = remaining_work(fleet_folder, only, lock.trees)
        if not work.todo:
            say(f"{fleet_folder.path.name}: every instance has succeeded")
            return 0
        if work.plan.spec.engine == "local":
            return _run_here(work, say, wait=wait)
        if work.plan.spec.engine == "ray":
            return ray.run_on_ray(work, say)
        return slurm.run_on_slurm(work, say, detach=detach)


def _run_here(work: Work, say: Callable[[str], None], *, wait: bool) -> int:
    """Run instances on this machine, next to each other: the engine `local`.

    Raises:
        Taken: too few GPUs are free, and they are not waited for.
    """
    plan = work.plan
    if plan.uses_gpus and not wait:
        # refuse before anything is started if another fleet holds what this one needs
        count = sum(len(gpus) for gpus in plan.slot(0).gpus.values())
        n_gpus = count * min(plan.parallel, len(work.todo))
        close_all(lock for _, lock in lock_gpus(work.gpus, n_gpus, (), "a check"))
    say(
        f"fleet {work.fleet_folder.path.name}: {len(work.todo)} instances, {plan.parallel} at a time"
    )
    return work.launcher(say, wait_for_gpus=wait, trials=_trials(work, say)).run(
        work.todo, work.before
    )


def _trials(work: Work, say: Callable[[str], None]) -> Trials | None:
    search = work.plan.spec.search
    if search is None:
        return None

    todo = {instance.index for instance in work.todo}
    events = events_before(work.fleet_folder)
    return Trials(search, work.fleet_folder.path, work.plan.instances, events, todo, say)
