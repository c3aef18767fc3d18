"""What the page's user asks a running run for: what waits there is shown, and requests are put into its folder."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request

from instar.api.control import check_operation_for, post_cancel, post_operation
from instar.api.waiting import WaitingEntry, read_waiting
from instar.config.errors import ConfigError, InstarError, shorten_text, value_text
from instar.record.control import MOST_BYTES, user_name
from instar.record.format import encodable
from instar.record.lock import lock_owner
from instar.record.rundir import RunDir
from instar.schedule.typed import typed_entry

BODY_S = 5.0
"""time limit for the body of a request"""
MAX_WAITING = 100
"""operations of the schedule, and of those that were asked for, that the page lists"""
READ_ONLY = "this dashboard is read-only"


class OperationText(msgspec.Struct, forbid_unknown_fields=True):
    """An operation as it was typed: `widen_mlp=x2 moments=reset`."""

    text: str


class CancelTarget(msgspec.Struct, forbid_unknown_fields=True):
    """What to cancel: the request of this id, or this entry of the schedule."""

    id: str | None = None
    entry: int | None = None


_Body = TypeVar("_Body", OperationText, CancelTarget)


def refusal_of(run: RunDir) -> tuple[int, str] | None:
    """Return why this server asks a run for nothing, with the status of an answer; None: it does."""
    owner, user = run.path.stat().st_uid, os.geteuid()
    if owner != user:
        return 403, f"the run belongs to {user_name(owner)}, this dashboard to {user_name(user)}"
    if lock_owner(run.lock) is None:
        return 409, "the run is not running"
    return None


def check_operation(run: RunDir, body: bytes) -> dict[str, Any]:
    """Check an operation without asking for it; the run's own checks are those that count."""
    check_operation_for(run, _entry(_decode(body, OperationText)))
    return {"refusal": ""}


def ask_for_operation(run: RunDir, body: bytes) -> dict[str, Any]:
    """Ask a run for an operation; return the request's id."""
    return {"id": post_operation(run, _entry(_decode(body, OperationText)))}


def cancel_operation(run: RunDir, body: bytes) -> dict[str, Any]:
    """Ask a run to give up what waits; return the request's id."""
    target = _decode(body, CancelTarget)
    if (target.id is None) == (target.entry is None):
        raise HTTPException(422, "name what waits by id, or by entry, its index in the schedule")
    names = {"id": target.id, "entry": target.entry}
    return {"id": post_cancel(run, {k: value for k, value in names.items() if value is not None})}


COMMANDS = {"check": check_operation, "apply": ask_for_operation, "cancel": cancel_operation}


async def answer_post(request: Request, run: RunDir, command: str) -> dict[str, Any]:
    """Carry out one of `COMMANDS`; of `check`, the answer says what is refused.

    Raises:
        HTTPException: the request is not JSON of at most `MOST_BYTES`, the run cannot be asked, or it is refused.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise HTTPException(415, "a request is JSON: Content-Type: application/json")
    body = await _body(request)
    if (refusal := await asyncio.to_thread(refusal_of, run)) is not None:
        raise HTTPException(*refusal)
    try:
        return await asyncio.to_thread(COMMANDS[command], run, body)
    except InstarError as error:
        problems = error.problems if isinstance(error, ConfigError) else (error,)
        text = encodable("\n".join(map(str, problems)))
    if command == "check":
        return {"refusal": text}
    raise HTTPException(422, text)


async def _body(request: Request) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MOST_BYTES:
                    raise HTTPException(413, f"a request has at most {MOST_BYTES:,} bytes")
    except TimeoutError:
        raise HTTPException(408, "the request did not arrive in time") from None
    return bytes(body)


def _decode(body: bytes, kind: type[_Body]) -> _Body:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HTTPException(422, f"the request cannot be read: {error}") from None


def _entry(operation: OperationText) -> Mapping[str, Any]:
    if not operation.text.strip():
        raise ConfigError.of("nothing was typed", hint="write e.g. change_lr=0.5")
    return typed_entry(operation.text, "operation")


def waiting_of(run: RunDir, *, read_only: bool) -> dict[str, Any]:
    """Return what waits in a run as rows, and why it cannot be asked for more: "": it can."""
    refusal = (403, READ_ONLY) if read_only else refusal_of(run)
    waiting = read_waiting(run)
    lists = (waiting.asked, waiting.schedule)
    return {
        "refusal": "" if refusal is None else encodable(refusal[1]),
        "rows": [_row(entry) for entries in lists for entry in entries[:MAX_WAITING]],
        "left_out": sum(max(0, len(entries) - MAX_WAITING) for entries in lists),
    }


def _row(entry: WaitingEntry) -> dict[str, Any]:
    value = [] if entry.value is None else [_plain(entry.value)]
    options = [f"{name}={_plain(option)}" for name, option in entry.options.items()]
    by = f"asked for by {entry.by}" if entry.by else "of the schedule"
    texts = {"what": " ".join([entry.name, *value, *options]), "when": entry.when, "by": by}
    which = {"id": encodable(entry.id[:40])} if entry.id else {"entry": entry.entry}
    return {"which": which} | {
        name: encodable(shorten_text(text, 200)) for name, text in texts.items()
    }


def _plain(value: object) -> str:
    return value if isinstance(value, str) else value_text(value)
