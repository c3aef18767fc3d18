"""Operations that people ask a running run for: taken in between two steps, agreed by all ranks, kept by checkpoints.

A post (`record/control.py`) is read and checked by rank 0. What it accepts waits in the run's state, and so in its
checkpoints, until its trigger fires; the post's file is removed when a checkpoint has it. A run that is killed
before finds the file again, one that is killed later finds the operation in its state: it is carried out once.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from instar.config.errors import InstarError
from instar.config.sections import ScheduledOperation
from instar.distributed.agree import agree, raise_on_all_ranks
from instar.models.shape import mask_of
from instar.record.atomic import replace_file
from instar.record.control import WAITING, Post
from instar.record.events import Asked
from instar.record.rundir import RunDir
from instar.run.components import Components
from instar.run.state.run_state import RunState
from instar.schedule.branches import BRANCH
from instar.schedule.forecast import legs_of
from instar.schedule.operations import Change, effective_changes
from instar.schedule.posted import Cancelled, Posted, normalize
from instar.schedule.triggers import Entry, entry_of, words

Answer = Mapping[str, Any]
"""what becomes of a post, as JSON: `id`, `command`, `by`, `content`, and `refusal` ("": it is accepted)"""


def take_in_at_start(
    state: RunState, parts: Components, *, has_other_schedule: bool = False
) -> RunState:
    """Take in what people have asked for while the run did not train: before its first step, at which it may be due. A
    collective.

    Args:
        has_other_schedule: this start sets a schedule, none of whose entries they can have meant.
    """
    inbox, earlier_ids, has_posts = parts.sync.inbox, state.request_ids, False
    if inbox is not None:
        inbox.requests()  # which looks
        has_posts = bool(inbox.posts())
    if not agree(parts.world, has_posts):
        return state
    state = take_in(state, parts, has_other_schedule=has_other_schedule)
    new_ids = {post.id for post in state.posted if not post.is_immediate} - earlier_ids
    log_waiting(state, parts, new_ids)
    return state


def take_in(state: RunState, parts: Components, *, has_other_schedule: bool = False) -> RunState:
    """Take in what people have asked for since the last look. A collective.

    Args:
        has_other_schedule: see `take_in_at_start`.
    """
    parts.sync.posts_waiting = False
    answers: list[Answer] = []
    with raise_on_all_ranks(parts.world, "reading what was asked for"):
        if parts.world.is_main:
            answers = _answers(state, parts, has_other_schedule)
    for answer in cast("list[Answer]", agree(parts.world, answers)):
        before, state = state, _after(state, answer)
        _log_answer(before, state, parts, answer)
    write_waiting(state, parts)  # before a long change: who asked can see that it is taken in
    return state


def _answers(state: RunState, parts: Components, has_other_schedule: bool) -> list[Answer]:
    inbox = parts.sync.inbox
    assert inbox is not None
    answers: list[Answer] = []
    known_ids = state.request_ids
    for post in inbox.posts():
        if post.id in known_ids:  # of the checkpoint that the run was resumed from
            inbox.discard(post)
            continue
        answers.append(_answer(state, parts, post, has_other_schedule))
        inbox.accept(post)
        state = _after(state, answers[-1])  # what the next one may cancel
    return answers


def _answer(state: RunState, parts: Components, post: Post, has_other_schedule: bool) -> Answer:
    """Return what becomes of a post: the run's own checks are those that count, whoever has written it."""
    content: Any = None
    by, refusal = "", ""
    try:
        content, by = post.read()
        if post.command == "apply":
            content = normalize(content, parts.config)
            check_possible(state, parts, entry_of(None, ScheduledOperation(**content)))
        else:
            _check_waits(state, parts, content, has_other_schedule)
    except (InstarError, ValueError, OSError) as error:
        refusal = str(error)
    except RecursionError:
        refusal = "it is nested too deep"
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        # whatever somebody asks for, the run goes on
        refusal = f"it cannot be checked: {type(error).__name__}: {error}"
    if refusal and not isinstance(content, Mapping):
        content = {}
    return {
        "id": post.id,
        "command": post.command,
        "by": by,
        "content": dict(content),
        "refusal": refusal,
    }


def check_possible(state: RunState, parts: Components, entry: Entry) -> None:
    """Raise ValueError if the operation is not possible now, or if what is left of the schedule would not be."""
    if entry.operation.name == BRANCH:
        _check_new_branch(state, entry)
    rest, spec, size = state.ahead(parts.entries), parts.task.spec, parts.world.size
    entry = replace(entry, on_failure="stop")  # it is refused now rather than skipped later
    legs_of((entry,), state.in_force, spec, size)
    try:
        legs_of(rest, state.in_force, spec, size)
    except ValueError:
        return  # it is not possible anyway; its own entry stops the run, or is skipped
    try:
        legs_of((entry, *rest), state.in_force, spec, size)
    except ValueError as error:
        raise ValueError(f"the rest of the schedule would not be possible: {error}") from None


def _check_new_branch(state: RunState, entry: Entry) -> None:
    """Raise ValueError if the run has a branch of this name, or somebody else has asked for one."""
    operations = [change.operation for change in effective_changes(state.history)]
    operations += [post.entry.operation for post in state.posted if post.entry is not entry]
    name = entry.operation.value
    if any((operation.name, operation.value) == (BRANCH, name) for operation in operations):
        raise ValueError(f"there is a branch {name} already, or it waits: choose another name")


def _check_waits(
    state: RunState, parts: Components, content: Any, has_other_schedule: bool
) -> None:
    """Raise ValueError if there is nothing to cancel."""
    if not isinstance(content, Mapping) or content.keys() not in ({"id"}, {"entry"}):
        raise ValueError("name what waits by `id`, or by `entry`, its index in the schedule")
    if "id" in content:
        if content["id"] not in [post.id for post in state.posted]:
            raise ValueError(f"no operation with the id {content['id']!r} waits")
        return
    if has_other_schedule:
        raise ValueError(
            f"entry {content['entry']!r} was one of the schedule before: this resume has set another"
        )
    numbers = sorted({e.number for e in state.ahead(parts.entries) if e.number is not None})
    if type(content["entry"]) is not int or content["entry"] not in numbers:
        which = f"these wait: {', '.join(map(str, numbers))}" if numbers else "none waits"
        raise ValueError(f"no entry {content['entry']!r} of the schedule waits; {which}")


def _after(state: RunState, answer: Answer) -> RunState:
    """Return the state after an answer."""
    content = answer["content"]
    if answer["refusal"]:
        return state
    if answer["command"] == "apply":
        post = Posted(answer["id"], answer["by"], state.step, content)
        return replace(state, posted=(*state.posted, post))
    if "id" in content:
        left = tuple(post for post in state.posted if post.id != content["id"])
        # a checkpoint must know that both were answered, or their files would be read again
        return replace(state, posted=left, closed=(*state.closed, content["id"], answer["id"]))
    entry = Cancelled(int(content["entry"]), answer["id"], answer["by"])
    return replace(state, cancelled=(*state.cancelled, entry))


def _log_answer(before: RunState, state: RunState, parts: Components, answer: Answer) -> None:
    """Log an answer to a request, but for one that waits or is carried out; `state`: after it."""
    content, by = answer["content"], answer["by"]
    if answer["refusal"]:
        name = "cancel" if answer["command"] == "cancel" else str(content.get("name", ""))
        asking = Asking(answer["id"], by, name, content.get("value"))
        log(state, parts, asking, "refused", answer["refusal"])
        if parts.sync.inbox is not None:  # the record has the answer
            parts.sync.inbox.settle([answer["id"]])
    elif answer["command"] == "cancel":
        entries = (
            [post.entry for post in before.posted if post.id == content["id"]]
            if "id" in content
            else [entry for entry in parts.entries if entry.number == content["entry"]]
        )
        operation = entries[0].operation
        asking = Asking(answer["id"], by, operation.name, operation.value)
        log(state, parts, asking, "cancelled", f"by {by}")


@dataclass(frozen=True)
class Asking:
    """What somebody asked for, for the record."""

    id: str
    by: str
    operation: str
    value: Any = None


def log(state: RunState, parts: Components, asking: Asking, outcome: Any, reason: str) -> None:
    """Log what became of something that somebody asked for."""
    write_waiting(state, parts)  # before the event: whoever reads that may list what waits
    event = Asked(
        step=state.step,
        id=asking.id,
        by=asking.by,
        outcome=outcome,
        operation=asking.operation,
        value=asking.value,
        reason=reason,
    )
    parts.logger.log_asked(state.progress, event)


def log_waiting(
    state: RunState, parts: Components, ids: Collection[str], *, at_end: bool = False
) -> None:
    """Log the operations of these requests that wait for their triggers.

    Args:
        at_end: the run has ended.
    """
    for post in state.posted:
        if post.id in ids:
            operation = post.entry.operation
            asking = Asking(post.id, post.by, operation.name, operation.value)
            why = words(post.entry.trigger)
            if post.is_immediate:
                is_masked = mask_of(state.in_force.architecture) is not None
                why = "until the open mask is folded" if is_masked else "until the next step"
                why = "until the run is resumed: it has ended" if at_end else why
            log(state, parts, asking, "waits", why)


def end_waiting(state: RunState, parts: Components) -> RunState:
    """Answer at a run's end what came last, and warn of what never fired. A collective."""
    earlier_ids = state.request_ids
    if parts.sync.posts_waiting:
        state = take_in(state, parts)
        log_waiting(state, parts, state.request_ids - earlier_ids, at_end=True)
    later = "a resume with a later end goes on with it"
    for post in state.posted:
        why = "" if post.is_immediate else f", {words(post.entry.trigger)}"
        text = f"{post.entry.operation.name} ({post.id}) asked for by {post.by} never fired{why}"
        parts.logger.warn(f"{text}; {later}", state.step)
    if (inbox := parts.sync.inbox) is not None:
        inbox.requests()  # which looks
        for unread in inbox.posts():
            parts.logger.warn(f"{unread.path.name} came after the last step; {later}", state.step)
    return state


def warn_of_unsaved(state: RunState, parts: Components, run: RunDir) -> None:
    """Say at a failure what was asked for since the last checkpoint, which a resume does again. Not a collective."""
    inbox = parts.sync.inbox
    for post in inbox.unsaved() if inbox is not None else ():
        if post.command != "apply" or post.id in state.closed:
            continue  # what was given up stays so: a resume reads that again, too
        changes = [c.operation for c in state.history if c.id == post.id]
        operations = [*changes, *(p.entry.operation for p in state.posted if p.id == post.id)]
        name = operations[0].name if operations else "an operation"
        parts.logger.warn(
            f"{name} was asked for after the last checkpoint: a resume carries it out again, unless it is given up "
            f"with: instar control {run.shell_word} cancel id={post.id}",
            state.step,
        )


def skip_cancelled(state: RunState, parts: Components) -> RunState:
    """Pass over the entries of the schedule that are next and that people gave up."""
    numbers = {entry.number: entry for entry in state.cancelled}
    while numbers:
        # those that were carried out, skipped or passed over are counted, as `remaining` does
        count = sum(change.entry is not None for change in state.history)
        if count >= len(parts.entries) or parts.entries[count].number not in numbers:
            break
        entry = parts.entries[count]
        given_up = numbers[cast(int, entry.number)]
        change = Change(
            entry.operation,
            state.step,
            state.progress.samples,
            entry.number,
            skipped=f"cancelled by {given_up.by}",
            id=given_up.id,
            by=given_up.by,
        )
        state = state.with_change(change, state.in_force)
    return state


def write_waiting(state: RunState, parts: Components) -> None:
    """Write what waits, on rank 0, if something has changed since it was written last."""
    inbox, version = parts.sync.inbox, (len(state.history), state.posted, state.cancelled)
    if inbox is None or version == parts.waiting_written:
        return
    parts.waiting_written = version
    rest = state.ahead(parts.entries)
    content = {
        "schedule": [_row(entry) | {"entry": entry.number} for entry in rest],
        "asked": [
            _row(post.entry) | {"id": post.id, "by": post.by, "since_step": post.step}
            for post in state.posted
        ],
    }
    path = inbox.folder / WAITING
    if not (rest or state.posted or path.exists()):
        return
    try:
        path.parent.mkdir(exist_ok=True)
        replace_file(path, json.dumps(content, indent=1).encode())
    except OSError as error:
        parts.logger.warn(f"{path} cannot be written: {error}", state.step)


def _row(entry: Entry) -> dict[str, Any]:
    operation = entry.operation
    return {
        "name": operation.name,
        "value": operation.value,
        "options": dict(operation.options),
        "when": words(entry.trigger),
    }
