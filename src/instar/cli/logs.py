"""`instar logs`: what runs have written down."""

from __future__ import annotations

import click

from instar.cli.lazy import LazyGroup

COMMANDS = {
    "list": ("instar.cli.logs_list:list_", "List runs, the latest last."),
    "summary": ("instar.cli.logs_summary:summary", "What runs come to: best, last, time, state."),
    "plot": ("instar.cli.logs_plot:plot", "Draw curves, of several runs too."),
    "compare": ("instar.cli.logs_compare:compare", "Set runs side by side at equal places."),
    "tail": ("instar.cli.logs_tail:tail", "Show how a run goes on, line by line."),
    "events": ("instar.cli.logs_events:events", "Print what happened in runs, by kind or step."),
    "export": ("instar.cli.logs_export:export", "Hand a run's record to another tool."),
    "report": ("instar.cli.report:report", "Write one page that shows all of a run."),
}


@click.group(
    cls=LazyGroup,
    table=COMMANDS,
    epilog="Runs are meant by folder, id, name, pattern or `latest`, which is the default.",
)
def logs() -> None:
    """List, summarize, plot and compare runs, also while they go on."""
