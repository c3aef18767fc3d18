"""A config as YAML text that reads back equal."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from instar.config.document import parse, printable
from instar.config.fields import keys, sections, value_of
from instar.config.schema import RunConfig


def resolved(config: RunConfig, origins: Mapping[str, str]) -> str:
    """Every key with its value, and its origin, where one is given, as a comment behind it."""
    lines: list[str] = []
    section = ""
    for key in keys():
        lines += opening(section, section := key.rpartition(".")[0])
        line = f"{'  ' * key.count('.')}{entry(config, key)}"
        lines.append(f"{line:<40}  # {printable(origins[key])}" if key in origins else line)
    return "\n".join(lines) + "\n"


def opening(before: str, section: str) -> list[str]:
    """The lines that open `section` after the section `before`."""
    if section == before:
        return []
    indent = "  " * section.count(".")
    about = (sections()[section].__doc__ or "").strip().splitlines()[0]
    return ["", f"{indent}# {about}", f"{indent}{section.rpartition('.')[2]}:"]


def entry(config: RunConfig, key: str) -> str:
    """`key: value` as one line of its section."""
    return f"{key.rpartition('.')[2]}: {in_yaml(value_of(config, key))}"


def in_yaml(value: Any) -> str:
    """A scalar or a list of scalars as YAML on one line, read back equal."""
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
