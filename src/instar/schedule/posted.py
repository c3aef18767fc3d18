"""Operations that people ask a running run for, as an entry of its schedule says them, and what of the schedule they give up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from instar.config.errors import ConfigProblem, InstarError
from instar.config.schema import RunConfig
from instar.config.sections import ScheduledOperation
from instar.config.suggestions import unknown_key, wrong_value
from instar.record.control import Inbox
from instar.schedule.branches import BRANCH
from instar.schedule.checks import entry_findings, mistakes
from instar.schedule.triggers import Entry, entry_of

TRIGGERS = ("when", "trigger_loss", "max_wait_iters")
AT_ONCE = {"at_step": 0}
"""the trigger of an operation that was asked for without one"""
_REFUSED = (
    InstarError,
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    RecursionError,
    TypeError,
    ValueError,
)
"""what a post raises that is nothing that anybody could ask for"""


@dataclass(frozen=True)
class Posted:
    """An operation that somebody asked for, and that waits for its trigger."""

    id: str
    """of the request: each is carried out at most once"""
    by: str
    """the user's name"""
    step: int
    """since which step it waits"""
    content: Mapping[str, Any]
    """the keys of an entry of a schedule"""

    @cached_property
    def entry(self) -> Entry:
        return entry_of(None, ScheduledOperation.model_validate(self.content))

    @property
    def is_immediate(self) -> bool:
        """Whether it was asked for without a trigger."""
        return self.content.get("when") == AT_ONCE


@dataclass(frozen=True)
class Cancelled:
    """An entry of the schedule that somebody gave up."""

    number: int
    """its index in the schedule"""
    id: str
    by: str


@dataclass(frozen=True)
class Unread:
    """What people have asked a run for, and no start of it has taken in and saved."""

    requests: Sequence[Posted] = ()
    cancel_ids: Set[str] = frozenset()
    """requests that they gave up"""
    cancel_entries: Set[int] = frozenset()
    """entries of the schedule that they gave up, by index"""

    def left(self, saved_requests: Iterable[Posted], closed_ids: Set[str]) -> list[Posted]:
        """Return the requests that a resume carries out: those of its checkpoint, and these.

        Args:
            closed_ids: those that the checkpoint knows to have ended.
        """
        requests = {request.id: request for request in (*saved_requests, *self.requests)}
        ended_ids = closed_ids | self.cancel_ids
        return [request for request in requests.values() if request.id not in ended_ids]


def read_unread(folder: Path, config: RunConfig, step: int) -> Unread:
    """Return what is in a run's control folder, without what the run would refuse.

    Args:
        step: of the checkpoint, from which on these requests wait.
    """
    inbox = Inbox(folder)
    inbox.requests()  # which looks
    requests: list[Posted] = []
    cancels: list[Mapping[str, Any]] = []
    for post in inbox.posts():
        with suppress(*_REFUSED):
            content, by = post.read()
            if post.command == "apply":
                requests.append(Posted(post.id, by, step, normalize(content, config)))
            elif isinstance(content, dict):
                cancels.append(content)
    return Unread(
        requests,
        {str(content["id"]) for content in cancels if "id" in content},
        {content["entry"] for content in cancels if type(content.get("entry")) is int},
    )


def normalize(content: object, config: RunConfig) -> dict[str, Any]:
    """Return the keys of an entry as `Posted` has them: with a trigger, and skipped if it fails.

    Raises:
        ValueError: it is no entry of a schedule, or no run could carry it out; says what instead.
    """
    if not isinstance(content, Mapping) or not all(isinstance(key, str) for key in content):
        raise ValueError(
            "an operation is a mapping, as an entry of a schedule: {name: …, value: …}"
        )
    keys = {"on_failure": "skip", **content}
    if not any(keys.get(name) is not None for name in TRIGGERS):
        keys["when"] = AT_ONCE
    if keys.get("repeat", 1) != 1:
        raise ValueError("repeat is of no use: ask for it as often, or set a schedule at a resume")
    if keys["on_failure"] == "stop":  # and at every resume again, for it would still wait
        raise ValueError(
            "on_failure is skip: what fails is refused, and the run goes on; leave it out"
        )
    try:
        entry = ScheduledOperation.model_validate(keys)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ("schedule", len(config.schedule), *first["loc"])
        if first["type"] == "extra_forbidden":
            message, hint, _ = unknown_key(type(config), path)
        else:
            message, hint = wrong_value(
                type(config), path, first["input"], first["type"], first["msg"]
            )
        text = "; ".join(filter(None, (message, hint)))
        place = f"schedule[{len(config.schedule)}]"  # which nobody has written
        text = text.replace(f" in {place}.", " in ").replace(f" in {place}", "")
        raise ValueError(text.replace(f"{place}.", "")) from None
    for key, message, hint in entry_findings(entry, config):
        text = f"{entry.name}{f'.{key}' if key else ''} {message}"
        raise ValueError("; ".join(filter(None, (text, hint))))
    if entry.name == BRANCH:
        _check_branch(entry, config)
    return keys


def _check_branch(entry: ScheduledOperation, config: RunConfig) -> None:
    place = f"schedule[{len(config.schedule)}]"
    with_entry = config.model_copy(update={"schedule": (*config.schedule, entry)})
    problem: ConfigProblem
    for problem in mistakes(with_entry):
        if problem.message.startswith(place):
            text = problem.message.replace(place, entry.name)
            raise ValueError("; ".join(filter(None, (text, problem.hint))))
