"""Reading files of other tools, which are not trusted: their beginnings, lines and JSON, within limits."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from instar.config.errors import ConfigError
from instar.config.files import of_bounded_depth, open_regular, read_regular

HEAD_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 20


def read_head(path: Path, size: int = HEAD_BYTES) -> bytes:
    """Return the first bytes of a file; empty for a folder.

    Raises:
        ConfigError: it cannot be read.
    """
    if path.is_dir():
        return b""
    try:
        with open_regular(path) as file:
            return file.read(size)
    except OSError as error:
        raise unreadable(path, error) from error


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text with their ends; the last one may have none.

    Raises:
        ConfigError: it cannot be read, or a line has more than `MAX_LINE_BYTES`.
    """
    try:
        with open_regular(path) as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                if len(line) > MAX_LINE_BYTES:
                    raise ConfigError.of(f"{path} has a line of more than {MAX_LINE_BYTES:,} bytes")
                yield line.decode("utf-8", "replace")
    except OSError as error:
        raise unreadable(path, error) from error


def read_text(path: Path) -> str:
    """Return a text of at most `SMALL_BYTES` that is nested no deeper than JSON should be.

    Raises:
        ConfigError: it is larger or deeper, or cannot be read.
    """
    try:
        return of_bounded_depth(read_regular(path)).decode("utf-8", "replace")
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise ConfigError.of(f"{path} is {error}") from error


def parse_json(text: str) -> Any:
    """Return the value of JSON, also of Python's NaN and Infinity.

    Raises:
        ValueError: it is not JSON, or nested too deep.
    """
    return json.loads(of_bounded_depth(text))


def unreadable(path: Path, error: OSError) -> ConfigError:
    """Return the error of a file that the system does not read."""
    return ConfigError.of(f"cannot read {path}: {error.strerror or error}")


def missing_package(package: str, path: Path) -> ConfigError:
    """Return the error where a record needs a package, whose extra has its name."""
    return ConfigError.of(
        f"{path} is read by the library `{package}`, which is not installed",
        hint=f"install the extra: pip install 'instar[{package}]'",
    )


def run_name(path: Path, usual_name: str) -> str:
    """Return a name for the run of a record: its file's if that is not the usual one, else its folder's, with that above
    it if it only counts: `gpt-version_3`."""
    path = path.absolute()
    if path.is_file() and path.name != usual_name:
        return path.stem
    folder = path if path.is_dir() else path.parent
    is_number = re.fullmatch(r"version_\d+", folder.name) is not None
    return f"{folder.parent.name}-{folder.name}" if is_number else folder.name
