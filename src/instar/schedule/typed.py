"""An operation as it is typed: `insert_layers=2 where=even`."""

from __future__ import annotations

import re
from typing import Any

from instar.config.document import parse
from instar.config.errors import ConfigError
from instar.config.sections import Operation
from instar.schedule.operations import check_operation

_NEXT = re.compile(r"\s+(?=[a-z_]+=)")
_NAME = re.compile(r"[a-z_]+(\.[a-z_]+)?")


def typed_entry(text: str, place: str) -> dict[str, Any]:
    """Parse `NAME=VALUE [KEY=VALUE …]`, whose values are YAML, into the keys of a schedule's entry.

    Args:
        place: where it was typed, for messages.

    Raises:
        ConfigError: the form is wrong.
    """
    values: dict[str, Any] = {}
    for part in _NEXT.split(text.strip()):
        name, equals, value_text = part.partition("=")
        value, problems = parse(value_text, place, ())
        if problems:
            raise ConfigError(*problems)
        if not _NAME.fullmatch(name) or (values and not equals) or name in values:
            raise ConfigError.of(
                f"{part!r} is not name=value", place, "write e.g. 'insert_layers=2 where=even'"
            )
        values[name] = None if value is None else value.data
    (name, value), *options = values.items()
    return {"name": name, "value": value, **dict(options)}


def typed_operation(text: str) -> Operation:
    """Parse the text of `--op`.

    Raises:
        ConfigError: the form is wrong, or the operation is unknown, or its value or an option is invalid.
    """
    place = f"--op {text}"
    entry = typed_entry(text, place)
    operation = Operation(entry.pop("name"), entry.pop("value"), entry)
    try:
        check_operation(operation)
    except ValueError as error:
        raise ConfigError.of(str(error), place) from None
    return operation
