"""Starting a fleet, or what is left of it, with the engine that its spec names."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import closing
from typing import Any

from instar.config.errors import ConfigError
from instar.fleet.engines import local, ray
from instar.fleet.engines.work import left, patience_s
from instar.fleet.folder import FleetFolder
from instar.fleet.launcher import FolderLock
from instar.fleet.spec import FleetSpec


def check(spec: FleetSpec, gpus: str | None, say: Callable[[str], None]) -> None:
    """Refuse, before a folder is created, what the engine can never run.

    Raises:
        ConfigError: the engine cannot be reached, or has no host with what an instance needs.
    """
    if spec.engine == "ray":
        ray.join(spec, gpus, say)


def requested(spec: FleetSpec, gpus: str | None) -> dict[str, Any]:
    """Return what the engine's scheduler is asked for, for each instance."""
    if spec.engine != "ray":
        return {}
    wanted = ray.bundles(spec, gpus)
    return {"placement_group": {"strategy": ray.strategy(wanted), "bundles": wanted}}


def run(
    started: FleetFolder, only: Collection[int], say: Callable[[str], None], *, wait: bool
) -> int:
    """Run the instances of a fleet that have not succeeded; return the exit code.

    Args:
        only: their indices; empty: all.
        wait: for GPUs that other launchers hold, instead of failing.

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
        raise ConfigError.one(f"there is no engine {work.plan.spec.engine} yet", where="engine")
