"""`instar logs import`."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from instar.api.selection import RUNS
from instar.cli.options import NewFolder, StrictCommand, json_option
from instar.cli.output import print_json
from instar.extensions.foreign.records.formats import FORMATS
from instar.extensions.foreign.records.importing import import_runs


@click.command("import", cls=StrictCommand)
@click.argument(
    "paths", nargs=-1, required=True, metavar="PATH...", type=click.Path(path_type=Path)
)
@click.option("--to", type=NewFolder(), metavar="RUN", help="New folder of the run.")
@click.option(
    "--from",
    "format_name",
    type=click.Choice([*FORMATS]),
    help="The tool that wrote PATH.  [default: by its contents]",
)
@click.option("--loss", metavar="NAME", help="The metric that is the training loss.")
@click.option("--val", metavar="NAME", help="The metric that is the loss on held-out samples.")
@json_option
def import_records(
    paths: tuple[Path, ...],
    to: Path | None,
    format_name: str | None,
    loss: str | None,
    val: str | None,
    as_json: bool,
) -> None:
    """Make runs of what other tools recorded, in the folder `runs`, to list, plot and compare them.

    A PATH is a file or a folder of transformers (trainer_state.json), Lightning (metrics.csv), TensorBoard, W&B
    (offline), trackio (local), nanoGPT (its output) or forgather (trainer_logs.json). The runs are marked
    as imported; they have no model, so that none can be resumed.
    """
    runs = []
    for run in import_runs(
        paths,
        RUNS,
        to=to,
        format_name=format_name,
        loss=loss,
        val=val,
        say=lambda text: click.echo(text, err=True),
    ):
        runs.append(run)
        click.echo(f"{run.path}: {run.origin}: {run.naming.text()}", err=True)
        for note in run.notes:
            click.echo(f"{run.path}: {note}", err=True)
        if not as_json:
            click.echo(run.path)
    if as_json:
        print_json([run.to_dict() for run in runs])
    else:
        click.echo(f"next: instar logs plot {shlex.quote(str(runs[-1].path))}", err=True)
