"""`instar control`: ask something of a run that is under way."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import click

from instar.config.errors import InstarError

if TYPE_CHECKING:
    from pathlib import Path

    from instar.record.rundir import RunDir


class NotRunning(InstarError):  # noqa: N818
    """Nobody is there to do what is asked."""

    exit_code = 3


@click.command()
@click.argument("run")
@click.argument("command", type=click.Choice(["save", "stop", "status"]))
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for it to be done.",
)
@click.option("--json", "as_json", is_flag=True, help="With status: as JSON.")
def control(run: str, command: str, timeout: float, as_json: bool) -> int:
    """Ask RUN (its folder, id, name, or `latest`) to save or to stop, or how it stands.

    `stop` saves and ends the run as Ctrl-C does: instar resume goes on. Requests are files in
    the run's folder; whoever may write there may ask.
    """
    from instar.record.control import ask
    from instar.record.rundir import find_run, holder

    found = find_run(run)
    if command == "status":
        _say(_status(found), as_json)
        return 0
    if holder(found) is None:
        raise NotRunning(
            f"{found.path} is not running; to go on with it: instar resume {found.path}"
        )
    latest = found.checkpoints / "latest"
    before = _written_at(latest)
    request = ask(found.control, "save" if command == "save" else "stop")
    deadline = time.monotonic() + timeout
    while not request.answered():
        if holder(found) is None:
            request.withdraw()
            raise NotRunning(f"{found.path} has ended before it did that; see {found.logs}")
        if time.monotonic() > deadline:
            request.withdraw()
            raise NotRunning(
                f"{found.path} has not done it within {timeout:g} s, and is not asked any more; a "
                "longer --timeout waits longer"
            )
        time.sleep(0.05)
    if _written_at(latest) == before:
        raise NotRunning(f"{found.path} could not save; see {found.log(0)}")
    click.echo(f"{'saved' if command == 'save' else 'stopped'}: {latest.read_text().strip()}")
    return 0


def _written_at(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def _status(run: RunDir) -> dict[str, Any]:
    """How a run stands, from its record, its lock and its logs."""
    from instar.logs.reading.record import read
    from instar.logs.telling.state import stand
    from instar.logs.telling.summary import summarize
    from instar.record.events import Saved

    if not run.events.exists():  # it prepares its data, or came no further
        standing = stand(run, (), 0.0)
        stands = {"state": standing.state, "reason": standing.reason}
        return stands | {"process": standing.process, "run": str(run.path)}
    record = read(run)
    found = summarize(record)
    status: dict[str, Any] = {
        key: getattr(found, key) for key in ("state", "reason", "process", "step", "tokens")
    }
    status |= {"run": found.path, "seen": found.seen, "go_on": found.go_on}
    for key, metric in (
        ("loss", "loss"),
        ("tokens_per_s", "tokens_per_s"),
        ("val_loss", "val/loss"),
    ):
        if metric in found.last:
            status[key] = found.last[metric].value
    if saved := record.of(Saved):
        event = saved[-1].event
        assert isinstance(event, Saved)
        status["saved"] = event.path
    return status


def _say(status: dict[str, Any], as_json: bool) -> None:
    from instar.record.events import to_words

    if as_json:
        click.echo(json.dumps(to_words(status), indent=2))
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
        click.echo(f"go on with: {status['go_on']}")
