"""Schedulers of `torch.optim.lr_scheduler` that are a function of the step: their arguments.

A test compares this table with the signatures of the installed torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from instar.config.torch_optim.arguments import (
    Argument,
    choice,
    flag,
    is_count,
    number,
    steps,
)

SCHEDULERS: Mapping[str, Mapping[str, Argument]] = {
    "StepLR": {"step_size": steps(None, is_needed=True), "gamma": number(0.1, 0)},
    "MultiStepLR": {
        "milestones": Argument(
            None,
            "a list of whole numbers of at least 1 that rise, such as [300, 800]",
            lambda value: (
                isinstance(value, list | tuple)
                and all(is_count(1)(step) for step in value)
                and [*value] == sorted(value)
            ),
            is_needed=True,
            counts_steps=True,
        ),
        "gamma": number(0.1, 0),
    },
    "ConstantLR": {"factor": number(1 / 3, 0, 1), "total_iters": steps(5)},
    "LinearLR": {
        "start_factor": number(1 / 3, 1e-12, 1),
        "end_factor": number(1.0, 0, 1),
        "total_iters": steps(5),
    },
    "ExponentialLR": {"gamma": number(None, 0, is_needed=True)},
    "PolynomialLR": {"total_iters": steps(5), "power": number(1.0, 0)},
    "CosineAnnealingLR": {
        "T_max": steps(None, is_needed=True),
        "eta_min": number(0.0, 0, is_rate=True),
    },
    "CosineAnnealingWarmRestarts": {
        "T_0": steps(None, is_needed=True),
        "T_mult": Argument(1, "a whole number of at least 1", is_count(1)),
        "eta_min": number(0.0, 0, is_rate=True),
    },
    "OneCycleLR": {
        "total_steps": steps(None, 2, is_needed=True),
        "pct_start": number(0.3, 0, 1),
        "anneal_strategy": choice("cos", "cos", "linear"),
        "div_factor": number(25.0, 1),
        "final_div_factor": number(1e4, 1e-6),
        "three_phase": flag(False),
    },
    "CyclicLR": {
        "base_lr": number(None, 0, is_needed=True, is_rate=True),
        "step_size_up": steps(2000),
        "step_size_down": Argument(
            None,
            "a whole number of at least 1, or null for step_size_up",
            lambda value: value is None or is_count(1)(value),
            counts_steps=True,
        ),
        "mode": choice("triangular", "triangular", "triangular2", "exp_range"),
        "gamma": number(1.0, 0),
    },
}
"""The arguments of each in `learning_rate.options`, by the names of `learning_rate.shape`."""

CYCLES_MOMENTUM = ("OneCycleLR", "CyclicLR")
"""Those that change the momentum too in torch, by default."""

_MOMENTUM = "the momentum stays: leave it out"
_MODE = "write mode: triangular, triangular2 or exp_range"
INSTEAD: Mapping[str, str] = {
    "optimizer": "leave it out: there is one",
    "last_epoch": "leave it out: a resumed run knows its step",
    "max_lr": "the highest rate is optimizer.lr",
    "epochs": "write total_steps",
    "steps_per_epoch": "write total_steps",
    "scale_fn": _MODE,
    "scale_mode": _MODE,
    **dict.fromkeys(("cycle_momentum", "base_momentum", "max_momentum"), _MOMENTUM),
}
"""What to write instead of arguments of torch that are no options."""

_FUNCTION = "a rate that code computes is `schedule` of a custom task"
_SEVERAL = (
    "a warm-up before another is learning_rate.warmup_iters, and changes in mid-run are operations of the schedule, such as "
    "change_lr; any other rate is `schedule` of a custom task"
)
REFUSED: Mapping[str, str] = {
    "lambdalr": _FUNCTION,
    "multiplicativelr": _FUNCTION,
    "sequentiallr": _SEVERAL,
    "chainedscheduler": _SEVERAL,
    "reducelronplateau": "set learning_rate.plateau.factor, beside a shape such as constant",
}
"""What to write instead of schedulers of torch that are no shapes, in lower case."""


def with_steps(
    shape: str, options: Mapping[str, Any], scale: Callable[[int], int]
) -> dict[str, Any]:
    """Return options of a scheduler with other numbers of steps, also of those that are left at their default."""

    def scaled(value: Any) -> Any:
        return [scale(step) for step in value] if isinstance(value, list | tuple) else scale(value)

    arguments = SCHEDULERS.get(shape, {})
    counts = {
        name: scaled(value)
        for name, argument in arguments.items()
        if argument.counts_steps and (value := options.get(name, argument.default)) is not None
    }
    return {**options, **counts}


def complete_options(shape: str, options: Mapping[str, Any], peak: float) -> dict[str, Any]:
    """Return the options of a scheduler with defaults, and with rates as shares of the peak; of another shape none."""
    return {
        name: value / peak if argument.is_rate else value
        for name, argument in SCHEDULERS.get(shape, {}).items()
        for value in (options.get(name, argument.default),)
    }
