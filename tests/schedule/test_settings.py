"""The learning rate of a step is one pure function of the settings and the step."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from instar.config.language import LanguageConfig
from instar.config.schema import LearningRateConfig
from instar.config.torch_optim.schedulers import SCHEDULERS
from instar.schedule.settings import Settings, initial_settings, is_frozen, learning_rate

SHAPES = [
    shape
    for shape in get_args(LearningRateConfig.model_fields["shape"].annotation)
    if shape not in SCHEDULERS
]


def settings(**changes: object) -> Settings:
    config = LanguageConfig.model_validate(
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


def test_linear_falls_in_a_line_from_the_peak_to_the_lowest() -> None:
    course = settings(lr_shape="linear", min_lr_ratio=0.2)
    rates = [learning_rate(course, step) for step in (9, 10, 35, 60, 109, 110, 10**6)]
    assert rates == pytest.approx([1, 1, 0.8, 0.6, 0.208, 0.2, 0.2])


def test_step_falls_at_once_every_so_many_steps() -> None:
    course = settings(lr_shape="step", decay_every=20, gamma=0.5, min_lr_ratio=0.2)
    rates = [learning_rate(course, step) for step in (9, 10, 29, 30, 49, 50, 69, 70, 10**12)]
    assert rates == [1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.2, 0.2]


def test_exponential_falls_as_far_but_smoothly() -> None:
    course = settings(lr_shape="exponential", decay_every=20, gamma=0.25, min_lr_ratio=0.1)
    rates = [learning_rate(course, step) for step in (9, 10, 20, 30, 40, 50, 10**12)]
    assert rates == [1, 1, 0.5, 0.25, 0.125, 0.1, 0.1]


@pytest.mark.parametrize("shape", ["step", "exponential"])
def test_shapes_without_an_end_know_of_none(shape: str) -> None:
    course = settings(lr_shape=shape, decay_every=20, min_lr_ratio=0.0, lr_decay_iters=None)
    finite = dataclasses.replace(course, lr_decay_iters=11)
    for step in range(200):
        assert learning_rate(course, step) == learning_rate(finite, step)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_course_begun_anew_is_the_same_course_later(shape: str) -> None:
    course = settings(lr_shape=shape, decay_every=7, gamma=0.7)
    later = dataclasses.replace(course, lr_start=1000)
    assert [learning_rate(later, 1000 + step) for step in range(200)] == [
        learning_rate(course, step) for step in range(200)
    ]


@pytest.mark.parametrize("shape", SHAPES)
def test_what_the_config_says_of_the_course_is_in_force(shape: str) -> None:
    fields = {"shape": shape, "decay_every": 30, "gamma": 0.3, "lr_decay_iters": 500}
    course = initial_settings(LanguageConfig.model_validate({"learning_rate": fields}))
    assert (course.lr_shape, course.decay_every, course.gamma) == (shape, 30, 0.3)
    assert {30, 500} <= set(course.counts())


def torchs(make: Any, steps: int, *args: Any, **options: Any) -> list[float]:
    """The rates that a scheduler of torch.optim gives to the first steps, from a peak of 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer, *args, **options)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"lr_shape": "linear", "lr_decay_iters": 60, "min_lr_ratio": 0.1},
            torchs(lr_scheduler.LinearLR, 100, 1.0, 0.1, total_iters=60),
        ),
        (
            {"lr_shape": "step", "decay_every": 15, "gamma": 0.3, "min_lr_ratio": 0.0},
            torchs(lr_scheduler.StepLR, 100, 15, 0.3),
        ),
        (
            {"lr_shape": "exponential", "decay_every": 1, "gamma": 0.9, "min_lr_ratio": 0.0},
            torchs(lr_scheduler.ExponentialLR, 100, 0.9),
        ),
        (
            {"lr_shape": "exponential", "decay_every": 8, "gamma": 0.5, "min_lr_ratio": 0.0},
            torchs(lr_scheduler.ExponentialLR, 100, 0.5 ** (1 / 8)),
        ),
        (
            {"lr_shape": "cosine", "lr_decay_iters": 60, "min_lr_ratio": 0.1},
            torchs(lr_scheduler.CosineAnnealingLR, 61, 60, eta_min=0.1),
        ),
        (
            {"lr_shape": "constant", "warmup_iters": 25},
            torchs(lr_scheduler.LinearLR, 100, 1 / 25, 1.0, total_iters=24),
        ),
    ],
)
def test_the_rates_are_those_of_torch(changes: dict[str, Any], expected: list[float]) -> None:
    course = settings(**{"warmup_iters": 0} | changes)
    assert [learning_rate(course, step) for step in range(len(expected))] == pytest.approx(expected)


def test_constant_stays_at_the_peak() -> None:
    course = settings(lr_shape="constant", lr_decay_iters=None)
    assert learning_rate(course, 10**9) == 1.0


@pytest.mark.parametrize("shape", ["cosine", "linear", "wsd"])
def test_without_a_last_step_the_rate_stays_at_the_peak(shape: str) -> None:
    course = settings(lr_shape=shape, lr_decay_iters=None)
    assert learning_rate(course, 0) < course.lr
    assert {learning_rate(course, step) for step in (10, 110, 10**6)} == {course.lr}


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
    shape=st.sampled_from(SHAPES),
    warmup=st.integers(0, 50),
    length=st.integers(1, 200),
    fraction=st.floats(0.01, 1.0),
    every=st.integers(1, 100),
    gamma=st.floats(0.0, 1.0, exclude_min=True, exclude_max=True),
    lowest=st.floats(0.0, 1.0),
    start=st.integers(0, 1000),
    step=st.integers(0, 5000),
)
def test_the_rate_rises_to_the_peak_then_falls_and_never_below_the_lowest(
    shape: Any,
    warmup: int,
    length: int,
    fraction: float,
    every: int,
    gamma: float,
    lowest: float,
    start: int,
    step: int,
) -> None:
    course = settings(
        lr_shape=shape,
        warmup_iters=warmup,
        lr_decay_iters=warmup + length,
        decay_fraction=fraction,
        decay_every=every,
        gamma=gamma,
        min_lr_ratio=lowest,
        lr_start=start,
    )
    rate, following = (learning_rate(course, start + offset) for offset in (step, step + 1))
    assert math.isfinite(rate)
    assert 0.0 <= rate <= 1.0
    if step < warmup:
        assert rate < following or rate == 1.0
    else:
        assert following <= rate + 1e-12
        assert rate >= lowest - 1e-12
    # the warm-up's last step and the one after it are both at the peak
    at_peak = [learning_rate(course, start + offset) for offset in (warmup, max(warmup - 1, 0))]
    assert at_peak == pytest.approx([1.0, 1.0])
