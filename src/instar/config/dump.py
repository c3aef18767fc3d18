"""A config as YAML text that reads back equal."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from instar.config.document import parse, printable
from instar.config.fields import Root, keys, sections, value_of
from instar.config.schema import RunConfig


def resolved(config: RunConfig, origins: Mapping[str, str]) -> str:
    """Every key with its value, and its origin, where one is given, as a comment behind it; an
    item's of a list stands under "key[index]"."""
    lines: list[str] = []
    section = ""
    for key in keys(type(config)):
        lines += opening(type(config), section, section := key.rpartition(".")[0])
        first, *items = entry(config, key)
        lines.append(_with_origin(first, key, origins))
        lines += [
            _with_origin(line, f"{key}[{index}]", origins) for index, line in enumerate(items)
        ]
    return "\n".join(lines) + "\n"


def _with_origin(line: str, key: str, origins: Mapping[str, str]) -> str:
    return f"{line:<40}  # {printable(origins[key])}" if key in origins else line


def opening(root: Root, before: str, section: str) -> list[str]:
    """The lines that open `section` after the section `before`."""
    if section == before:
        return []
    indent = "  " * section.count(".")
    home, _, name = section.rpartition(".")
    said = sections(root)[section].__doc__ or sections(root)[home].model_fields[name].description
    about = (said or name).strip().splitlines()[0]
    return ["", f"{indent}# {about}", f"{indent}{name}:"]


def entry(config: RunConfig, key: str) -> list[str]:
    """`key: value` as a line of its section; a list of mappings has a line for each of them."""
    indent, name, value = "  " * key.count("."), key.rpartition(".")[2], value_of(config, key)
    if isinstance(value, tuple) and any(isinstance(item, dict) for item in value):
        return [f"{indent}{name}:", *(f"{indent}  - {in_yaml(item)}" for item in value)]
    return [f"{indent}{name}: {in_yaml(value)}"]


def in_yaml(value: Any) -> str:
    """Scalars, lists and mappings of them as YAML on one line, read back equal."""
    if isinstance(value, Mapping):
        pairs = (f"{in_yaml(str(key))}: {in_yaml(item)}" for key, item in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(in_yaml, value))}]"
    if isinstance(value, str):
        return value if _plain(value) else _quoted(value)
    return json.dumps(value)


def _plain(text: str) -> bool:
    """Whether a text may stand without quotes, in a list too."""
    if not re.fullmatch(r"[\w./][\w./<=-]*", text, re.ASCII):
        return False
    value, found = parse(f"[{text}]", "")
    return not found and value is not None and value.plain() == [text]


def _quoted(text: str) -> str:
    """YAML's double-quoted form: what cannot be printed is escaped by its code point."""
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}
    return f'"{"".join(escapes.get(char) or _escaped(char) for char in text)}"'


def _escaped(char: str) -> str:
    code = ord(char)
    if char.isprintable() and code < 0x10000:
        return char
    return (
        f"\\x{code:02x}"
        if code < 0x100
        else f"\\u{code:04x}"
        if code < 0x10000
        else f"\\U{code:08x}"
    )
