"""`instar logs list`: the runs of a folder, one line each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from instar.cli.logs_output import as_text, deliver, output_options

if TYPE_CHECKING:
    from instar.logs.telling.listed import Row

HEADERS = ("id", "name", "state", "step", "tokens", "loss", "best val", "at", "time", "started")
NUMBERS = ("step", "tokens", "loss", "best val", "at", "time")
SPARE = ("at", "tokens", "started", "time", "name", "best val", "loss")
"""what a narrow terminal does without, the first first"""


@click.command("list")
@click.argument("folders", nargs=-1, metavar="[DIR]...")
@click.option("--state", metavar="STATE", help="Only those running, finished, stopped or crashed.")
@click.option("--name", metavar="NAME", help="Only those of this name, also like `grow-*`.")
@click.option("-n", "last", type=click.IntRange(min=1), metavar="N", help="Only the last N.")
@output_options("text", "json", "md")
def list_(
    folders: tuple[str, ...],
    state: str | None,
    name: str | None,
    last: int | None,
    form: str,
    as_json: bool,
    output: str | None,
    open_it: bool,
) -> None:
    """List the runs in each DIR (default: runs), the one that was written to last at the end.

    A DIR may also be a run, a name, or a pattern.
    """
    from instar.cli.logs_read import OUT_DIR
    from instar.logs.telling.listed import faults, listed, runs_of, to_json

    rows = listed(runs_of(folders, OUT_DIR), state=state, name=name, last=last)
    if as_json or form == "json":
        deliver(as_text([to_json(row) for row in rows]), output, open_it=open_it)
    elif form == "text" and output is None and not open_it:
        _print(rows)
    else:
        deliver(_table(rows, form), output, open_it=open_it)
    for fault in faults(rows):
        click.echo(fault, err=True)


def _print(rows: list[Row]) -> None:
    from instar.cli.table import print_table

    if rows:
        print_table(HEADERS, [_cells(row) for row in rows], right=NUMBERS, spare=SPARE)
    else:
        click.echo("no runs", err=True)


def _table(rows: list[Row], form: str) -> str:
    from instar.logs.telling.aligned import aligned
    from instar.logs.telling.words import markdown_table

    cells = [_cells(row) for row in rows]
    right = [HEADERS.index(header) for header in NUMBERS]
    table = (
        markdown_table(HEADERS, cells, right) if form == "md" else aligned((HEADERS, *cells), right)
    )
    return "\n".join(table)


def _cells(row: Row) -> tuple[str, ...]:
    from instar.logs.telling.words import NONE, date
    from instar.record.lines import duration, loss, si

    seen = row.glance
    return (
        seen.id,
        seen.name,
        row.standing.state,
        NONE if seen.step is None else f"{seen.step:,}",
        NONE if seen.tokens is None else si(seen.tokens),
        NONE if seen.loss is None else loss(seen.loss),
        NONE if seen.best is None else loss(seen.best, 4),
        NONE if seen.best_step is None else f"{seen.best_step:,}",
        NONE if row.time_s is None else duration(row.time_s),
        date(seen.started or 0.0)[:-3] or NONE,
    )
