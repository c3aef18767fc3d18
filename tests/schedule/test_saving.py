"""What a pilot says of a schedule's saving, on runs that follow a known law exactly."""

from __future__ import annotations

import math

import pytest
from msgspec import structs
from pilots import FINAL, SMALL, TOKENS, a_pilot, spent

from instar.schedule.pilot import Pilot, Spent
from instar.schedule.saving import (
    Measured,
    before_growth,
    exponent_of,
    predicted,
    summary,
    worth,
)


def share_saved(theta: float, steps: int, grown_at: int) -> float:
    small, final = grown_at * TOKENS, (steps - grown_at) * TOKENS
    return 1 - (SMALL * small + FINAL * final) / FINAL / (final + 0.3**theta * small)


def test_what_stages_are_worth_and_cost_are_inverses() -> None:
    cost = (Spent(100.0, 50.0), Spent(300.0, 20.0), Spent(1000.0, 30.0))
    assert worth(cost, 0.0) == 100.0
    assert worth(cost, 1.0) == pytest.approx(5 + 6 + 30)
    assert exponent_of(cost, worth(cost, 0.37)) == pytest.approx(0.37)
    assert before_growth(cost) == 70.0


def test_a_constant_worth_is_measured_and_predicted_exactly() -> None:
    found = Measured(a_pilot(lambda _: 0.2))
    assert [one.exponent for one in found.grown] == pytest.approx([0.2] * 3)
    assert [one.token_worth for one in found.grown] == pytest.approx([0.3**0.2] * 3)
    assert found.slope == pytest.approx(0.0, abs=1e-6)
    saving = predicted(a_pilot(lambda _: 0.2), spent(2000, 1500))
    assert saving.share == pytest.approx(share_saved(0.2, 2000, 1500), abs=0.01)
    assert saving.low < saving.share < saving.high
    assert saving.tokens == pytest.approx(TOKENS * (500 + 1500 * 0.3**0.2), rel=0.02)
    # a small step takes half as long, and costs three tenths
    assert saving.of_time == pytest.approx(
        1 - (0.5 * 500 + 0.25 * 1500) / (0.5 * saving.tokens / TOKENS), abs=0.01
    )


def test_a_small_model_that_saturates_is_worth_less_after_more_tokens() -> None:
    def theta(tokens: float) -> float:
        return 0.1 + 0.2 * math.log(tokens / 10_000)

    found = Measured(a_pilot(theta))
    assert found.slope == pytest.approx(0.2, rel=0.1)
    saving = predicted(a_pilot(theta), spent(2000, 1200))
    assert saving.share == pytest.approx(share_saved(theta(120_000), 2000, 1200), abs=0.03)
    constant = predicted(a_pilot(lambda _: 0.1), spent(2000, 1200))
    assert saving.share < constant.share - 0.05


def test_the_interval_grows_with_noise_and_with_the_distance() -> None:
    def width(pilot: Pilot, steps: int = 250) -> float:
        saving = predicted(pilot, spent(steps, steps // 2))
        return saving.high - saving.low

    calm = a_pilot(lambda _: 0.2, seeds=(1, 2, 3, 4), spread=0.001)
    loud = a_pilot(lambda _: 0.2, seeds=(1, 2, 3, 4), spread=0.02)
    assert Measured(loud).noise > 5 * Measured(calm).noise
    assert width(loud) > 2 * width(calm)
    assert width(calm, 4000) > 2 * width(calm)


def test_it_says_where_it_extrapolates() -> None:
    pilot = a_pilot(lambda _: 0.2)
    assert predicted(pilot, spent(200, 100)).extrapolates == ()
    (later,) = predicted(pilot, spent(2000, 1200)).extrapolates
    assert "grows after 120k tokens, 10 times as many" in later
    (longer,) = predicted(pilot, spent(140, 118)).extrapolates
    assert "84 % of the tokens" in longer
    other = (Spent(500.0, 1e4), Spent(FINAL, 1e4))
    assert "another size" in predicted(pilot, other).extrapolates[-1]


def test_a_range_of_moments_gives_the_interval_of_all() -> None:
    pilot = a_pilot(lambda _: 0.2)
    early, late = (predicted(pilot, spent(200, at)) for at in (60, 120))
    both = predicted(pilot, spent(200, 60), spent(200, 120))
    assert (both.low, both.high) == (early.low, late.high)
    assert both.share == pytest.approx((early.share + late.share) / 2)


def test_nothing_is_predicted_of_half_a_pilot_or_without_growth() -> None:
    pilot = a_pilot(lambda _: 0.2)
    with pytest.raises(ValueError, match="runs of the pilot are missing"):
        predicted(structs.replace(pilot, runs=pilot.runs[1:]), spent(200, 100))
    assert summary(structs.replace(pilot, runs=())) == {}
    with pytest.raises(ValueError, match="does not grow"):
        predicted(pilot, spent(200, 0))
