"""`instar resume`: go on with a run that was stopped."""

from __future__ import annotations

import click

from instar.cli.train import rank_options, train


@click.command()
@click.argument("run")
@rank_options
@click.option(
    "--from",
    "start",
    default="latest",
    show_default=True,
    metavar="CHECKPOINT",
    help="latest, best, best-<metric>, or a step.",
)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one value.")
@click.option("--until", multiple=True, metavar="BUDGET", help="A new end, e.g. 4000it.")
@click.option(
    "--allow",
    multiple=True,
    type=click.Choice(["architecture", "data", "tokenizer"]),
    help="Go on although this is another than it was.",
)
@click.pass_context
def resume(
    context: click.Context,
    run: str,
    nproc: int | None,
    devices: str | None,
    start: str,
    overrides: tuple[str, ...],
    until: tuple[str, ...],
    allow: tuple[str, ...],
) -> int:
    """Go on with RUN (its folder, id, name, or `latest`) from its latest whole checkpoint.

    With any number of ranks: the samples still to come are the same. What is set otherwise is
    recorded, and is the run's own config from then on.
    """
    code: int = context.invoke(
        train,
        resume=run,
        start=start,
        nproc=nproc,
        devices=devices,
        overrides=overrides,
        until=until,
        allow=allow,
    )
    return code
