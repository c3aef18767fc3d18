"""What there is to do in a fleet's folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from instar.config.fields import plain_root_of, schema_keys
from instar.config.load import load_config
from instar.extensions.fleet.checks import make_plan
from instar.extensions.fleet.folder import FleetFolder
from instar.extensions.fleet.launcher import Launcher, this_machine
from instar.extensions.fleet.load import LoadedFleet
from instar.extensions.fleet.placement import Gpu, find_gpus
from instar.extensions.fleet.plan import ANY_MACHINE, FleetPlan, Instance
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
