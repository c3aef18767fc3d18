"""The runs of a fleet's instances, in the groups that its matrix makes."""

from __future__ import annotations

from pathlib import Path

from instar.config.errors import ConfigError, printable
from instar.fleet.folder import describe
from instar.fleet.plan import Instance, instances_of
from instar.fleet.state import InstanceStatus, fold, read_events
from instar.fleet.template import text_of
from instar.record.rundir import RunDir


def fleet_runs(folder: Path) -> dict[RunDir, str]:
    """Return the runs of a fleet's instances, each with its group.

    Raises:
        ConfigError: there is no run yet, or the fleet's file is damaged.
    """
    spec, cwd = describe(folder)
    base = Path() if cwd == Path.cwd() else cwd
    found = fold(read_events(folder)).instances
    runs: dict[RunDir, str] = {}
    try:
        for instance in instances_of(spec):
            run = RunDir(base / instance.output_dir)
            if run.holds_run():
                runs[run] = group_name(spec.name, instance, found.get(instance.index))
    except ValueError as error:
        raise ConfigError.one(f"cannot be expanded: {error}", where=str(folder)) from None
    if not runs:
        raise ConfigError.one("no instance of this fleet has a run yet", where=str(folder))
    return runs


def group_name(fleet: str, instance: Instance, status: InstanceStatus | None) -> str:
    """Return the fleet's name and the values of the matrix, or of a search, other than seeds."""
    values = {**instance.values, **(status.values if status else {})}
    last = {key: key.rpartition(".")[2] for key in values}
    given = [f"{last[key]}={text_of(each)}" for key, each in values.items() if last[key] != "seed"]
    return printable(" ".join([fleet, *given]))
