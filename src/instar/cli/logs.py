"""The commands `instar logs list`, `tag`, `note`, `archive`, `summary`, `compare` and `tail`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import msgspec

from instar.api.runs import RUNS, read_all, selected_groups, selected_runs
from instar.cli import completion
from instar.cli.output import (
    WIDTH,
    Output,
    as_text,
    json_format_option,
    output_options,
    print_table,
    report_faults,
    runs_argument,
    terminal_width,
)
from instar.config.errors import ConfigError
from instar.logs.query.alignment import axis_named, parse_place
from instar.logs.query.compare import compare_groups, comparison_to_json
from instar.logs.query.groups import By, group_runs, notes_on_data
from instar.logs.query.labels import RunLabels, change_labels, labels_of
from instar.logs.query.runs import (
    Row,
    branch_start,
    find_runs,
    in_trees,
    list_rows,
    row_faults,
    row_notes,
    row_to_json,
    runs_of,
)
from instar.logs.query.summary import Summary, summarize, summary_to_json
from instar.logs.query.tail import follow_log, last_events, last_lines, unit_of
from instar.logs.query.tail import follow_record as added
from instar.logs.text.comparison import comparison_markdown, comparison_text
from instar.logs.text.format_event import EventFormatter
from instar.logs.text.stdout import align_columns, indent_text
from instar.logs.text.summary import (
    NONE,
    best_text,
    date,
    markdown_table,
    one_lines,
    page,
    summary_markdown,
)
from instar.record.events import RecordError, to_words
from instar.record.format import duration, loss, si
from instar.record.rundir import RunDir

HEADERS = ("id", "name", "state", "step", "tokens", "loss", "best val", "at", "time", "started")
NUMBERS = ("step", "tokens", "loss", "best val", "at", "time")
OPTIONAL = ("at", "tokens", "started", "time", "name", "tags", "branch at", "best val", "loss")
"""Columns that are omitted on a narrow terminal, in this order; `tags` and `branch at` are there if a run has
some."""


@click.command("list")
@click.argument("folders", nargs=-1, metavar="[DIR]...")
@click.option(
    "--state",
    metavar="STATE",
    help="Only runs in this state: running, finished, stopped or crashed.",
)
@click.option("--name", metavar="NAME", help="Only runs of this name or pattern, e.g. `grow-*`.")
@click.option("--tag", metavar="TAG", help="Only runs with this tag.")
@click.option("--archived", is_flag=True, help="Also archived runs.")
@click.option("-n", "last", type=click.IntRange(min=1), metavar="N", help="Only the last N runs.")
@output_options("text", "json", "md")
def list_(folders: tuple[str, ...], output: Output, **filters: Any) -> None:
    """List the runs in each DIR (default: runs), the most recently written last.

    A DIR may also be a run, a name, or a pattern.
    """
    rows = list_rows(runs_of(folders, RUNS), **filters)
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
        headers, cells = _table(rows)
        print_table(headers, cells, right=NUMBERS, optional=OPTIONAL)
    else:
        click.echo("no runs", err=True)


def _table_lines(rows: list[Row], form: str) -> list[str]:
    headers, cells = _table(rows)
    right = [headers.index(header) for header in NUMBERS]
    if form == "md":
        return markdown_table(headers, cells, right)
    return align_columns((headers, *cells), right)


def _table(rows: Sequence[Row]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return headers and cells of a list of runs; branches are below their trunks."""
    trees = in_trees(rows, lambda row: row.summary)
    headers: tuple[str, ...] = HEADERS
    cells: list[tuple[str, ...]] = [_row_cells(row, depth) for depth, row in trees]
    branches = [branch_start(row.summary) for _, row in trees]
    if any(branches):
        steps = (f"step {first.step:,}" if first else "" for first in branches)
        headers = (*headers, "branch at")
        cells = [(*row_cells, step) for row_cells, step in zip(cells, steps, strict=True)]
    if any(row.labels.tags for row in rows):
        tags = (" ".join(row.labels.tags) for _, row in trees)
        headers = (*headers, "tags")
        cells = [(*row_cells, tag) for row_cells, tag in zip(cells, tags, strict=True)]
    return headers, cells


def _row_cells(row: Row, depth: int) -> tuple[str, ...]:
    summary = row.summary
    return (
        indent_text(summary.id, depth),
        summary.name,
        row.status.state,
        NONE if summary.step is None else f"{summary.step:,}",
        NONE if summary.tokens is None else si(summary.tokens),
        NONE if summary.loss is None else loss(summary.loss),
        best_text(summary.best_metric, summary.best),
        NONE if summary.best_step is None else f"{summary.best_step:,}",
        NONE if row.time_s is None else duration(row.time_s),
        date(summary.started or 0.0)[:-3] or NONE,
    )


@click.command()
@runs_argument
@click.option("-a", "--add", multiple=True, metavar="TAG", help="Add this tag.")
@click.option("-r", "--remove", multiple=True, metavar="TAG", help="Remove this tag.")
def tag(runs: tuple[str, ...], add: tuple[str, ...], remove: tuple[str, ...]) -> None:
    """Add or remove tags of each RUN, then print them. They are kept in .instar/labels.json."""

    def change_tags(labels: RunLabels) -> RunLabels:
        tags = dict.fromkeys((*labels.tags, *add))
        return RunLabels(tuple(t for t in tags if t not in remove), labels.note, labels.archived)

    run_dirs = selected_runs(runs)
    if add or remove:
        change_labels(run_dirs, change_tags)
    for run, labels in zip(run_dirs, labels_of(run_dirs), strict=True):
        click.echo(f"{run.path}: {', '.join(labels.tags) or 'no tags'}")


@click.command()
@runs_argument
@click.option("-m", "--message", metavar="TEXT", help="The note; an empty one removes it.")
def note(runs: tuple[str, ...], message: str | None) -> None:
    """Set the note of each RUN, then print it."""
    run_dirs = selected_runs(runs)
    if message is not None:
        change_labels(run_dirs, lambda labels: RunLabels(labels.tags, message, labels.archived))
    for run, labels in zip(run_dirs, labels_of(run_dirs), strict=True):
        click.echo(f"{run.path}: {labels.note or 'no note'}")


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--undo", is_flag=True, help="Show them again.")
def archive(runs: tuple[str, ...], undo: bool) -> None:
    """Leave each RUN out of lists and of the dashboard; its files stay as they are."""
    run_dirs = selected_runs(runs)
    change_labels(run_dirs, lambda labels: RunLabels(labels.tags, labels.note, archived=not undo))
    for run in run_dirs:
        click.echo(f"{run.path}: {'shown again' if undo else 'archived'}")


@click.command()
@runs_argument
@click.option("--all", "every", is_flag=True, help="Every run in the folder `runs`, or in DIR.")
@output_options("text", "json", "md", "one-line")
def summary(runs: tuple[str, ...], every: bool, output: Output) -> int:
    """Summarize each RUN: state, amounts, best and last values, operations, checkpoints.

    A RUN is a folder, an id, a name (all runs of that name), a pattern, a file in a run, a folder
    of runs, or `latest`, which is the default. Superseded steps are ignored.
    --format one-line prints one line for each run, always with the same fields.
    """
    read = read_all(selected_runs(runs, every=every))
    summaries = [summarize(record) for record in read.records]
    if output.form == "json":
        output.deliver(as_text([summary_to_json(run_summary) for run_summary in summaries]))
    else:
        output.deliver(_summary_lines(summaries, output.form, terminal_width() or WIDTH))
    return report_faults(read.faults)


def _summary_lines(summaries: Sequence[Summary], form: str, width: int) -> list[str]:
    if form == "one-line":
        return one_lines(summaries)
    if form == "md":
        return summary_markdown(summaries)
    pages = [page(run_summary, width) for run_summary in summaries]
    return [line for number, lines in enumerate(pages) for line in ["", *lines][number == 0 :]]


@click.command()
@runs_argument
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="NAME",
    help="Metric or pattern to compare, e.g. `val/*`; may be given several times.  [default: losses]",
)
@click.option(
    "--at",
    "places",
    multiple=True,
    metavar="PLACE",
    help="Place to compare at: step=1000, tokens=1.5B, flops=1e15, wall=10min, active=90s, epoch=2; may be "
    "given several times.  [default: five places up to the end of the shortest run]",
)
@click.option("--x", "axis", default="step", show_default=True, help="Axis of the default places.")
@click.option(
    "--at-loss",
    "target",
    type=float,
    metavar="VALUE",
    help="Also report where each run first reaches this loss, and the savings relative to the first.",
)
@click.option(
    "--of",
    "target_metric",
    default="val/loss",
    show_default=True,
    metavar="NAME",
    help="The metric of --at-loss.",
)
@click.option(
    "--by",
    type=click.Choice(["run", "name", "seed"]),
    help="What to compare: single runs, groups of one name, or groups that differ only in the seed. "
    "[default: run; of a fleet, groups that its matrix makes]",
)
@output_options("text", "json", "md")
def compare(
    runs: tuple[str, ...],
    metrics: tuple[str, ...],
    places: tuple[str, ...],
    axis: str,
    target: float | None,
    target_metric: str,
    by: By | None,
    output: Output,
) -> int:
    """Compare RUNs at equal steps, tokens, FLOPs or time, interpolating between measurements.

    A RUN may also be a fleet, such as fleets/NAME: its runs, in groups that differ only in the seed.
    "-" marks a place that a run has not reached. Groups (--by) show the mean and the standard
    deviation over runs. The keys in which the configs differ follow at the end.
    """
    axis, at = axis_named(axis), [parse_place(place) for place in places]
    groups = selected_groups(runs)
    if len(groups) < 2 and not runs:
        raise ConfigError.of("a comparison needs two runs", hint="instar logs compare RUN RUN")
    read = read_all([*groups])
    runs_read = [record.run for record in read.records]
    sides, faults = group_runs(runs_read, by or "run", {} if by else groups)
    for fault in faults:
        click.echo(f"config not compared: {fault}", err=True)
    for note in notes_on_data({group.name: group.runs for group in sides}):
        click.echo(f"note: {note}", err=True)
    result = compare_groups(
        sides,
        read.records,
        metrics=metrics,
        places=at,
        axis=axis,
        target=target,
        target_metric=target_metric,
    )
    if output.form == "json":
        output.deliver(as_text(comparison_to_json(result)))
    elif output.form == "md":
        output.deliver(comparison_markdown(result))
    else:
        output.deliver(comparison_text(result, terminal_width()))
    return report_faults(read.faults)


@click.command()
@click.argument("run", default="latest", shell_complete=completion.run_names)
@click.option(
    "-n",
    "count",
    type=click.IntRange(min=0),
    default=20,
    show_default=True,
    metavar="N",
    help="Number of events, or lines of a log.",
)
@click.option("-f", "--follow", is_flag=True, help="Follow the run until it ends or Ctrl-C.")
@click.option(
    "--rank", type=click.IntRange(min=0), help="Show the log of this rank, not the events."
)
@json_format_option
def tail(run: str, count: int, follow: bool, rank: int | None, as_json: bool) -> None:
    """Show the last events of RUN as the console prints them, or a rank's log.

    Superseded events are shown too.
    """
    if as_json and (follow or rank is not None):
        raise ConfigError.of(
            f"--json cannot be combined with {'-f' if follow else '--rank'}",
            hint="to follow JSON lines: tail -f RUN/events.jsonl",
        )
    runs = find_runs([run], RUNS)
    run_dir = runs[-1]
    if len(runs) > 1:
        click.echo(f"{run!r} matches {len(runs)} runs; showing {run_dir.path}", err=True)
    if rank is not None:
        _tail_log(run_dir, rank, count, follow)
    elif as_json:
        _tail_json(run_dir, count)
    else:
        _tail_events(run_dir, count, follow)


def _tail_events(run: RunDir, count: int, follow: bool) -> None:
    formatter = EventFormatter(run.path, terminal_width(), unit_of(run.events))
    with _readable(run.events):
        events, end = last_events(run.events, max(count, 1))
    for event in events if count else ():
        for line in formatter.lines(event):
            click.echo(line)
    for new in added(run, events, end) if follow else ():
        for event in new:
            for line in formatter.lines(event):
                click.echo(line)


def _tail_log(run: RunDir, rank: int, count: int, follow: bool) -> None:
    path = run.log(rank)
    if not path.is_file():
        ranks = sorted(
            int(p.stem[5:]) for p in run.logs.glob("rank_*.log") if p.stem[5:].isdecimal()
        )
        hint = f"ranks with a log: {_spans(ranks)}" if ranks else "no rank has written a log yet"
        raise ConfigError.of(f"rank {rank} has no log in {run.logs}", hint=hint)
    with _readable(path):
        lines, end = last_lines(path, count)
    for line in lines:
        click.echo(line.decode("utf-8", "replace"))
    for new_lines in follow_log(run, path, end) if follow else ():
        for line in new_lines:
            click.echo(line.decode("utf-8", "replace"))


def _tail_json(run: RunDir, count: int) -> None:
    with _readable(run.events):
        events, _ = last_events(run.events, max(count, 1))
    click.echo(as_text(to_words(msgspec.to_builtins(events if count else []))))


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from error


def _spans(numbers: list[int]) -> str:
    """Format ascending numbers as ranges: `0 to 3, 5`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][-1] == number - 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    return ", ".join(f"{s[0]} to {s[-1]}" if len(s) > 1 else str(s[0]) for s in spans)
