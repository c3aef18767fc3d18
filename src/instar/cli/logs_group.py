"""The group `instar logs`, whose help imports none of its commands."""

from __future__ import annotations

import click

from instar.cli.options import LazyGroup

COMMANDS = {
    "list": ("instar.cli.logs:list_", "List runs, the latest last."),
    "tag": ("instar.cli.logs:tag", "Tag runs, to find them again in lists and pages."),
    "note": ("instar.cli.logs:note", "Write a note on runs, shown in lists and pages."),
    "archive": ("instar.cli.logs:archive", "Leave runs out of lists; nothing is deleted."),
    "summary": ("instar.cli.logs:summary", "Summarize runs: best and last values, time, state."),
    "plot": ("instar.cli.plot:plot", "Plot curves of one run or several."),
    "compare": ("instar.cli.logs:compare", "Compare runs at equal steps, tokens, FLOPs or time."),
    "tail": ("instar.cli.logs:tail", "Show the last events of a run, and follow it."),
    "events": ("instar.cli.export:events", "Print the events of runs, by kind or step."),
    "export": ("instar.cli.export:export", "Export runs to another tool, or as a table."),
}


@click.group(
    cls=LazyGroup,
    table=COMMANDS,
    epilog="A RUN is a folder, an id, a name, a pattern or `latest`, which is the default.",
)
def logs() -> None:
    """List, summarize, plot and compare runs, also while they train."""
