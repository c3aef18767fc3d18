"""What is wrong with a schedule, as far as it can be told without data and without a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from instar.config.budget import parse_budget
from instar.config.checks import cross_checks
from instar.config.clash import Clash
from instar.config.explain import nearest
from instar.config.load import SCHEDULE, Loaded, load
from instar.config.operation import Operation
from instar.config.schedule import ScheduledOperation, When
from instar.config.schema import RunConfig
from instar.schedule.entries import operation, tokens
from instar.schedule.operations import OperationError, check, names

_COUNTED = ("steps", "tokens", "samples", "epochs")


def load_checked(path: str | None, overrides: Sequence[str] = ()) -> Loaded:
    """`config.load.load`, the schedule's mistakes found with all the others.

    Raises ConfigError with all of them.
    """
    return load(path, overrides, (cross_checks, mistakes))


def mistakes(config: RunConfig) -> Iterator[Clash]:
    """Everything in the schedule that no run could carry out."""
    for number, given in enumerate(config.schedule):
        place = f"{SCHEDULE}[{number}]"
        for key, message, hint in (*_operation(given), *_triggers(given, config)):
            said = f"{place}.{key} {message}" if key else f"{place}: {message}"
            # looked at neither where the entry nor where the whole schedule could not be read
            keys = (f"{place}.{key}" if key else place, place, SCHEDULE)
            yield Clash(keys, said, hint)
    yield from _context(config)


Finding = tuple[str, str, str]
"""The key within the entry ("" for all of it), the message that follows it, a hint."""


def _operation(given: ScheduledOperation) -> Iterator[Finding]:
    if given.name == "fold_masks":
        yield "name", "must not be fold_masks: a run folds its masks by itself", "leave it out"
        return
    if given.name not in names():
        meant = nearest(given.name, names())
        hint = f"did you mean '{meant}'?" if meant else f"there are {', '.join(names())}"
        yield "name", f"must be an operation, got '{given.name}'", hint
        return
    whole = operation(given)
    if value := _refused(whole, None):
        yield value
    for option in whole.options:
        if meant := _meant(option):
            yield option, "is unknown", f"did you mean '{meant}'?"
        elif value is None and (found := _refused(whole, option)):
            yield found


def _meant(option: str) -> str | None:
    """The schedule's own key that was mistyped, where that is what looks like an option."""
    return nearest(option, ScheduledOperation.model_fields, 0.8)


def _refused(whole: Operation, option: str | None) -> Finding | None:
    """What is wrong with an operation that has this option alone, or none: so that what is refused
    is wrong in itself."""
    part = option or "value"
    options = {} if option is None else {option: whole.options[option]}
    try:
        check(replace(whole, options=options))
    except OperationError as error:
        return error.part, error.said, ""
    except ValueError as error:
        said = str(error)
        if "has no option" in said:
            return part, f"is unknown: {said}", ""
        said = said.removeprefix(f"{whole.name}: ").removeprefix(f"{part}: ")
        return part, said, ""
    return None


def _triggers(given: ScheduledOperation, config: RunConfig) -> Iterator[Finding]:
    beside = given.trigger_loss is not None or given.max_wait_iters is not None
    mistyped = any(map(_meant, given.model_extra or {}))
    if given.when is not None:
        if beside:
            hint = "write them as loss_below and waited, under 'any:'"
            yield "when", "does not go with trigger_loss and max_wait_iters beside it", hint
        yield from _when(given.when, "when", config)
    elif not beside and not mistyped:
        hint = "give it trigger_loss, max_wait_iters or when"
        yield "", "this operation could never fire", hint


def _when(when: When, key: str, config: RunConfig) -> Iterator[Finding]:
    given = {name for name in type(when).model_fields if getattr(when, name) is not None}
    if not given:
        yield key, "is empty: it would never fire", f"it has {', '.join(type(when).model_fields)}"
    if isinstance(when.at_tokens, str):
        try:
            tokens(when.at_tokens)
        except ValueError as error:
            yield f"{key}.at_tokens", f"does not count tokens: {error}", ""
    if when.at_fraction is not None and not _has_end(config):
        hint = "add a budget such as 2000it to train.until, or use at_step"
        yield f"{key}.at_fraction", "is a share of a budget that counts something", hint
    for name in ("any", "all"):
        inner: tuple[When, ...] | None = getattr(when, name)
        if inner == ():
            hint = "list triggers, each beginning with '-'"
            yield f"{key}.{name}", "is empty: it says nothing", hint
        for index, each in enumerate(inner or ()):
            yield from _when(each, f"{key}.{name}[{index}]", config)


def _has_end(config: RunConfig) -> bool:
    try:
        return any(parse_budget(text).kind in _COUNTED for text in config.train.until)
    except ValueError:
        return True  # what is no budget is told by itself


def _context(config: RunConfig) -> Iterator[Clash]:
    """Samples longer than the model will look back on by then."""
    longest: int | None = config.context
    before: tuple[str, ...] = (SCHEDULE,)
    for number, given in enumerate(config.schedule):
        place = f"{SCHEDULE}[{number}]"
        before = (place, *before)
        whole = given.value if type(given.value) is int else None
        if given.name == "extend_context":
            # a factor is worked out where the architecture is known
            longest = None if longest is None or whole is None else max(longest, whole)
        elif given.name == "set_context" and whole and longest and whole > longest:
            yield Clash(
                (f"{place}.value", *before, "model.context"),
                f"{place}.value ({whole}) is more than the {longest:,} tokens that the model "
                "looks back on then",
                "extend_context before it",
            )
