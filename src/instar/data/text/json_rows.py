"""Rows of JSON files: JSON lines or an array of objects, also compressed, with or without a byte order mark."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from instar.config.errors import ConfigError
from instar.config.files import TooDeep, of_bounded_depth, open_regular
from instar.data.text.files import JSON, suffix_of

_BOM = b"\xef\xbb\xbf"


def open_source(path: Path) -> IO[bytes]:
    """Open a file of a source. Raises ConfigError if it cannot be read."""
    try:
        return open_regular(path, follow=True)
    except OSError as error:
        raise ConfigError.at("data.source", f"cannot read {path}: {error.strerror}") from None


def json_rows(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the JSON of each row with its line, from 1 on, or its place in the array; blank lines are no rows.

    Raises:
        ConfigError: the file cannot be read or unpacked, is neither, or a row is nested too deep.
    """
    try:
        with open_source(path) as file:
            for number, row in _rows(path, _unpack(path, file)):
                try:
                    yield number, of_bounded_depth(row)
                except TooDeep as error:
                    where = f"{path}:{number}"
                    raise ConfigError.of(f"this line is not JSON: {error}", where=where) from None
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise ConfigError.of(f"cannot be unpacked: {error}", where=str(path)) from None


def row_of(path: Path, number: int, row: bytes) -> dict[str, Any]:
    """Return a row as an object. Raises ConfigError, naming its place, if it is none."""
    where = f"{path}:{number}"
    try:
        content: Any = msgspec.json.decode(row)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError.of(f"this line is not JSON: {error}", where=where) from None
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise ConfigError.of(f"this line is not a JSON object but a {kind}", where=where)
    return content


def field_value(path: Path, number: int, row: bytes, field: str, *, ids: bool = False) -> Any:
    """Return the text in a row's field, where null is an empty one, or its token ids.

    Raises:
        ConfigError: the row has none; names its place.
    """
    content = row_of(path, number, row)
    value = content.get(field)
    if field in content and value is None and not ids:
        return ""
    is_list = isinstance(value, list) and all(type(element) is int for element in value)
    if is_list if ids else isinstance(value, str):
        return value
    keys = ", ".join(map(str, content)) or "none"
    expected, key = (
        ("a list of token ids", "data.tokens_field") if ids else ("text", "data.text_field")
    )
    what = f"is not {expected}" if field in content else f"is missing (keys: {keys})"
    raise ConfigError.of(
        f"the field {field!r} {what}",
        where=f"{path}:{number}",
        hint=f"name the field of {'the ids' if ids else 'the text'} in {key}",
        key=key,
    )


def _unpack(path: Path, file: IO[bytes]) -> IO[bytes]:
    match path.suffix.lower():
        case ".gz":
            return cast("IO[bytes]", gzip.GzipFile(fileobj=file))
        case ".bz2":
            return bz2.BZ2File(file)
        case ".xz":
            return lzma.LZMAFile(file)
        case ".zst":
            try:
                import zstandard
            except ImportError:
                raise ConfigError.at(
                    "data.source",
                    f"unpacking {path} needs zstandard, which is not installed",
                    "install the extra: pip install 'instar[delta]'",
                ) from None
            reader: Any = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
            return io.BufferedReader(reader)
    return file


def _rows(path: Path, file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    first = True
    for number, line in enumerate(file, 1):
        if first:
            line = line.removeprefix(_BOM)
        if not line.strip():
            continue
        if first and suffix_of(path) == JSON:
            if line.lstrip().startswith(b"["):
                yield from _of_array(path, line + file.read())
                return
            if not _is_row(line):
                raise _no_rows(path, "it is no array of objects, and no JSON lines")
        first = False
        yield number, line


def _of_array(path: Path, content: bytes) -> Iterator[tuple[int, bytes]]:
    try:
        elements = msgspec.json.decode(of_bounded_depth(content), type=list[msgspec.Raw])
    except (msgspec.DecodeError, ValueError) as error:
        raise _no_rows(path, str(error)) from None
    for number, row in enumerate(elements, 1):
        yield number, bytes(row)


def _is_row(line: bytes) -> bool:
    try:
        return isinstance(msgspec.json.decode(of_bounded_depth(line)), dict)
    except (msgspec.DecodeError, ValueError):
        return False


def _no_rows(path: Path, reason: str) -> ConfigError:
    hint = "JSON that is to be read as text needs another ending, e.g. .txt"
    return ConfigError.at("data.source", f"{path} has no rows: {reason}", hint)
