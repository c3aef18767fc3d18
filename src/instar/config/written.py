"""A resolved config read line by line, with the origins that `dump.resolved` wrote behind its values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

DEFAULT = "default"
DERIVED = "derived"


@dataclass(frozen=True)
class Line:
    """One line of a config."""

    text: str
    """without its origin"""
    origin: str
    """where its value comes from: `default`, `derived`, `preset llama`, `run.yaml:4:3`; empty of a
    line that gives none"""
    key: str = ""
    """dotted; empty of a comment, a section's heading and an empty line"""
    value: str = ""

    @property
    def chosen(self) -> bool:
        """Whether somebody gave it a value."""
        return self.origin not in ("", DEFAULT)


def lines_of(text: str) -> list[Line]:
    """The lines of a config that `resolved` wrote; of any other text, what can be made of it."""
    lines, sections = list[Line](), list[tuple[int, str]]()
    for raw in text.splitlines():
        body, mark, origin = raw.rpartition("  # ")
        if not mark:
            body, origin = raw, ""
        stripped = body.strip()
        indent = len(body) - len(body.lstrip())
        name, colon, value = stripped.partition(":")
        if not colon or stripped.startswith(("#", "- ")):
            item = stripped.startswith("- ") and sections
            key = ".".join(name for _, name in sections) if item else ""
            lines.append(Line(body.rstrip(), origin.strip(), key, stripped if item else ""))
            continue
        while sections and sections[-1][0] >= indent:
            sections.pop()
        key = ".".join([*(name for _, name in sections), name])
        if not value.strip():
            sections.append((indent, name))
            key = ""
        lines.append(Line(body.rstrip(), origin.strip(), key, value.strip()))
    return lines


def origins_of(lines: Iterable[Line]) -> dict[str, str]:
    """Where the value of every key comes from; an item's of a list stands under "key[index]"."""
    items = Counter[str]()
    origins: dict[str, str] = {}
    for line in lines:
        key = line.key
        if key and line.text.lstrip().startswith("- "):
            key = f"{key}[{items[key]}]"
            items[line.key] += 1
        if key and line.origin:
            origins[key] = line.origin
    return origins
