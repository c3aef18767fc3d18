"""What there is to do in a fleet's folder, and the host that does one instance of it where a scheduler placed it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from instar.config.errors import ConfigError
from instar.config.fields import plain_root_of, schema_keys
from instar.config.load import load_config
from instar.config.user_code.trust import FLAG, is_trusted
from instar.extensions.fleet.checks import make_plan, with_gpus_of_runs
from instar.extensions.fleet.engines.nodes import nodes_of
from instar.extensions.fleet.folder import FleetFolder, FolderLock, reopen_fleet
from instar.extensions.fleet.launcher import Launcher, this_machine
from instar.extensions.fleet.placement import Gpu, find_gpus, given_gpus
from instar.extensions.fleet.plan import ANY_MACHINE, FleetPlan, Instance, LoadedFleet
from instar.extensions.fleet.state import (
    STATE_FILE,
    FleetEvent,
    FleetStatus,
    fold_events,
    read_fleet_events,
)

_EARLIER_S = 10.0
"""beyond their grace, how long processes of a killed launcher are waited for"""


@dataclass(frozen=True)
class Work:
    """A fleet's instances that have not succeeded, and what is known of all."""

    fleet_folder: FleetFolder
    plan: FleetPlan
    gpus: tuple[Gpu, ...]
    before: FleetStatus
    todo: tuple[Instance, ...]
    trees: int
    """see `FolderLock`"""

    def launcher(self, say: Callable[[str], None], **options: Any) -> Launcher:
        """Return a launcher of this machine with these values of its optional fields."""
        config_keys: dict[str, None] = {}
        for file in self.fleet_folder.configs.values():
            task = load_config(file, import_task=False).config.task
            config_keys |= dict.fromkeys(schema_keys(plain_root_of(task)))
        return Launcher(
            self.plan,
            self.fleet_folder.path,
            self.trees,
            self.gpus,
            self.fleet_folder.configs,
            tuple(config_keys),
            say,
            **options,
        )


def plan_and_gpus(
    loaded_config: LoadedFleet, gpus: str | None, *, on_this_machine: bool = True
) -> tuple[FleetPlan, tuple[Gpu, ...]]:
    """Return the plan of a fleet, and the GPUs of this machine that it uses; `on_this_machine`: see `make_plan`.

    Raises:
        ConfigError: with all problems of the plan.
    """
    if loaded_config.spec.engine != "local":
        return make_plan(loaded_config, ANY_MACHINE, on_this_machine=on_this_machine), ()
    machine_gpus = find_gpus(gpus, os.environ)
    return make_plan(
        loaded_config, this_machine(machine_gpus), on_this_machine=on_this_machine
    ), machine_gpus


def name_gpus(
    loaded_config: LoadedFleet, gpus: str | None, say: Callable[[str], None] | None
) -> LoadedFleet:
    """Return a new fleet with the GPUs of this machine that its runs take without naming them, see
    `with_gpus_of_runs`; `say` is told of them."""
    if loaded_config.spec.engine != "local":
        return loaded_config
    named = with_gpus_of_runs(loaded_config, this_machine(find_gpus(gpus, os.environ)))
    for name, job in named.spec.jobs.items():
        if say and (count := job.resources.gpus) > loaded_config.spec.jobs[name].resources.gpus:
            what = f"{count} GPU{'' if count == 1 else 's'} for each instance"
            say(f"jobs.{name}: {what}, as no process names any; resources: {{gpus: 0}} shares them")
    return named


def remaining_work(fleet_folder: FleetFolder, only: Collection[int], trees: int) -> Work:
    """Return what there is to do of these instances; of all, if `only` is empty."""
    plan, gpus = plan_and_gpus(fleet_folder.loaded_config, fleet_folder.gpus)
    before = status_before(fleet_folder)
    finished_indices = {
        index
        for index, instance in before.instances.items()
        if instance.phase == "succeeded" or (instance.phase == "pruned" and index not in only)
    }
    indices = set(only or range(len(plan.instances))) - finished_indices
    todo = tuple(instance for instance in plan.instances if instance.index in indices)
    return Work(fleet_folder, plan, gpus, before, todo, trees)


def status_before(fleet_folder: FleetFolder) -> FleetStatus:
    """Return the state that earlier launchers left."""
    return fold_events(events_before(fleet_folder))


def events_before(fleet_folder: FleetFolder) -> list[FleetEvent]:
    """Return the events that earlier launchers left."""
    return read_fleet_events(fleet_folder.path) if (fleet_folder.path / STATE_FILE).exists() else []


def patience_s(fleet_folder: FleetFolder) -> float:
    """Return how long processes of an earlier launcher are waited for."""
    graces = [process.stop.grace for process in fleet_folder.loaded_config.spec.processes.values()]
    return max(graces, default=0.0) + _EARLIER_S


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
