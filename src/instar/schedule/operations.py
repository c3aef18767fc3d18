"""Operations, and the fold that makes a run its config plus its history."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from instar.config.document import show
from instar.config.explain import nearest
from instar.config.operation import Operation
from instar.config.schema import RunConfig
from instar.growth import operators as growth
from instar.growth.plan import GrowthPlan
from instar.models.mask import mask_of
from instar.models.shape import Growable
from instar.schedule.settings import THAWED, Settings, initial_settings, is_frozen


@dataclass(frozen=True)
class State:
    """What is in force at a step: every hyperparameter, and the model's shape."""

    settings: Settings
    architecture: Growable


@dataclass(frozen=True)
class Change:
    """An operation that was carried out, and where in the run."""

    operation: Operation
    step: int
    cursor: int
    entry: int | None = None
    """of the schedule, counted from 0; None: the run made it by itself"""
    skipped: str = ""
    """why it was passed over; it then changed nothing"""
    reason: str = ""
    """what made it fire, e.g. `val 3.41 < 3.50`"""


History = tuple[Change, ...]

LARGEST = 10**12
"""of any number in the settings: beyond are typing errors, and the end of floating point"""

FOLD = Operation("fold_masks")
"""what a run does by itself where a mask is open"""

Effect = Callable[[Settings, Any, int], Settings]


def fold(config: RunConfig, architecture: Growable, history: History) -> State:
    """What is in force after `history`: law 1, a run is its config plus its history.

    Args:
        architecture: the one that the run began with.

    Raises:
        ValueError: see `carried_out`.
    """
    state = State(initial_settings(config), architecture)
    for change in history:
        if not change.skipped:
            state = carried_out(state, change.operation, change.step)
    return state


def carried_out(state: State, operation: Operation, step: int) -> State:
    """`state` after one operation at `step`; nothing is changed in place.

    Raises:
        ValueError: the operation is unknown, its value or an option is not allowed, or the model
            as it is does not allow it; says what would be.
    """
    return planned(state, operation, step)[0]


def when_due(state: State, operation: Operation) -> State:
    """`state` as an operation will find it: growth waits until a mask is open and folded."""
    mask = mask_of(state.architecture)
    if mask is None or not growth.is_growth(operation.name):
        return state
    return carried_out(state, FOLD, mask.end)


def planned(state: State, operation: Operation, step: int) -> tuple[State, GrowthPlan | None]:
    """The same, and what becomes of the model's tensors; None where they stay as they are."""
    check(operation)
    if growth.is_growth(operation.name):
        architecture, plan = growth.plan(state.architecture, operation, step=step)
        return State(_after_growth(state.settings, operation, step), architecture), plan
    settings = SETTINGS[operation.name](state.settings, operation.value, step)
    _fits(operation, settings, state.architecture)
    return dataclasses.replace(state, settings=settings), None


class OperationError(ValueError):
    """An operation in a form that it cannot have."""

    def __init__(self, name: str, part: str, said: str) -> None:
        """`part` is what is wrong in it: value or an option."""
        super().__init__(f"{name}: {part} {said}")
        self.part, self.said = part, said


def names() -> list[str]:
    """Every operation that there is."""
    return sorted([*SETTINGS, *growth.OPERATORS])


def check(operation: Operation) -> None:
    """Raise ValueError unless the operation is known, and its value and options have the form that
    it wants."""
    name, value = operation.name, operation.value
    if growth.is_growth(name):
        growth.check(operation)
        return
    if name not in SETTINGS:
        meant = nearest(name, names())
        hint = f"did you mean {meant!r}?" if meant else f"there are {', '.join(names())}"
        raise ValueError(f"there is no operation {name!r}; {hint}")
    for option in operation.options:
        raise OperationError(name, option, f"is no option of {name}, which has none")
    if name == "reset_lr_schedule":
        # schedules in which every operation has a value give it one that means nothing
        if value is not None and not isinstance(value, int | float):
            raise OperationError(name, "value", f"must be left out, got {show(value)}")
    elif name in ("freeze", "unfreeze"):
        texts = [value] if isinstance(value, str) else value
        if not (isinstance(texts, list | tuple) and texts and all(map(_is_pattern, texts))):
            raise OperationError(
                name,
                "value",
                "must be a pattern of parameter names, such as 'blocks.0.*', or a list of them, "
                f"got {show(value)}",
            )
    else:
        _check_number(name, value)


def _is_pattern(text: Any) -> bool:
    return isinstance(text, str) and bool(text) and not text.startswith(THAWED)


def _check_number(name: str, value: Any) -> None:
    kind = "whole number" if name.startswith("set_") and name != "set_lr" else "number"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and value > 0):
        raise OperationError(name, "value", f"must be a positive {kind}, got {show(value)}")
    if not value <= LARGEST:
        raise OperationError(name, "value", f"must be at most {LARGEST:g}, got {show(value)}")
    if kind == "whole number" and value != int(value):
        raise OperationError(name, "value", f"must be a whole number, got {show(value)}")


def _fits(operation: Operation, settings: Settings, architecture: Growable) -> None:
    """Raise ValueError if settings after `operation` are no settings, or not this model's."""
    if not 0 < settings.lr < math.inf or max(settings.counts()) > LARGEST:
        raise ValueError(f"{operation.name} {operation.value:g}: this is beyond any sense")
    longest = architecture.sizes().get("context", 1)
    if settings.context > longest:
        raise ValueError(
            f"{operation.name} {settings.context}: the model looks back on {longest} "
            "tokens; extend_context first"
            if "context" in architecture.sizes()
            else f"{operation.name}: this model's samples have no length to choose"
        )
    if operation.name not in ("freeze", "unfreeze"):
        return
    there = list(architecture.parameters())
    for pattern in _patterns(operation.value):
        if not any(is_frozen((pattern,), name) for name in there):
            meant = nearest(pattern, there)
            hint = f"did you mean {meant!r}?" if meant else f"they are called like {there[0]!r}"
            raise ValueError(f"{operation.name}: no parameter matches {pattern!r}; {hint}")
    if all(is_frozen(settings.frozen, name) for name in there):
        raise ValueError("freeze: nothing would be left to train")


def _after_growth(settings: Settings, operation: Operation, step: int) -> Settings:
    """The learning rate may begin anew, or rise again, for the sake of what is new."""
    lr = operation.options.get("lr", "keep")
    if lr == "reset":
        return dataclasses.replace(settings, lr_start=step)
    if lr == "keep":
        return settings
    return dataclasses.replace(settings, rewarm_start=step, rewarm_iters=lr["rewarm"])


def _patterns(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _whole(value: float) -> int:
    return max(1, math.floor(value + 0.5))


def _lr(settings: Settings, lr: float) -> Settings:
    return dataclasses.replace(settings, lr=lr)


def _warmup(settings: Settings, warmup: int) -> Settings:
    """New warm-up; the decay's end moves by the same factor, so the course keeps its shape."""
    end, every = settings.lr_decay_iters, settings.decay_every
    if settings.warmup_iters > 0:
        factor = warmup / settings.warmup_iters
        end = None if end is None else max(warmup + 1, _whole(end * factor))
        every = None if every is None else _whole(every * factor)
    return dataclasses.replace(settings, warmup_iters=warmup, lr_decay_iters=end, decay_every=every)


def _eval_iters(settings: Settings, iters: float) -> Settings:
    return dataclasses.replace(settings, eval_iters=_whole(iters))


def _change_eval_iters(settings: Settings, factor: float, _step: int) -> Settings:
    if settings.eval_iters is None:
        return settings  # the whole validation set stays the whole
    return _eval_iters(settings, settings.eval_iters * factor)


def _freeze(settings: Settings, value: Any, _step: int) -> Settings:
    return dataclasses.replace(settings, frozen=(*_without(settings, value), *_patterns(value)))


def _unfreeze(settings: Settings, value: Any, _step: int) -> Settings:
    """What was frozen by the same words is forgotten; of other patterns these are exceptions."""
    kept = () if "*" in _patterns(value) else _without(settings, value)
    exceptions = [f"{THAWED}{pattern}" for pattern in _patterns(value)] if kept else []
    return dataclasses.replace(settings, frozen=(*kept, *exceptions))


def _without(settings: Settings, value: Any) -> tuple[str, ...]:
    """Frozen patterns that are not said anew."""
    new = _patterns(value)
    return tuple(each for each in settings.frozen if each.removeprefix(THAWED) not in new)


SETTINGS: Mapping[str, Effect] = {
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
    "set_context": lambda s, value, _: dataclasses.replace(s, context=int(value)),
    "freeze": _freeze,
    "unfreeze": _unfreeze,
}
"""Every operation on settings: `change_*` multiplies, `set_*` is absolute; products of counts are
rounded to the nearest, halves up, and are 1 at least."""
