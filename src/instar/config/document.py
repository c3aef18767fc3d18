"""YAML parsing: plain data with the position of every key and value; problems in plain English."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from instar.config.errors import (
    ConfigProblem,
    SourceLocation,
    near_path,
    odd_space,
    printable_text,
    shorten_text,
    value_text,
)
from instar.config.files import HINT, is_address, message_of, open_regular
from instar.config.yaml_nodes import simple
from instar.config.yaml_nodes.simple import LINE_BREAK

SCHEMA_KEY = "$schema"
"""The key of a file by which editors find its JSON Schema; it is no part of a config."""
MAX_BYTES = 1 << 20
MAX_PROBLEMS = 100
MAX_VALUES = 20_000
"""bounds also the expansion of nested aliases"""
MOST_SHOWN = f"there are more than {MAX_PROBLEMS} errors"
MAX_DIGITS = 300  # Python itself refuses to print integers of several thousand digits

KeyPath = tuple[str | int, ...]
"""Keys and list indices, from the outermost in."""


@dataclass(frozen=True)
class Document:
    """Plain data with source positions."""

    data: Any
    """Dicts, lists and scalars, without `unreadable` values."""
    places: Mapping[KeyPath, tuple[SourceLocation, SourceLocation]]
    """(key, value) positions; () is the whole document, a list item is its own key."""
    unreadable: frozenset[KeyPath] = field(default=frozenset())
    """Paths of values that could not be parsed; the problems say why."""

    def place(self, path: KeyPath = (), *, key: bool = False) -> SourceLocation:
        """Return the position of the value at a path, or of its key; if it does not exist, that of
        the innermost value around it."""
        if path in self.places:
            return self.places[path][0 if key else 1]
        return self.place(path[:-1])


def parse(
    text: str, source: str, under: KeyPath | None = None, within: KeyPath = ()
) -> tuple[Document | None, list[ConfigProblem]]:
    """Parse one YAML 1.2 document; None if it is empty or cannot be parsed.

    All problems are returned: a syntax error, duplicate keys, tags, values that are not YAML.

    Args:
        under: the path of the key whose value the text is, if it is not a file but a short text
            such as a command-line option. Positions then name the source as a whole.
        within: the path of the key whose value is in this separate file, for messages.
    """
    reader = _Reader(text, source, within, has_numbers=under is None)
    try:
        node = simple.compose_simple(text)
    except simple.NotSimpleError:
        from instar.config.yaml_nodes import full  # which most commands do without

        try:
            node = full.compose_any(text, MAX_VALUES)
        except full.NotYamlError as error:
            at = SourceLocation(source)
            if error.line is not None:
                at = reader.place(error.line, error.column)
            return None, [problem_at(at, f"not readable as YAML: {error.message}", error.hint)]
    if node is None:
        return None, []
    data = reader.read(node, under or ())
    if (under or ()) in reader.unreadable:
        return None, reader.problems
    data = _nested(under or (), data)
    location = reader.place(node.start_mark.line, node.start_mark.column)
    places = {(): (location, location)} | reader.places
    return Document(data, places, frozenset(reader.unreadable)), reader.problems


def read_document(
    path: str, start: str, link: SourceLocation | None = None, within: KeyPath = ()
) -> tuple[Document | None, list[ConfigProblem]]:
    """Parse a file; None after a problem that prevents it.

    Args:
        start: hint if the file is missing or empty.
        link: where its path was written, if in another file.
        within: see `parse`.
    """
    location = SourceLocation(path)
    if is_address(path):
        return None, [problem_at(link or location, message_of(path), HINT)]
    try:
        with open_regular(path, follow=True) as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            message = f"larger than {MAX_BYTES >> 20} MiB; this is not a config"
            return None, [problem_at(location, message)]
        text = raw.decode("utf-8-sig")
    except FileNotFoundError:
        hint = near_path(path, "*.y*ml") or start
        if link is not None and link.line:
            return None, [problem_at(link, f"no such file: {path}", hint)]
        return None, [problem_at(location, "no such file", hint)]
    except IsADirectoryError:
        candidates = ", ".join(map(str, sorted(Path(path).glob("*.y*ml"))[:3]))
        hint = candidates and f"it holds {candidates}"
        return None, [problem_at(location, "is a folder, not a config file", hint)]
    except UnicodeDecodeError as error:
        lines = raw[: error.start].decode("utf-8").split("\n")
        place = SourceLocation(path, len(lines), len(lines[-1]) + 1, lines[-1] + "�")
        message = f"byte 0x{raw[error.start]:02x} is not UTF-8"
        return None, [problem_at(place, message, "save the file as UTF-8")]
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return None, [problem_at(location, f"cannot be read: {reason}")]
    document, problems = parse(text, path, within=within)
    if document is not None and document.data is not None:
        document, more = _without_schema(document)
        return document, [*problems, *more]
    return None, problems or [problem_at(location, "the file is empty", start)]


def _without_schema(document: Document) -> tuple[Document, list[ConfigProblem]]:
    """Return a file's content without the key by which editors find its schema."""
    data = document.data
    if not isinstance(data, dict) or SCHEMA_KEY not in data:
        return document, []
    problems = []
    if not isinstance(data[SCHEMA_KEY], str):
        message = f"{SCHEMA_KEY} is the address or the path of a schema, for editors"
        problems.append(problem_at(document.place((SCHEMA_KEY,)), message, "leave it out"))
    rest = {key: value for key, value in data.items() if key != SCHEMA_KEY}
    return replace(document, data=rest), problems


def parse_option(
    text: str, example: str = "model.n_layer=6"
) -> tuple[Document | None, list[ConfigProblem]]:
    """Parse the `--set` text `a.b=v` as a document {a: {b: v}}; without a value, v is None."""
    source = f"--set {shorten_text(text, 80)}"
    key, equals, value = text.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or path == ("",):
        message, hint = "--set expects key=value", f"e.g. --set {example}"
        return None, [problem_at(SourceLocation(source), message, hint)]
    document, problems = parse(value, source, path)
    if document is None and not problems:  # nothing after "="
        place = SourceLocation(source)
        return Document(_nested(path, None), {(): (place, place)}), []
    return document, problems


def merge_data(below: Any, above: Any) -> Any:
    """Return a value over another: mappings are merged key by key, but {} is empty."""
    if isinstance(below, dict) and isinstance(above, dict) and above:
        return below | {key: merge_data(below.get(key), value) for key, value in above.items()}
    return above


def _nested(path: KeyPath, data: Any) -> Any:
    for name in reversed(path):
        data = {name: data}
    return data


def problem_at(place: SourceLocation, message: str, hint: str = "", key: str = "") -> ConfigProblem:
    """Return a problem at a position; terminal escapes in quoted text are made printable."""
    return ConfigProblem(
        (key,) if key else (), printable_text(message), printable_text(hint), place
    )


def dotted_key(path: KeyPath) -> str:
    """Format a path for messages: ("train", "until", 0) is train.until[0]."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)[1:]


_TYPOGRAPHIC = "“”„‘’‚«»"
_TAG = "tag:yaml.org,2002:"
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}


class _Unreadable(Exception):  # noqa: N818
    """A value whose problem has been reported."""


class _Reader:
    """Reads one document and collects positions and problems."""

    def __init__(self, text: str, source: str, within: KeyPath, *, has_numbers: bool) -> None:
        self.text, self.source, self.within, self.numbered = text, source, within, has_numbers
        self.lines = LINE_BREAK.split(text)
        self.problems: list[ConfigProblem] = []
        self.places: dict[KeyPath, tuple[SourceLocation, SourceLocation]] = {}
        self.unreadable: set[KeyPath] = set()
        self.count = 0
        self.open: set[int] = set()

    def place(self, line: int, column: int) -> SourceLocation:
        if not self.numbered:
            return SourceLocation(self.source)
        text = self.lines[line] if line < len(self.lines) else ""
        return SourceLocation(self.source, line + 1, column + 1, text)

    def name(self, path: KeyPath) -> str:
        return dotted_key((*self.within, *path))

    def report(self, message: str, place: SourceLocation, key: str = "", hint: str = "") -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem_at(place, message, hint, key))
        elif len(self.problems) == MAX_PROBLEMS:
            self.problems.append(problem_at(place, f"{MOST_SHOWN}, and the rest is not read"))
            raise _Unreadable

    def read(self, node: Any, path: KeyPath, key_place: SourceLocation | None = None) -> Any:
        """Return a node's data and record its positions; None if it is recorded as unreadable."""
        place = self.place(node.start_mark.line, node.start_mark.column)
        self.places[path] = key_place or place, place
        self.count += 1
        try:
            if self.count > MAX_VALUES:
                if self.count == MAX_VALUES + 1:
                    self.report(f"more than {MAX_VALUES:,} values; this is not a config", place)
                raise _Unreadable
            if id(node) in self.open:
                self.report("an anchor contains itself", place)
                raise _Unreadable
            if node.id == "scalar":
                return self.scalar(node, place, path)
            if node.tag not in (f"{_TAG}map", f"{_TAG}seq"):
                self.report(f"tags such as {value_text(node.tag)} are not understood", place)
                raise _Unreadable
            self.open.add(id(node))
            try:
                if node.id == "mapping":
                    return self.mapping(node, path)
                return [self.read(item, (*path, n)) for n, item in enumerate(node.value)]
            finally:
                self.open.discard(id(node))
        except _Unreadable:
            self.unreadable.add(path)
            return None

    def mapping(self, node: Any, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        values_below: dict[str, Any] = {}
        keys = set[str]()
        inside = f" in {self.name(path)}" if path else ""
        # own keys override merged ones wherever they are written, so read merges first
        for key_node, value_node in sorted(
            node.value, key=lambda pair: pair[0].tag != f"{_TAG}merge"
        ):
            place = self.place(key_node.start_mark.line, key_node.start_mark.column)
            if key_node.id != "scalar":
                self.report(f"a key{inside} must be a word, not a list or mapping", place)
                continue
            key = key_node.value
            if not key_node.style and (odd := odd_space(key)):
                self.report(f"invalid key: {odd}", place, hint="write ordinary spaces")
            elif key_node.tag == f"{_TAG}merge":
                values_below = self.merge(value_node, path, place) | values_below
            elif key in keys:
                first = self.places[(*path, key)][0]
                message = f"duplicate key '{key}'{inside}; first given at {first}"
                self.report(message, place, self.name((*path, key)))
            else:
                keys.add(key)
                values_below.pop(key, None)
                own_path = (*path, key)
                if own_path in self.places:  # from a merge
                    self.unreadable = {p for p in self.unreadable if p[: len(own_path)] != own_path}
                value = self.read(value_node, own_path, place)
                if own_path not in self.unreadable:
                    values[key] = value
        return values_below | values

    def merge(self, node: Any, path: KeyPath, place: SourceLocation) -> dict[str, Any]:
        """Return the merged keys of the mappings that `<<` names; earlier ones take precedence."""
        parts = [node] if node.id == "mapping" else node.value
        if isinstance(parts, str) or not all(part.id == "mapping" for part in parts):
            hint = "give it an alias of one, e.g. <<: *base"
            self.report("'<<' merges mappings only", place, hint=hint)
            return {}
        values_below: dict[str, Any] = {}
        own_path = self.places[path]
        for part in reversed(parts):
            values_below |= self.read(part, path) or {}
        self.places[path] = own_path
        return values_below

    def scalar(self, node: Any, place: SourceLocation, path: KeyPath) -> Any:
        text: str = node.value
        kind = str(node.tag).removeprefix(_TAG)
        name = self.name(path)
        try:
            match kind:
                case "null":
                    return None
                case "bool" if text.lower() in ("true", "false"):
                    return text.lower() == "true"
                case "int" if len(text) <= MAX_DIGITS:
                    return _whole_number(text)
                case "float":
                    number = float(re.sub(r"\.(inf|nan)$", r"\1", text.replace("_", "").lower()))
                    if abs(number) < float("inf"):
                        return number
                    self.report(f"{name} must be a finite number", place, name)
                    raise _Unreadable
                case "str" if not node.style and text[:1] in _TYPOGRAPHIC and text:
                    message = (
                        f"{name}: {text[0]} is not a quotation mark in YAML but part of the text"
                    )
                    self.report(message, place, name, f"write {text.strip(_TYPOGRAPHIC)!r}")
                    raise _Unreadable
                case "str" | "timestamp" | "merge" | "value" | "!":
                    return text
        except ValueError:
            pass
        if kind in _KINDS:
            self.report(f"{name}: {value_text(text)} cannot be read as {_KINDS[kind]}", place)
        else:
            self.report(f"tags such as {value_text(node.tag)} are not understood", place)
        raise _Unreadable


def _whole_number(text: str) -> int:
    digits = text.replace("_", "").lower()
    sign = -1 if digits.startswith("-") else 1
    digits = digits.lstrip("+-")
    base = {"0x": 16, "0o": 8, "0b": 2}.get(digits[:2], 10)
    return sign * int(digits if base == 10 else digits[2:], base)
