"""`instar schedule`: what a schedule makes of a run, before there is one."""

from __future__ import annotations

import json

import click

from instar.cli.lazy import Group
from instar.cli.options import json_option, set_option


@click.group(cls=Group)
def schedule() -> None:
    """Check schedules of operations."""


@schedule.command()
@click.argument("file")
@click.option("--config", "cfg", metavar="CFG", help="The run's config; default: the defaults.")
@click.option("--nproc", type=click.IntRange(min=1), default=1, help="Ranks of the run.")
@set_option
@json_option
def check(
    file: str, cfg: str | None, nproc: int, overrides: tuple[str, ...], as_json: bool
) -> None:
    """Print what the run would be, stage by stage, under the schedule in FILE.

    Every mistake is listed with its line, exit code 2. No data are prepared for it: where they
    are not there yet, epochs are not known.
    """
    from instar.schedule.checks import load_checked
    from instar.schedule.forecast import checked_forecast
    from instar.schedule.render import render
    from instar.tasks.blueprint import kind_of

    loaded = load_checked(cfg, (*overrides, schedule_option(file)))
    blueprint = kind_of(loaded.config.task).assumed(loaded, lambda text: click.echo(text, err=True))
    told = checked_forecast(loaded, blueprint, nproc)
    click.echo(json.dumps(told.to_dict(), indent=2) if as_json else render(told))


def schedule_option(file: str) -> str:
    """The schedule's file as a text for --set."""
    return f"schedule={json.dumps(file)}"
