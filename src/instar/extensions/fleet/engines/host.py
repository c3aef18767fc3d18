"""The host of one instance: the launcher of this machine, for what an engine's scheduler has placed here."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from instar.config.errors import ConfigError
from instar.config.user_code import FLAG, is_trusted
from instar.extensions.fleet.checks import make_plan
from instar.extensions.fleet.engines.work import Work, patience_s, status_before
from instar.extensions.fleet.folder import reopen_fleet
from instar.extensions.fleet.launcher import this_machine
from instar.extensions.fleet.lock import FolderLock
from instar.extensions.fleet.nodes import nodes_of
from instar.extensions.fleet.placement import given_gpus


def host_command(folder: Path, index: int | str) -> list[str]:
    """Return the command that calls `run_on_host` on a host."""
    trust = [FLAG] if is_trusted() else []
    words = ["-m", "instar.cli.main", "fleet", "host", str(folder.absolute()), str(index)]
    return [sys.executable, *words, *trust]


def run_on_host(folder: Path, index: int, say: Callable[[str], None]) -> tuple[int, str]:
    """Run one instance of a fleet on this host; return the exit code, and the signal that stopped it
    or "".

    Raises:
        ConfigError: the folder or its working directory is not seen from here, or another host
            runs the instance.
    """
    if not folder.is_dir():
        hint = "a fleet's folder is on a file system that all hosts see"
        raise ConfigError.of("there is no such folder on this host", where=str(folder), hint=hint)
    fleet_folder = reopen_fleet(folder)
    try:
        os.chdir(fleet_folder.cwd)
    except OSError as error:
        hint = "a fleet is started in a folder that all hosts see"
        text = f"cannot be entered on this host: {error.strerror}"
        raise ConfigError.of(text, where=str(fleet_folder.cwd), hint=hint) from None
    with closing(FolderLock(fleet_folder.path, patience_s(fleet_folder), index)) as lock:
        before = status_before(fleet_folder)
        was = before.instances.get(index)
        if was is not None and was.phase == "succeeded":
            return 0, ""
        gpus = given_gpus(os.environ, fleet_folder.gpus)
        plan = replace(make_plan(fleet_folder.loaded_config, this_machine(gpus)), parallel=1)
        todo = tuple(instance for instance in plan.instances if instance.index == index)
        if not todo:
            raise ConfigError.of(f"there is no instance {index}", where=str(folder))
        work = Work(fleet_folder, plan, gpus, before, todo, lock.trees)
        nodes = nodes_of(plan.spec.engine, os.environ)
        launcher = work.launcher(say, part=index, nodes=nodes)
        return launcher.run(todo, before), launcher.requested
