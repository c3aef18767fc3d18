"""Triggers fire on what a moment says, and on nothing else."""

from __future__ import annotations

import dataclasses

import pytest

from instar.config.budget import Counters
from instar.schedule.curves import PowerLaw
from instar.schedule.triggers import (
    AllOf,
    AnyOf,
    AtFraction,
    AtStep,
    AtTokens,
    LossBelow,
    Moment,
    NoiseAbove,
    Plateau,
    SlopeBelow,
    Trigger,
    Waited,
    fires,
    losses_needed,
    needs_loss,
    words,
)

NOW = Moment(Counters(2000, tokens=10**6), fraction=0.5, since_last=300, loss=3.41, noise=2.5)
FLAT = Plateau(window=3, slope=0.1)


@pytest.mark.parametrize(
    ("trigger", "reason"),
    [
        (LossBelow(3.5), "val 3.41 < 3.50"),
        (LossBelow(3.41), None),
        (LossBelow(3.4101), "val 3.4100 < 3.4101"),
        (Waited(300), "waited 300 steps"),
        (Waited(301), None),
        (AtStep(2000), "step 2,000"),
        (AtStep(2001), None),
        (AtTokens(10**6), "1.00M tokens"),
        (AtTokens(10**6 + 1), None),
        (AtFraction(0.5), "0.5 of the budget"),
        (AtFraction(0.51), None),
        (NoiseAbove(2.0), "noise scale 2.5 × the batch > 2"),
        (NoiseAbove(2.5), None),
        (AnyOf((LossBelow(3.0), Waited(300))), "waited 300 steps"),
        (AnyOf((LossBelow(3.5), Waited(300))), "val 3.41 < 3.50"),
        (AnyOf((LossBelow(3.0), Waited(301))), None),
        (AllOf((LossBelow(3.5), AtStep(7))), "val 3.41 < 3.50 and step 7"),
        (AllOf((LossBelow(3.5), AtStep(7000))), None),
    ],
)
def test_it_fires_with_a_reason_or_not_at_all(trigger: Trigger, reason: str | None) -> None:
    assert fires(trigger, NOW) == reason


def test_without_a_counted_budget_no_share_is_ever_used() -> None:
    assert fires(AtFraction(0.0), dataclasses.replace(NOW, fraction=None)) is None


def test_noise_that_is_unknown_or_was_just_acted_upon_does_not_fire() -> None:
    assert fires(NoiseAbove(2.0), dataclasses.replace(NOW, noise=None)) is None
    assert fires(NoiseAbove(2.0), dataclasses.replace(NOW, has_changed=True)) is None


def test_a_share_is_not_missed_by_rounding() -> None:
    assert 60 / 400 / 3 < 0.05
    assert fires(AtFraction(0.05), dataclasses.replace(NOW, fraction=60 / 400 / 3)) is not None
    assert fires(AtFraction(0.05), dataclasses.replace(NOW, fraction=59 / 400 / 3)) is None


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_not_below_any(loss: float) -> None:
    assert fires(LossBelow(3.5), dataclasses.replace(NOW, loss=loss)) is None


@pytest.mark.parametrize(
    ("trigger", "expected"),
    [
        (Waited(1), False),
        (AnyOf((AtStep(1), AtTokens(1))), False),
        (LossBelow(1.0), True),
        (FLAT, True),
        (NoiseAbove(0.1), True),
        (AnyOf((Waited(1), LossBelow(1.0))), True),
        (AllOf((Waited(1), AnyOf((AtStep(1), FLAT)))), True),
    ],
)
def test_what_needs_a_loss_is_asked_at_evaluations_only(trigger: Trigger, expected: bool) -> None:
    assert needs_loss(trigger) is expected
    between = dataclasses.replace(
        NOW, counters=Counters(10**9, tokens=10**12), since_last=10**9, loss=None
    )
    assert (fires(trigger, between) is None) is expected


def losses(*values: float, every: int = 100) -> Moment:
    """After these evaluations, the first `every` steps after an operation at step 1,000."""
    steps = range(1000 + every, 1000 + every * (len(values) + 1), every)
    points = ((1000, 99.0), *zip(steps, values, strict=True))
    return Moment(Counters(points[-1][0]), None, points[-1][0] - 1000, values[-1], points)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((4.0, 3.0), False),  # too few
        ((4.0, 3.5, 3.0), False),  # falls by 5 per 1,000 steps
        ((3.00, 2.995, 2.990), True),  # by 0.05
        ((3.0, 3.0, 3.0), True),
        ((3.0, 3.1, 3.2), True),  # rises
        ((3.00, 2.991, 2.980), True),  # by exactly 0.1
        ((9.0, 3.0, 3.0, 3.0), True),  # only the last three count
    ],
)
def test_a_plateau_is_a_line_that_hardly_falls(values: tuple[float, ...], expected: bool) -> None:
    assert (fires(Plateau(3, 0.1000001), losses(*values)) is not None) is expected


def test_a_plateau_must_last_as_long_as_its_patience() -> None:
    patient = Plateau(window=2, slope=0.1, patience=2)
    assert fires(patient, losses(4.0, 3.0, 3.0)) is None
    reason = fires(patient, losses(4.0, 3.0, 3.0, 3.0))
    assert reason == "val fell 0 per 1,000 steps over 2 evaluations"


def test_what_an_operation_did_to_the_loss_is_no_slope() -> None:
    before = Moment(Counters(1000), None, 1000, 3.0, ((800, 3.0), (900, 3.0), (1000, 3.0)))
    assert fires(FLAT, before) is not None
    assert fires(FLAT, dataclasses.replace(before, since_last=150)) is None


def test_a_slope_is_compared_per_flop() -> None:
    # falls by 0.5 nats in 100 steps of 1e12 FLOPs: by 5 per 1e15
    moment = dataclasses.replace(losses(4.0, 3.5, 3.0), flops_per_step=1e12)
    assert fires(SlopeBelow(3, 5.01), moment) == (
        "val fell 5 per 1e15 FLOPs over 3 evaluations, at most 5.01"
    )
    assert fires(SlopeBelow(3, 4.99), moment) is None
    assert fires(SlopeBelow(3, 5.01), dataclasses.replace(moment, flops_per_step=5e11)) is None
    assert fires(SlopeBelow(4, 9e9), moment) is None  # the one before was at the last operation
    assert fires(SlopeBelow(3, 9e9, patience=2), moment) is None


def test_the_slope_of_another_model_is_that_at_the_same_loss() -> None:
    law = PowerLaw(floor=2.0, flops=1e15, exponent=0.5)
    flops = law.flops / (3.5 - law.floor) ** (1 / law.exponent)
    assert law.loss(flops) == pytest.approx(3.5)
    fall = (law.loss(flops * 0.999) - law.loss(flops * 1.001)) / (0.002 * flops) * 1e15
    assert law.slope_at(3.5) == pytest.approx(fall, rel=1e-4)
    moment = dataclasses.replace(losses(4.0, 3.5, 3.0), flops_per_step=1e12)
    assert fires(SlopeBelow(3, law), moment) is None  # 5 here, 1.7 there
    assert fires(SlopeBelow(3, PowerLaw(2.0, 1e14, 0.5)), moment) is not None
    # what the other one never reaches, it does not reach faster
    assert fires(SlopeBelow(3, PowerLaw(3.6, 1e14, 0.5)), moment) is None


def test_how_many_losses_to_remember() -> None:
    assert losses_needed(Waited(3)) == 0
    assert losses_needed(LossBelow(3.0)) == 1
    assert losses_needed(AnyOf((Waited(3), Plateau(4, 0.1, 3)))) == 6
    assert losses_needed(SlopeBelow(4, 0.1, 3)) == 6


def test_words() -> None:
    trigger = AllOf((AnyOf((LossBelow(3.5), Waited(4000))), AtFraction(0.25), AtTokens(50_000_000)))
    assert words(trigger) == (
        "(val < 3.5 or 4,000 steps after the last operation) and after 0.25 of the budget and after "
        "50.0M tokens"
    )
    assert words(Plateau(5, 0.02, 2)) == (
        "val falls by at most 0.02 per 1,000 steps over 5 evaluations, 2 times in a row"
    )
    assert words(SlopeBelow(5, 12.0)) == (
        "val falls by at most 12 nats per 1e15 FLOPs over 5 evaluations"
    )
    assert words(SlopeBelow(5, PowerLaw(1.9, 2e15, 0.25))) == (
        "val falls per FLOP by at most as much over 5 evaluations as 1.9 + (2e+15 / FLOPs)^0.25"
    )
