"""Operations on settings, and the fold that makes a run its config plus its history."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from instar.config.schema import RunConfig
from instar.schedule.settings import Settings, initial_settings


@dataclass(frozen=True)
class Operation:
    """One change of a run: what is done, and with which value."""

    name: str
    value: float | None = None


@dataclass(frozen=True)
class Change:
    """An operation that was carried out, and where in the run."""

    operation: Operation
    step: int
    cursor: int


History = tuple[Change, ...]

Effect = Callable[[Settings, float, int], Settings]


def fold(config: RunConfig, history: History) -> Settings:
    """The settings in force after `history`: law 1, a run is its config plus its history.

    Raises:
        ValueError: an operation in the history is unknown or its value is not allowed.
    """
    settings = initial_settings(config)
    for change in history:
        settings = apply_operation(settings, change.operation, change.step)
    return settings


def apply_operation(settings: Settings, operation: Operation, step: int) -> Settings:
    """`settings` after one operation at `step`; nothing is changed in place.

    Raises:
        ValueError: the operation is unknown, or its value is not allowed.
    """
    check(operation)
    value = 0.0 if operation.value is None else operation.value
    return OPERATIONS[operation.name](settings, value, step)


def check(operation: Operation) -> None:
    """Raise ValueError unless the operation is known and its value allowed."""
    if operation.name not in OPERATIONS:
        raise ValueError(
            f"unknown operation {operation.name!r}; known are {', '.join(sorted(OPERATIONS))}"
        )
    if operation.name == "reset_lr_schedule":
        return
    value = operation.value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{operation.name} needs a number, got {value!r}")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{operation.name} needs a positive number, got {value!r}")
    counts = operation.name.startswith("set_") and operation.name != "set_lr"
    if counts and value != int(value):
        raise ValueError(f"{operation.name} needs a whole number, got {value!r}")


def _whole(value: float) -> int:
    return max(1, math.floor(value + 0.5))


def _lr(settings: Settings, lr: float) -> Settings:
    return dataclasses.replace(settings, lr=lr)


def _warmup(settings: Settings, warmup: int) -> Settings:
    """New warm-up; the decay's end moves by the same factor, so the course keeps its shape."""
    end = settings.lr_decay_iters
    if end is not None and settings.warmup_iters > 0:
        end = max(warmup + 1, _whole(end * warmup / settings.warmup_iters))
    return dataclasses.replace(settings, warmup_iters=warmup, lr_decay_iters=end)


def _eval_iters(settings: Settings, iters: float) -> Settings:
    return dataclasses.replace(settings, eval_iters=_whole(iters))


def _change_eval_iters(settings: Settings, factor: float, _step: int) -> Settings:
    if settings.eval_iters is None:
        return settings  # the whole validation set stays the whole
    return _eval_iters(settings, settings.eval_iters * factor)


OPERATIONS: Mapping[str, Effect] = {
    "change_lr": lambda s, factor, _: _lr(s, s.lr * factor),
    "set_lr": lambda s, value, _: _lr(s, value),
    "change_batch_size": lambda s, factor, _: dataclasses.replace(
        s, batch_size=_whole(s.batch_size * factor)
    ),
    "set_batch_size": lambda s, value, _: dataclasses.replace(s, batch_size=int(value)),
    "change_grad_accum": lambda s, factor, _: dataclasses.replace(
        s, grad_accum=_whole(s.grad_accum * factor)
    ),
    "set_grad_accum": lambda s, value, _: dataclasses.replace(s, grad_accum=int(value)),
    "change_warmup_iters": lambda s, factor, _: _warmup(s, _whole(s.warmup_iters * factor)),
    "set_warmup_iters": lambda s, value, _: _warmup(s, int(value)),
    "change_eval_iters": _change_eval_iters,
    "set_eval_iters": lambda s, value, _: _eval_iters(s, value),
    "change_eval_interval": lambda s, factor, _: dataclasses.replace(
        s, eval_interval=_whole(s.eval_interval * factor)
    ),
    "set_eval_interval": lambda s, value, _: dataclasses.replace(s, eval_interval=int(value)),
    "reset_lr_schedule": lambda s, _, step: dataclasses.replace(s, lr_start=step),
}
"""Every operation on settings: `change_*` multiplies, `set_*` is absolute."""
