"""`instar test`: the final test of a run."""

from __future__ import annotations

from typing import Any

import click

from instar.cli.options import from_option, rank_options, set_option
from instar.cli.train import train


@click.command()
@click.argument("run")
@rank_options
@from_option("best", "best, best-<metric>, latest, or a step.")
@set_option
@click.pass_context
def test(context: click.Context, /, run: str, **options: Any) -> int:
    """Test a checkpoint of RUN (its folder, id, name, or `latest`) on the whole test split.

    Writes `test/result.json` in the run's folder, and `test/predictions.parquet` where the task
    predicts anything of a sample. No step is made, whatever the number of ranks.
    """
    code: int = context.invoke(train, resume=run, only_test=True, **options)
    return code
