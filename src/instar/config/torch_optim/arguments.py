"""Arguments of torch's classes: their defaults, the values that they take, and what is wrong with others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from instar.config.errors import nearest_hint, value_text
from instar.config.sections import LARGEST


@dataclass(frozen=True)
class Argument:
    """An argument of a constructor."""

    default: Any
    """torch's; None for one that is needed"""
    form: str
    """what its value must be"""
    is_valid: Callable[[Any], bool]
    is_needed: bool = False
    counts_steps: bool = False
    """whether its value is a number of steps, or a list of such numbers"""
    is_rate: bool = False
    """whether its value is a learning rate, not a share of one"""


def number(
    default: float | None,
    low: float = -LARGEST,
    high: float = LARGEST,
    *,
    is_needed: bool = False,
    is_rate: bool = False,
) -> Argument:
    """Return an argument that is a number, within bounds that belong to it."""
    return Argument(
        default, f"a number{_range(low, high)}", _is_within(low, high), is_needed, is_rate=is_rate
    )


def steps(default: int | None, low: int = 1, *, is_needed: bool = False) -> Argument:
    """Return an argument that is a number of steps."""
    form = f"a whole number of at least {low}"
    return Argument(default, form, is_count(low), is_needed, counts_steps=True)


def flag(default: bool) -> Argument:
    """Return an argument that is true or false."""
    return Argument(default, "true or false", lambda value: isinstance(value, bool))


def choice(default: str, *words: str) -> Argument:
    """Return an argument that is one of some words."""
    return Argument(default, f"one of {', '.join(words)}", lambda value: value in words)


def pair(
    default: tuple[float | None, float], form: str, holds: Callable[[Any, Any], bool]
) -> Argument:
    """Return an argument that is a list of two values, both numbers unless `holds` allows others."""

    def is_valid(value: Any) -> bool:
        return isinstance(value, list | tuple) and len(value) == 2 and holds(*value)

    return Argument(default, form, is_valid)


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number; true and false are none."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and math.isfinite(value) and abs(value) <= LARGEST


def is_count(low: int) -> Callable[[Any], bool]:
    """Return whether a value is a whole number within bounds."""
    return lambda value: type(value) is int and low <= value <= LARGEST


def argument_problems(
    arguments: Mapping[str, Argument], values: Mapping[str, Any], instead: Mapping[str, str]
) -> Iterator[tuple[str, str, str]]:
    """Yield what is wrong with values of arguments: the argument, what it must be, and a hint.

    Args:
        instead: hints for names that are no arguments here.
    """
    for name, value in values.items():
        argument = arguments.get(name)
        if argument is None:
            known = f"there are {', '.join(arguments)}" if arguments else "there are none"
            yield name, "is unknown", instead.get(name) or nearest_hint(name, arguments, known)
        elif not argument.is_valid(value):
            yield name, f"must be {argument.form}, got {value_text(value)}", ""
    for name, argument in arguments.items():
        if argument.is_needed and name not in values:
            yield name, f"is needed: {argument.form}", ""


def _is_within(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: is_number(value) and low <= value <= high


def _range(low: float, high: float) -> str:
    if abs(low) < LARGEST and abs(high) < LARGEST:
        return f" from {low:g} to {high:g}"
    if abs(low) < LARGEST:
        return f" of at least {low:g}"
    return f" of at most {high:g}" if abs(high) < LARGEST else ""
