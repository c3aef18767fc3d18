"""The table of optimizers is that of the installed torch, and configs are held against it before torch is imported."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch
from torch.nn import Parameter

from instar.config.errors import ConfigError
from instar.config.load import load_config
from instar.config.schema import OptimizerConfig, OptimizerName
from instar.config.torch_optim.optimizers import (
    INSTEAD,
    OPTIMIZERS,
    REFUSED,
    constructor_arguments,
    defaults_of,
    shaped_states,
)
from instar.run.start.preflight import preflight

OF_TORCH = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
}
TABLED = [name for name in OPTIMIZERS if name != "muon"]
NEW = [name for name, spec in OPTIMIZERS.items() if spec.is_torchs]
TRIED = (None, True, "x", -1e9, -1.0, -1e-6, 0, 0.0, 1e-6, 0.5, 1, 1.0, 1.5, 1e6)
CHANGED: dict[str, Any] = {
    "eps": [1e-8, 0.01],
    "etas": [0.4, 1.3],
    "step_sizes": [1e-4, 10],
    "beta2_decay": -0.5,
    "d": 2.0,
    "t0": 3.0,
}
"""other values than the default, for arguments that are no shares and no flags"""


def changed_options(name: str) -> dict[str, Any]:
    """Options of an optimizer, each with another value than its default."""
    return {
        option: CHANGED.get(
            option, not argument.default if argument.default in (True, False) else 0.3
        )
        for option, argument in OPTIMIZERS[name].arguments.items()
    }


def section(name: str, **keys: Any) -> OptimizerConfig:
    return OptimizerConfig.model_validate({"name": name, **keys})


def refusals(*overrides: str) -> list[str]:
    try:
        load_config(None, overrides)
    except ConfigError as error:
        return [problem.message for problem in error.problems]
    return []


def test_every_optimizer_of_torch_can_be_chosen_or_is_refused_by_name() -> None:
    assert OF_TORCH.keys() == OPTIMIZERS.keys() | REFUSED.keys()
    assert {name: kind.__name__ for name, kind in OF_TORCH.items() if name in OPTIMIZERS} == {
        name: spec.target for name, spec in OPTIMIZERS.items()
    }
    assert tuple(OPTIMIZERS) == get_args(OptimizerName)
    for name, remedy in REFUSED.items():
        with pytest.raises(ConfigError, match=re.escape(remedy)):
            load_config(None, [f"optimizer.name={OF_TORCH[name].__name__}"])


@pytest.mark.parametrize("name", TABLED)
def test_arguments_and_defaults_are_torchs(name: str) -> None:
    spec = OPTIMIZERS[name]
    signature = inspect.signature(OF_TORCH[name]).parameters
    of_keys = {*constructor_arguments(name, section(name).model_dump())} - {*spec.arguments}
    of_keys |= {"nesterov"} if name == "sgd" else set()
    left_out = {"params", "lr", "maximize", *("foreach", "fused", "capturable", "differentiable")}
    assert signature.keys() - left_out == of_keys | spec.arguments.keys()
    assert signature.keys() - {"params"} - spec.arguments.keys() <= INSTEAD.keys() | {"dampening"}
    for option, argument in spec.arguments.items():
        assert argument.default == signature[option].default, option
        assert argument.is_valid(argument.default), option
    if spec.is_torchs:
        arguments = constructor_arguments(name, section(name).model_dump())
        assert {key: arguments[key] for key in of_keys} == {
            key: signature[key].default for key in of_keys
        }
        assert spec.keys["lr"] == signature["lr"].default


@pytest.mark.parametrize("name", TABLED)
def test_what_torch_refuses_is_refused_and_what_is_allowed_torch_takes(name: str) -> None:
    def pairs() -> Iterator[list[Any]]:
        return ([first, second] for first in TRIED for second in TRIED)

    for option, argument in OPTIMIZERS[name].arguments.items():
        is_pair = isinstance(argument.default, tuple)
        for value in pairs() if is_pair else TRIED:
            if not argument.is_valid(value):
                continue
            values = section(name, options={option: value}).model_dump()
            parameters = [Parameter(torch.ones(2, 2))]
            OF_TORCH[name](parameters, lr=0.1, **constructor_arguments(name, values))


@pytest.mark.parametrize("name", TABLED)
@pytest.mark.parametrize("has_options", [False, True])
def test_states_are_those_that_torch_keeps(name: str, has_options: bool) -> None:
    more = {"momentum": 0.5} if has_options and "momentum" in OPTIMIZERS[name].keys else {}
    values = section(
        name, options=changed_options(name) if has_options else {}, **more
    ).model_dump()
    parameter = Parameter(torch.ones(3, 2))
    optimizer = OF_TORCH[name]([parameter], lr=0.1, **constructor_arguments(name, values))
    parameter.grad = torch.ones(3, 2)
    optimizer.step()
    shapes = {
        state: tuple(value.shape)
        for state, value in optimizer.state[parameter].items()
        if isinstance(value, torch.Tensor) and value.ndim
    }
    factors = {"row_var": (3, 1), "col_var": (1, 2)} if OPTIMIZERS[name].is_factored else {}
    assert shapes == {**dict.fromkeys(shaped_states(name, values), (3, 2)), **factors}


@pytest.mark.parametrize("name", NEW)
def test_a_key_that_an_optimizer_does_not_read_is_refused_by_name(name: str) -> None:
    constant = ("learning_rate.shape=constant", "learning_rate.warmup_iters=0")
    assert refusals(f"optimizer.name={name}", *constant) == []
    for key, default in defaults_of(name).items():
        problems = refusals(f"optimizer.name={name}", f"optimizer.{key}=0.5", *constant)
        assert (default is None) is any(f"optimizer.{key} is not for {name}" in p for p in problems)
        if default is not None:
            (problem,) = refusals(f"optimizer.name={name}", f"optimizer.{key}=null", *constant) or [
                ""
            ]
            assert f"optimizer.{key}" in problem


def test_all_mistakes_are_told_at_once_with_what_to_write() -> None:
    text = "{alpha: 2, centred: true, betas: [0.9, 0.99], fused: true, maximize: true}"
    with pytest.raises(ConfigError) as caught:
        load_config(
            None,
            [
                "optimizer.name=rmsprop",
                f"optimizer.options={text}",
                "optimizer.muon_lr=0.1",
                "optimizer.beta1=0.8",
            ],
        )
    hints = {problem.message: problem.hint for problem in caught.value.problems}
    assert hints == {
        "optimizer.options.alpha must be a number from 0 to 1, got 2": "",
        "optimizer.options.centred is unknown": "did you mean 'centered'?",
        "optimizer.options.betas is unknown": INSTEAD["betas"],
        "optimizer.options.fused is unknown": INSTEAD["fused"],
        "optimizer.options.maximize is unknown": INSTEAD["maximize"],
        "optimizer.muon_lr is for muon, not for rmsprop": "leave it out",
        "optimizer.beta1 is not for rmsprop, which reads lr, eps, momentum, weight_decay": "leave it out, or set it "
        "to null",
    }


def test_options_are_merged_key_by_key_and_kept_when_a_run_is_resumed() -> None:
    loaded_config = load_config(
        None,
        [
            "optimizer.name=rmsprop",
            "optimizer.options={alpha: 0.9}",
            "optimizer.options.centered=true",
        ],
    )
    assert loaded_config.config.optimizer.options == {"alpha": 0.9, "centered": True}
    assert loaded_config.config.optimizer.beta1 is None
    copy = type(loaded_config.config).model_validate_json(loaded_config.config.model_dump_json())
    assert copy == loaded_config.config


@pytest.mark.parametrize("name", ["adafactor", "rprop"])
def test_optimizers_that_need_whole_parameters_are_not_for_shards(name: str) -> None:
    constant = ("learning_rate.shape=constant", "learning_rate.warmup_iters=0")
    problems = refusals(f"optimizer.name={name}", "parallel.strategy=fsdp", *constant)
    assert problems == [
        f"strategy fsdp may divide parameters among ranks, and {name} cannot update some rows of one alone"
    ]


def test_a_rate_that_nothing_reads_again_is_not_scheduled() -> None:
    problems = refusals("optimizer.name=rprop", "learning_rate.plateau.factor=0.5")
    assert [problem.partition(" has no effect")[0] for problem in problems] == [
        f"learning_rate.{key}" for key in ("shape", "warmup_iters", "plateau.factor")
    ]


def test_the_rate_of_the_others_does_not_follow_the_size_if_nobody_knows_how() -> None:
    for name in ("adadelta", "adafactor", "asgd"):
        (problem,) = refusals(f"optimizer.name={name}", "optimizer.lr_base_width=64")
        assert problem.startswith(f"optimizer.lr_base_width is not for {name}")


def test_of_instars_own_optimizers_it_is_said_what_has_no_effect() -> None:
    def warnings_of(*overrides: str) -> list[str]:
        preparation = preflight(load_config(None, overrides), 1, assume=lambda _: None)
        return [text for text in preparation.warnings if "has no effect" in text]

    assert warnings_of() == warnings_of("optimizer.name=muon", "optimizer.muon_lr=0.1") == []
    assert warnings_of("optimizer.momentum=0.5", "optimizer.muon_lr=0.1") == [
        f"optimizer.{key} has no effect on adamw" for key in ("momentum", "muon_lr")
    ]
    assert warnings_of("optimizer={name: sgd, beta2: 0.5}") == [
        "optimizer.beta2 has no effect on sgd"
    ]
    assert warnings_of("learning_rate={gamma: 0.3}") == [
        "learning_rate.gamma has no effect on the shape cosine"
    ]


def test_no_optimizer_needs_torch_to_be_checked() -> None:
    code = (
        "import sys; from instar.config.load import load_config;"
        "load_config(None, ['optimizer.name=rmsprop', 'optimizer.options={alpha: 0.5}']);"
        "assert 'torch' not in sys.modules"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
