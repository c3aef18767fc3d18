"""Budgets: the first one used up ends the run."""

from __future__ import annotations

import pytest

from instar.config.budget import Counters, budget_met, fraction_used, parse_budget


def budget_reached(*budgets: str, loss: float | None = None, **used: int) -> str | None:
    progress = Counters(**used)
    budget = budget_met(
        [parse_budget(text) for text in budgets],
        progress,
        epochs=progress.samples / 100,
        validation_loss=loss,
    )
    return None if budget is None else str(budget)


@pytest.mark.parametrize(
    ("budget", "before", "at"),
    [
        ("10it", {"step": 9}, {"step": 10}),
        ("1ktok", {"tokens": 999}, {"tokens": 1000}),
        ("2ep", {"samples": 199}, {"samples": 200}),
        ("50samples", {"samples": 49}, {"samples": 50}),
    ],
)
def test_counted_budgets_end_exactly(
    budget: str, before: dict[str, int], at: dict[str, int]
) -> None:
    assert budget_reached(budget, **before) is None
    assert budget_reached(budget, **at) is not None


def test_a_loss_counts_only_when_it_was_just_measured() -> None:
    assert budget_reached("loss<3.0") is None
    assert budget_reached("loss<3.0", loss=3.0) is None
    assert budget_reached("loss<3.0", loss=2.9) == "loss<3.0"
    assert budget_reached("loss<3.0", loss=float("nan")) is None


def test_seconds_are_not_counted_here() -> None:
    assert budget_reached("1s", step=10**9) is None


def test_the_first_one_met_is_named() -> None:
    assert budget_reached("10it", "5it", step=7) == "5it"


def test_the_fraction_is_that_of_the_counted_budget_nearest_to_its_end() -> None:
    budgets = [parse_budget(text) for text in ("10it", "4ep", "1h", "loss<3.0")]
    assert fraction_used(budgets, Counters(step=3), epochs=2.0) == 0.5
    assert fraction_used(budgets, Counters(step=8), epochs=2.0) == 0.8
    assert fraction_used(budgets[2:], Counters(step=8), epochs=2.0) is None
