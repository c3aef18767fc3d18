"""Reading a fleet file: all mistakes at once, each with its line and a suggestion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from instar.config.document import (
    Document,
    KeyPath,
    merge_data,
    parse_option,
    problem_at,
    read_document,
)
from instar.config.errors import ConfigError, ConfigProblem, SourceLocation
from instar.config.fields import choices
from instar.config.files import FLEET, HINT, WEB, addresses, message_of
from instar.config.suggestions import unknown_key, wrong_value
from instar.extensions.fleet.spec import FleetSpec


@dataclass(frozen=True)
class LoadedFleet:
    """A fleet with the positions of its values."""

    spec: FleetSpec
    documents: tuple[Document, ...]
    """the file and the command line's values; later ones take precedence"""

    def place(self, path: KeyPath, *, key: bool = False) -> SourceLocation:
        """Return where a value, or its key, was written."""
        for document in reversed(self.documents):
            if path in document.places:
                return document.place(path, key=key)
        return self.documents[0].place(path, key=key)

    def problem(self, path: KeyPath, message: str, hint: str = "") -> ConfigProblem:
        """Return a problem of a value."""
        return problem_at(self.place(path), message, hint)


def load_fleet(path: str, overrides: Sequence[str] = ()) -> LoadedFleet:
    """Read a fleet file with `--set` texts such as "vars.model=gpt2" applied.

    Raises:
        ConfigError: with all problems.
    """
    document, problems = read_document(path, "docs/fleet.md has examples")
    if document is None:
        raise ConfigError(*problems)
    if not isinstance(document.data, dict):
        message, hint = "a fleet file is made of 'key: value' lines", "docs/fleet.md has examples"
        raise ConfigError(*problems, problem_at(document.place(), message, hint))
    documents = [document]
    data: dict[str, Any] = document.data
    for text in overrides:
        option, mistakes = parse_option(text, "max_parallel=2")
        problems += mistakes
        if option is not None:
            documents.append(option)
            data = merge_data(data, option.data)
    unreadable = {path for document in documents for path in document.unreadable}
    try:
        spec = FleetSpec.model_validate(data)
    except ValidationError as error:
        reading = LoadedFleet(FleetSpec(name="unread"), tuple(documents))
        for item in error.errors(include_url=False):
            location = _key_path(tuple(item["loc"]), data)
            if not any(location[: len(path)] == path for path in unreadable):
                problems.append(_explain(reading, location, item, data))
        raise ConfigError(*_sorted(problems)) from None
    loaded_config = LoadedFleet(spec, tuple(documents))
    for place, address in addresses(data):
        keys = (key for key in place if isinstance(key, str))
        if not any(key in FLEET or key.startswith(WEB) for key in keys):
            problems.append(loaded_config.problem(place, message_of(address), HINT))
    if problems:
        raise ConfigError(*_sorted(problems))
    return loaded_config


def _key_path(location: tuple[Any, ...], data: Any) -> KeyPath:
    """Return the part of pydantic's location that is in the data: without branches of unions."""
    path: list[str | int] = []
    for number, step in enumerate(location):
        last = number == len(location) - 1
        inside = (isinstance(data, dict) and step in data) or (
            isinstance(data, list) and isinstance(step, int) and step < len(data)
        )
        if inside:
            path.append(step)
            data = data[step]
        elif isinstance(data, dict) and last:  # a missing key
            path.append(step)
    return tuple(path)


def _explain(reading: LoadedFleet, path: KeyPath, item: Any, data: dict[str, Any]) -> ConfigProblem:
    if item["type"] == "extra_forbidden":
        message, hint, _ = unknown_key(FleetSpec, path)
        return problem_at(reading.place(path, key=True), message, hint)
    value: Any = data
    for step in path[:-1] if item["type"] == "missing" else path:
        value = value[step]
    # of a word in place of a section, pydantic names the key that the word is the value of
    field = tuple(item["loc"]) if item["type"] == "literal_error" else path
    field = field if choices(FleetSpec, field) else path
    return reading.problem(path, *wrong_value(FleetSpec, field, value, item["type"], item["msg"]))


def _sorted(problems: Sequence[ConfigProblem]) -> list[ConfigProblem]:
    """By position, the first of each: the branches of a union fail alike."""
    first: dict[str, ConfigProblem] = {}
    for problem in problems:
        first.setdefault(problem.where, problem)

    def position(problem: ConfigProblem) -> tuple[bool, int, int]:
        place = problem.place
        line = place.line if isinstance(place, SourceLocation) else 0
        return not line, line, place.column if isinstance(place, SourceLocation) else 0

    return sorted(first.values(), key=position)


def resolve_beside(reading: LoadedFleet, path: KeyPath, name: str) -> Path:
    """Return a path that is written in the file, relative to where the command was typed, or else to
    the file."""
    path_here = Path(name)
    path_beside = Path(reading.place(path).source).parent / name
    return path_beside if not path_here.exists() and path_beside.exists() else path_here
