"""Operations that set keys of the config in mid-run which are no `Settings`: what optimizers, clipping and the average use.

They are part of the history as all others, so a resume, a branch and a rank that joins later have the value in force.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from instar.config.errors import value_text
from instar.config.fields import values, with_values
from instar.config.schema import RunConfig
from instar.config.torch_optim.optimizers import OPTIMIZERS
from instar.growth.values import without_x


@dataclass(frozen=True)
class ConfigOperation:
    """An operation that sets keys of the config, or multiplies their value."""

    keys: tuple[str, ...]
    form: str
    """what its value must be"""
    is_valid: Callable[[Any], bool]
    multiplies: bool = False
    refusal: Callable[[RunConfig], str] = lambda _: ""
    """why a run of a config cannot carry it out; empty: it can"""


def check_value(operation: ConfigOperation, value: Any) -> str:
    """Return what is wrong with a value; empty: nothing."""
    number = without_x(value) if operation.multiplies else value
    return (
        "" if operation.is_valid(number) else f"must be {operation.form}, got {value_text(value)}"
    )


def changed_keys(operation: ConfigOperation, value: Any, config: RunConfig) -> dict[str, Any]:
    """Return the keys of a config with their values after an operation.

    Raises:
        ValueError: the config has nothing that the operation could change, or the result is out of range.
    """
    if reason := operation.refusal(config):
        raise ValueError(reason)
    if operation.multiplies:
        (key,) = operation.keys
        return {key: values(config)[key] * without_x(value)}
    given = value if len(operation.keys) > 1 else (value,)
    return {
        key: float(part) if part is not None else None
        for key, part in zip(operation.keys, given, strict=True)
    }


def with_operation(operation: ConfigOperation, value: Any, config: RunConfig) -> RunConfig:
    """Return a config after an operation.

    Raises:
        ValueError: see `changed_keys`.
    """
    changes = changed_keys(operation, value, config)
    try:
        return with_values(config, changes)
    except ValidationError as error:
        text = ", ".join(f"{key} {number:g}" for key, number in changes.items())
        message = error.errors(include_url=False)[0]["msg"]
        raise ValueError(f"the result is {text}: {message}") from None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 1


def _is_factor(value: Any) -> bool:
    return _is_number(value) and 0 < value <= 1e6


def _lacks(key: str, what: str) -> Callable[[RunConfig], str]:
    """Return a refusal where the optimizer does not read a key of its section, which says what it reads instead."""

    def refusal(config: RunConfig) -> str:
        name, read = config.optimizer.name, OPTIMIZERS[config.optimizer.name].keys
        if key in read:
            return ""
        dials = {
            "beta1": "set_betas",
            "momentum": "set_momentum",
            "weight_decay": "set_weight_decay",
        }
        instead = next((dial for other, dial in dials.items() if other in read), "")
        return f"optimizer.name {name} has no {what}" + (f": {instead}" if instead else "")

    return refusal


_no_betas = _lacks("beta1", "betas")
_no_momentum = _lacks("momentum", "momentum")
_no_decay = _lacks("weight_decay", "weight decay")


def _no_average(config: RunConfig) -> str:
    return (
        ""
        if config.train.ema is not None
        else "the run keeps no moving average: set train.ema at its start"
    )


def _no_clip(config: RunConfig) -> str:
    return "" if config.train.clip is not None else "gradients are not clipped: set_clip"


_FACTOR = "a factor above 0, such as 0.5 or x2"
_SHARE = "a number from 0 to less than 1"
_DECAY, _CLIP, _MOMENTUM, _AVERAGE = (
    ("optimizer.weight_decay",),
    ("train.clip",),
    ("optimizer.momentum",),
    ("train.ema",),
)

CONFIG_OPERATIONS: Mapping[str, ConfigOperation] = {
    "set_weight_decay": ConfigOperation(
        _DECAY,
        "a number of at least 0",
        lambda value: _is_number(value) and 0 <= value <= 1e6,
        refusal=_no_decay,
    ),
    "change_weight_decay": ConfigOperation(
        _DECAY, _FACTOR, _is_factor, multiplies=True, refusal=_no_decay
    ),
    "set_clip": ConfigOperation(
        _CLIP,
        "a number above 0, or null, which does not clip",
        lambda value: value is None or (_is_number(value) and 0 < value <= 1e12),
    ),
    "change_clip": ConfigOperation(_CLIP, _FACTOR, _is_factor, multiplies=True, refusal=_no_clip),
    "set_betas": ConfigOperation(
        ("optimizer.beta1", "optimizer.beta2"),
        "two numbers from 0 to less than 1, such as [0.9, 0.95]",
        lambda value: (
            isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_share, value))
        ),
        refusal=_no_betas,
    ),
    "set_momentum": ConfigOperation(_MOMENTUM, _SHARE, _is_share, refusal=_no_momentum),
    "change_momentum": ConfigOperation(
        _MOMENTUM, _FACTOR, _is_factor, multiplies=True, refusal=_no_momentum
    ),
    "set_ema_decay": ConfigOperation(
        _AVERAGE,
        "a number between 0 and 1",
        lambda value: _is_share(value) and value > 0,
        refusal=_no_average,
    ),
    "change_ema_decay": ConfigOperation(
        _AVERAGE, _FACTOR, _is_factor, multiplies=True, refusal=_no_average
    ),
}
"""The operations by name."""


def changed_config(before: RunConfig, after: RunConfig) -> dict[str, Any]:
    """Return the keys of these operations whose values differ, with those of `after`."""
    if before is after:
        return {}
    keys = {key for operation in CONFIG_OPERATIONS.values() for key in operation.keys}
    was, now = values(before), values(after)
    return {key: now[key] for key in sorted(keys) if now[key] != was[key]}
