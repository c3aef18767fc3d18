"""What waits in a run: entries of its schedule, and what people asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from instar.checkpoint.listing import latest_intact
from instar.checkpoint.manifest import CheckpointError, Manifest
from instar.checkpoint.store import Checkpoint
from instar.config.errors import ConfigError, InstarError
from instar.config.files import read_regular
from instar.config.schema import RunConfig
from instar.record.control import MOST_BYTES, WAITING
from instar.record.lock import lock_owner
from instar.record.rundir import RunDir
from instar.run.resume import began_with
from instar.schedule.operations import effective, history_from_json
from instar.schedule.posted import Cancelled, Posted, read_unread
from instar.schedule.triggers import Entry, remaining, schedule_entries, words


class WaitingEntry(msgspec.Struct, frozen=True):
    """An operation that waits for its trigger: an entry of the schedule, or asked for."""

    name: str
    when: str
    value: Any = None
    options: dict[str, Any] = {}
    entry: int | None = None
    """its index in the schedule"""
    id: str = ""
    """of the request"""
    by: str = ""
    since_step: int | None = None


class Waiting(msgspec.Struct, frozen=True):
    """What waits in a run, as it was when the run wrote it last."""

    schedule: list[WaitingEntry] = []
    asked: list[WaitingEntry] = []


class _RequestState(msgspec.Struct, frozen=True):
    """What a checkpoint's state says of requests; see `RunState.to_json`."""

    requests: tuple[Posted, ...] = msgspec.field(default=(), name="posted")
    cancellations: tuple[Cancelled, ...] = msgspec.field(default=(), name="cancelled")
    closed_ids: tuple[str, ...] = msgspec.field(default=(), name="closed")


def read_waiting(run: RunDir) -> Waiting:
    """Return what waits in a run, empty if nothing does: what it wrote last, and of a run that does not train what a
    resume of its latest checkpoint would find.

    Raises:
        ConfigError: the file in which the run wrote it cannot be read.
    """
    if lock_owner(run.lock) is None:
        try:
            return _at_rest(run)
        except (InstarError, LookupError, OSError, TypeError, ValueError):
            pass  # what the run wrote last can still be read
    path = run.control / WAITING
    try:
        return msgspec.json.decode(read_regular(path, 64 * MOST_BYTES), type=Waiting)
    except FileNotFoundError:
        return Waiting()
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError.of(f"cannot be read: {error}", where=str(path)) from None


def _at_rest(run: RunDir) -> Waiting:
    """Return what a resume of the latest checkpoint would find, there and in the control folder.

    Raises:
        InstarError, LookupError, OSError, TypeError, ValueError: the run cannot be read.
    """
    checkpoint = _latest_readable(run)
    manifest = None if checkpoint is None else checkpoint.manifest
    state: Mapping[str, Any] = {} if checkpoint is None else checkpoint.state
    request_state = msgspec.convert(state, _RequestState)
    history = history_from_json(manifest.history if manifest is not None else ())
    config = config_in_force(run)
    unread = read_unread(run.control, config, 0 if manifest is None else manifest.step)
    closed_ids = {change.id for change in history} | {*request_state.closed_ids}
    numbers = {entry.number for entry in request_state.cancellations} | unread.cancel_entries
    entries = remaining(schedule_entries(config), history)
    return Waiting(
        schedule=[_row(e, number=e.number) for e in entries if e.number not in numbers],
        asked=[
            _row(request.entry, id_=request.id, by=request.by, since_step=request.step)
            for request in unread.left(request_state.requests, closed_ids)
        ],
    )


def _row(
    entry: Entry,
    *,
    number: int | None = None,
    id_: str = "",
    by: str = "",
    since_step: int | None = None,
) -> WaitingEntry:
    operation = entry.operation
    return WaitingEntry(
        name=operation.name,
        value=operation.value,
        options=dict(operation.options),
        when=words(entry.trigger),
        entry=number,
        id=id_,
        by=by,
        since_step=since_step,
    )


def latest_manifest(run: RunDir) -> Manifest | None:
    """Return the manifest of the checkpoint that a resume goes on from; None if none can be read."""
    checkpoint = _latest_readable(run)
    return None if checkpoint is None else checkpoint.manifest


def _latest_readable(run: RunDir) -> Checkpoint | None:
    """Return the latest checkpoint whose manifest and state can be read, as a resume walks back to it."""
    try:
        return latest_intact(run.path, check=False)[0]
    except (OSError, ValueError, CheckpointError):
        return None


def config_in_force(run: RunDir) -> RunConfig:
    """Return the config of a run as of its latest checkpoint.

    Raises:
        ConfigError: its history cannot be read.
    """
    manifest = latest_manifest(run)
    config = began_with(run, manifest)
    try:
        return effective(config, history_from_json(manifest.history if manifest else ()))[0]
    except ValueError as error:
        raise ConfigError.of(f"the run's history cannot be read: {error}") from None
