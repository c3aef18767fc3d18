"""The driver of a schedule: what is due is carried out in order, and what fails stops the training or is skipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn, TypeVar

from instar.schedule.operations import Change, History
from instar.schedule.triggers import Entry, next_entry

T = TypeVar("T")


def next_due(
    entries: Sequence[Entry], history: History, reason_now: Callable[[Entry], str | None]
) -> tuple[Entry, str] | None:
    """Return the entry that is due at this step, and why; None: none is. The caller adds it to the history, and asks
    again.

    Args:
        reason_now: why an entry is due; None: it is not. The same in all processes.
    """
    entry = next_entry(entries, history)
    reason = None if entry is None else reason_now(entry)
    return None if entry is None or reason is None else (entry, reason)


def attempt_change(
    change: Change,
    entry: Entry | None,
    work: Callable[[], T],
    *,
    stop: Callable[[Exception], NoReturn] | None = None,
    fatal: tuple[type[Exception], ...] = (),
) -> tuple[Change, T | None]:
    """Try an operation; if it fails, skip it for good or stop, as its entry says.

    Args:
        entry: None: the operation is none of a schedule, and is not skipped.
        work: leaves all as it was if it raises. All processes come to the same end.
        stop: raises what ends the training; default: what `work` raised.
        fatal: what ends the training at once, such as a lost process.

    Returns:
        the change, which says so if it was skipped, and what `work` returned; None: it was skipped.
    """
    try:
        return change, work()
    except fatal:
        raise
    except Exception as error:  # a user's model may raise anything
        if entry is None or entry.on_failure != "skip":
            if stop is not None:
                stop(error)
            raise
        # a change without a reason would count as carried out
        return replace(change, skipped=_reason(error)), None


def _reason(error: Exception) -> str:
    kind, text = type(error), str(error)
    if kind.__module__ != "builtins" or isinstance(error, ValueError | RuntimeError | OSError):
        return text or kind.__name__
    return f"{kind.__name__}: {text}" if text else kind.__name__
