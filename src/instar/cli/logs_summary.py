"""`instar logs summary`: what runs come to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from instar.cli.logs_output import WIDTH, as_text, deliver, output_options, runs_argument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from instar.logs.telling.summary import Summary


@click.command()
@runs_argument
@click.option("--all", "every", is_flag=True, help="Every run in the folder `runs`, or in DIR.")
@output_options("text", "json", "md", "one-line")
def summary(
    runs: tuple[str, ...],
    every: bool,
    form: str,
    as_json: bool,
    output: str | None,
    open_it: bool,
) -> int:
    """Say what each RUN comes to: state, amounts, best and last values, operations, checkpoints.

    A RUN is a folder, an id, a name (all runs of that name), a pattern, a file in a run, a folder
    of runs, or `latest`, which is the default. What a resumed run superseded counts nowhere. With
    --format one-line one line for each run, always with the same fields.
    """
    from instar.cli.logs_read import chosen, read_all
    from instar.cli.table import terminal_width
    from instar.logs.telling.summary import summarize, to_json

    read = read_all(chosen(runs, every=every))
    found = [summarize(record) for record in read.records]
    if as_json or form == "json":
        text = as_text([to_json(each) for each in found])
    else:
        text = "\n".join(_lines(found, form, terminal_width() or WIDTH))
    deliver(text, output, open_it=open_it)
    return read.tell()


def _lines(found: Sequence[Summary], form: str, width: int) -> list[str]:
    from instar.logs.telling.words import markdown, one_lines, page

    if form == "one-line":
        return one_lines(found)
    if form == "md":
        return markdown(found)
    pages = [page(each, width) for each in found]
    return [line for number, lines in enumerate(pages) for line in ["", *lines][number == 0 :]]
