"""`${name}` in the texts of a fleet file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_VARIABLE = re.compile(r"\$(?:(\$)|\{([^{}$]*)\}|(\{))")


class UnknownVariable(ValueError):  # noqa: N818
    """A text names a variable that does not exist."""

    def __init__(self, name: str) -> None:
        super().__init__(f"unknown variable ${{{name}}}")
        self.name = name


def names_in(text: str) -> Iterator[str]:
    """Yield the names of the variables in a text.

    Raises:
        ValueError: a `${` is not closed.
    """
    for match in _VARIABLE.finditer(text):
        if match[3]:
            raise ValueError("'${' without a '}'; write '$$' for a dollar sign")
        if match[2] is not None:
            yield match[2].strip()


def expand(text: str, values: Mapping[str, object]) -> str:
    """Replace variables by their values; `$$` is a dollar sign.

    Raises:
        UnknownVariable: there is no such variable.
    """

    def value_of(match: re.Match[str]) -> str:
        if match[1]:
            return "$"
        name = (match[2] or "").strip()
        if name not in values:
            raise UnknownVariable(name)
        return text_of(values[name])

    return _VARIABLE.sub(value_of, text)


def text_of(value: object) -> str:
    """Return a value as it is written in YAML."""
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)
