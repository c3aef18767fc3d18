"""What `instar control` does: save, stop, apply, cancel, list, status. Its options are in `train.py`, which a shell loads to
complete them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import click
import msgspec

from instar.api.control import (
    RequestOutcome,
    change_run,
    preview_operation,
    request,
)
from instar.api.waiting import read_waiting
from instar.cli.output import print_json, print_table
from instar.config.errors import ConfigError
from instar.logs.query.state import run_status
from instar.logs.query.summary import summarize
from instar.logs.read.record import read_record
from instar.record.events import Asked, Saved
from instar.record.format import asked_text, loss, operation_lines
from instar.record.rundir import RunDir, find_run
from instar.schedule.render import render_change
from instar.schedule.typed import typed_entry


def control(
    run: str, command: str, words: Sequence[str], timeout: float, dry_run: bool, as_json: bool
) -> int:
    """Do what `instar control` is asked to; return the exit code."""
    run_dir, text = find_run(run), " ".join(words)
    if bool(words) != (command in ("apply", "cancel")):
        example = (
            "apply change_lr=0.5" if command != "cancel" else "cancel entry=3, or id=ID as in list"
        )
        message = f"{command} takes nothing after it" if words else f"{command} of what?"
        raise ConfigError.of(message, f"control {command}", f"write e.g. {example}")
    if dry_run and command != "apply":
        raise ConfigError.of("--dry-run is for apply", f"control {command}")
    match command:
        case "status":
            _print_status(_status(run_dir), as_json)
        case "list":
            _print_waiting(run_dir, as_json)
        case "apply" if dry_run:
            _print_preview(run_dir, text, as_json)
        case "apply":
            entry = typed_entry(text, f"apply {text}")
            _print_outcome(change_run(run_dir, entry, timeout), as_json)
        case "cancel":
            outcome = change_run(run_dir, _what_waits(text), timeout, command="cancel")
            _print_outcome(outcome, as_json)
        case "save" | "stop":
            name = request(run_dir, "save" if command == "save" else "stop", timeout)
            click.echo(f"{'saved' if command == 'save' else 'stopped'}: {name}")
    return 0


def _what_waits(text: str) -> dict[str, Any]:
    """Return what `entry=N` or `id=ID` names; an id may look like a number."""
    name, _, id_ = text.partition("=")
    if name == "id" and id_:
        return {name: id_}
    which = typed_entry(text, f"cancel {text}")
    if which.pop("name") != "entry" or which.keys() != {"value"}:
        hint = "write entry=N or id=ID, as `list` prints them"
        raise ConfigError.of(f"{text!r} names nothing that waits", "cancel", hint)
    return {"entry": which["value"]}


def _print_outcome(outcome: RequestOutcome, as_json: bool) -> None:
    event = outcome.event
    if as_json:
        fields = msgspec.to_builtins(event)
        print_json({"id": outcome.id, "outcome": outcome.outcome, "event": fields})
        return
    lines = [asked_text(event)] if isinstance(event, Asked) else operation_lines(event)
    click.echo("\n".join(line.strip() for line in lines))


def _print_waiting(run: RunDir, as_json: bool) -> None:
    waiting = read_waiting(run)
    if as_json:
        print_json(msgspec.to_builtins(waiting))
        return
    rows = [
        [
            f"id={entry.id}" if entry.id else f"entry={entry.entry}",
            f"{entry.name}{'' if entry.value is None else f' {entry.value}'}",
            " ".join(f"{key}={value}" for key, value in entry.options.items()),
            entry.when,
            entry.by,
        ]
        for entry in (*waiting.asked, *waiting.schedule)
    ]
    if rows:
        print_table(["CANCEL", "OPERATION", "OPTIONS", "WHEN", "ASKED BY"], rows)
    else:
        click.echo("nothing waits", err=True)


def _print_preview(run: RunDir, text: str, as_json: bool) -> None:
    preview = preview_operation(run, typed_entry(text, f"apply {text}"))
    if as_json:
        print_json(
            {
                "as_of": preview.as_of,
                "skipped": preview.after.skipped,
                **{
                    name: {
                        "settings": dataclasses.asdict(stage.settings),
                        "architecture": dict(stage.architecture.to_dict()),
                        "parameters": stage.parameters.total,
                        "memory_bytes": sum(stage.memory_bytes.values()),
                    }
                    for name, stage in (("before", preview.before), ("after", preview.after))
                },
            }
        )
        return
    click.echo(render_change(preview.before, preview.after, preview.unit, preview.world_size))
    click.echo(f"As of {preview.as_of}; nothing was asked for.", err=True)


def _status(run: RunDir) -> dict[str, Any]:
    """Return the status of a run, from its record, its lock and its logs."""
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
            parts.append(f"{name} {loss(status[key], 4)}")
    if "saved" in status:
        parts.append(f"saved {status['saved']}")
    click.echo("  ".join(parts))
    if status.get("go_on"):
        click.echo(f"resume with: {status['go_on']}")
