"""YAML text read into plain values that remember where they stand.

Only YAML 1.2 data is understood: mappings, lists, text, numbers, true, false and null, with
anchors and merge keys. Nothing is constructed from tags.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, ReusedAnchorWarning, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode
from ruamel.yaml.reader import ReaderError

from instar.config.errors import Problem
from instar.config.syntax import MAX_DEPTH, fault, odd_space

MAX_VALUES = 20_000  # aliases of aliases may unfold without end
MAX_DIGITS = 300  # Python itself refuses to print integers of several thousand
SHOWN_COLUMNS = 72

_TYPOGRAPHIC = "“”„‘’‚«»"

_LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
_TAG = "tag:yaml.org,2002:"

_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}

KeyPath = tuple[str | int, ...]
"""keys and list indices, from the outside in"""

UNREADABLE = object()  # stands for data about which a mistake has been noted


@dataclass(frozen=True)
class Place:
    """A position in a source: line and column count from 1; line 0 means the source as a whole."""

    source: str
    line: int = 0
    column: int = 0
    text: str = ""

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source

    def excerpt(self) -> str:
        """The line with its number, and under it a caret at the column."""
        if not self.line:
            return ""
        start = max(0, self.column - SHOWN_COLUMNS // 2) if self.column > SHOWN_COLUMNS else 0
        shown = self.text[start : start + SHOWN_COLUMNS]
        shown = "\t".join(map(printable, shown.split("\t")))
        before = shown[: self.column - 1 - start]
        pad = "".join("\t" if char == "\t" else " " * _cells(char) for char in before)
        number = f"{self.line:>3}"
        return f"{number} | {shown}\n{' ' * len(number)} | {pad}^"


@dataclass(frozen=True)
class Mistake:
    """A problem and the place by which problems are ordered."""

    place: Place
    message: str
    hint: str = ""
    key: str = ""

    def problem(self, task: str = "") -> Problem:
        """`task`: whose key it is, if not language's."""
        where = printable(str(self.place))
        excerpt = self.place.excerpt()
        return Problem(
            printable(self.message), where, excerpt, printable(self.hint), self.key, task
        )


@dataclass(frozen=True)
class Value:
    """Data at a place: a scalar, a tuple of values, or a dict of key → (place of key, value);
    or UNREADABLE."""

    data: Any
    place: Place

    def plain(self) -> Any:
        """The data alone, as Python lists, dicts and scalars."""
        if isinstance(self.data, tuple):
            return [item.plain() for item in self.data]
        if isinstance(self.data, dict):
            return {key: value.plain() for key, (_, value) in self.data.items()}
        return self.data

    def within(self, path: KeyPath) -> Value:
        """The value at the end of the path, or the innermost one that exists."""
        value = self
        for step in path:
            if isinstance(value.data, tuple) and isinstance(step, int) and step < len(value.data):
                value = value.data[step]
            elif isinstance(value.data, dict) and step in value.data:
                value = value.data[str(step)][1]
            else:
                break
        return value

    def key_place(self, path: KeyPath) -> Place:
        """The place of the key at the end of the path, or of the innermost value that exists."""
        outer = self.within(path[:-1])
        if path and isinstance(outer.data, dict) and path[-1] in outer.data:
            place: Place = outer.data[str(path[-1])][0]
            return place
        return self.within(path).place

    def readable(self) -> bool:
        return all(value.data is not UNREADABLE for value in self.scalars())

    def scalars(self) -> Iterator[Value]:
        """Every scalar in it."""
        return (value for _, value in self.leaves())

    def leaves(self, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Value]]:
        """Every scalar in it, with the way there."""
        if isinstance(self.data, tuple):
            for index, item in enumerate(self.data):
                yield from item.leaves((*path, index))
        elif isinstance(self.data, dict):
            for key, (_, value) in self.data.items():
                yield from value.leaves((*path, key))
        else:
            yield path, self


def parse(text: str, source: str, *, numbered: bool = True) -> tuple[Value | None, list[Mistake]]:
    """Read one YAML document.

    Returns its value (None: there is none, or it cannot be read) and all mistakes found:
    a syntax error, duplicate keys, keys that are no text, tags. `numbered=False` for a source
    that is one short text, such as a command-line option: places then name it as a whole.
    """
    reader = _Reader(text, source, numbered)
    yaml = YAML(typ="safe", pure=True)
    yaml.max_depth = MAX_DEPTH
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReusedAnchorWarning)
            node = yaml.compose(text)
    except (YAMLError, ValueError, OverflowError, RecursionError) as error:
        return None, [reader.syntax_mistake(error)]
    value = None if node is None else reader.read(node, ())
    return value, reader.mistakes


def show(data: Any, limit: int = 60) -> str:
    """Data as a short text for a message: text in quotes, true, false and null as in YAML."""
    text = printable(json.dumps(data, ensure_ascii=False, default=str))
    return text if len(text) <= limit else text[: limit - 1] + "…"


def printable(text: str) -> str:
    """Text without anything that could steer a terminal or end a comment."""
    return "".join(char if char.isprintable() else "�" for char in text)


class _Reader:
    """One reading of a document: gathers mistakes on its way down."""

    def __init__(self, text: str, source: str, numbered: bool) -> None:
        self.text = text
        self.source = source
        self.lines = _LINE_BREAK.split(text)
        self.numbered = numbered
        self.mistakes: list[Mistake] = []
        self.count = 0
        self.open: set[int] = set()

    def place(self, line: int, column: int) -> Place:
        if not self.numbered:
            return Place(self.source)
        text = self.lines[line] if line < len(self.lines) else ""
        return Place(self.source, line + 1, column + 1, text)

    def report(self, message: str, place: Place, key: str = "", hint: str = "") -> None:
        self.mistakes.append(Mistake(place, message, hint, key))

    def read(self, node: Node, path: tuple[str, ...]) -> Value:
        place = self.place(node.start_mark.line, node.start_mark.column)
        self.count += 1
        if id(node) in self.open or self.count > MAX_VALUES:
            if self.count <= MAX_VALUES:
                self.report("an anchor contains itself", place)
            elif self.count == MAX_VALUES + 1:
                self.report(f"more than {MAX_VALUES:,} values; this is no config", place)
            return Value(UNREADABLE, place)
        if isinstance(node, ScalarNode):
            return Value(self.scalar(node, place, path), place)
        self.open.add(id(node))
        if node.tag not in (f"{_TAG}map", f"{_TAG}seq"):
            self.report(f"tags such as {show(node.tag)} are not understood", place)
            value = Value(UNREADABLE, place)
        elif isinstance(node, MappingNode):
            value = Value(self.mapping(node, path), place)
        else:
            value = Value(tuple(self.read(item, path) for item in node.value), place)
        self.open.discard(id(node))
        return value

    def mapping(self, node: MappingNode, path: tuple[str, ...]) -> dict[str, tuple[Place, Value]]:
        own: dict[str, tuple[Place, Value]] = {}
        merged: dict[str, tuple[Place, Value]] = {}
        inside = f" in {'.'.join(path)}" if path else ""
        for key_node, value_node in node.value:
            place = self.place(key_node.start_mark.line, key_node.start_mark.column)
            if not isinstance(key_node, ScalarNode):
                self.report(f"a key{inside} must be a word, not a list or mapping", place)
                continue
            key = key_node.value
            if key_node.style is None and (odd := odd_space(key)):
                self.report(f"this key is none: {odd}", place, hint="write ordinary spaces")
                continue
            if key_node.tag == f"{_TAG}merge":
                value = self.read(value_node, path)
                parts = value.data if isinstance(value.data, tuple) else (value,)
                if not all(isinstance(part.data, dict) for part in parts):
                    hint = "give it an alias of one, e.g. <<: *base"
                    self.report("'<<' merges mappings only", place, hint=hint)
                    continue
                for part in parts:
                    merged = part.data | merged
                continue
            value = self.read(value_node, (*path, key))
            if key in own:
                first = own[key][0]
                self.report(
                    f"duplicate key '{key}'{inside}; first given at {first}",
                    place,
                    ".".join((*path, key)),
                )
                continue
            own[key] = (place, value)
        return merged | own

    def scalar(self, node: ScalarNode, place: Place, path: tuple[str, ...]) -> Any:
        text: str = node.value
        kind = str(node.tag).removeprefix(_TAG)
        try:
            match kind:
                case "null":
                    return None
                case "bool":
                    return _truth(text)
                case "int":
                    return _whole_number(text)
                case "float":
                    return float(re.sub(r"\.(inf|nan)$", r"\1", text.replace("_", "").lower()))
                case "str" if node.style is None and text[:1] in _TYPOGRAPHIC and text:
                    message = (
                        f"{'.'.join(path)}: {text[0]} is no quote in YAML, but part of the text"
                    )
                    hint = f"write {text.strip(_TYPOGRAPHIC)!r}"
                    self.report(message, place, ".".join(path), hint)
                    return UNREADABLE
                case "str" | "timestamp" | "merge" | "value" | "!":
                    return text
        except ValueError:
            self.report(f"{'.'.join(path)}: {show(text)} cannot be read as {_KINDS[kind]}", place)
            return UNREADABLE
        self.report(f"tags such as {show(node.tag)} are not understood", place)
        return UNREADABLE

    def syntax_mistake(self, error: Exception) -> Mistake:
        place, said, hint = Place(self.source), str(error), ""
        if isinstance(error, MarkedYAMLError):
            said, hint, line, column = fault(error, self.lines)
            place = place if line is None else self.place(line, column)
        elif isinstance(error, ReaderError):
            said = f"the character U+{int(error.character):04X} is not allowed in YAML"
            before = _LINE_BREAK.split(self.text[: error.position])
            place = self.place(len(before) - 1, len(before[-1]))
        return Mistake(place, f"not readable as YAML: {said}", hint)


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def _whole_number(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(text)
    digits = text.replace("_", "").lower()
    sign = -1 if digits.startswith("-") else 1
    digits = digits.lstrip("+-")
    base = {"0x": 16, "0o": 8, "0b": 2}.get(digits[:2], 10)
    return sign * int(digits if base == 10 else digits[2:], base)


def _cells(char: str) -> int:
    """Columns a character takes on a terminal."""
    from unicodedata import combining, east_asian_width

    return 0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1
