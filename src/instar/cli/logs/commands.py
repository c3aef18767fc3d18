"""The commands of `instar logs`: what they are given, and their help. What they do is imported when they are called: a
shell that completes their arguments loads only this."""

from __future__ import annotations

import click

from instar.cli import completion
from instar.cli.options import DeferredCommand, LazyGroup
from instar.cli.output import (
    json_format_option,
    output_options,
    runs_argument,
)
from instar.record.trackers import TRACKERS

TABLES = ("csv", "parquet", "jsonl")
FORMATS = ("png", "svg", "pdf", "html", "text", "json")
COMMANDS = {
    "list": ("instar.cli.logs.commands:list_", "List runs, the latest last."),
    "tag": ("instar.cli.logs.commands:tag", "Tag runs, to find them again in lists and pages."),
    "note": ("instar.cli.logs.commands:note", "Write a note on runs, shown in lists and pages."),
    "archive": ("instar.cli.logs.commands:archive", "Leave runs out of lists; nothing is deleted."),
    "summary": (
        "instar.cli.logs.commands:summary",
        "Summarize runs: best and last values, time, state.",
    ),
    "plot": ("instar.cli.logs.commands:plot", "Plot curves of one run or several."),
    "compare": (
        "instar.cli.logs.commands:compare",
        "Compare runs at equal steps, tokens, FLOPs or time.",
    ),
    "tail": ("instar.cli.logs.commands:tail", "Show the last events of a run, and follow it."),
    "events": ("instar.cli.logs.commands:events", "Print the events of runs, by kind or step."),
    "export": ("instar.cli.logs.commands:export", "Export runs to another tool, or as a table."),
}


@click.group(
    cls=LazyGroup,
    table=COMMANDS,
    epilog="A RUN is a folder, an id, a name, a pattern or `latest`, which is the default.",
)
def logs() -> None:
    """List, summarize, plot and compare runs, also while they train."""


@click.command("list", cls=DeferredCommand, work="instar.cli.logs.run_list:list_runs_in")
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
def list_() -> None:
    """List the runs in each DIR (default: runs), the most recently written last.

    A DIR may also be a fleet, a run, a name, or a pattern.
    """


@click.command(cls=DeferredCommand, work="instar.cli.logs.run_list:tag_runs")
@runs_argument
@click.option("-a", "--add", multiple=True, metavar="TAG", help="Add this tag.")
@click.option("-r", "--remove", multiple=True, metavar="TAG", help="Remove this tag.")
def tag() -> None:
    """Add or remove tags of each RUN, then print them. They are kept in .instar/labels.json."""


@click.command(cls=DeferredCommand, work="instar.cli.logs.run_list:note_runs")
@runs_argument
@click.option("-m", "--message", metavar="TEXT", help="The note; an empty one removes it.")
def note() -> None:
    """Set the note of each RUN, then print it."""


@click.command(cls=DeferredCommand, work="instar.cli.logs.run_list:archive_runs")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--undo", is_flag=True, help="Show them again.")
def archive() -> None:
    """Leave each RUN out of lists and of the dashboard; its files stay as they are."""


@click.command(cls=DeferredCommand, work="instar.cli.logs.summaries:summarize_runs")
@runs_argument
@click.option("--all", "every", is_flag=True, help="Every run in the folder `runs`, or in DIR.")
@output_options("text", "json", "md", "one-line")
def summary() -> None:
    """Summarize each RUN: state, amounts, best and last values, operations, checkpoints.

    A RUN is a folder, an id, a name (all runs of that name), a pattern, a file in a run, a folder
    of runs, or `latest`, which is the default. Superseded steps are ignored.
    --format one-line prints one line for each run, always with the same fields.
    """


@click.command(cls=DeferredCommand, work="instar.cli.logs.summaries:compare_runs")
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
    help="What to compare: single runs, groups of one name, or groups that differ only in the seed or the fold. "
    "[default: run; of a fleet, groups that its matrix makes]",
)
@output_options("text", "json", "md")
def compare() -> None:
    """Compare RUNs at equal steps, tokens, FLOPs or time, interpolating between measurements.

    A RUN may also be a fleet, such as fleets/NAME: its runs, in groups that differ only in the seed or the fold.
    "-" marks a place that a run has not reached. Groups (--by) show the mean and the standard
    deviation over runs. The keys in which the configs differ follow at the end.
    """


@click.command(cls=DeferredCommand, work="instar.cli.logs.tail:show_tail")
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
def tail() -> None:
    """Show the last events of RUN as the console prints them, or a rank's log.

    Superseded events are shown too.
    """


@click.command(cls=DeferredCommand, work="instar.cli.logs.plot:plot_runs")
@runs_argument
@click.option(
    "--metrics", metavar="NAMES", help="Metrics, each in its own panel, e.g. loss,grad_norm."
)
@click.option("--loss-curves", is_flag=True, help="Training and validation loss; the default.")
@click.option("--compare", is_flag=True, help="Overlay runs; without RUN, all of them.")
@click.option(
    "--by",
    type=click.Choice(["run", "name", "seed"]),
    help="Draw single runs, or mean and standard deviation of runs of one name, or that differ only in "
    "the seed.  [default: run; of a fleet, groups that its matrix makes]",
)
@click.option(
    "-x",
    "--x",
    "axis",
    default="step",
    show_default=True,
    metavar="AXIS",
    help="step, samples, tokens, epoch, flops, wall, active or time.",
)
@click.option("--from", "start", metavar="X", help="Begin at this place, such as 20M or 10min.")
@click.option("--to", "end", metavar="X", help="End at this place.")
@click.option(
    "--smooth",
    "weight",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    metavar="WEIGHT",
    help="Weight of an exponential moving average, 0 to 1; the raw curve is drawn behind it.",
)
@click.option("--log", is_flag=True, help="A logarithmic y axis.")
@click.option("--log-x", is_flag=True, help="A logarithmic x axis.")
@click.option("--lr", is_flag=True, help="The learning rate on a second y axis.")
@click.option(
    "--clip",
    type=click.FloatRange(50, 100, min_open=True),
    metavar="PERCENT",
    help="Clip the y axis to this percentile of the values and its opposite.",
)
@click.option("--marks/--no-marks", default=True, help="Operations, checkpoints, resumes, alerts.")
@click.option(
    "-o", "--output", "path", metavar="FILE", help="Write a .png, .svg, .pdf, .html, .txt, .json."
)
@click.option("-e", "--open", "open_it", is_flag=True, help="Open the picture.")
@click.option("--format", "form", type=click.Choice(FORMATS), help="Default: by FILE's suffix.")
@json_format_option
def plot() -> None:
    """Draw curves of the latest run, or of each RUN, overlaid.

    A RUN may also be a fleet, such as fleets/NAME: mean and standard deviation over its seeds.
    Without -o or -e, draws in the terminal. Operations are marked, superseded steps are faint, and
    the best value of a validation metric has a ring.
    """


@click.command(cls=DeferredCommand, work="instar.cli.logs.export:write_events")
@runs_argument
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    metavar="KIND",
    help="Only train, eval, operation, checkpoint, …; may be given several times.",
)
@click.option("--from-step", type=click.IntRange(min=0), metavar="N", help="Not before this step.")
@click.option("--to-step", type=click.IntRange(min=0), metavar="N", help="Not after this step.")
@click.option("--superseded", is_flag=True, help="Include superseded events.")
@output_options("text", "jsonl", "json")
def events() -> None:
    """Print the events of each RUN: as text, as JSON lines (jsonl) or as one JSON document.

    JSON lines of a single run are identical to its record; for several runs, or with
    --superseded, `run` and `superseded` are added.
    """


@click.command(cls=DeferredCommand, work="instar.cli.logs.export:export_runs")
@runs_argument
@click.option(
    "--to",
    required=True,
    type=click.Choice([*TRACKERS, *TABLES]),
    help="A tool, or a file format: csv and parquet have a row per step, jsonl a line per event.",
)
@click.option(
    "-o",
    "--output",
    metavar="DIR|FILE",
    help="Destination.  [default: stdout for tables; the tool's own location for tools]",
)
@click.option("--superseded", is_flag=True, help="Include superseded events.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def export() -> None:
    """Export the record of each RUN to another tool, or as a table.

    A RUN is a folder, an id, a name (all runs of that name), a pattern, a file in a run, a folder
    of runs, or `latest`, which is the default. Nothing is uploaded: runs for W&B are written for
    `wandb sync`. Exporting a run again adds a second copy.
    """
