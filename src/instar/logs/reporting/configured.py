"""The config of a run as its `run.yaml` writes it: line by line, and in what runs differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from instar.record.rundir import RunDir

DEFAULT = "default"
MAX_BYTES = 1 << 20
"""as of any config"""


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


def config_lines(run: RunDir) -> list[Line]:
    """The lines of a run's config; none where it cannot be read."""
    try:
        with run.config.open("rb") as file:
            text = file.read(MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return []
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


def config_differences(configs: Sequence[Sequence[Line]]) -> list[tuple[str, list[str]]]:
    """The keys whose values are not the same in all configs, each with its value in each of them;
    empty where one has none."""
    tables = [_values(lines) for lines in configs]
    keys = dict.fromkeys(key for table in tables for key in table)
    rows = [(key, [table.get(key, "") for table in tables]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _values(lines: Sequence[Line]) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in lines:
        if line.key:
            before = found.get(line.key)
            found[line.key] = line.value if before is None else f"{before}\n{line.value}"
    return found
