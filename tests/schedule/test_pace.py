"""Steps into samples, tokens and epochs, and back."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from instar.config.budget import Budget, parse_budget
from instar.data.order import plan_step
from instar.data.source import windows_of
from instar.schedule.timeline import Clock, Leg, Pace, Timeline, partial_steps


def steps(
    *budgets: str, samples: int | None = 100, batch: int = 8, context: int = 10
) -> int | None:
    pace = Pace(batch, context, samples, flops_per_token=1)
    return Clock().end(pace, [parse_budget(text) for text in budgets])


def test_steps_are_themselves() -> None:
    assert steps("2000it") == 2000


def test_an_epoch_ends_with_a_smaller_step() -> None:
    assert steps("1ep") == 13
    assert steps("2ep") == 26
    assert steps("0.5ep") == 7


def test_a_part_of_an_epoch_is_exact_in_decimals() -> None:
    assert steps("0.1ep", samples=30, batch=1) == 3


def test_samples_and_tokens_count_over_smaller_steps() -> None:
    assert steps("100samples") == 13
    assert steps("108samples") == 14
    assert steps("1000tok") == 13
    assert steps("1001tok") == 14


def test_the_tightest_budget_counts() -> None:
    assert steps("2000it", "1ep", "10min") == 13


def test_time_and_loss_say_nothing_about_steps() -> None:
    assert steps("10min", "loss<3.0") is None


def test_epochs_say_nothing_where_nobody_knows_how_long_they_are() -> None:
    assert steps("1ep", samples=None) is None
    assert steps("1ep", "108samples", samples=None) == 14


def test_a_batch_larger_than_the_data_makes_one_step_an_epoch() -> None:
    assert steps("3ep", samples=5, batch=8) == 3


def test_a_share_of_a_budget() -> None:
    pace = Pace(8, 10, 100, 1)
    budgets = [parse_budget("1000it"), parse_budget("4ep")]
    clock = Clock().after(pace, 26)
    assert clock.used(pace, budgets) == Fraction(1, 2)
    assert Clock().after(pace, 25).used(pace, budgets) == Fraction(49, 100)
    assert clock.used(pace, [parse_budget("10min")]) is None


def test_windows_cover_all_tokens_but_the_first() -> None:
    assert windows_of(1001, 10) == 100
    assert windows_of(1002, 10) == 101


def test_samples_of_another_length_begin_a_new_order() -> None:
    long, short = Pace(8, 10, 100, 1), Pace(8, 5, 200, 1)
    half = Clock().after(long, 7).new_order(long)
    assert (half.tokens, half.in_order) == (560, 0)
    assert half.epochs(short) == Fraction(56, 100)
    later = half.after(short, 26)
    assert later.tokens == 560 + 200 * 5 + 8 * 5
    assert later.epochs(short) == Fraction(56, 100) + Fraction(208, 200)
    assert half.end(short, [Budget("epochs", 1)]) == 7 + 11


SIZES = st.integers(1, 200)


@given(SIZES, st.integers(1, 60), st.lists(st.integers(0, 40), min_size=1, max_size=4), SIZES)
def test_any_stride_through_the_epochs_ends_at_the_same_place(
    size: int, batch: int, strides: list[int], context: int
) -> None:
    """A step takes a whole batch, or what is left of its epoch."""
    pace = Pace(batch, context, size, flops_per_token=3)
    samples, spot = 0, Clock()
    for _ in range(sum(strides)):
        samples += min(batch, size - samples % size)
    for stride in strides:
        spot = spot.after(pace, stride)
    assert (spot.step, spot.samples) == (sum(strides), samples)
    assert (spot.tokens, spot.flops) == (samples * context, samples * context * 3)


@given(
    SIZES,
    st.integers(1, 60),
    st.integers(0, 400),
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
)
def test_a_clock_without_last_samples_is_at_the_cursor_of_the_run(
    size: int, batch: int, begin: int, strides: list[int]
) -> None:
    batch = min(batch, size)
    pace = Pace(batch, 2, size, flops_per_token=3, drop_last=True)
    cursor, spot = begin, Clock(samples=begin, in_order=begin)
    for _ in range(sum(strides)):
        cursor = plan_step(cursor, size, batch, drop_last=True).after
    for stride in strides:
        spot = spot.after(pace, stride)
    assert (spot.step, spot.samples, spot.in_order) == (sum(strides), cursor, cursor)
    assert spot.tokens == 2 * batch * sum(strides)
    end = Clock().end(pace, [Budget("epochs", 2)])
    assert end == 2 * (size // batch)


def test_partial_steps_are_those_that_a_run_comes_to() -> None:
    """Of the epoch in which its batch changes as well."""

    def partial(until: int, *changes: tuple[int, int], **pace: Any) -> list[int]:
        legs = []
        for _, batch in ((0, 8), *changes):
            settings = SimpleNamespace(batch_size=batch, global_batch=batch)
            legs.append(
                Leg(None, SimpleNamespace(settings=settings), Pace(batch, 1, 21, 1, **pace))
            )  # type: ignore[arg-type]
        clocks = [Clock()]
        for leg, (step, _) in zip(legs, changes, strict=False):
            clocks.append(clocks[-1].after(leg.pace, step - clocks[-1].step))
        end = clocks[-1].after(legs[-1].pace, until - clocks[-1].step)
        return [
            step.samples
            for step in partial_steps(Timeline(tuple(clocks), end, legs[-1].pace), legs)
        ]

    assert partial(2) == []
    assert partial(3) == [5]
    assert partial(9, drop_last=True) == []
    assert partial(9, (1, 6)) == [1, 3]
    assert partial(4, (1, 6)) == [1]
    assert partial(9, (1, 13)) == [8]


@given(SIZES, st.integers(1, 60), st.integers(0, 40), st.integers(1, 3000), SIZES)
def test_the_steps_of_an_amount_are_the_fewest_that_reach_it(
    size: int, batch: int, before: int, amount: int, context: int
) -> None:
    pace = Pace(batch, context, size, flops_per_token=1)
    spot = Clock().after(pace, before)
    step = spot.end(pace, [Budget("samples", spot.samples + amount)])
    assert step is not None
    assert spot.after(pace, step - before).samples >= spot.samples + amount
    assert spot.after(pace, step - before - 1).samples < spot.samples + amount
    assert spot.tokens == 0 or spot.end(pace, [Budget("tokens", spot.tokens)]) == before
