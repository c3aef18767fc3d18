"""`instar resume`: go on with a run that was stopped."""

from __future__ import annotations

import click

from instar.cli.train import train


@click.command()
@click.argument("run")
@click.option("--nproc", type=click.IntRange(min=1), help="Ranks to start on this machine.")
@click.option("--devices", help="GPUs of the ranks, e.g. 0,1; as many ranks as devices.")
@click.option("--until", multiple=True, metavar="BUDGET", help="A new end, e.g. 4000it.")
@click.pass_context
def resume(
    context: click.Context,
    run: str,
    nproc: int | None,
    devices: str | None,
    until: tuple[str, ...],
) -> int:
    """Go on with RUN (its folder, id, name, or `latest`) from its latest checkpoint.

    With any number of ranks: the samples still to come are the same.
    """
    code: int = context.invoke(train, resume=run, nproc=nproc, devices=devices, until=until)
    return code
