"""The group `instar fleet`, and what its commands share."""

from __future__ import annotations

from contextlib import suppress
from typing import get_args

import click

from instar.cli.options import CommandGroup
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


detach_option = click.option(
    "--detach", is_flag=True, help="Return when the jobs are in SLURM's queue."
)


@click.group(cls=CommandGroup)
def fleet() -> None:
    """Run a matrix of trainings with the servers that they need."""


def say_to_terminal(text: str) -> None:
    with suppress(OSError):  # the terminal was closed
        click.echo(text, err=True)
