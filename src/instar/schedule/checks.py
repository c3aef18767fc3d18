"""Validation of a schedule, as far as it needs neither data nor a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from instar.config.budget import COUNTED, parse_budget
from instar.config.checks import cross_checks
from instar.config.errors import ConfigProblem, nearest
from instar.config.fields import with_values
from instar.config.load import Brought, Loaded, load_config
from instar.config.origins import SCHEDULE
from instar.config.schema import RunConfig
from instar.config.sections import Operation, ScheduledOperation, When
from instar.schedule.aliases import translate
from instar.schedule.branches import BRANCH, Finding, branch_conflicts, branch_problems, read_branch
from instar.schedule.operations import (
    OperationError,
    check_operation,
    hint_for_unknown,
    is_operation,
)
from instar.schedule.settings import ADJUST_BATCH, AVERAGE
from instar.schedule.triggers import operation, stays_due, tokens, trigger


def load_checked(
    path: str | None,
    overrides: Sequence[str] = (),
    *,
    import_task: bool = True,
    weights: Callable[[Mapping[str, Any]], Brought] | None = None,
) -> Loaded:
    """Load a config with `config.load.load` and also check its schedule, which may be of another form.

    Raises:
        ConfigError: with all problems of both.
    """
    checks = (cross_checks, mistakes)
    return load_config(
        path, overrides, checks, import_task=import_task, weights=weights, translate=translate
    )


def mistakes(config: RunConfig) -> Iterator[ConfigProblem]:
    """Yield every problem of a schedule that no run could carry out."""
    for number, entry in enumerate(config.schedule):
        place = f"{SCHEDULE}[{number}]"
        for key, message, hint in entry_findings(entry, config):
            text = f"{place}.{key} {message}" if key else f"{place}: {message}"
            # skip what could not be parsed: the key, its entry, or the whole schedule
            keys = (f"{place}.{key}" if key else place, place, SCHEDULE)
            yield ConfigProblem(keys, text, hint)
    yield from _branches(config)
    yield from _context(config)


def entry_findings(entry: ScheduledOperation, config: RunConfig) -> Iterator[Finding]:
    """Yield what is wrong with an entry by itself."""
    yield from _operation(entry)
    yield from _triggers(entry, config)


def _operation(entry: ScheduledOperation) -> Iterator[Finding]:
    if entry.name == "fold_masks":
        yield "name", "must not be fold_masks: a run folds its masks by itself", "leave it out"
        return
    if not is_operation(entry.name):
        hint = hint_for_unknown(entry.name)
        yield "name", f"must be an operation, got '{entry.name}'", hint
        return
    operation_of_entry = operation(entry)
    if entry.name == BRANCH:
        yield from branch_problems(operation_of_entry)
        if entry.repeat > 1:
            yield "repeat", "is of no use: a branch has one name", "write an entry for each branch"
        return
    if value := _refusal(operation_of_entry, None):
        yield value
    for option in operation_of_entry.options:
        if suggestion := _known_spelling(option):
            yield option, "is unknown", f"did you mean '{suggestion}'?"
        elif value is None and (reason := _refusal(operation_of_entry, option)):
            yield reason


def remarks(config: RunConfig) -> Iterator[str]:
    """Yield the operations of a schedule that change nothing, whenever they fire, and those that no forecast knows."""
    names_before: set[str] = set()
    for number, entry in enumerate(config.schedule):
        what = f"{SCHEDULE}[{number}] {entry.name} has no effect"
        if entry.name in ("set_eval_interval", "change_eval_interval") and config.eval.eval_epochs:
            yield f"{what}: eval.eval_epochs is {config.eval.eval_epochs}, and steps between evaluations do not count"
        unset = config.eval.eval_iters is None and "set_eval_iters" not in names_before
        if entry.name == "change_eval_iters" and unset:
            yield f"{what}: eval.eval_iters is not set, and the whole validation set is evaluated"
        if entry.name == ADJUST_BATCH:
            assumed = (entry.model_extra or {}).get("batch_size")
            size = "the present batch" if assumed is None else f"a batch of {assumed}"
            yield f"{SCHEDULE}[{number}] {entry.name} measures the batch when it fires; the forecast assumes {size}"
        if entry.name == AVERAGE and config.train.ema is not None:
            yield f"{SCHEDULE}[{number}] {entry.name} leaves the moving average as it is, which evaluations use (train.ema)"
        names_before.add(entry.name)


def _branches(config: RunConfig) -> Iterator[ConfigProblem]:
    """Yield the problems of branches that depend on the rest of the config."""
    names_before: set[str] = set()
    for number, entry in enumerate(config.schedule):
        if entry.name != BRANCH or any(branch_problems(operation(entry))):
            continue
        branch, place = read_branch(operation(entry)), f"{SCHEDULE}[{number}]"
        findings = list(branch_conflicts(branch, config))
        if branch.name.lower() in names_before:
            hint = "some file systems do not tell upper from lower case"
            findings.append(("value", f"{branch.name} is the name of another branch", hint))
        names_before.add(branch.name.lower())
        for key, message, hint in findings:
            key = f"{place}.{key}"
            yield ConfigProblem((key, place, SCHEDULE), f"{key} {message}", hint)
        if findings:
            continue
        known_messages = {problem.message for problem in cross_checks(config)}
        branch_config = with_values(config, branch.changes(0))
        for problem in (*cross_checks(branch_config), *mistakes(branch_config)):
            if problem.message not in known_messages:
                text = f"{place}: in the branch, {problem.message}"
                yield ConfigProblem((place, SCHEDULE), text, problem.hint)
    save_keys = (name for name in type(config.checkpoint).model_fields if name.startswith("save_"))
    left_out = [name for name in save_keys if not getattr(config.checkpoint, name)]
    if names_before and left_out:
        key = f"checkpoint.{left_out[0]}"
        text = f"{key} is false, and a branch begins with a whole checkpoint"
        yield ConfigProblem((key, SCHEDULE), text, "set it to true, or leave the branches out")


def _known_spelling(option: str) -> str | None:
    """Return the schedule's own key that an unknown option is probably a misspelling of."""
    return nearest(option, ScheduledOperation.model_fields, 0.8)


def _refusal(operation_of_entry: Operation, option: str | None) -> Finding | None:
    """Check an operation with only this option, or with none, so that a problem is attributed to
    the option that causes it."""
    part = option or "value"
    options = {} if option is None else {option: operation_of_entry.options[option]}
    try:
        check_operation(replace(operation_of_entry, options=options))
    except OperationError as error:
        return error.part, error.message, ""
    except ValueError as error:
        text = str(error)
        if "has no option" in text:
            return part, f"is unknown: {text}", ""
        text = text.removeprefix(f"{operation_of_entry.name}: ").removeprefix(f"{part}: ")
        return part, text, ""
    return None


def _triggers(entry: ScheduledOperation, config: RunConfig) -> Iterator[Finding]:
    has_loss_trigger = entry.trigger_loss is not None or entry.max_wait_iters is not None
    is_mistyped = any(map(_known_spelling, entry.model_extra or {}))
    if entry.when is not None:
        if has_loss_trigger:
            hint = "write them as loss_below and waited, under 'any:'"
            yield "when", "cannot be combined with trigger_loss and max_wait_iters", hint
        yield from _when(entry.when, "when", config)
        yield from _repeat_problems(entry)
    elif not has_loss_trigger and not is_mistyped:
        hint = "give it trigger_loss, max_wait_iters or when"
        yield "", "this operation could never fire", hint


def _repeat_problems(entry: ScheduledOperation) -> Iterator[Finding]:
    with suppress(ValueError, IndexError):  # an invalid trigger is reported itself
        if entry.repeat > 1 and not entry.min_steps and stays_due(trigger(entry)):
            hint = "add min_steps, or use waited, plateau or trigger_loss"
            yield (
                "repeat",
                "is of no use: with this trigger all of them fire at the same step",
                hint,
            )


def _when(when: When, key: str, config: RunConfig) -> Iterator[Finding]:
    triggers = {name for name in type(when).model_fields if getattr(when, name) is not None}
    if not triggers:
        yield key, "is empty: it would never fire", f"use {', '.join(type(when).model_fields)}"
    if isinstance(when.at_tokens, str):
        try:
            tokens(when.at_tokens)
        except ValueError as error:
            yield f"{key}.at_tokens", f"is not a number of tokens: {error}", ""
    if when.at_fraction is not None and not has_end(config):
        hint = "add a budget such as 2000it to train.until, or use at_step"
        yield f"{key}.at_fraction", "needs a budget of steps, tokens, samples or epochs", hint
    if (slow := when.slope_below) is not None and (slow.slope is None) == (slow.curve is None):
        hint = "slope: nats per 1e15 FLOPs; curve: the one that instar schedule pilot prints"
        yield f"{key}.slope_below", "needs slope or curve, one of them", hint
    if when.noise_scale is not None and not config.measures_noise:
        local = config.parallel.strategy == "diloco"
        hint = "use another strategy than diloco" if local else "set record.noise_every, e.g. to 50"
        yield f"{key}.noise_scale", "is not measured in this run", hint
    for name in ("any", "all"):
        inner: tuple[When, ...] | None = getattr(when, name)
        if inner == ():
            hint = "list triggers, each beginning with '-'"
            yield f"{key}.{name}", "is empty", hint
        for index, part in enumerate(inner or ()):
            yield from _when(part, f"{key}.{name}[{index}]", config)


def has_end(config: RunConfig) -> bool:
    """Return whether a budget of the run is counted in steps, tokens, samples or epochs."""
    try:
        return any(parse_budget(text).kind in COUNTED for text in config.train.until)
    except ValueError:
        return True  # an invalid budget is reported elsewhere


def _context(config: RunConfig) -> Iterator[ConfigProblem]:
    """Yield samples that would be longer than the model's context at that point."""
    longest = config.longest_context
    before: tuple[str, ...] = (SCHEDULE,)
    for number, entry in enumerate(config.schedule):
        place = f"{SCHEDULE}[{number}]"
        before = (place, *before)
        size = entry.value if type(entry.value) is int else None
        if entry.name == "extend_context":
            # a factor is applied where the architecture is known
            longest = None if longest is None or size is None else max(longest, size)
        elif entry.name == "set_context" and size and longest and size > longest:
            yield ConfigProblem(
                (f"{place}.value", *before, "model.context"),
                f"{place}.value ({size}) is more than the {longest:,} tokens that the model "
                "has as context then",
                "extend_context before it",
            )
