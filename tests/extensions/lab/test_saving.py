"""What a pilot says of a schedule's saving, on runs that follow a known law exactly."""

from __future__ import annotations

import math

import pytest
from msgspec import structs
from pilots import FINAL, SMALL, TOKENS, a_pilot, loss_after, stage_budgets

from instar.extensions.lab.pilot_file import Pilot, Spent
from instar.extensions.lab.saving import (
    PilotFindings,
    before_growth,
    exponent_of,
    pilot_summary,
    predict_saving,
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


def test_what_a_pilot_measured_is_predicted_exactly() -> None:
    pilot = a_pilot(lambda _: 0.2)
    (grown,) = PilotFindings(pilot).grown_cases
    assert grown.exponent == pytest.approx(0.2)
    assert grown.token_worth == pytest.approx(0.3**0.2)
    assert grown.missing == pytest.approx(loss_after(80 + 120 * 0.3**0.2) - loss_after(200))
    saving = predict_saving(pilot, stage_budgets(200, 120))
    assert saving.share == pytest.approx(share_saved(0.2, 200, 120), abs=0.005)
    assert saving.low < saving.share < saving.high
    assert saving.tokens == pytest.approx(TOKENS * (80 + 120 * 0.3**0.2), rel=0.01)
    # a small step takes half as long, and costs three tenths
    seconds = 0.5 * 80 + 0.25 * 120
    assert saving.of_time == pytest.approx(1 - seconds / (0.5 * saving.tokens / TOKENS))


def test_several_stages_have_one_exponent() -> None:
    stages = (Spent(SMALL, 6000.0), Spent(600.0, 6000.0), Spent(FINAL, 8000.0))
    saving = predict_saving(a_pilot(lambda _: 0.2), stages)
    tokens = 6000 * 0.3**0.2 + 6000 * 0.6**0.2 + 8000
    assert saving.share == pytest.approx(1 - (1800 + 3600 + 8000) / tokens, abs=0.005)


def test_a_small_model_that_saturates_is_worth_less_after_more_tokens() -> None:
    def theta(tokens: float) -> float:
        return 0.1 + 0.1 * math.log(tokens / 10_000)

    slow, fast = a_pilot(lambda t: theta(t) * 0.1 + 0.108), a_pilot(theta)
    # between what is usual around these tokens per parameter and what the evaluations say
    first, last = (math.log(tokens / 5000) for tokens in (12_000, 120_000))
    usual = -0.06 - 0.12 * (first + last) / 2
    b = [PilotFindings(pilot).b(stage_budgets(2000, 1200)) for pilot in (fast, slow)]
    assert b[0] < b[1]
    assert usual - 0.1 < b[0] < usual + 0.1
    assert usual < b[1] < -0.012
    late = [predict_saving(pilot, stage_budgets(2000, 1200)).share for pilot in (fast, slow)]
    assert share_saved(0.8, 2000, 1200) < late[0] < late[1] < share_saved(0.1, 2000, 1200)


def test_the_interval_grows_with_noise_and_with_the_distance() -> None:
    def width(pilot: Pilot, steps: int = 250) -> float:
        saving = predict_saving(pilot, stage_budgets(steps, steps // 2))
        return saving.high - saving.low

    calm = a_pilot(lambda _: 0.2, seeds=(1, 2, 3, 4), spread=0.001)
    loud = a_pilot(lambda _: 0.2, seeds=(1, 2, 3, 4), spread=0.02)
    assert PilotFindings(loud).noise > 5 * PilotFindings(calm).noise
    assert width(loud) > 2 * width(calm)
    assert width(calm, 4000) > 2 * width(calm)
    assert predict_saving(calm, stage_budgets(250, 125)).low > 0


def test_it_says_where_it_extrapolates() -> None:
    pilot = a_pilot(lambda _: 0.2)
    assert predict_saving(pilot, stage_budgets(200, 118)).extrapolates == ()
    (later,) = predict_saving(pilot, stage_budgets(2000, 1200)).extrapolates
    assert "grows after 120k tokens, 10 times as many" in later
    (more,) = predict_saving(pilot, stage_budgets(140, 118)).extrapolates
    assert "84 % of the tokens come before the final size, in the pilot 60 %" in more
    (ahead,) = predict_saving(a_pilot(lambda _: -0.3), stage_budgets(200, 118)).extrapolates
    assert "worth 1.44 of the final size" in ahead
    other = (Spent(500.0, 1e4), Spent(FINAL, 1e4))
    assert "another size" in predict_saving(pilot, other).extrapolates[-1]


def test_a_range_of_moments_gives_the_interval_of_all() -> None:
    pilot = a_pilot(lambda _: 0.2)
    early, late = (predict_saving(pilot, stage_budgets(200, at)) for at in (110, 120))
    both = predict_saving(pilot, stage_budgets(200, 110), stage_budgets(200, 120))
    assert (both.low, both.high) == (early.low, late.high)
    assert both.share == pytest.approx((early.share + late.share) / 2)


def test_nothing_is_predicted_of_half_a_pilot_or_without_growth() -> None:
    pilot = a_pilot(lambda _: 0.2)
    with pytest.raises(ValueError, match="runs of the pilot are missing"):
        predict_saving(structs.replace(pilot, runs=pilot.runs[1:]), stage_budgets(200, 100))
    assert pilot_summary(structs.replace(pilot, runs=())) == {}
    for costs in ((Spent(SMALL, 2e4),), (Spent(FINAL, 2e4),)):
        runs = [structs.replace(run, spent=costs) for run in pilot.runs if run.case.grown_at]
        other = structs.replace(pilot, runs=(*pilot.runs[:2], *runs))
        with pytest.raises(ValueError, match="its run grown-200-at-120-s1 did not grow to"):
            predict_saving(other, stage_budgets(200, 100))
        assert pilot_summary(other) == {}
    with pytest.raises(ValueError, match="does not grow"):
        predict_saving(pilot, stage_budgets(200, 0))
