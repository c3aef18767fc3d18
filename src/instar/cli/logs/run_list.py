"""What `instar logs list`, `tag`, `note` and `archive` do. They need only summaries of records, so they
import neither columns nor numpy: lists of many runs are asked for often."""

from __future__ import annotations

from typing import Any

import click

from instar.api.selection import listed_runs, selected_runs
from instar.cli.output import Output, as_text, packs_output, print_table
from instar.logs.query.labels import RunLabels, change_labels, labels_of
from instar.logs.query.runs import Row, list_rows, row_faults, row_notes, row_to_json
from instar.logs.text.run_list import NUMBERS, OPTIONAL, run_table
from instar.logs.text.stdout import align_columns, markdown_table


@packs_output()
def list_runs_in(folders: tuple[str, ...], output: Output, **filters: Any) -> None:
    """Print runs as a list."""
    rows = list_rows(listed_runs(folders), **filters)
    if output.form == "json":
        output.deliver(as_text([row_to_json(row) for row in rows]))
    elif output == Output("text", None, open_it=False):
        _print_rows(rows)
    else:
        output.deliver(_table_lines(rows, output.form))
    for text in (*row_notes(rows), *row_faults(rows)):
        click.echo(text, err=True)


def _print_rows(rows: list[Row]) -> None:
    if rows:
        headers, cells = run_table(rows)
        print_table(headers, cells, right=NUMBERS, optional=OPTIONAL)
    else:
        click.echo("no runs", err=True)


def _table_lines(rows: list[Row], form: str) -> list[str]:
    headers, cells = run_table(rows)
    right = [headers.index(header) for header in NUMBERS]
    if form == "md":
        return markdown_table(headers, cells, right)
    return align_columns((headers, *cells), right)


def tag_runs(runs: tuple[str, ...], add: tuple[str, ...], remove: tuple[str, ...]) -> None:
    """Change tags of runs, then print them."""

    def change_tags(labels: RunLabels) -> RunLabels:
        tags = dict.fromkeys((*labels.tags, *add))
        return RunLabels(tuple(t for t in tags if t not in remove), labels.note, labels.archived)

    run_dirs = selected_runs(runs)
    if add or remove:
        change_labels(run_dirs, change_tags)
    for run, labels in zip(run_dirs, labels_of(run_dirs), strict=True):
        click.echo(f"{run.path}: {', '.join(labels.tags) or 'no tags'}")


def note_runs(runs: tuple[str, ...], message: str | None) -> None:
    """Set the note of runs, then print it."""
    run_dirs = selected_runs(runs)
    if message is not None:
        change_labels(run_dirs, lambda labels: RunLabels(labels.tags, message, labels.archived))
    for run, labels in zip(run_dirs, labels_of(run_dirs), strict=True):
        click.echo(f"{run.path}: {labels.note or 'no note'}")


def archive_runs(runs: tuple[str, ...], undo: bool) -> None:
    """Leave runs out of lists, or show them again."""
    run_dirs = selected_runs(runs)
    change_labels(run_dirs, lambda labels: RunLabels(labels.tags, labels.note, archived=not undo))
    for run in run_dirs:
        click.echo(f"{run.path}: {'shown again' if undo else 'archived'}")
