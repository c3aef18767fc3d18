"""What `instar logs list`, `tag`, `note`, `archive`, `summary`, `compare`, `plot` and `tail` do; their options are in `logs.py`."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import click
import msgspec

from instar.api.runs import RUNS, listed_runs, read_all, selected_groups, selected_runs
from instar.cli.logs import FORMATS
from instar.cli.output import (
    WIDTH,
    Output,
    as_text,
    open_file,
    packs_output,
    print_table,
    report_faults,
    terminal_width,
)
from instar.config.errors import ConfigError, without_filter
from instar.extensions import how_to_install, plot_in
from instar.logs.plot.chart import Chart
from instar.logs.plot.compose import LOSS_CURVES, ChartRequest, compose
from instar.logs.plot.picture import picture
from instar.logs.plot.terminal import TerminalSize, terminal
from instar.logs.query.alignment import axis_named, parse_place, place_on
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
)
from instar.logs.query.summary import Summary, summarize, summary_to_json
from instar.logs.query.tail import follow_log, last_events, last_lines, unit_of
from instar.logs.query.tail import follow_record as added
from instar.logs.read.record import AXES, RunRecord
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
from instar.record.atomic import replace_file
from instar.record.events import RecordError, to_words
from instar.record.format import duration, loss, si
from instar.record.rundir import RunDir

HEADERS = ("id", "name", "state", "step", "tokens", "loss", "best val", "at", "time", "started")
NUMBERS = ("step", "tokens", "loss", "best val", "at", "time")
OPTIONAL = ("at", "tokens", "started", "time", "name", "tags", "branch at", "best val", "loss")
"""Columns that are omitted on a narrow terminal, in this order; `tags` and `branch at` are there if a run has
some."""


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
    if any(row.summary.imported_from for row in rows):
        origins = (row.summary.imported_from or "" for _, row in trees)
        headers = (*headers, "imported from")
        cells = [(*row_cells, origin) for row_cells, origin in zip(cells, origins, strict=True)]
    if any(row.labels.tags for row in rows):
        tags = (" ".join(row.labels.tags) for _, row in trees)
        headers = (*headers, "tags")
        cells = [(*row_cells, tag) for row_cells, tag in zip(cells, tags, strict=True)]
    return headers, cells


def _row_cells(row: Row, depth: int) -> tuple[str, ...]:
    summary = row.summary
    unknown_tokens = (None, 0) if summary.imported_from else (None,)
    return (
        indent_text(summary.id, depth),
        summary.name,
        row.status.state,
        NONE if summary.step is None else f"{summary.step:,}",
        NONE if summary.tokens in unknown_tokens else si(summary.tokens or 0),
        NONE if summary.loss is None else loss(summary.loss),
        best_text(summary.best_metric, summary.best),
        NONE if summary.best_step is None else f"{summary.best_step:,}",
        NONE if row.time_s is None else duration(row.time_s),
        date(summary.started or 0.0)[:-3] or NONE,
    )


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


@packs_output()
def summarize_runs(runs: tuple[str, ...], every: bool, output: Output) -> int:
    """Print summaries of runs."""
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


@packs_output()
def compare_runs(
    runs: tuple[str, ...],
    metrics: tuple[str, ...],
    places: tuple[str, ...],
    axis: str,
    target: float | None,
    target_metric: str,
    by: By | None,
    output: Output,
) -> int:
    """Print a comparison of runs."""
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


def show_tail(run: str, count: int, follow: bool, rank: int | None, as_json: bool) -> None:
    """Print the last events of a run or the last lines of a rank's log, and follow them."""
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


_HEIGHT = 24
_SUFFIXES = {f".{form}": form for form in FORMATS} | {".htm": "html", ".txt": "text"}


def _choose_picture(form: str | None, path: str | None, as_json: bool, open_it: bool) -> Output:
    """Choose the format: --format, else by FILE's suffix, else text; a picture to open. `-o -` is stdout."""
    is_dash, path = path == "-", None if path == "-" else path
    if not form:
        default = "json" if as_json else "png" if open_it else "text"
        form = default if as_json or path is None else _form_of(path)
    return Output(form, path, open_it and not (is_dash and form not in ("text", "json")))


def _form_of(path: str) -> str:
    suffix = Path(path).suffix.lower()
    if suffix in _SUFFIXES:
        return _SUFFIXES[suffix]
    raise ConfigError.of(
        f"{path} has no suffix of a known format",
        where="-o",
        hint="use .png, .svg, .pdf, .html, .txt or .json, or --format",
    )


@packs_output(_choose_picture)
def plot_runs(
    runs: tuple[str, ...],
    metrics: str | None,
    loss_curves: bool,
    compare: bool,
    by: By | None,
    axis: str,
    output: Output,
    **look: Any,
) -> int:
    """Draw curves of runs."""
    if output.form == "html" and plot_in(output.form) is None:
        remedy = how_to_install("plots", output.form)
        raise ConfigError.of(f"no extension draws {output.form}", "--format", remedy)
    x = axis_named(axis, AXES, "--x")
    groups = selected_groups(runs, every=compare)
    for name, option in (("start", "--from"), ("end", "--to")):
        if look[name] is not None:
            look[name] = place_on(x, look[name], option)
    request = ChartRequest(
        panels=_panels(metrics, loss_curves=loss_curves),
        axis=x,
        by=by or "run",
        group_names={} if by else groups,
        **look,
    )
    read = read_all([*groups])
    _deliver(read.records, request, output)
    return report_faults(read.faults)


def _panels(metrics: str | None, *, loss_curves: bool) -> tuple[tuple[str, ...], ...]:
    names = [name.strip() for name in (metrics or "").split(",")]
    panels = tuple((name,) for name in dict.fromkeys(filter(None, names)))
    return (*LOSS_CURVES, *panels) if loss_curves or not panels else panels


def _deliver(records: tuple[RunRecord, ...], request: ChartRequest, output: Output) -> None:
    """Draw the chart and write it to its destination."""
    chart = compose(records, request)
    if output.form == "json":
        output.deliver(as_text(chart.to_dict()))
    elif output.form != "text":
        _write(_draw(chart, records, request, output.form), output)
    elif output.path is None and not output.open_it:
        with without_filter(sys.stdout):
            # already in stdout's encoding
            click.echo(terminal(chart, _screen(to_stdout=True)), color=True)
    else:
        output.deliver(terminal(chart, _screen(to_stdout=output.path is None)))


def _draw(chart: Chart, records: tuple[RunRecord, ...], request: ChartRequest, form: str) -> bytes:
    if form == "html":
        page: str = plot_in(form)(records, chart, request)
        return page.encode("utf-8", "backslashreplace")

    return picture(chart, cast(Literal["png", "svg", "pdf"], form))


def _write(data: bytes, output: Output) -> None:
    """Write atomically to FILE; without it to stdout, or to a new file that is opened."""
    if output.path is not None:
        path = Path(output.path)
    elif output.open_it:
        path = Path(tempfile.mkdtemp(prefix="instar-")) / f"plot.{output.form}"
    elif terminal_width() is None:
        sys.stdout.buffer.write(data)
        return
    else:
        raise ConfigError.of(
            f"a terminal cannot show {output.form}", hint="name a file with -o FILE"
        )
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)  # a pipe or a device
        else:
            replace_file(path, data)
    except OSError as error:
        raise ConfigError.of(f"cannot write {path}: {error.strerror}", where="-o") from error
    click.echo(f"wrote {path}", err=True)
    if output.open_it:
        open_file(path)


def _screen(*, to_stdout: bool) -> TerminalSize:
    """Return what stdout can display; a file takes everything but colours."""
    if not to_stdout:
        return TerminalSize(WIDTH, _HEIGHT)
    size = shutil.get_terminal_size((WIDTH, _HEIGHT))
    is_terminal = terminal_width() is not None
    plain = os.environ.get("TERM") == "dumb" or os.environ.get("LC_ALL") in ("C", "POSIX")
    encoding = (getattr(sys.stdout, "encoding", None) or "ascii").lower().replace("-", "")
    return TerminalSize(
        max(size.columns, 20),
        max(size.lines, 12),
        colour=is_terminal and not plain and not os.environ.get("NO_COLOR"),
        ascii=plain or not encoding.startswith("utf"),
    )
