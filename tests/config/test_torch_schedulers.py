"""The table of schedulers is that of the installed torch, and configs are held against it before torch is imported."""

from __future__ import annotations

import inspect
import re
from typing import Any, get_args

import pytest
import torch
from torch.optim import lr_scheduler

from instar.config.errors import ConfigError
from instar.config.load import load_config
from instar.config.schema import LearningRateConfig, Shape
from instar.config.torch_optim.curves import CURVES
from instar.config.torch_optim.schedulers import CYCLES_MOMENTUM, INSTEAD, REFUSED, SCHEDULERS

OF_TORCH = {
    name: getattr(lr_scheduler, name) for name in lr_scheduler.__all__ if name != "LRScheduler"
}
NEEDED: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": 3},
    "MultiStepLR": {"milestones": [2, 5]},
    "ExponentialLR": {"gamma": 0.9},
    "CosineAnnealingLR": {"T_max": 8},
    "CosineAnnealingWarmRestarts": {"T_0": 4},
    "OneCycleLR": {"total_steps": 9},
    "CyclicLR": {"base_lr": 0.01},
}
TRIED = (
    None,
    True,
    "cos",
    "triangular2",
    -1.0,
    0,
    1,
    3,
    0.5,
    1.0,
    25.0,
    [2, 3],
    [3, 2],
    [0],
    [1.5],
)


def problems(*overrides: str) -> dict[str, str]:
    """Hints by the messages of what is wrong with a config."""
    try:
        load_config(None, overrides)
    except ConfigError as error:
        return {problem.message: problem.hint for problem in error.problems}
    return {}


def test_every_scheduler_of_torch_is_a_shape_or_is_refused_by_name() -> None:
    names = {name for name in OF_TORCH if name.lower() in REFUSED}
    assert OF_TORCH.keys() == SCHEDULERS.keys() | names
    assert len(names) == len(REFUSED)
    assert CURVES.keys() == SCHEDULERS.keys() == {s for s in get_args(Shape) if s[0].isupper()}
    for name in names:
        remedy = re.escape(REFUSED[name.lower()])
        with pytest.raises(ConfigError, match=remedy):
            load_config(None, [f"learning_rate.shape={name}"])


@pytest.mark.parametrize("name", SCHEDULERS)
def test_arguments_and_defaults_are_torchs(name: str) -> None:
    signature = inspect.signature(OF_TORCH[name]).parameters
    assert signature.keys() - SCHEDULERS[name].keys() <= INSTEAD.keys()
    assert SCHEDULERS[name].keys() <= signature.keys()
    assert (name in CYCLES_MOMENTUM) is ("cycle_momentum" in signature)
    for option, argument in SCHEDULERS[name].items():
        torchs = signature[option].default
        is_needed = torchs is inspect.Parameter.empty or option == "total_steps"
        assert argument.is_needed is is_needed, option
        if not is_needed:
            assert argument.default == torchs, option
            assert argument.is_valid(torchs), option


@pytest.mark.parametrize("name", SCHEDULERS)
def test_what_is_allowed_torch_takes(name: str) -> None:
    more = {"max_lr": 0.1} if name in CYCLES_MOMENTUM else {}
    for option, argument in SCHEDULERS[name].items():
        for value in filter(argument.is_valid, TRIED):
            optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9)
            number = type(argument.default) is float  # torch tells 1 from 1.0
            setting = {option: float(value) if number else value}
            OF_TORCH[name](optimizer, **{**NEEDED.get(name, {}), **more, **setting})


@pytest.mark.parametrize("name", SCHEDULERS)
def test_torchs_names_have_torchs_defaults(name: str) -> None:
    rate = LearningRateConfig.model_validate({"shape": name})
    assert (rate.warmup_iters, rate.min_lr_ratio) == (0, 0.0)
    expected = {f"learning_rate.options.{option}" for option in NEEDED.get(name, {})}
    assert {
        message.partition(" is needed")[0] for message in problems(f"learning_rate.shape={name}")
    } == expected


def test_all_mistakes_are_told_at_once_with_what_to_write() -> None:
    text = "{T_max: 0, eta_min: 0.5, etamin: 1, last_epoch: 3, max_lr: 1}"
    keys = ("learning_rate.gamma=0.9", "learning_rate.lr_decay_iters=10")
    shape = "learning_rate.shape=CosineAnnealingLR"
    assert problems(shape, f"learning_rate.options={text}", *keys) == {
        "learning_rate.options.T_max must be a whole number of at least 1, got 0": "",
        "learning_rate.options.etamin is unknown": "did you mean 'eta_min'?",
        "learning_rate.options.last_epoch is unknown": INSTEAD["last_epoch"],
        "learning_rate.options.max_lr is unknown": INSTEAD["max_lr"],
        "learning_rate.options.eta_min (0.5) is more than the highest rate, optimizer.lr (0.001)": "",
        **{
            f"learning_rate.{key} is not for CosineAnnealingLR, whose arguments are learning_rate.options": "leave it "
            "out; the options are T_max, eta_min"
            for key in ("gamma", "lr_decay_iters")
        },
    }


def test_options_without_a_scheduler_are_refused() -> None:
    (problem,) = problems("learning_rate.options={step_size: 3}")
    assert problem == "learning_rate.options are for schedulers of torch, and the shape is cosine"
    hint = problems("learning_rate.shape=steplr")
    assert [*hint.values()] == ["did you mean 'StepLR'?"]


@pytest.mark.parametrize(
    ("keys", "unread"),
    [
        ({"shape": "cosine", "gamma": 0.3, "decay_every": 5}, ["decay_every", "gamma"]),
        ({"shape": "step", "gamma": 0.3, "decay_every": 5}, []),
        ({"shape": "exponential", "decay_fraction": 0.3, "decay_every": 5}, ["decay_fraction"]),
        ({"shape": "wsd", "decay_fraction": 0.3}, []),
        ({"shape": "constant", "gamma": 0.5}, []),
    ],
)
def test_keys_that_a_shape_does_not_read_are_known(
    keys: dict[str, object], unread: list[str]
) -> None:
    assert LearningRateConfig(**keys).unread == unread  # type: ignore[arg-type]
