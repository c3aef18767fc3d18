"""The schema as a table: which sections and keys there are, and what each may hold, in words.

`root` is the whole config of the task in question (`config/roots.py`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from instar.config.schedule import Plateau, ScheduledOperation, When
from instar.config.schema import RunConfig

PATTERNS = {
    r"^[A-Za-z0-9][A-Za-z0-9._-]*$": "a name of letters, digits, '.', '_' and '-'",
    r"^[A-Za-z][A-Za-z0-9_-]*$": "a name of letters, digits, '_' and '-' that begins with a letter",
    r"^(auto|cpu|cuda(:\d+)?)$": "auto, cpu, cuda or cuda:<index>",
}


Root = type[RunConfig]


@cache
def sections(root: Root) -> dict[str, type[BaseModel]]:
    """Every section by its dotted name, in the schema's order; "" is the top level."""
    found: dict[str, type[BaseModel]] = {"": root}
    for name, field in root.model_fields.items():
        _add_sections(found, name, field.annotation)
    return found


def _add_sections(found: dict[str, type[BaseModel]], name: str, annotation: Any) -> None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        found[name] = annotation
        for inner, field in annotation.model_fields.items():
            _add_sections(found, f"{name}.{inner}", field.annotation)


@cache
def keys(root: Root) -> dict[str, FieldInfo]:
    """Every dotted key that holds a value, in the order in which files are written."""
    found = {}
    for section, model in sections(root).items():
        for name, field in model.model_fields.items():
            key = f"{section}.{name}" if section else name
            if key not in sections(root):
                found[key] = field
    return found


@cache
def schedule_keys() -> dict[tuple[str | int, ...], FieldInfo]:
    """The keys of an operation of the schedule, by their paths in the first one."""
    first: tuple[str | int, ...] = ("schedule", 0)
    found: dict[tuple[str | int, ...], type[BaseModel]] = {
        first: ScheduledOperation,
        (*first, "when"): When,
        (*first, "when", "plateau"): Plateau,
    }
    return {
        (*path, name): field
        for path, section in found.items()
        for name, field in section.model_fields.items()
    }


def default(root: Root, key: str) -> Any:
    return _plain(keys(root)[key].get_default(call_default_factory=True))


def value_of(config: RunConfig, key: str) -> Any:
    """The value that a config holds under a dotted key: scalars, tuples, dicts."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return _plain(value)


def values(config: RunConfig) -> dict[str, Any]:
    """Every key of a config and its value, defaults included, as plain data."""
    return {key: value_of(config, key) for key in keys(type(config))}


def _plain(value: Any) -> Any:
    """A section as a mapping, a list of sections as a list of mappings."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


@cache
def json_schema(root: Root) -> dict[str, Any]:
    """JSON Schema of a config file, for editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **root.model_json_schema(),
    }


def editor_schema(root: Root, name: str = "") -> dict[str, Any]:
    """`json_schema`, or that of one section or key, with what the reader also takes: empty
    sections, one text for a list of texts, and a path for the schedule."""
    if not name:
        node = json_schema(root)
    elif name in sections(root):
        node = sections(root)[name].model_json_schema()
    else:
        node = schema_node(root, tuple(name.split("."))) or {}
        if name == "schedule":
            kinds = (ScheduledOperation, When, Plateau)
            every = json_schema(root)["$defs"]
            node["$defs"] = {kind.__name__: every[kind.__name__] for kind in kinds}
    widened: dict[str, Any] = _widen(node)
    return widened


def _widen(node: Any) -> Any:
    if isinstance(node, list):
        return [_widen(item) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get("type") == "array":
        if node.get("items") in ({"type": "string"}, _OPERATION):
            listed = {"type": node["type"], "items": node["items"]}
            rest = {name: inner for name, inner in node.items() if name not in listed}
            return {"anyOf": [listed, {"type": "string"}], **rest}
        return node
    node = {name: _widen(inner) for name, inner in node.items()}
    if "$ref" in node:
        return {"anyOf": [{"$ref": node.pop("$ref")}, {"type": "null"}], **node}
    return node


_OPERATION = {"$ref": "#/$defs/ScheduledOperation"}


def schema_node(root: Root, path: tuple[str | int, ...]) -> dict[str, Any] | None:
    """The JSON Schema of what stands at a path of keys and list indices; None: not to be told."""
    node: Any = json_schema(root)
    for step in path:
        choices = [node, *(_resolved(root, each) for each in node.get("anyOf", ()))]
        inner = [
            _resolved(
                root,
                choice.get("items")
                if isinstance(step, int)
                else choice.get("properties", {}).get(step),
            )
            for choice in choices
        ]
        node = next((found for found in inner if found is not None), None)
        if node is None:
            return None
    return dict(node)


def properties(root: Root, path: tuple[str | int, ...]) -> list[str]:
    """The keys that the section at a path may have."""
    node = schema_node(root, path) or {}
    choices = [node, *(_resolved(root, each) for each in node.get("anyOf", ()))]
    return [name for choice in choices for name in choice.get("properties", {})]


def _resolved(root: Root, node: Any) -> Any:
    if isinstance(node, dict) and "$ref" in node:
        name = str(node["$ref"]).rpartition("/")[2]
        return json_schema(root)["$defs"][name] | {k: v for k, v in node.items() if k != "$ref"}
    return node


def expected(root: Root, node: dict[str, Any]) -> str:
    """In words, what a JSON Schema node allows: "a whole number greater than 0 or null"."""
    node = _resolved(root, node)
    if "anyOf" in node:
        return " or ".join(expected(root, choice) for choice in node["anyOf"])
    if "enum" in node:
        return f"one of {', '.join(map(str, node['enum']))}"
    if "const" in node:
        return str(node["const"])
    match node.get("type"):
        case "integer":
            return f"a whole number{_bounds(node)}"
        case "number":
            return f"a number{_bounds(node)}"
        case "boolean":
            return "true or false"
        case "null":
            return "null"
        case "array":
            items = _resolved(root, node.get("items", {}))
            if items.get("type") == "object":
                return "a list of 'key: value' groups"
            return f"a list of {expected(root, items).removeprefix('a ')}s"
        case "string" if "pattern" in node:
            return PATTERNS.get(node["pattern"], f"text that matches {node['pattern']}")
        case "string":
            return "text"
        case "object":
            return "a section of keys"
        case None if not node.keys() - {"title", "description", "default"}:
            return "anything"
    return "something else"


def _bounds(node: dict[str, Any]) -> str:
    words = {
        "exclusiveMinimum": "greater than",
        "minimum": "of at least",
        "exclusiveMaximum": "less than",
        "maximum": "at most",
    }
    found = [f"{word} {_bound(node[name])}" for name, word in words.items() if name in node]
    return f" {' and '.join(found)}" if found else ""


def _bound(number: float) -> str:
    for power in (31, 32, 63, 64):
        if number == 2**power:
            return f"2^{power}"
    return f"{number:g}"
