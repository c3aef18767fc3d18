"""Operations, and the fold: a run is its config plus its history of operations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from instar.config.errors import nearest_hint, value_text
from instar.config.fields import with_values
from instar.config.schema import CheckpointConfig, RunConfig
from instar.config.sections import LARGEST, Operation
from instar.config.torch_optim.optimizers import OPTIMIZERS
from instar.config.torch_optim.schedulers import with_steps
from instar.growth import operators as growth
from instar.growth.plan import GrowthError, GrowthPlan, check_buffers
from instar.growth.values import without_x
from instar.models.shape import Facts, Growable, ModuleFacts, mask_of, no_facts
from instar.schedule.aliases import remedy
from instar.schedule.branches import BRANCH, BRANCHED, Branch, branch_problems
from instar.schedule.config_operations import CONFIG_OPERATIONS, check_value, with_operation
from instar.schedule.settings import (
    ADJUST_BATCH,
    AVERAGE,
    CONTEXT,
    SET_MIXTURE,
    THAWED,
    Intervals,
    NewParamWarmup,
    Settings,
    initial_settings,
    is_frozen,
    patterns_of,
    refused_options,
    with_mixture,
    with_options,
)


@dataclass(frozen=True)
class State:
    """The state in force at a step: hyperparameters, architecture, and config."""

    settings: Settings
    architecture: Growable
    config: RunConfig
    """The config of the start of the run, with the overrides of its resumes."""
    began: Growable | None = field(default=None, compare=False, repr=False)
    """The architecture of step 0, from which learning rates follow the width; None: the present one."""
    facts: Facts = field(default=no_facts, compare=False, repr=False)
    """Facts about the modules of an architecture: buffers, and parameters that never train."""


@dataclass(frozen=True)
class Change:
    """An operation that was carried out, and its place in the run."""

    operation: Operation
    step: int
    cursor: int
    entry: int | None = None
    """The entry's index in the schedule; None if the run created the operation by itself, or somebody asked for it."""
    skipped: str = ""
    """The reason for skipping the operation, which then has no effect."""
    reason: str = ""
    """The reason for firing, e.g. `val 3.41 < 3.50`."""
    id: str = ""
    """The request's, if somebody asked for the operation, or gave up its entry of the schedule."""
    by: str = ""
    """Who did."""

    @property
    def is_wanted(self) -> bool:
        """Whether the schedule or a person wanted the operation, not the run by itself."""
        return self.entry is not None or bool(self.id)

    @property
    def is_given_up(self) -> bool:
        """Whether a person asked for the operation and the run refused it, or gave up its entry of the schedule: the
        run goes on as if it had never been."""
        return bool(self.id and self.skipped)


History = tuple[Change, ...]

FOLD = Operation("fold_masks")
"""The operation that a run carries out by itself when a mask is open."""

RESTART_LR = Operation("reset_lr_schedule")
"""The operation of a resume without the state of the learning rate schedule."""

OVERRIDE = "override"
"""The operation created by a resume: keys of the config with their new values."""

_INCOMPARABLE = frozenset({*CONTEXT, "resize_vocab", OVERRIDE})

SETTING_OF = {
    "optimizer.lr": "lr",
    "learning_rate.shape": "lr_shape",
    "learning_rate.options": "lr_options",
    "learning_rate.warmup_iters": "warmup_iters",
    "learning_rate.lr_decay_iters": "lr_decay_iters",
    "learning_rate.decay_fraction": "decay_fraction",
    "learning_rate.decay_every": "decay_every",
    "learning_rate.gamma": "gamma",
    "learning_rate.min_lr_ratio": "min_lr_ratio",
    "train.batch_size": "batch_size",
    "train.gradient_accumulation_steps": "grad_accum",
    "eval.eval_interval": "eval_interval",
    "eval.eval_iters": "eval_iters",
    "model.context": "context",
    "data.context": "context",
    "data.mixture": "mixture",
}
"""The config key that gives the initial value of each setting."""

Effect = Callable[[Settings, Any, int], Settings]


def value_in_force(key: str, config_values: Mapping[str, Any], settings: Settings) -> Any:
    """Return the value of a key of a config in a run with these settings, which operations may have changed."""
    if key == "data.mixture":
        parts, weights = config_values[key], settings.mixture
        return (
            [{**part, "weight": weight} for part, weight in zip(parts, weights, strict=True)]
            if weights
            else parts
        )
    return getattr(settings, SETTING_OF[key]) if key in SETTING_OF else config_values[key]


def initial_state(config: RunConfig, architecture: Growable, facts: Facts = no_facts) -> State:
    """Return the state at step 0; parameters that a custom task excludes are frozen."""
    frozen = patterns_of(facts(architecture).frozen, architecture.parameters())
    settings = dataclasses.replace(initial_settings(config), frozen=frozen)
    return State(settings, architecture, config, architecture, facts)


def keeps_training_loss_comparable(name: str, value: object) -> bool:
    """Return whether training losses after an operation can be compared with earlier ones; of evaluations
    `tasks/basis.py` decides."""
    if name == "widen" and isinstance(value, Mapping):
        return value.get("axis") != "vocab"
    return name not in _INCOMPARABLE


def effective_changes(history: History) -> Iterator[Change]:
    """Yield the changes of a history that were not skipped."""
    return (change for change in history if not change.skipped)


def states(initial: State, history: History) -> Iterator[tuple[Change, State]]:
    """Yield each change of `history` that was not skipped, with the state after it.

    Raises:
        ValueError: see `carried_out`.
    """
    state = initial
    for change in effective_changes(history):
        state = carried_out(state, change.operation, change.step)
        yield change, state


def fold_history(initial: State, history: History) -> State:
    """Return the state after `history`: law 1, a run is its config plus its history.

    Raises:
        ValueError: see `carried_out`.
    """
    state = initial
    for _, after in states(initial, history):
        state = after
    return state


def history_to_json(history: History) -> list[dict[str, Any]]:
    """Serialize a history to JSON values; who asked only of what somebody asked for."""
    return [
        {
            key: value
            for key, value in dataclasses.asdict(change).items()
            if value or key not in ("id", "by")
        }
        for change in history
    ]


def history_from_json(entries: Sequence[Mapping[str, Any]]) -> History:
    """Deserialize a history, the inverse of `history_to_json`.

    Raises:
        ValueError: an entry is not a valid change.
    """
    try:
        return tuple(
            Change(**{**entry, "operation": Operation(**entry["operation"])}) for entry in entries
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"the history is not readable: {error}") from error


def set_lr(lr: Any) -> Operation:
    """Return the operation of a run whose metric stands still, which lowers its learning rate."""
    return Operation("set_lr", lr)


def override(values: Mapping[str, Any], origins: Mapping[str, str]) -> Operation:
    """Return the operation that sets keys of the config to new absolute values from its step on.

    Args:
        origins: the origin of each value, as in `Loaded.origins`.
    """
    return Operation(OVERRIDE, dict(values), {"origins": dict(origins)})


def overrides(history: History) -> Iterator[tuple[str, Any, str]]:
    """Yield key, value and origin of everything that was set at resumes, in order."""
    for change in history:
        if change.operation.name == OVERRIDE:
            origins = change.operation.options.get("origins", {})
            for key, value in change.operation.value.items():
                yield key, value, origins.get(key, "")


def number_of(history: History) -> int:
    """Return the number of operations without overrides and branches. It seeds new weights, so that a
    run resumed with a later end grows exactly as one that had this end from the beginning, a
    trunk as one without branches, and a run that was asked for what it refused or gave up as one that was not."""
    return sum(
        change.operation.name not in (OVERRIDE, BRANCH, BRANCHED) and not change.is_given_up
        for change in history
    )


def history_of_branch(
    history: History, branch: Branch, parent: str, step: int, cursor: int
) -> History:
    """Return the history that a branch of the run `parent` begins with at `step`.

    Its own schedule has no entry that was carried out yet, and what resumes of the trunk have set is in
    its config.
    """
    origin = f"branch {branch.name}"
    own_changes = [change for change in history if change.operation.name != BRANCH]
    before = [
        dataclasses.replace(_given_in_config(change, origin), entry=None) for change in own_changes
    ]
    changes = branch.changes(step)
    branch_changes = (override(changes, dict.fromkeys(changes, origin)), branch.began(parent, step))
    return (
        *before,
        *(
            Change(operation, step, cursor, reason=f"branch of {parent}")
            for operation in branch_changes
        ),
    )


def config_of_branch(history: History) -> dict[str, Any]:
    """Return the keys in which a branch's own config differs from that of its trunk at step 0, with their
    values; empty for other runs."""
    ends = [n for n, change in enumerate(history) if change.operation.name == BRANCHED]
    return {key: value for key, value, _ in overrides(history[: ends[-1]])} if ends else {}


def _given_in_config(change: Change, origin: str) -> Change:
    if change.operation.name != OVERRIDE:
        return change
    values_before = change.operation.value
    return dataclasses.replace(
        change, operation=override(values_before, dict.fromkeys(values_before, origin))
    )


def effective(config: RunConfig, history: History) -> tuple[RunConfig, Settings]:
    """Return config and settings after `history`, without knowing the model's architecture.

    `frozen` contains the patterns that operations gave: parameters may have been renamed since, and
    what a custom task's module froze is unknown. So are the parameters of `new_param_warmups`, which is empty.

    Raises:
        ValueError: an operation is unknown, or its value or an option is invalid.
    """
    settings = initial_settings(config)
    for change in effective_changes(history):
        config, settings = _effective(config, settings, change.operation, change.step)
    return config, settings


def _effective(
    config: RunConfig, settings: Settings, operation: Operation, step: int
) -> tuple[RunConfig, Settings]:
    if operation.name == OVERRIDE:
        return _overridden(config, settings, operation.value)
    if operation.name == BRANCHED:
        start, iters = (int(operation.options[key]) for key in ("decay_start", "decay_iters"))
        return config, dataclasses.replace(settings, decay_start=start, decay_iters=iters)
    check_operation(operation)
    if growth.is_growth(operation.name):
        return config, _after_growth(settings, operation, step)
    if (of_config := CONFIG_OPERATIONS.get(operation.name)) is not None:
        try:
            return with_operation(of_config, operation.value, config), settings
        except ValueError as error:
            raise ValueError(f"{operation.name}: {error}") from None
    if operation.name == SET_MIXTURE:
        return config, with_mixture(settings, config, operation.value)
    after = SETTINGS[operation.name](settings, _number_of(operation), step)
    return config, with_options(settings, after, operation.options)


def _number_of(operation: Operation) -> Any:
    """Return an operation's value; the factor `x2` means the number 2."""
    return without_x(operation.value) if operation.name.startswith("change_") else operation.value


def carried_out(state: State, operation: Operation, step: int) -> State:
    """Return `state` after one operation at `step`.

    Raises:
        ValueError: the operation is unknown, its value or an option is invalid, or the present
            model does not allow it; the message says what would be allowed.
    """
    return plan_operation(state, operation, step)[0]


def when_due(state: State, operation: Operation) -> State:
    """Return the state that an operation will apply to: growth waits until masks are folded."""
    mask = mask_of(state.architecture)
    if mask is None or not growth.is_growth(operation.name):
        return state
    return carried_out(state, FOLD, mask.end)


def plan_operation(
    state: State, operation: Operation, step: int
) -> tuple[State, GrowthPlan | None]:
    """Return the state after one operation, and the growth plan; None if no tensor changes."""
    check_rate_change(operation, state.config)
    config, settings = _effective(state.config, state.settings, operation, step)
    with_config = partial(dataclasses.replace, state, config=config)
    if operation.name == OVERRIDE:
        architecture = _switch(state.architecture, config, operation.value)
        return with_config(settings=settings, architecture=architecture), None
    if growth.is_growth(operation.name):
        architecture, plan = growth.plan(state.architecture, operation, step=step)
        now, later = state.facts(state.architecture), state.facts(architecture)
        try:
            check_buffers(plan, now.buffers, later.buffers)
        except GrowthError as error:
            raise GrowthError(f"{operation.name}: {error}") from None
        frozen = _still_frozen(settings.frozen, plan, later)
        warmups = _warmups(settings.new_param_warmups, plan, operation, step)
        settings = dataclasses.replace(settings, frozen=frozen, new_param_warmups=warmups)
        return with_config(settings=settings, architecture=architecture), plan
    if operation.name == AVERAGE:
        _check_retention(operation.value, config.checkpoint)
    if operation.name in SETTINGS:
        _check_result(operation, settings, state.architecture)
    return with_config(settings=settings), None


_RATE_OPERATIONS = ("change_lr", "set_lr", "change_warmup_iters", "set_warmup_iters")


def check_rate_change(operation: Operation, config: RunConfig) -> None:
    """Raise ValueError if an operation changes a rate that the optimizer reads at a parameter's first step alone."""
    optimizer = config.optimizer.name
    if OPTIMIZERS[optimizer].follows_rate:
        return
    changes_rate = operation.name in _RATE_OPERATIONS
    if operation.name == OVERRIDE:
        changes_rate = "optimizer.lr" in operation.value
    if changes_rate or operation.options.get("lr", "keep") != "keep":
        raise ValueError(
            f"{operation.name}: {optimizer} finds its steps itself, and the learning rate is only the first one of a "
            "parameter, which nothing changes later"
        )


class OperationError(ValueError):
    """An operation with an invalid value or option."""

    def __init__(self, name: str, part: str, message: str) -> None:
        """
        Args:
            part: the invalid part, "value" or an option.
        """
        super().__init__(f"{name}: {part} {message}")
        self.part, self.message = part, message


def operation_names() -> list[str]:
    """Return the names of all operations."""
    return sorted([*SETTINGS, *CONFIG_OPERATIONS, *growth.OPERATORS])


def is_operation(name: str) -> bool:
    """Return whether there is an operation of this name, in an extension of another package too."""
    return name in SETTINGS or name in CONFIG_OPERATIONS or growth.is_growth(name)


def hint_for_unknown(name: str) -> str:
    """Return what may have been meant by an operation that is not there."""
    if instead := remedy(name):
        return instead
    package, dot, _ = name.partition(".")
    setting = f"set_{name.rpartition('.')[2]}"  # of a setting, or the key of one
    if is_operation(setting):
        return f"did you mean '{setting}'?"
    if dot:
        return f"no package with the operation is installed, an extension {package!r}"
    return nearest_hint(name, operation_names(), f"there are {', '.join(operation_names())}")


def check_operation(operation: Operation) -> None:
    """Raise ValueError unless the operation is known and its value and options are valid."""
    name, value = operation.name, operation.value
    if growth.is_growth(name):
        growth.check_growth(operation)
        return
    if not is_operation(name):
        raise ValueError(f"unknown operation {name!r}; {hint_for_unknown(name)}")
    if name == BRANCH:
        for part, message, _ in branch_problems(operation):
            raise OperationError(name, part, message)
        return
    for option, message in refused_options(name, operation.options):
        raise OperationError(name, option, message)
    if (of_config := CONFIG_OPERATIONS.get(name)) is not None:
        if message := check_value(of_config, value):
            raise OperationError(name, "value", message)
    elif name == "reset_lr_schedule":
        # schedules in which every operation has a value also give one here; it has no effect
        if value is not None and not isinstance(value, int | float):
            raise OperationError(name, "value", f"must be left out, got {value_text(value)}")
    elif name in ("freeze", "unfreeze"):
        texts = [value] if isinstance(value, str) else value
        if not (isinstance(texts, list | tuple) and texts and all(map(_is_pattern, texts))):
            raise OperationError(
                name,
                "value",
                "must be a pattern of parameter names, such as 'blocks.0.*', or a list of them, "
                f"got {value_text(value)}",
            )
    elif name == SET_MIXTURE:
        if not (isinstance(value, Mapping) and value and all(map(_is_weight, value.values()))):
            text = f"must be weights by the names of parts, {{books: 2, code: 1}}, got {value_text(value)}"
            raise OperationError(name, "value", text)
        if not any(value.values()):
            raise OperationError(name, "value", "leaves out every part")
    elif name == ADJUST_BATCH:
        if not (isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1):
            text = f"must be a share of the device's memory, such as 0.85, got {value_text(value)}"
            raise OperationError(name, "value", text)
    elif name == AVERAGE:
        if not _selects_checkpoints(value):
            text = "must be a number of checkpoints, such as 3, or a list of their steps, such as [100, 200]"
            raise OperationError(name, "value", f"{text}, got {value_text(value)}")
    else:
        _check_number(name, _number_of(operation), value)


def _is_weight(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LARGEST


def _is_pattern(text: Any) -> bool:
    return isinstance(text, str) and bool(text) and not text.startswith(THAWED)


def _selects_checkpoints(value: Any) -> bool:
    if not isinstance(value, list | tuple):
        return type(value) is int and value > 0
    steps = [step for step in value if type(step) is int and step >= 0]
    return 0 < len(value) == len(set(steps))


def _check_retention(value: Any, checkpoint: CheckpointConfig) -> None:
    """Raise ValueError if a run deletes some of the last checkpoints that are to be averaged."""
    last = checkpoint.keep_last
    if isinstance(value, int) and checkpoint.keep_every is None and value > last:
        raise ValueError(
            f"{AVERAGE} {value}: the run keeps its last {last} checkpoints only: set checkpoint.keep_last to {value}"
        )


def _check_number(name: str, number: Any, value: Any) -> None:
    """Raise OperationError for a wrong number; `value`: as it was written."""
    kind = "whole number" if name.startswith("set_") and name != "set_lr" else "number"
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not (is_number and number > 0):
        raise OperationError(name, "value", f"must be a positive {kind}, got {value_text(value)}")
    if not number <= LARGEST:
        raise OperationError(name, "value", f"must be at most {LARGEST:g}, got {value_text(value)}")
    if kind == "whole number" and number != int(number):
        raise OperationError(name, "value", f"must be a whole number, got {value_text(value)}")


def _check_result(operation: Operation, settings: Settings, architecture: Growable) -> None:
    """Raise ValueError if settings after `operation` are invalid, or invalid for this model."""
    if not 0 < settings.lr < math.inf or max(settings.counts()) > LARGEST:
        raise ValueError(
            f"{operation.name} {value_text(operation.value)}: the result is out of range (0 < x ≤ {LARGEST:g})"
        )
    longest = architecture.sizes().get("context", 1)
    if settings.context > longest:
        raise ValueError(
            f"{operation.name} {settings.context}: the model's context has {longest} tokens; "
            "extend_context first"
            if "context" in architecture.sizes()
            else f"{operation.name}: this model's samples have no context length"
        )
    if operation.name not in ("freeze", "unfreeze"):
        return
    parameter_names = list(architecture.parameters())
    for pattern in _patterns(operation.value):
        if not any(is_frozen((pattern,), name) for name in parameter_names):
            otherwise = f"names look like {parameter_names[0]!r}"
            hint = nearest_hint(pattern, parameter_names, otherwise)
            raise ValueError(f"{operation.name}: no parameter matches {pattern!r}; {hint}")
    if all(is_frozen(settings.frozen, name) for name in parameter_names):
        raise ValueError("freeze: nothing would be left to train")


def _overridden(
    config: RunConfig, settings: Settings, values: Mapping[str, Any]
) -> tuple[RunConfig, Settings]:
    """Set new values in config and settings, replacing the results of earlier operations."""
    config = with_values(config, values)
    fresh = initial_settings(config)
    keys = {SETTING_OF[key]: key for key in values if key in SETTING_OF}
    return config, dataclasses.replace(settings, **{name: getattr(fresh, name) for name in keys})


def _switch(architecture: Any, config: RunConfig, values: Mapping[str, Any]) -> Growable:
    """Return the architecture with the config's values of the fields that `model.*` keys name."""
    names = [key.removeprefix("model.") for key in values if key.startswith("model.")]
    fields = {field.name for field in dataclasses.fields(architecture)}
    if unknown := [name for name in names if name not in fields]:
        raise ValueError(f"model.{unknown[0]} cannot change in a run: its model has no such field")
    changes = {name: getattr(config.model, name) for name in names}
    new_architecture: Growable = dataclasses.replace(architecture, **changes)
    return new_architecture


def _after_growth(settings: Settings, operation: Operation, step: int) -> Settings:
    """Apply the growth option `lr` to all parameters: restart the learning rate schedule, or rewarm it."""
    lr = operation.options.get("lr", "keep")
    if lr == "reset":
        return settings.with_restart(step)
    if lr == "keep" or "rewarm" not in lr:
        return settings
    return dataclasses.replace(settings, rewarm_start=step, rewarm_iters=lr["rewarm"])


def _warmups(
    warmups: tuple[NewParamWarmup, ...], plan: GrowthPlan, operation: Operation, step: int
) -> tuple[NewParamWarmup, ...]:
    """Apply the growth option `lr` to new parameters. Those of earlier warmups stay in them under their new names;
    copies of them do not.

    Raises:
        ValueError: no parameter is new.
    """
    lr, new = operation.options.get("lr", "keep"), tuple[str, ...]()
    if "rewarm_new" in lr and not (new := plan.mostly_new):
        raise ValueError(
            f"{operation.name}: lr: rewarm_new is for parameters of which growth makes at least half, and there is "
            "none; use rewarm"
        )
    warmups_after = []
    for warmup in warmups:
        names = (n for n in plan.tensors if plan.source(n) in warmup.names and n not in new)
        warmups_after.append(dataclasses.replace(warmup, names=tuple(names)))
    if new:
        warmups_after.append(NewParamWarmup(step, lr["rewarm_new"], new))
    return tuple(warmup for warmup in warmups_after if warmup.names and step < warmup.end)


def _still_frozen(frozen: tuple[str, ...], plan: GrowthPlan, facts: ModuleFacts) -> tuple[str, ...]:
    """Return frozen patterns for the grown model: parameters stay frozen under their new names. New
    parameters, copies too, are trained unless the task's own module leaves them out."""
    if not frozen and not facts.frozen:
        return frozen
    patterns = set()
    for name in plan.tensors:
        source = plan.source(name)
        if name in facts.frozen if source is None else is_frozen(frozen, source):
            patterns.add(name)
    new = [name for name in plan.tensors if is_frozen(frozen, name) and name not in patterns]
    frozen_patterns = (
        *frozen,
        *(f"{THAWED}{pattern}" for pattern in patterns_of(new, plan.tensors)),
    )
    complete = patterns_of(patterns, plan.tensors)
    is_equal = all(is_frozen(frozen_patterns, name) == (name in patterns) for name in plan.tensors)
    return (
        frozen_patterns
        if is_equal and (not new or len(frozen_patterns) < len(complete))
        else complete
    )


def _patterns(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _round(value: float) -> int:
    return max(1, math.floor(value + 0.5))


def _set_warmup(settings: Settings, warmup: int) -> Settings:
    """Set the warm-up; scale the decay by the same factor, so that the schedule keeps its shape."""
    end, every, options = settings.lr_decay_iters, settings.decay_every, settings.lr_options
    if settings.warmup_iters > 0:
        factor = warmup / settings.warmup_iters
        end = None if end is None else max(warmup + 1, _round(end * factor))
        every = None if every is None else _round(every * factor)
        options = _with_steps(settings, options, lambda step: _round(step * factor))
    return dataclasses.replace(
        settings, warmup_iters=warmup, lr_decay_iters=end, decay_every=every, lr_options=options
    )


def _with_steps(
    settings: Settings, options: tuple[tuple[str, Any], ...], scale: Callable[[int], int]
) -> tuple[tuple[str, Any], ...]:
    scaled_options = with_steps(settings.lr_shape, dict(options), scale)
    return tuple(
        (name, tuple(value) if isinstance(value, list) else value)
        for name, value in scaled_options.items()
    )


def _change_warmup(settings: Settings, factor: float) -> Settings:
    """Scale the warm-up and the decay by the product of all factors so far, rounded down.

    The factor applies to the counts of the start of the run, or to those set explicitly since, so
    that rounding errors do not accumulate.
    """
    now = settings.intervals
    first_intervals, before = settings.unscaled_intervals, settings.interval_factor
    if first_intervals is None or _scale(settings, first_intervals, before) != now:
        first_intervals, before = now, 1.0
    total = before * factor
    if not 1 / LARGEST <= total <= LARGEST:
        raise ValueError(
            f"change_warmup_iters {factor:g}: the product of all factors would be {total:g}; it "
            f"must be from {1 / LARGEST:g} to {LARGEST:g}"
        )
    warmup, end, every, options = _scale(settings, first_intervals, total)
    return dataclasses.replace(
        settings,
        warmup_iters=warmup,
        lr_decay_iters=end,
        decay_every=every,
        lr_options=options,
        interval_factor=total,
        unscaled_intervals=first_intervals,
    )


def _scale(settings: Settings, intervals: Intervals, factor: float) -> Intervals:
    warmup, end, every = int(intervals[0] * factor), intervals[1], intervals[2]
    # the decay ends after the warm-up, and a decay interval is at least one step
    return (
        warmup,
        None if end is None else max(warmup + 1, int(end * factor)),
        None if every is None else max(1, int(every * factor)),
        _with_steps(settings, intervals[3], lambda step: max(1, int(step * factor))),
    )


def _effect(name: str, change: Callable[[Any, Any], Any]) -> Effect:
    """Return the effect that makes a setting's new value of its present one and the operation's."""

    def effect(settings: Settings, value: Any, _step: int) -> Settings:
        return dataclasses.replace(settings, **{name: change(getattr(settings, name), value)})

    return effect


def _set_count(name: str) -> Effect:
    return _effect(name, lambda _, count: int(count))


def _scale_count(name: str) -> Effect:
    """Return the effect that multiplies a count; one that is None, which is no limit, stays so."""
    return _effect(name, lambda now, factor: None if now is None else _round(now * factor))


def _freeze(settings: Settings, value: Any, _step: int) -> Settings:
    return dataclasses.replace(settings, frozen=(*_without(settings, value), *_patterns(value)))


def _unfreeze(settings: Settings, value: Any, _step: int) -> Settings:
    """Remove equal patterns from `frozen`; add exceptions to all other patterns."""
    frozen = () if "*" in _patterns(value) else _without(settings, value)
    exceptions = [f"{THAWED}{pattern}" for pattern in _patterns(value)] if frozen else []
    return dataclasses.replace(settings, frozen=(*frozen, *exceptions))


def _without(settings: Settings, value: Any) -> tuple[str, ...]:
    """Return the frozen patterns that `value` does not repeat."""
    new = _patterns(value)
    return tuple(pattern for pattern in settings.frozen if pattern.removeprefix(THAWED) not in new)


SETTINGS: Mapping[str, Effect] = {
    "change_lr": _effect("lr", lambda now, factor: now * factor),
    "set_lr": _effect("lr", lambda _, lr: lr),
    "change_batch_size": _scale_count("batch_size"),
    "set_batch_size": _set_count("batch_size"),
    "change_grad_accum": _scale_count("grad_accum"),
    "set_grad_accum": _set_count("grad_accum"),
    "change_warmup_iters": lambda s, factor, _: _change_warmup(s, factor),
    "set_warmup_iters": lambda s, value, _: _set_warmup(s, int(value)),
    "change_eval_iters": _scale_count("eval_iters"),
    "set_eval_iters": _set_count("eval_iters"),
    "change_eval_interval": _scale_count("eval_interval"),
    "set_eval_interval": _set_count("eval_interval"),
    "reset_lr_schedule": lambda s, _, step: s.with_restart(step),
    "change_context": _scale_count("context"),
    "set_context": _set_count("context"),
    "freeze": _freeze,
    "unfreeze": _unfreeze,
    ADJUST_BATCH: lambda s, _share, _step: s,
    SET_MIXTURE: lambda s, _weights, _step: s,
    AVERAGE: lambda s, _value, _step: s,
    BRANCH: lambda s, _value, _step: s,
}
"""Effects of all operations on settings. `change_*` multiplies, `set_*` is absolute. Products of
counts are rounded to the nearest, halves up, and are at least 1, except `change_warmup_iters`,
which rounds down."""
