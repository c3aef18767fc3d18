"""The group `instar fleet`, and options of its commands, which are in `commands`."""

from __future__ import annotations

from contextlib import suppress
from typing import get_args

import click

from instar.cli.options import LazyGroup, takes_json
from instar.extensions import load_target
from instar.extensions.fleet.engines import EngineName

gpus_option = click.option(
    "--gpus",
    metavar="GPUS",
    help="GPUs to use, e.g. 0-3,6 or a number; without a driver, pretended ones.",
)

engine_option = click.option(
    "--engine",
    type=click.Choice(get_args(EngineName)),
    help="What runs the instances, instead of FILE's `engine`.",
)

only_option = click.option(
    "--only", metavar="INDICES", help="Instances to run, e.g. 0 or 0,2-4; default: all."
)


matrix_option = click.option(
    "--matrix",
    "dimensions",
    multiple=True,
    metavar="KEY=VALUES",
    help="FILE is a run config, trained once for each value, e.g. data.fold=0-4 or seed=1,2,3; several: for each "
    "combination.",
)


detach_option = click.option(
    "--detach", is_flag=True, help="Return when the jobs are in SLURM's queue."
)


_HERE = "instar.extensions.fleet.commands"
_HOST = f"{_HERE}:host"
"""what engines run on hosts; no help lists it"""

_TABLE = {
    "doctor": (
        f"{_HERE}:check_host",
        "Check what a long run of FILE needs: GPUs, disk, ports, keys of trackers, limits.",
    ),
    "down": (
        f"{_HERE}:down",
        "Stop a running fleet: jobs, then services; return when everything has ended.",
    ),
    "logs": (
        f"{_HERE}:logs",
        "Print the logs of fleet NAME: of all instances, or of INSTANCE (index or name) and PROCESS.",
    ),
    "plan": (
        f"{_HERE}:plan_fleet",
        "Check FILE and print which instance would get which GPUs and ports.",
    ),
    "reap": (
        f"{_HERE}:reap",
        "Kill processes of fleets whose launcher is gone (yours; see --dry-run).",
    ),
    "resume": (
        f"{_HERE}:resume_fleet",
        "Run the instances of fleet NAME that have not succeeded; finished jobs are not run again.",
    ),
    "status": (
        f"{_HERE}:status",
        "Print the state of fleet NAME, or list all fleets; also after its launcher has died.",
    ),
    "stop": (
        f"{_HERE}:stop",
        "Stop INSTANCES (indices or names) of a running fleet; the others go on.",
    ),
    "up": (f"{_HERE}:up", "Start FILE's instances and supervise them until all have ended."),
}


class FleetGroup(LazyGroup):
    """The commands of the table, and one that only engines call."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == "host":
            return takes_json(load_target(_HOST))
        return super().get_command(ctx, cmd_name)


@click.group(cls=FleetGroup, table=_TABLE)
def fleet() -> None:
    """Run a matrix of trainings with the servers that they need."""


def say_to_terminal(text: str) -> None:
    with suppress(OSError):  # the terminal was closed
        click.echo(text, err=True)
