"""The rate of a scheduler of torch is torch's, as a function of the step; what is done to rates goes on working."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from instar.config.load import load_config
from instar.config.origins import in_yaml
from instar.config.schema import RunConfig
from instar.config.sections import Operation
from instar.config.torch_optim.curves import CURVES
from instar.config.torch_optim.schedulers import CYCLES_MOMENTUM, complete_options, with_steps
from instar.run.start.preflight import preflight
from instar.schedule.operations import Change, effective, override
from instar.schedule.settings import initial_settings, learning_rate

LR, STEPS = 0.07, 400
CASES: list[tuple[str, dict[str, Any]]] = [
    ("StepLR", {"step_size": 30}),
    ("StepLR", {"step_size": 1, "gamma": 0.97}),
    ("MultiStepLR", {"milestones": [1, 80, 80, 200], "gamma": 0.3}),
    ("ConstantLR", {}),
    ("ConstantLR", {"factor": 0.5, "total_iters": 40}),
    ("LinearLR", {}),
    ("LinearLR", {"start_factor": 1.0, "end_factor": 0.01, "total_iters": 300}),
    ("ExponentialLR", {"gamma": 0.98}),
    ("PolynomialLR", {"total_iters": 350, "power": 2.0}),
    ("PolynomialLR", {"total_iters": 399}),
    ("CosineAnnealingLR", {"T_max": 400, "eta_min": 0.001}),
    ("CosineAnnealingLR", {"T_max": 90, "eta_min": 0.001}),
    ("CosineAnnealingLR", {"T_max": 50}),
    ("CosineAnnealingWarmRestarts", {"T_0": 17}),
    ("CosineAnnealingWarmRestarts", {"T_0": 10, "T_mult": 3, "eta_min": 0.002}),
    ("OneCycleLR", {"total_steps": 400}),
    ("OneCycleLR", {"total_steps": 401, "pct_start": 0.25, "anneal_strategy": "linear"}),
    ("OneCycleLR", {"total_steps": 400, "three_phase": True, "div_factor": 10.0}),
    ("CyclicLR", {"base_lr": 0.001, "step_size_up": 30}),
    (
        "CyclicLR",
        {"base_lr": 0.001, "step_size_up": 20, "step_size_down": 45, "mode": "triangular2"},
    ),
    ("CyclicLR", {"base_lr": 0.0, "step_size_up": 25, "mode": "exp_range", "gamma": 0.99}),
]
SCHEDULED = pytest.mark.parametrize(
    ("shape", "options"),
    CASES,
    ids=[f"{shape}-{number}" for number, (shape, _) in enumerate(CASES)],
)


def config_of(shape: str, options: Mapping[str, Any], *more: str) -> RunConfig:
    keys = [f"learning_rate.shape={shape}", f"learning_rate.options={in_yaml(dict(options))}"]
    return load_config(None, [*keys, f"optimizer.lr={LR}", f"train.until={STEPS}it", *more]).config


def of_torch(shape: str, options: Mapping[str, Any], steps: int = STEPS) -> list[float]:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=LR)
    cycles = {"max_lr": LR, "cycle_momentum": False} if shape in CYCLES_MOMENTUM else {}
    scheduler = getattr(lr_scheduler, shape)(optimizer, **options, **cycles)
    rates = []
    for step in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if step < steps - 1:
            scheduler.step()
    return rates


def test_every_scheduler_has_cases() -> None:
    assert {shape for shape, _ in CASES} == CURVES.keys()


@SCHEDULED
def test_the_rate_of_every_step_is_torchs(shape: str, options: dict[str, Any]) -> None:
    settings = initial_settings(config_of(shape, options))
    rates = [learning_rate(settings, step) for step in range(STEPS)]
    expected = of_torch(shape, options)
    assert len(set(expected)) > 1
    # where torch multiplies its way down to about 0, the rounding of larger rates is left
    assert rates == pytest.approx(expected, rel=1e-12, abs=1e-15 * LR * STEPS)


@SCHEDULED
def test_a_warm_up_comes_before_and_a_lowest_rate_under_it(
    shape: str, options: dict[str, Any]
) -> None:
    more = ("learning_rate.warmup_iters=10", "learning_rate.min_lr_ratio=0.3")
    settings = initial_settings(config_of(shape, options, *more))
    rates = [learning_rate(settings, step) for step in range(STEPS)]
    assert rates[:10] == pytest.approx([LR * (step + 1) / 10 for step in range(10)])
    expected = [max(0.3 * LR, rate) for rate in of_torch(shape, options)[: STEPS - 10]]
    assert rates[10:] == pytest.approx(expected, rel=1e-12)


@SCHEDULED
def test_operations_scale_restart_and_stretch_it(shape: str, options: dict[str, Any]) -> None:
    config = config_of(shape, options, "learning_rate.warmup_iters=4")
    history = (
        Change(Operation("change_lr", 0.5), 100, 0),
        Change(Operation("reset_lr_schedule"), 200, 0),
        Change(Operation("change_warmup_iters", 2), 200, 0),
        Change(Operation("change_warmup_iters", 0.5), 200, 0),
    )
    _, settings = effective(config, history)
    before = initial_settings(config)
    for step in (0, 5, 80):
        assert learning_rate(settings, 200 + step) == pytest.approx(
            0.5 * learning_rate(before, step), rel=1e-12
        )
    assert settings.lr_options == before.lr_options
    _, doubled_settings = effective(config, history[2:3])
    _, set_to_8 = effective(config, (Change(Operation("set_warmup_iters", 8), 0, 0),))
    assert doubled_settings.lr_options == set_to_8.lr_options
    counts = {n: v for n, v in doubled_settings.lr_options if v != dict(before.lr_options)[n]}
    assert counts.keys() == {
        name
        for name, value in before.lr_options
        if name in ("step_size", "milestones", "total_iters", "T_max", "T_0", "total_steps")
        or (name.startswith("step_size_") and value is not None)
    }


def test_rates_among_the_options_follow_the_peak() -> None:
    config = config_of("CosineAnnealingLR", {"T_max": 10, "eta_min": 0.01})
    _, settings = effective(config, (Change(Operation("set_lr", 0.7), 3, 0),))
    assert learning_rate(settings, 10) == pytest.approx(0.1)


def test_a_resume_with_another_scheduler_has_that_one_from_then_on() -> None:
    config = config_of("StepLR", {"step_size": 30})
    values = {"learning_rate.shape": "ExponentialLR", "learning_rate.options": {"gamma": 0.9}}
    _, settings = effective(config, (Change(override(values, {}), 50, 0),))
    assert learning_rate(settings, 60) == pytest.approx(LR * 0.9**60)
    _, second_settings = effective(
        config, (Change(override({"learning_rate.options": {"step_size": 20}}, {}), 50, 0),)
    )
    assert learning_rate(second_settings, 60) == pytest.approx(LR * 0.1**3)


def test_after_the_last_step_of_a_cycle_the_rate_stays() -> None:
    settings = initial_settings(config_of("OneCycleLR", {"total_steps": 100}))
    lowest = LR / 25 / 1e4
    assert learning_rate(settings, 99) == pytest.approx(lowest)
    assert learning_rate(settings, 10**6) == pytest.approx(lowest)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ("StepLR", {"step_size": 1, "gamma": 1e3}),
        ("MultiStepLR", {"milestones": [*range(1, 200)], "gamma": 1e3}),
        ("ExponentialLR", {"gamma": 2.0}),
        ("CyclicLR", {"base_lr": 0.0, "step_size_up": 7, "mode": "exp_range", "gamma": 2.0}),
    ],
)
def test_a_rate_that_grows_without_end_is_a_number(shape: str, options: dict[str, Any]) -> None:
    rates = [CURVES[shape](complete_options(shape, options, 1.0), step) for step in range(2000)]
    assert all(map(math.isfinite, rates))
    assert max(rates) > 1e200


def test_what_a_scheduler_leaves_is_said_before_the_start() -> None:
    keys = ["learning_rate.shape=OneCycleLR", "learning_rate.options={total_steps: 50}"]
    loaded_config = load_config(None, [*keys, "train.until=80it"])
    preparation = preflight(loaded_config, 1, assume=lambda _: None)
    assert any("momentum stays" in text for text in preparation.warnings)
    assert any("total_steps (50) ends before the 80 steps" in text for text in preparation.warnings)
    assert preparation.config.learning_rate.lr_decay_iters is None


def test_a_halving_cycle_goes_on_for_ever() -> None:
    options = complete_options(
        "CyclicLR", {"base_lr": 0.001, "step_size_up": 2, "mode": "triangular2"}, LR
    )
    assert CURVES["CyclicLR"](options, 1_000_002) == pytest.approx(options["base_lr"])


def test_steps_that_are_left_at_their_default_are_scaled_too() -> None:
    options = with_steps("CyclicLR", {"base_lr": 1e-5}, lambda step: step // 10)
    assert options == {"base_lr": 1e-5, "step_size_up": 200}
    assert with_steps("PolynomialLR", {}, lambda step: step * 2) == {"total_iters": 10}
