"""Checks of the values and options of growth operations, and the sizes that they request."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any

from instar.growth.plan import GrowthError, VocabularyMap

MAX_FACTOR = 1024
"""Largest factor by which an axis may grow at once."""

Check = Callable[[Any], None]
"""Raises GrowthError, without the name of the operation, for an invalid value."""


def make_check(valid: Callable[[Any], bool], description: str) -> Check:
    """Return a check of a condition; `description` completes the sentence of its error."""

    def check(value: Any) -> None:
        if not valid(value):
            raise GrowthError(f"{description}, not {value!r}")

    return check


def factor_of(value: Any) -> Fraction | None:
    """2 for `x2`, 3/2 for `x1.5`; None for anything else."""
    match = re.fullmatch(r"x(\d+(?:\.\d+)?)", value) if isinstance(value, str) else None
    return Fraction(match[1]) if match else None


def without_x(value: Any) -> Any:
    """Return the number of a factor such as `x2`, whole if it is; anything else as it is."""
    factor = factor_of(value)
    if factor is None:
        return value
    return factor.numerator if factor.denominator == 1 else float(factor)


def _is_count(value: Any, minimum: int = 1) -> bool:
    return type(value) is int and value >= minimum


def is_size(value: Any) -> None:
    """A whole number above 0, or a factor above 1 such as `x2`."""
    factor = factor_of(value)
    if factor is None and not _is_count(value):
        raise GrowthError(f"needs a whole number above 0 or a factor such as 'x2', not {value!r}")
    if factor is not None and factor <= 1:
        raise GrowthError(f"a model only grows, and {value!r} is not a factor above 1")


def is_vocabulary(value: Any) -> None:
    """A size, or a tokenizer: ``{tokenizer: FOLDER}``, with ``from: FOLDER`` and ``rows: n`` if need be."""
    if isinstance(value, VocabularyMap):
        return
    if not isinstance(value, Mapping):
        is_size(value)
    elif "tokenizer" not in value:
        raise GrowthError(f"needs a size or {{tokenizer: FOLDER}}, not {value!r}")
    else:
        check_each(value, {"tokenizer": is_text, "from": is_text, "rows": is_count})


def is_layer_map(value: Any) -> None:
    """How many copies of the whole stack, or the old layer of each new one."""
    if not isinstance(value, list | tuple):
        is_multiple(value)
    elif not value or not all(_is_count(layer, 0) for layer in value):
        raise GrowthError(f"a layer map lists old layers, such as [0, 0, 1, 1], not {value!r}")


def _are_positions(value: Any) -> bool:
    if isinstance(value, list | tuple) and value:
        return all(_is_count(position, 0) for position in value)
    return value in ("end", "start", "even")


def is_lr(value: Any) -> None:
    """`keep`, `reset`, `{rewarm: steps}`, or `{rewarm_new: steps}`."""
    if value in ("keep", "reset"):
        return
    if not (isinstance(value, Mapping) and [*value] in (["rewarm"], ["rewarm_new"])):
        raise GrowthError(
            f"must be keep, reset, {{rewarm: steps}}, or {{rewarm_new: steps}}, not {value!r}"
        )
    check_each(value, {"rewarm": is_count, "rewarm_new": is_count})


is_index = make_check(lambda value: _is_count(value, 0), "needs the number of a layer, from 0 on")
is_count = make_check(_is_count, "needs a whole number above 0")
is_multiple = make_check(
    lambda value: _is_count(without_x(value), 2), "needs a whole factor of at least 2"
)
are_experts = make_check(
    lambda value: _is_count(value, 2), "needs a whole number of experts, at least 2"
)
is_rank = make_check(
    lambda value: _is_count(value, 0), "needs a whole number, 0 to take adapters away"
)
is_positions = make_check(
    _are_positions, "must be end, start, even, or a list of the old layers before which they come"
)
is_share = make_check(
    lambda value: type(value) is float and 0 < value < 1, "must be a number between 0 and 1"
)
is_probability = make_check(
    lambda value: type(value) in (int, float) and 0 <= value < 1,
    "must be a number from 0 to less than 1",
)
is_true = make_check(lambda value: value is True, "must be true")
is_flag = make_check(lambda value: type(value) is bool, "must be true or false")
is_positive = make_check(
    lambda value: type(value) in (int, float) and 0 < value < math.inf, "must be a number above 0"
)
is_factor = make_check(
    lambda value: type(number := without_x(value)) in (int, float) and 0 < number < math.inf,
    "must be a factor above 0",
)
is_not_negative = make_check(
    lambda value: type(value) in (int, float) and 0 <= value < math.inf,
    "must be a number from 0 on",
)
is_text = make_check(lambda value: isinstance(value, str) and value != "", "needs a name")
is_text_or_nothing = make_check(
    lambda value: value is None or (isinstance(value, str) and value != ""), "needs a name"
)
is_nothing = make_check(lambda value: value is None, "takes no value")


def one_of(*words: str) -> Check:
    """Return a check for one of these words."""
    return make_check(lambda value: value in words, f"must be {' or '.join(words)}")


def either(number: Check, mapping: Check) -> Check:
    """Return a check of a mapping, or of the one number that stands for it."""

    def check(value: Any) -> None:
        (mapping if isinstance(value, Mapping) else number)(value)

    return check


def has(**keys: Check) -> Check:
    """Return a check for a mapping with exactly these keys."""

    def check(value: Any) -> None:
        if not isinstance(value, Mapping) or value.keys() != keys.keys():
            raise GrowthError(f"needs {{{', '.join(f'{key}: …' for key in keys)}}}, not {value!r}")
        check_each(value, keys)

    return check


def check_each(values: Mapping[str, Any], checks: Mapping[str, Check]) -> None:
    """Check values by name. Raises GrowthError for an unknown name too."""
    for key, value in values.items():
        if key not in checks:
            raise GrowthError(f"has no option {key!r}; there are {', '.join(sorted(checks))}")
        try:
            checks[key](value)
        except GrowthError as error:
            raise GrowthError(f"{key}: {error}") from None


def grown_size(value: Any, now: int, axis: str) -> int:
    """Return the size that `value` requests for an axis of size `now`; halves are rounded up."""
    is_size(value)
    factor = factor_of(value)
    size: int = value if factor is None else math.floor(now * factor + Fraction(1, 2))
    if size <= now:
        raise GrowthError(f"{axis} is {now:,} already and only grows; choose more, or 'x2'")
    if size > MAX_FACTOR * now:
        raise GrowthError(
            f"{axis} is {now:,}, and {size:,} is more than {MAX_FACTOR:,} times that; a factor of about "
            "2 at a time is safest"
        )
    return size


def format_list(parts: Iterable[int | str]) -> str:
    """Return the parts as text, separated by commas."""
    return ", ".join(map(str, parts))
