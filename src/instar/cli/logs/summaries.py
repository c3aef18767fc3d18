"""What `instar logs summary` and `compare` do."""

from __future__ import annotations

from collections.abc import Sequence

import click

from instar.api.selection import selected_groups, selected_runs
from instar.cli.output import WIDTH, Output, as_text, packs_output, report_faults, terminal_width
from instar.config.errors import ConfigError
from instar.logs.query.alignment import axis_named, parse_place
from instar.logs.query.compare import compare_groups, comparison_to_json
from instar.logs.query.groups import By, group_runs, notes_on_data
from instar.logs.query.summary import Summary, summarize, summary_to_json
from instar.logs.read.record import read_all
from instar.logs.text.comparison import comparison_markdown, comparison_text
from instar.logs.text.summary import one_lines, page, summary_markdown


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
