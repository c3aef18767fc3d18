"""JSON Schemas of config and schedule files for editors, with every operation and the form of its value."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from instar.config.document import SCHEMA_KEY
from instar.config.fields import LANGUAGE, editor_schema, root_of
from instar.config.schema import RunConfig
from instar.config.sections import Operation, ScheduledOperation
from instar.schedule.operations import check_operation, operation_names

_ITEM = ScheduledOperation.__name__
_SAMPLES: Mapping[str, tuple[Any, ...]] = {
    "null": (None,),
    "boolean": (True, False),
    "integer": (0, 1, 2, 3, 8, 64),
    "number": (0.001, 0.25, 0.5, 0.9, 1.5, 2.0),
    "string": ("x2", "x1.5", "attn", "end", "even", "none", "blocks.0.*", "side"),
    "array": ([0, 0, 1, 1], [0, 1], [1, 2], [0.9, 0.95], ["blocks.0.*"], ["*"]),
    "object": (
        {"target": "attn", "rank": 4},
        {"target": "attn", "factor": 2},
        {"target": "attn", "alpha": 8.0},
        {"from": 0, "to": 1, "times": 2},
        {"axis": "hidden", "size": "x2"},
        {"tokenizer": "folder"},
        {"layers": [0], "size": 16},
        {"books": 2, "code": 1},
    ),
}
"""Values of each type; a type is one of an operation's if a check accepts one of them."""
_REFUSED = re.compile(r",? (?:not|got) [^,]*$")


def config_schema(root: type[RunConfig], name: str = "") -> dict[str, Any]:
    """Return the JSON Schema of a config file, or of one of its sections or keys."""
    schema = editor_schema(root, name)
    if _ITEM in schema.get("$defs", {}):
        schema["$defs"][_ITEM] = _described(schema["$defs"][_ITEM])
    if not name:
        schema["properties"] = {SCHEMA_KEY: _OWN_KEY, **schema["properties"]}
    return schema


def schedule_schema() -> dict[str, Any]:
    """Return the JSON Schema of a schedule's file: a list of operations, alone or with the shape that a run begins with."""
    schema = config_schema(root_of(LANGUAGE))
    entries = {"type": "array", "items": {"$ref": f"#/$defs/{_ITEM}"}}
    with_shape = {
        "type": "object",
        "properties": {
            SCHEMA_KEY: _OWN_KEY,
            "model": {"type": "object", "description": "the shape that the run begins with"},
            "schedule": entries,
        },
        "required": ["schedule"],
        "additionalProperties": False,
    }
    return {
        SCHEMA_KEY: schema[SCHEMA_KEY],
        "title": "Schedule of Instar",
        "anyOf": [entries, with_shape],
        "$defs": schema["$defs"],
    }


_OWN_KEY = {"type": "string", "description": "this schema, for editors; not part of the run"}


def _described(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of an operation, with the names that there are and what each wants as its value."""
    of_packages = {"type": "string", "pattern": r"\."}
    properties = dict(item["properties"])
    names = {"anyOf": [{"enum": operation_names()}, of_packages]}
    properties["name"] = {**names, "description": properties["name"]["description"]}
    return {**item, "properties": properties, "allOf": list(_forms())}


def _forms() -> Iterator[dict[str, Any]]:
    """Yield what the value of each operation has to be."""
    for name in operation_names():
        condition = {"properties": {"name": {"const": name}}, "required": ["name"]}
        types = _types_of(name)
        value = {"type": list(types), "description": _form_text(name)}
        needed = {} if "null" in types else {"required": ["value"]}
        yield {"if": condition, "then": {"properties": {"value": value}, **needed}}


@cache
def _types_of(name: str) -> tuple[str, ...]:
    """Return the JSON types that an operation's value may have."""
    types = [
        kind
        for kind, samples in _SAMPLES.items()
        if any(_complaint(name, sample) is None for sample in samples)
    ]
    return tuple(types) or tuple(_SAMPLES)


def _form_text(name: str) -> str:
    """Return what an operation wants, in the words of its check."""
    text = _complaint(name, {"?": "?"}) or _complaint(name, "?") or "any value"
    return _REFUSED.sub("", text.removeprefix(f"{name} ").removeprefix(f"{name}: "))


def _complaint(name: str, value: Any) -> str | None:
    """Return what the check of an operation says of a value; None: nothing."""
    options = {"iters": 1} if name == "branch" else {}
    try:
        check_operation(Operation(name, value, options))
    except ValueError as error:
        return str(error)
    return None
