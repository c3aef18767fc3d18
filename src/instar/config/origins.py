"""Where each value of a config comes from, and resolved configs as YAML text that says so: writing and reading.

Also redacts possible secrets, for configs that are shown to others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from instar.config.document import Document, KeyPath, dotted_key, merge_data, parse
from instar.config.errors import HIDDEN, SourceLocation, is_secret, printable_text, redact_text
from instar.config.fields import Root, section_types, values
from instar.config.schema import RunConfig

DEFAULT = "default"
DERIVED = "derived"
PRESET = "preset "
SCHEDULE = "schedule"
SET = "--set"
"""The origin of a value given on the command line."""
WEIGHTS = "from "
"""The origin of a value that comes with the weights of `model.from`, with their path."""


@dataclass(frozen=True)
class ConfigEntry:
    """A value given by one layer."""

    value: Any
    origin: str
    document: Document
    path: KeyPath
    """The path of its key."""
    inside: KeyPath
    """The path of its value in the document; differs if the value is in a separate file."""

    def place(self, inner: KeyPath = (), *, key: bool = False) -> SourceLocation:
        """Return the position of the value, of a value within it, or of its key."""
        return self.document.place((*self.inside, *inner), key=key)

    def over(self, below: ConfigEntry | None) -> ConfigEntry:
        """Return this entry over that of a layer below; mappings are merged, unless this is empty."""
        return self if below is None else replace(self, value=merge_data(below.value, self.value))


def operation_places(layer: Mapping[KeyPath, ConfigEntry]) -> dict[str, str]:
    """Return the position of each operation of the schedule."""
    entry = layer.get((SCHEDULE,))
    if entry is None or entry.origin.startswith(PRESET):
        return {}
    places = {f"{SCHEDULE}[{n}]": entry.place((n,)) for n in range(len(entry.value))}
    return {key: str(place) for key, place in places.items() if place.line}


def value_places(layer: Mapping[KeyPath, ConfigEntry]) -> dict[str, SourceLocation]:
    """Return the position of each value and nested value; for a preset's, the preset."""
    places: dict[str, SourceLocation] = {}
    within = {(id(entry.document), entry.inside): entry for entry in layer.values()}
    for document in {id(entry.document): entry.document for entry in layer.values()}.values():
        for path, (_, place) in document.places.items():
            starts = (path[:n] for n in range(len(path) + 1))
            start = next((start for start in starts if (id(document), start) in within), None)
            if start is not None:
                entry = within[id(document), start]
                is_generated = entry.origin.startswith((PRESET, WEIGHTS))
                name = dotted_key((*entry.path, *path[len(start) :]))
                places[name] = SourceLocation(entry.origin) if is_generated else place
    return places


def place_of(places: Mapping[str, SourceLocation], key: str) -> SourceLocation | None:
    """Return the position of a key's value, or of the innermost around it; None: a default."""
    while key and key not in places:
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
    return places.get(key)


def config_text(config: RunConfig, origins: Mapping[str, str]) -> str:
    """Format every key with its value, and its origin, if given, as a trailing comment; the origin
    of a list item has the key "key[index]"."""
    return yaml_of(values(config), origins, type(config))


def yaml_of(
    values: Mapping[str, Any], origins: Mapping[str, str] | None = None, root: Root | None = None
) -> str:
    """Format values of dotted keys as YAML that reads back equal, grouped by section.

    Args:
        root: adds a line with the description of each of its sections.
    """
    lines: list[str] = []
    section = ""
    for key, value in values.items():
        lines += opening(section, section := key.rpartition(".")[0], root)
        for index, line in enumerate(entry_text(key, value)):
            origin = (origins or {}).get(f"{key}[{index - 1}]" if index else key)
            lines.append(f"{line:<40}  # {printable_text(origin)}" if origin else line)
    return "\n".join(lines) + "\n"


def opening(before: str, section: str, root: Root | None = None) -> list[str]:
    """Return the lines that open `section` and its parents, after the section `before`."""
    names, lines = section.split(".") if section else [], list[str]()
    open_ = [".".join(before.split(".")[:depth]) for depth in range(1, before.count(".") + 2)]
    for depth in range(len(names)):
        if ".".join(names[: depth + 1]) in open_:
            continue
        indent, name, home = "  " * depth, names[depth], ".".join(names[:depth])
        if root is not None:
            model = section_types(root)[".".join(names[: depth + 1])]
            description = model.__doc__ or section_types(root)[home].model_fields[name].description
            lines += ["", f"{indent}# {(description or name).strip().splitlines()[0]}"]
        lines.append(f"{indent}{name}:")
    return lines


def entry_text(key: str, value: Any) -> list[str]:
    """Format `key: value` as a line of its section; a list of mappings has one line per item."""
    indent, name = "  " * key.count("."), in_yaml(key.rpartition(".")[2])
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return [f"{indent}{name}:", *(f"{indent}  - {in_yaml(item)}" for item in value)]
    return [f"{indent}{name}: {in_yaml(value)}"]


def in_yaml(value: Any) -> str:
    """Format scalars, lists and mappings as YAML on one line that reads back equal."""
    if isinstance(value, Mapping):
        pairs = (f"{in_yaml(str(key))}: {in_yaml(item)}" for key, item in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(in_yaml, value))}]"
    if isinstance(value, str):
        return value if _needs_no_quotes(value) else _quote(value)
    return json.dumps(value)


def plain_text(value: Any) -> str:
    """Format a value for a table: as in YAML, but texts without quotes unless they look like another value."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(plain_text, value))}]"
    if not isinstance(value, str) or not value.isprintable() or value != value.strip() or not value:
        return in_yaml(value)
    other = re.fullmatch(r"null|~|true|false|[-+]?(\.?\d.*|\.inf)|\.nan", value, re.IGNORECASE)
    return in_yaml(value) if other or value[0] in "[{" else value


@lru_cache(maxsize=1024)  # a config repeats the same few words
def _needs_no_quotes(text: str) -> bool:
    """Return whether a text can be written without quotes, also in a list."""
    if not re.fullmatch(r"[\w./][\w./<=-]*", text, re.ASCII):
        return False
    document, problems = parse(f"[{text}]", "")
    return not problems and document is not None and document.data == [text]


def _quote(text: str) -> str:
    """Return YAML's double-quoted form; unprintable characters are escaped by code point."""
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}
    return f'"{"".join(escapes.get(char) or _escape(char) for char in text)}"'


def _escape(char: str) -> str:
    code = ord(char)
    if char.isprintable() and code < 0x10000:
        return char
    return f"\\x{code:02x}" if code < 0x100 else f"\\U{code:08x}"


@dataclass(frozen=True)
class ConfigLine:
    """One line of a config."""

    text: str
    """Without the origin."""
    origin: str
    """The origin of the value: `default`, `derived`, `preset llama`, `run.yaml:4:3`; empty for
    lines without one."""
    key: str = ""
    """Dotted; empty for comments, section headings and empty lines."""
    value: str = ""

    @property
    def chosen(self) -> bool:
        """Whether the value was given explicitly; used in page templates."""
        return self.origin not in ("", DEFAULT)


def lines_of(text: str) -> list[ConfigLine]:
    """Parse the lines written by `config_text`; other text is parsed as far as possible."""
    lines, sections = list[ConfigLine](), list[tuple[int, str]]()
    for raw in text.splitlines():
        body, mark, origin = raw.rpartition("  # ")
        if not mark:
            body, origin = raw, ""
        content = body.strip()
        indent = len(body) - len(body.lstrip())
        name, colon, value = content.partition(":")
        if not colon or content.startswith(("#", "- ")):
            item = content.startswith("- ") and sections
            key = ".".join(name for _, name in sections) if item else ""
            lines.append(ConfigLine(body.rstrip(), origin.strip(), key, content if item else ""))
            continue
        while sections and sections[-1][0] >= indent:
            sections.pop()
        key = ".".join([*(name for _, name in sections), name])
        if not value.strip():
            sections.append((indent, name))
            key = ""
        lines.append(ConfigLine(body.rstrip(), origin.strip(), key, value.strip()))
    return lines


_EMPTY = ("null", "~", "[]", "{}", '""', "''")


def redacted_value(key: str, value: Any) -> Any:
    """Return the value of a key with secrets redacted."""
    if is_secret(key):
        return HIDDEN if value else value
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, list | tuple):
        return type(value)(redacted_value(key, item) for item in value)
    if isinstance(value, dict):
        return {name: redacted_value(f"{key}.{name}", item) for name, item in value.items()}
    return value


def redacted_lines(lines: Sequence[ConfigLine]) -> list[ConfigLine]:
    """Redact the lines of a config."""
    return [_redact_line(line) for line in lines]


def _redact_line(line: ConfigLine) -> ConfigLine:
    if is_secret(line.key) and line.value not in _EMPTY:
        # "--set key=value" repeats the value
        text = line.text.replace(line.value, HIDDEN)
        return replace(line, text=text, value=HIDDEN, origin=line.origin.partition("=")[0])
    parts = {name: redact_text(getattr(line, name)) for name in ("text", "value", "origin")}
    return replace(line, **parts)
