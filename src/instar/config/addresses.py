"""Addresses such as s3://bucket/folder, which no path of Instar's may be: they would be taken for folders."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from instar.config.errors import ConfigError, ConfigProblem, printable

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
WEB = ("record.alerts.", "record.trackers.", "record.sample_prompt", "model.config")
"""Keys of a config whose values may be addresses or texts."""
FLEET = frozenset({"env", "command", "http", "address", "sbatch"})
"""Keys of a fleet file, at any depth, of which this holds too."""
OPTIONS = frozenset({"--prompt", "--stop", "--message", "--tag", "--add", "--remove", "--set"})
"""Options of the command line that take texts."""
HINT = (
    "only files and folders of this machine are read and written; copy it here first, or mount it"
)


def is_address(text: object) -> bool:
    return isinstance(text, str) and _ADDRESS.match(text.strip()) is not None


def message_of(text: str) -> str:
    """Return the refusal of an address."""
    return f"{printable(text)} is an address, not a path"


def check_path(text: str, what: str) -> None:
    """Raise ConfigError if a path is an address; `what` names what it is the path of."""
    if is_address(text):
        raise ConfigError(ConfigProblem((), message_of(text), HINT, what))


def addresses(data: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Yield every address within nested data, with its path."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from addresses(value, (*path, key))
    elif isinstance(data, list | tuple):
        for number, value in enumerate(data):
            yield from addresses(value, (*path, number))
    elif is_address(data):
        yield path, data


def check_words(words: Sequence[str]) -> None:
    """Raise ConfigError if an argument or an option's value on the command line is an address."""
    before = ""
    for word in words:
        if word == "--":
            return
        option, _, value = word.partition("=") if word.startswith("-") else (before, "", word)
        if option not in OPTIONS:
            check_path(value, option if option.startswith("--") else "")
        before = word if word.startswith("--") and "=" not in word else ""
