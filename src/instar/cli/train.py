"""The commands `instar train`, `resume`, `test`, `sample` and `control`. Imports little: a shell that completes their
arguments loads this."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from instar.checkpoint.manifest import CheckpointError, read_manifest
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
from instar.config.errors import InstarError
from instar.config.files import read_regular
from instar.logs.query.state import run_status
from instar.record.control import REQUESTED, send_request
from instar.record.events import Saved
from instar.record.lock import lock_owner
from instar.record.rundir import RunDir, find_run


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


class NotRunning(InstarError):  # noqa: N818
    """No running process can handle the request."""

    exit_code = 3


@click.command()
@click.argument("run", shell_complete=completion.run_names)
@click.argument("command", type=click.Choice(["save", "stop", "status"]))
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="Maximum wait for the request to be carried out.",
)
@click.option("--json", "as_json", is_flag=True, help="With status: as JSON.")
def control(run: str, command: str, timeout: float, as_json: bool) -> int:
    """Make RUN (its folder, id, name, or `latest`) save or stop, or print its status.

    `stop` saves and ends the run as Ctrl-C does; `instar resume` continues it. Requests are files
    in the run's folder, so everyone with write access there can make them.
    """
    run_dir = find_run(run)
    if command == "status":
        _print_status(_status(run_dir), as_json)
        return 0
    if lock_owner(run_dir.lock) is None:
        raise NotRunning(
            f"{run_dir.path} is not running; resume it with: instar resume {run_dir.shell_word}"
        )
    latest = run_dir.checkpoints / "latest"
    before = _identity(latest)
    request = send_request(run_dir.control, "save" if command == "save" else "stop")
    deadline = time.monotonic() + timeout
    while not request.is_answered():
        # a run that cannot delete another user's request still handles it
        if command == "save" and _identity(latest) != before and _saved_on_request(run_dir):
            request.withdraw()
            break
        if lock_owner(run_dir.lock) is None:
            request.withdraw()
            if command == "stop" and _identity(latest) != before:
                break
            raise NotRunning(
                f"{run_dir.path} ended before it handled the request; see {run_dir.logs}"
            )
        if time.monotonic() > deadline:
            request.withdraw()
            raise NotRunning(
                f"{run_dir.path} did not handle the request within {timeout:g} s; the request is "
                "withdrawn; set a longer --timeout"
            )
        time.sleep(0.05)
    if _identity(latest) == before:
        raise NotRunning(f"{run_dir.path} could not save; see {run_dir.log(0)}")
    click.echo(
        f"{'saved' if command == 'save' else 'stopped'}: {read_regular(latest).decode().strip()}"
    )
    return 0


def _identity(path: Path) -> tuple[int, int]:
    """Return a value that changes whenever the file is replaced."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_ino, status.st_mtime_ns


def _saved_on_request(run: RunDir) -> bool:
    """Return whether the latest checkpoint was saved on request."""
    path = run.latest_checkpoint()
    try:
        return path is not None and REQUESTED in read_manifest(path).reason
    except (OSError, ValueError, CheckpointError):
        return False


def _status(run: RunDir) -> dict[str, Any]:
    """Return the status of a run, from its record, its lock and its logs."""
    from instar.logs.query.summary import summarize
    from instar.logs.read.record import read_record

    if not run.events.exists():  # it is preparing its data, or stopped before training
        state = run_status(run, (), 0.0)
        states = {"state": state.state, "reason": state.reason}
        return states | {"process": state.process, "run": str(run.path)}
    record = read_record(run)
    summary = summarize(record)
    status: dict[str, Any] = {
        key: getattr(summary, key) for key in ("state", "reason", "process", "step", "tokens")
    }
    status |= {"run": summary.path, "seen": summary.seen, "go_on": summary.go_on}
    for key, metric in (
        ("loss", "loss"),
        ("tokens_per_s", "tokens_per_s"),
        ("val_loss", "val/loss"),
    ):
        if metric in summary.last:
            status[key] = summary.last[metric].value
    if save_event := record.of(Saved):
        status["saved"] = save_event[-1].event.path
    return status


def _print_status(status: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(status)
        return
    reason = f" ({status['reason']})" if status["reason"] else ""
    parts = [f"{status['run']}: {status['state']}{reason}"]
    if status["process"]:
        parts.append(f"process {status['process']}")
    if "step" in status:
        parts.append(f"step {status['step']:,}")
    if status.get("seen"):
        parts.append(f"{max(0.0, time.time() - status['seen']):.0f} s ago")
    for key, name in (("loss", "loss"), ("val_loss", "val")):
        if key in status:
            parts.append(f"{name} {status[key]:.4f}")
    if "saved" in status:
        parts.append(f"saved {status['saved']}")
    click.echo("  ".join(parts))
    if status.get("go_on"):
        click.echo(f"resume with: {status['go_on']}")
