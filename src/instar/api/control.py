"""A running run from outside: it saves, stops, carries out operations or gives them up (docs/control.md)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from instar.api.waiting import config_in_force, latest_manifest, read_waiting
from instar.config.errors import ConfigError, InstarError
from instar.config.files import read_regular
from instar.config.sections import ScheduledOperation
from instar.logs.query.tail import Follower
from instar.logs.read.reader_cache import cached_summary
from instar.record.control import (
    REQUESTED,
    Command,
    Post,
    send_post,
    send_request,
    user_name,
)
from instar.record.events import Asked, OperationEvent, RunStarted
from instar.record.imported import refuse_imported
from instar.record.lock import lock_owner
from instar.record.rundir import RunDir
from instar.record.start_folder import begun_in
from instar.run.load_config import load_run_config
from instar.schedule.forecast import Stage, forecast_change
from instar.schedule.operations import fold_history, history_from_json, initial_state
from instar.schedule.posted import normalize
from instar.schedule.triggers import entry_of

_POLL_S = 0.05
_TAKE_IN_S = 1.0
"""how long a withdrawn request may still be one that the run had just read"""


class NotRunning(InstarError):  # noqa: N818
    """No running process can handle the request."""

    exit_code = 3


class Refused(InstarError):  # noqa: N818
    """The run has refused what it was asked for; it goes on unchanged."""

    exit_code = 2


@dataclass(frozen=True)
class RequestOutcome:
    """What became of a request."""

    id: str
    outcome: Literal["done", "waits", "cancelled"]
    event: Asked | OperationEvent


@dataclass(frozen=True)
class Preview:
    """What would become of a run by an operation: as of its latest checkpoint, or of its start."""

    before: Stage
    after: Stage
    unit: str
    """of the task's data"""
    world_size: int
    as_of: str
    """the checkpoint's name, or "the start"""


def check_operation_for(run: RunDir, content: Mapping[str, Any]) -> None:
    """Check an operation against a run's config, as the run itself will against its present state.

    Args:
        content: the keys of a schedule's entry: `name`, `value`, the operation's options, a trigger.

    Raises:
        ConfigError: no run of this config could carry it out.
    """
    try:
        normalize(content, config_in_force(run))
    except ValueError as error:
        raise ConfigError.of(str(error)) from None


def preview_operation(run: RunDir, content: Mapping[str, Any]) -> Preview:
    """Return what would become of a run's settings, shape, memory and cost by an operation. Nothing is posted.

    Raises:
        ConfigError: it is not possible.
    """
    from instar.run.start.preflight import preflight  # opens the data

    run, base, overrides = begun_in(run, ())
    manifest, world_size = latest_manifest(run), _world_size(run)
    try:
        with chdir(base):
            loaded_config = load_run_config(str(run.config), overrides, resuming=True)
            spec = preflight(loaded_config, world_size, new=False).spec
        operation = ScheduledOperation.model_validate(normalize(content, loaded_config.config))
        entry = entry_of(None, operation)
        history = history_from_json(manifest.history if manifest is not None else ())
        state = fold_history(
            initial_state(loaded_config.config, spec.architecture, spec.facts), history
        )
        before, after = forecast_change(state, entry, spec, world_size)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError.of(str(error)) from None
    as_of = f"step-{manifest.step}" if manifest is not None else "the start"
    return Preview(before, after, spec.unit, world_size, as_of)


def post_operation(run: RunDir, content: Mapping[str, Any]) -> str:
    """Ask a running run for an operation; return the request's id.

    Args:
        content: see `check_operation_for`.

    Raises:
        NotRunning: nothing trains in the folder.
        ConfigError: no run of this config could carry it out, or it is too long.
    """
    check_operation_for(run, content)
    return _post(run, "apply", content).id


def post_cancel(run: RunDir, which: Mapping[str, Any]) -> str:
    """Ask a running run to give up what waits; return the request's id.

    Args:
        which: {"id": of a request} or {"entry": index in the schedule}.

    Raises:
        NotRunning: nothing trains in the folder.
    """
    return _post(run, "cancel", which).id


def change_run(
    run: RunDir,
    content: Mapping[str, Any],
    timeout_s: float = 120.0,
    *,
    command: Literal["apply", "cancel"] = "apply",
) -> RequestOutcome:
    """Ask a running run for an operation, or to give one up, and wait for what becomes of it.

    Args:
        content: see `check_operation_for`; for cancel see `post_cancel`.

    Raises:
        Refused: the run cannot carry it out; says why.
        NotRunning: nothing trains in the folder, or it has not answered in time: then the request is withdrawn,
            unless the run has taken it in, and is still carrying it out.
        ConfigError: see `post_operation`.
    """
    if command == "cancel" and lock_owner(run.lock) is None:
        refuse_imported(run)
        return _cancel_at_rest(run, content)
    offset = run.events.stat().st_size if run.events.exists() else 0
    if command == "apply":
        check_operation_for(run, content)
    post = _post(run, command, content)
    deadline, withdrawn = time.monotonic() + timeout_s, False
    for event in _answers(run, offset, post.id):
        if event is not None:
            if isinstance(event, OperationEvent):
                return RequestOutcome(post.id, "done", event)
            if event.outcome == "refused":
                raise Refused(f"{run.path} refused it: {event.reason}")
            return RequestOutcome(post.id, event.outcome, event)
        if lock_owner(run.lock) is None:
            post.path.unlink(missing_ok=True)
            raise NotRunning(f"{run.path} ended before it answered; see {run.logs}")
        if time.monotonic() > deadline:
            late = f"{run.path} did not answer within {timeout_s:g} s"
            if any(entry.id == post.id for entry in read_waiting(run).asked):
                raise NotRunning(
                    f"{late}, but has taken {post.id} in, and carries it out as soon as it can; see "
                    f"instar control {run.shell_word} list"
                )
            if withdrawn:
                raise NotRunning(f"{late}; the request is withdrawn; set a longer --timeout")
            post.path.unlink(missing_ok=True)
            deadline, withdrawn = deadline + _TAKE_IN_S, True
        time.sleep(_POLL_S)
    raise AssertionError("the answers do not end")


def _cancel_at_rest(run: RunDir, target: Mapping[str, Any]) -> RequestOutcome:
    """Give up what a run that does not train would carry out at its next resume.

    Raises:
        Refused: nothing of that waits.
        ConfigError: see `post_operation`.
    """
    waiting = read_waiting(run)
    entries = [*waiting.asked, *waiting.schedule]
    is_index = type(target.get("entry")) is int  # 0.0 and False are equal to 0
    matches = [
        entry
        for entry in entries
        if (entry.id and target == {"id": entry.id})
        or (is_index and target == {"entry": entry.entry})
    ]
    if not matches:
        names = (f"id={e.id}" if e.id else f"entry={e.entry}" for e in entries)
        raise Refused(
            f"{run.path}: that does not wait; what waits: {', '.join(names) or 'nothing'}"
        )
    entry = matches[0]
    try:
        post = send_post(run.control, "cancel", target)
    except (TypeError, ValueError) as error:
        raise ConfigError.of(f"the request cannot be sent: {error}") from None
    try:
        post.read()  # as the resume will, which hears the run's owner and root alone
    except ValueError as error:
        post.path.unlink(missing_ok=True)
        raise Refused(f"{run.path}: its resume would refuse it: {error}") from None
    manifest = latest_manifest(run)
    event = Asked(
        step=0 if manifest is None else manifest.step,
        id=post.id,
        by=user_name(os.geteuid()),
        outcome="cancelled",
        operation=entry.name,
        value=entry.value,
        reason="the next resume gives it up before its first step",
    )
    return RequestOutcome(post.id, "cancelled", event)


def request(run: RunDir, command: Command, timeout_s: float = 120.0) -> str:
    """Make a running run save, or save and stop; return the checkpoint's name.

    Raises:
        NotRunning: nothing trains in the folder, or it could not save in time.
    """
    _check_running(run)
    latest = run.checkpoints / "latest"
    before = _identity(latest)
    sent = send_request(run.control, command)
    deadline = time.monotonic() + timeout_s
    while not sent.is_answered():
        # a run that cannot delete another user's request still handles it
        if command == "save" and _identity(latest) != before and _saved_on_request(run):
            sent.withdraw()
            break
        if lock_owner(run.lock) is None:
            sent.withdraw()
            if command == "stop" and _identity(latest) != before:
                break
            raise NotRunning(f"{run.path} ended before it handled the request; see {run.logs}")
        if time.monotonic() > deadline:
            sent.withdraw()
            raise NotRunning(
                f"{run.path} did not handle the request within {timeout_s:g} s; the request is "
                "withdrawn; set a longer --timeout"
            )
        time.sleep(_POLL_S)
    if _identity(latest) == before:
        raise NotRunning(f"{run.path} could not save; see {run.log(0)}")
    return read_regular(latest).decode().strip()


def _post(run: RunDir, command: Literal["apply", "cancel"], content: Mapping[str, Any]) -> Post:
    _check_running(run)
    try:
        return send_post(run.control, command, content)
    except (TypeError, ValueError) as error:
        raise ConfigError.of(f"the request cannot be sent: {error}") from None


def _check_running(run: RunDir) -> None:
    if lock_owner(run.lock) is None:
        refuse_imported(run)
        raise NotRunning(
            f"{run.path} is not running; resume it with: instar resume {run.shell_word}"
        )


def _answers(run: RunDir, offset: int, number: str) -> Iterator[Asked | OperationEvent | None]:
    """Yield the events of a request that were written after `offset`, and None after each look."""
    follower = Follower(run.events, offset)
    while True:
        for event in follower.poll():
            if isinstance(event, Asked | OperationEvent) and event.id == number:
                yield event
        yield None


def _world_size(run: RunDir) -> int:
    events = cached_summary(run).events if run.events.exists() else ()
    sizes = [event.world_size for event in events if isinstance(event, RunStarted)]
    return sizes[-1] if sizes else 1


def _identity(path: Path) -> tuple[int, int]:
    """Return a value that changes whenever the file is replaced."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_ino, status.st_mtime_ns


def _saved_on_request(run: RunDir) -> bool:
    """Return whether the latest checkpoint was saved on request."""
    manifest = latest_manifest(run)
    return manifest is not None and REQUESTED in manifest.reason
