"""Optimizers by name: which keys of the section `optimizer` each reads, and arguments of its own.

A test compares this table with the signatures and the states of the installed torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from instar.config.torch_optim.arguments import (
    Argument,
    argument_problems,
    flag,
    is_number,
    number,
    pair,
)

SHARED = ("beta1", "beta2", "eps", "momentum", "weight_decay")
"""Keys of the section that some optimizers read and others do not."""


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer."""

    target: str
    """its class in torch.optim"""
    keys: Mapping[str, float]
    """the keys of the section that it reads, and their defaults"""
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    """the arguments of `optimizer.options`"""
    states: Mapping[str, str] = field(default_factory=dict)
    """its states of the parameter's shape; each may depend on an argument that is not 0 or false"""
    steps_like: Literal["adamw", "sgd"] | None = None
    """whose rates follow the width and the depth of a model as its rates do; None: it is not known how"""
    is_torchs: bool = True
    """whether keys that it does not read are null, and its defaults those of torch"""
    follows_rate: bool = True
    """whether it reads the learning rate at every step, not at a parameter's first alone"""
    is_factored: bool = False
    """whether it keeps means over the rows and over the columns of a matrix instead of a state of its shape"""
    is_elementwise: bool = True
    """whether an element's update depends on that element alone, so that rows of a parameter can be updated alone"""


_ADAM: Mapping[str, float] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
_OURS: Mapping[str, float] = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
_MOMENTS: Mapping[str, str] = {"exp_avg": "", "exp_avg_sq": ""}
_AMSGRAD: Mapping[str, str] = {**_MOMENTS, "max_exp_avg_sq": "amsgrad"}
_DECOUPLED: Mapping[str, Argument] = {"decoupled_weight_decay": flag(False)}

OPTIMIZERS: Mapping[str, OptimizerSpec] = {
    "adamw": OptimizerSpec(
        "AdamW",
        {"lr": 1e-3, **_OURS},
        {"amsgrad": flag(False)},
        _AMSGRAD,
        "adamw",
        is_torchs=False,
    ),
    "muon": OptimizerSpec(
        "Muon",
        {"lr": 1e-3, **_OURS, "momentum": 0.95},
        states={"momentum_buffer": ""},
        steps_like="adamw",
        is_torchs=False,
    ),
    "sgd": OptimizerSpec(
        "SGD",
        {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.0},
        {"dampening": number(0.0, 0, 1)},
        {"momentum_buffer": "momentum"},
        "sgd",
        is_torchs=False,
    ),
    "adadelta": OptimizerSpec(
        "Adadelta",
        {"lr": 1.0, "eps": 1e-6, "weight_decay": 0.0},
        {"rho": number(0.9, 0, 1)},
        {"square_avg": "", "acc_delta": ""},
    ),
    "adafactor": OptimizerSpec(
        "Adafactor",
        {"lr": 0.01, "weight_decay": 0.0},
        {
            "beta2_decay": number(-0.8, high=0),
            "eps": pair(
                (None, 1e-3),
                "two numbers of at least 0, the first of which may be null, such as [null, 0.001]",
                lambda first, second: (first is None or _is_size(first)) and _is_size(second),
            ),
            "d": number(1.0, 1),
        },
        is_factored=True,
        is_elementwise=False,
    ),
    "adagrad": OptimizerSpec(
        "Adagrad",
        {"lr": 0.01, "eps": 1e-10, "weight_decay": 0.0},
        {"lr_decay": number(0.0, 0), "initial_accumulator_value": number(0.0, 0)},
        {"sum": ""},
        "adamw",
    ),
    "adam": OptimizerSpec(
        "Adam", {"lr": 1e-3, **_ADAM}, {"amsgrad": flag(False), **_DECOUPLED}, _AMSGRAD, "adamw"
    ),
    "adamax": OptimizerSpec(
        "Adamax",
        {"lr": 2e-3, **_ADAM},
        states={"exp_avg": "", "exp_inf": ""},
        steps_like="adamw",
    ),
    "asgd": OptimizerSpec(
        "ASGD",
        {"lr": 0.01, "weight_decay": 0.0},
        {"lambd": number(1e-4, 0), "alpha": number(0.75, 0), "t0": number(1e6, 0)},
        {"ax": ""},
    ),
    "nadam": OptimizerSpec(
        "NAdam",
        {"lr": 2e-3, **_ADAM},
        {"momentum_decay": number(4e-3, 0), **_DECOUPLED},
        _MOMENTS,
        "adamw",
    ),
    "radam": OptimizerSpec("RAdam", {"lr": 1e-3, **_ADAM}, _DECOUPLED, _MOMENTS, "adamw"),
    "rmsprop": OptimizerSpec(
        "RMSprop",
        {"lr": 0.01, "eps": 1e-8, "momentum": 0.0, "weight_decay": 0.0},
        {"alpha": number(0.99, 0, 1), "centered": flag(False)},
        {"square_avg": "", "momentum_buffer": "momentum", "grad_avg": "centered"},
        "adamw",
    ),
    "rprop": OptimizerSpec(
        "Rprop",
        {"lr": 0.01},
        {
            "etas": pair(
                (0.5, 1.2),
                "two numbers, from 0 to 1 and above 1, such as [0.5, 1.2]",
                lambda low, high: is_number(low) and is_number(high) and 0 < low < 1 < high,
            ),
            "step_sizes": pair(
                (1e-6, 50.0),
                "two numbers of at least 0, the lower first, such as [1e-6, 50]",
                lambda low, high: _is_size(low) and _is_size(high) and low <= high,
            ),
        },
        {"prev": "", "step_size": ""},
        follows_rate=False,
        is_elementwise=False,
    ),
}
"""The optimizers by the names of `optimizer.name`."""

REFUSED: Mapping[str, str] = {
    "lbfgs": "LBFGS computes the loss several times a step; write a training loop of your own, or choose adamw",
    "sparseadam": "SparseAdam is for sparse gradients, which cannot be clipped or added up; choose adam",
}
"""What to write instead of optimizers of torch that cannot be chosen."""

_CHOSEN = "how it is computed is chosen for you: leave it out"
INSTEAD: Mapping[str, str] = {
    "betas": "write optimizer.beta1 and optimizer.beta2",
    **{name: f"write optimizer.{name}" for name in ("lr", "eps", "weight_decay", "momentum")},
    "nesterov": "write optimizer.nesterov",
    "maximize": "losses are minimised: return the negative one",
    **dict.fromkeys(("foreach", "fused", "capturable", "differentiable"), _CHOSEN),
}
"""What to write instead of arguments of torch that are no options."""


def _is_size(value: Any) -> bool:
    return is_number(value) and value >= 0


def defaults_of(name: str) -> dict[str, float | None]:
    """Return the defaults of keys that an optimizer has of its own; null where it does not read a key."""
    spec = OPTIMIZERS[name]
    unread = [key for key in SHARED if spec.is_torchs and key not in spec.keys]
    return {**dict.fromkeys(unread), **spec.keys}


def constructor_arguments(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an optimizer of torch beside parameters and learning rate.

    Args:
        settings: the keys of the section `optimizer`.
    """
    spec = OPTIMIZERS[name]
    keys = {key: settings[key] for key in spec.keys if key != "lr"}
    if "beta1" in keys:
        keys["betas"] = (keys.pop("beta1"), keys.pop("beta2"))
    options = settings["options"]
    return {**keys, **{n: options.get(n, a.default) for n, a in spec.arguments.items()}}


def shaped_states(name: str, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the states of the parameter's shape that an optimizer keeps; see `constructor_arguments`."""
    arguments = {**constructor_arguments(name, settings), "": True}
    return tuple(state for state, needs in OPTIMIZERS[name].states.items() if arguments[needs])


def optimizer_problems(
    name: str, settings: Mapping[str, Any], of_muon: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    """Yield keys of the section `optimizer` that an optimizer does not read, or whose values are wrong, each with a
    message that follows its name and a hint.

    Args:
        settings: the keys of the section.
        of_muon: those that Muon alone reads, with their defaults.
    """
    spec = OPTIMIZERS[name]
    for key in SHARED:
        if key in spec.keys and settings[key] is None:
            yield key, f"is null, and {name} needs it", f"e.g. {spec.keys[key]:g}"
        elif spec.is_torchs and key not in spec.keys and settings[key] is not None:
            read = ", ".join(spec.keys)
            yield key, f"is not for {name}, which reads {read}", "leave it out, or set it to null"
    if spec.is_torchs:
        for key, default in of_muon.items():
            if settings[key] != default:
                yield key, f"is for muon, not for {name}", "leave it out"
    for option, message, hint in argument_problems(spec.arguments, settings["options"], INSTEAD):
        yield f"options.{option}", message, hint


def unread_keys(settings: Mapping[str, Any], of_muon: Mapping[str, Any]) -> list[str]:
    """Return the keys of the section `optimizer` that are set and that one of Instar's own optimizers does not read.

    Args:
        settings, of_muon: see `optimizer_problems`.
    """
    name = settings["name"]
    if OPTIMIZERS[name].is_torchs:
        return []  # which is a problem
    defaults = {**OPTIMIZERS["muon"].keys, **of_muon}
    read = OPTIMIZERS[name].keys.keys() | (of_muon.keys() if name == "muon" else set())
    return [key for key, value in defaults.items() if key not in read and settings[key] != value]
