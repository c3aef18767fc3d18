"""What carries out a schedule, for runs and for loops of one's own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from instar.config.sections import Operation
from instar.schedule.driver import attempt_change, next_due
from instar.schedule.operations import Change
from instar.schedule.triggers import AtStep, Entry

ENTRIES = tuple(Entry(number, Operation("widen_mlp", "x2"), AtStep(1)) for number in range(2))
CHANGE = Change(ENTRIES[0].operation, 1, 0, 0, reason="step 1")
SKIPS = replace(ENTRIES[0], on_failure="skip")


def test_entries_are_due_in_their_order_one_after_the_other() -> None:
    numbers: list[int] = []

    def reason_now(entry: Entry) -> str | None:
        numbers.append(entry.number)
        return None if entry.number else "step 1"

    assert next_due(ENTRIES, (), reason_now) == (ENTRIES[0], "step 1")
    assert next_due(ENTRIES, (CHANGE,), reason_now) is None
    assert next_due(ENTRIES, (CHANGE, replace(CHANGE, entry=1)), reason_now) is None
    assert numbers == [0, 1]


def test_what_succeeds_is_in_the_history_as_carried_out() -> None:
    assert attempt_change(CHANGE, SKIPS, lambda: "grown") == (CHANGE, "grown")


@pytest.mark.parametrize("error", [ValueError("x"), OSError("x"), MemoryError(), IndexError("x")])
def test_what_fails_is_skipped_for_good_and_says_why(error: Exception) -> None:
    """Also where the error has no text: a change that does not say that it was skipped counts as carried out."""

    def fail() -> str:
        raise error

    why = {MemoryError: "MemoryError", IndexError: "IndexError: x"}.get(type(error), "x")
    skipped_change = replace(CHANGE, skipped=why)
    assert attempt_change(CHANGE, SKIPS, fail) == (skipped_change, None)


@pytest.mark.parametrize("entry", [None, ENTRIES[0]])
def test_what_may_not_be_skipped_stops_the_training(entry: Entry | None) -> None:
    def fail() -> str:
        raise ValueError("x")

    def stop(error: Exception) -> None:
        raise KeyError("stopped") from error

    with pytest.raises(ValueError, match="x"):
        attempt_change(CHANGE, entry, fail)
    with pytest.raises(KeyError, match="stopped"):
        attempt_change(CHANGE, entry, fail, stop=stop)  # type: ignore[arg-type]


def test_what_ends_the_training_is_never_skipped() -> None:
    def fail() -> str:
        raise KeyError("a process is lost")

    with pytest.raises(KeyError):
        attempt_change(CHANGE, SKIPS, fail, fatal=(LookupError,))
    assert attempt_change(CHANGE, SKIPS, fail)[1] is None
