"""The learning rate of a step is one pure function of the settings and the step."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instar.config.schema import RunConfig
from instar.schedule.settings import Settings, initial_settings, is_frozen, learning_rate


def settings(**changes: object) -> Settings:
    config = RunConfig.model_validate(
        {"learning_rate": {"warmup_iters": 10, "lr_decay_iters": 110}}
    )
    return dataclasses.replace(initial_settings(config), lr=1.0, **changes)  # type: ignore[arg-type]


def test_warm_up_is_linear_and_ends_at_the_peak() -> None:
    rates = [learning_rate(settings(), step) for step in range(10)]
    assert rates == pytest.approx([(step + 1) / 10 for step in range(10)])


def test_cosine_is_halfway_in_the_middle_and_lowest_at_the_end() -> None:
    course = settings(min_lr_ratio=0.1)
    assert learning_rate(course, 60) == pytest.approx(0.1 + 0.9 / 2)
    assert learning_rate(course, 110) == pytest.approx(0.1)
    assert learning_rate(course, 10_000) == pytest.approx(0.1)


def test_wsd_is_stable_then_falls_linearly() -> None:
    course = settings(lr_shape="wsd", decay_fraction=0.5, min_lr_ratio=0.0)
    assert {learning_rate(course, step) for step in range(10, 56)} == {1.0}
    assert learning_rate(course, 55 + 11) == pytest.approx(1 - 11 / 55)
    assert learning_rate(course, 110) == 0.0


def test_constant_stays_at_the_peak() -> None:
    course = settings(lr_shape="constant", lr_decay_iters=None)
    assert learning_rate(course, 10**9) == 1.0


def test_without_warm_up_the_first_step_is_at_the_peak() -> None:
    assert learning_rate(settings(warmup_iters=0), 0) == 1.0


def test_a_rewarming_rises_on_top_of_a_course_that_goes_on() -> None:
    course = settings(min_lr_ratio=0.1)
    rising = dataclasses.replace(course, rewarm_start=60, rewarm_iters=4)
    ratios = [learning_rate(rising, step) / learning_rate(course, step) for step in range(58, 66)]
    assert ratios == pytest.approx([1, 1, 0.25, 0.5, 0.75, 1, 1, 1])


def test_nothing_is_frozen_by_no_pattern() -> None:
    assert settings().frozen == ()
    assert not is_frozen((), "head.weight")
    assert not is_frozen(("Head*",), "head.weight")


@given(
    shape=st.sampled_from(["cosine", "wsd", "constant"]),
    warmup=st.integers(0, 50),
    length=st.integers(1, 200),
    fraction=st.floats(0.01, 1.0),
    lowest=st.floats(0.0, 1.0),
    start=st.integers(0, 1000),
    step=st.integers(0, 5000),
)
def test_the_rate_is_finite_and_never_above_the_peak(
    shape: str, warmup: int, length: int, fraction: float, lowest: float, start: int, step: int
) -> None:
    course = settings(
        lr_shape=shape,
        warmup_iters=warmup,
        lr_decay_iters=warmup + length,
        decay_fraction=fraction,
        min_lr_ratio=lowest,
        lr_start=start,
    )
    rate = learning_rate(course, start + step)
    assert math.isfinite(rate)
    assert 0.0 <= rate <= 1.0
    if step >= warmup:
        assert rate >= lowest - 1e-12
