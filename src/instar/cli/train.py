"""The commands `instar train`, `resume`, `test`, `sample` and `control`. Imports little: a shell that completes their
arguments loads this."""

from __future__ import annotations

import json
from typing import Any

import click

from instar.cli import completion
from instar.cli.options import (
    DeferredCommand,
    allow_option,
    from_option,
    json_option,
    profile_option,
    rank_options,
    set_option,
    trust_option,
)
from instar.cli.output import print_json
from instar.config.files import read_regular
from instar.record.rundir import find_run

COMMANDS = ("apply", "cancel", "list", "save", "status", "stop")
"""of `instar control`"""


@click.command(
    cls=DeferredCommand,
    work="instar.cli.training:train",
    epilog="Without CFG, the run uses the default config and --set. Start with: instar init gpt",
)
@click.argument("cfg", required=False, type=click.Path())
@rank_options
@set_option
@click.option("--schedule", metavar="FILE", help="Schedule of operations; a YAML or JSON file.")
@click.option(
    "--until",
    multiple=True,
    metavar="BUDGET",
    help="When to stop, instead of train.until: 2000it, 50Mtok, 3ep, 10min, loss<3.0.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Maximum number of restarts of all ranks from the last checkpoint after a failure.",
)
@click.option(
    "--resume",
    metavar="RUN",
    shell_complete=completion.run_names,
    help="Resume this run; CFG is its run.yaml.",
)
@click.option("--from", "start", default="latest", help="With --resume: latest, best, or a step.")
@trust_option
@allow_option("With --resume: resume although this has changed.")
@click.option("--only-test", is_flag=True, hidden=True)
@profile_option
@click.option("--dry-run", is_flag=True, help="Print a forecast of the run without starting it.")
@click.option(
    "--on",
    metavar="HARDWARE",
    help="With --dry-run: time, memory and cost on other devices, e.g. 8xH100, or 2x8xH100 for 2 hosts.",
)
@click.option(
    "--utilization",
    type=click.FloatRange(0, 1, min_open=True),
    help="With --on: share of the devices' peak that a step reaches.  [default: 0.4 with compile, else 0.25]",
)
@click.option(
    "--json", "as_json", is_flag=True, help="One line of JSON; with --dry-run, the forecast."
)
def train() -> None:
    """Train the model that CFG describes."""


@click.command()
@click.argument("run", shell_complete=completion.run_names)
@rank_options
@from_option("latest", "latest, best, best-<metric>, or a step.")
@set_option
@click.option("--until", multiple=True, metavar="BUDGET", help="A new end, e.g. 4000it.")
@profile_option
@trust_option
@allow_option("Resume although this has changed.")
@click.pass_context
def resume(context: click.Context, /, run: str, **options: Any) -> int:
    """Resume RUN (its folder, id, name, or `latest`) from its latest whole checkpoint.

    The number of ranks may differ: the remaining samples are the same. Changed settings are
    recorded and stay in force from then on.
    """
    code: int = context.invoke(train, resume=run, **options)
    return code


@click.command()
@click.argument("run", shell_complete=completion.run_names)
@rank_options
@from_option("best", "best, best-<metric>, latest, or a step.")
@set_option
@trust_option
@json_option
@click.pass_context
def test(context: click.Context, /, run: str, as_json: bool, **options: Any) -> int:
    """Test a checkpoint of RUN (its folder, id, name, or `latest`) on the whole test split.

    Writes `test/result.json` in the run's folder, and `test/predictions.parquet` if the task
    makes predictions, without training. The result does not depend on the number of ranks.
    """
    code: int = context.invoke(train, resume=run, only_test=True, **options)
    if as_json and code == 0:
        print_json(json.loads(read_regular(find_run(run).path / "test" / "result.json")))
    return code


@click.command()
@click.argument("run", metavar="RUN|CHECKPOINT", shell_complete=completion.checkpoints)
@click.option("--prompt", default="\n", show_default="a new line", help="Text to continue.")
@click.option("--chat", is_flag=True, help="The prompt is what a user says: print the answer.")
@click.option("--max-tokens", "--tokens", default=200, show_default=True, type=click.IntRange(1))
@click.option("--num", "--samples", default=1, show_default=True, type=click.IntRange(1, 10**4))
@click.option("--temperature", default=0.8, show_default=True, type=click.FloatRange(min=0.0))
@click.option("--top-k", default=50, show_default=True, type=click.IntRange(min=1))
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), help="Nucleus sampling.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; repeatable.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**63 - 1))
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda")
@json_option
def sample(run: str, prompt: str, as_json: bool, **options: Any) -> None:
    """Print text generated by the model of a run (its folder, id, name, or `latest`), as it is
    generated; Ctrl-C ends it. The same seed gives the same text."""
    from instar.api import models

    if as_json:
        print_json({"texts": models.sample(run, prompt, **options)})
        return
    last_printed = -1
    try:
        for number, piece in models.stream_samples(run, prompt, **options):
            if number > last_printed:
                click.echo(("\n" + "─" * 8 + "\n") * (number > 0), nl=False)
                last_printed = number
            click.echo(piece, nl=False)
    finally:
        if last_printed >= 0:
            click.echo()


@click.command(cls=DeferredCommand, work="instar.cli.control:control")
@click.argument("run", shell_complete=completion.run_names)
@click.argument("command", type=click.Choice(COMMANDS))
@click.argument("words", nargs=-1, metavar="[NAME=VALUE]...")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="Maximum wait for the request to be carried out.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="With apply: show what would become of settings, shape and memory, and ask for nothing.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def control() -> None:
    """Make RUN (its folder, id, name, or `latest`) save, stop or carry out an operation, or print its status.

    `stop` saves and ends the run as Ctrl-C does; `instar resume` continues it. `apply change_lr=0.5`
    or `apply insert_layers=2 where=even` carries out an operation of a schedule after the next step,
    or when its trigger fires, e.g. `when='{at_step: 5000}'`. `list` prints what waits, `cancel
    entry=3` or `cancel id=…` gives it up. Requests are files in the run's folder: its owner and root
    can ask for operations, everyone with write access there for the rest.
    """
