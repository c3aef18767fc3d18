"""`instar test`: the final test of a run."""

from __future__ import annotations

import click

from instar.cli.train import rank_options, train


@click.command()
@click.argument("run")
@rank_options
@click.option(
    "--from",
    "start",
    default="best",
    show_default=True,
    metavar="CHECKPOINT",
    help="best, best-<metric>, latest, or a step.",
)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one value.")
@click.pass_context
def test(
    context: click.Context,
    run: str,
    nproc: int | None,
    devices: str | None,
    start: str,
    overrides: tuple[str, ...],
) -> int:
    """Test a checkpoint of RUN (its folder, id, name, or `latest`) on the whole test split.

    Writes `test/result.json` in the run's folder, and `test/predictions.parquet` where the task
    predicts anything of a sample. No step is made, whatever the number of ranks.
    """
    code: int = context.invoke(
        train,
        resume=run,
        start=start,
        nproc=nproc,
        devices=devices,
        overrides=overrides,
        only_test=True,
    )
    return code
