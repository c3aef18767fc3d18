"""Values and options of growth operations: their form, and the sizes that they mean."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any

from instar.growth.plan import GrowthError

MOST_TIMES = 1024
"""Beyond, a plan would be larger than its tensors; nobody means it."""

Check = Callable[[Any], object]
"""Raises GrowthError, without the operation's name, for a value of another form."""

_FACTOR = re.compile(r"x(\d+(?:\.\d+)?)")


def _factor(value: Any) -> Fraction | None:
    """2 of `x2`, 3/2 of `x1.5`; None for anything else."""
    found = _FACTOR.fullmatch(value) if isinstance(value, str) else None
    return Fraction(found[1]) if found else None


def is_size(value: Any) -> None:
    """A whole number above 0, or a factor above 1 as text."""
    factor = _factor(value)
    if factor is None:
        is_count(value, "a whole number above 0 or a factor such as 'x2'")
    elif factor <= 1:
        raise GrowthError(f"a model only grows, and {value!r} is no factor above 1")


def is_count(value: Any, wanted: str = "a whole number above 0") -> None:
    if type(value) is not int or value < 1:
        raise GrowthError(f"needs {wanted}, not {value!r}")


def is_multiple(value: Any) -> None:
    if type(value) is not int or value < 2:
        raise GrowthError(f"needs a whole factor of at least 2, not {value!r}")


def is_layer_map(value: Any) -> None:
    """How often the whole, or the old layer of each new one."""
    if not isinstance(value, list | tuple):
        is_multiple(value)
    elif not value or any(type(layer) is not int or layer < 0 for layer in value):
        raise GrowthError(f"a layer map lists old layers, such as [0, 0, 1, 1], not {value!r}")


def is_positions(value: Any) -> None:
    if isinstance(value, list | tuple) and value:
        if all(type(position) is int and position >= 0 for position in value):
            return
    elif value in ("end", "start", "even"):
        return
    raise GrowthError(
        f"must be end, start, even, or a list of the old layers before which they come, not {value!r}"
    )


def is_share(value: Any) -> None:
    if type(value) is not float or not 0 < value < 1:
        raise GrowthError(f"must be a number between 0 and 1, not {value!r}")


def is_lr(value: Any) -> None:
    if value in ("keep", "reset"):
        return
    if not (isinstance(value, Mapping) and value.keys() == {"rewarm"}):
        raise GrowthError(f"must be keep, reset, or {{rewarm: steps}}, not {value!r}")
    is_count(value["rewarm"])


def is_flag(value: Any) -> None:
    if type(value) is not bool:
        raise GrowthError(f"must be true or false, not {value!r}")


def is_positive(value: Any) -> None:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise GrowthError(f"must be a number above 0, not {value!r}")


def is_text(value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise GrowthError(f"needs a name, not {value!r}")


def is_text_or_nothing(value: Any) -> None:
    if value is not None:
        is_text(value)


def is_nothing(value: Any) -> None:
    if value is not None:
        raise GrowthError(f"takes no value, not {value!r}")


def one_of(*words: str) -> Check:
    def check(value: Any) -> None:
        if value not in words:
            raise GrowthError(f"must be {' or '.join(words)}, not {value!r}")

    return check


def has(**keys: Check) -> Check:
    """A mapping with just these keys."""

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
    """The size that a value means for an axis of size `now`; halves are rounded up."""
    is_size(value)
    factor = _factor(value)
    size: int = value if factor is None else math.floor(now * factor + Fraction(1, 2))
    if size <= now:
        raise GrowthError(f"{axis} is {now:,} already and only grows; choose more, or 'x2'")
    if size > MOST_TIMES * now:
        raise GrowthError(
            f"{axis} is {now:,}, and {size:,} is more than {MOST_TIMES:,} times that; growing by "
            "about 2 at once is the safest"
        )
    return size


def listed(parts: Iterable[int | str]) -> str:
    """In a sentence."""
    return ", ".join(map(str, parts))
