"""`instar resume`: go on with a run that was stopped."""

from __future__ import annotations

from typing import Any

import click

from instar.cli.options import allow_option, from_option, rank_options, set_option
from instar.cli.train import train


@click.command()
@click.argument("run")
@rank_options
@from_option("latest", "latest, best, best-<metric>, or a step.")
@set_option
@click.option("--until", multiple=True, metavar="BUDGET", help="A new end, e.g. 4000it.")
@allow_option("Go on although this is another than it was.")
@click.pass_context
def resume(context: click.Context, /, run: str, **options: Any) -> int:
    """Go on with RUN (its folder, id, name, or `latest`) from its latest whole checkpoint.

    With any number of ranks: the samples still to come are the same. What is set otherwise is
    recorded, and is the run's own config from then on.
    """
    code: int = context.invoke(train, resume=run, **options)
    return code
