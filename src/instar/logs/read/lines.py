"""The lines of a record: read in blocks, and what is said of a line, or of a whole file, that is no event."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from instar.config.files import open_regular
from instar.record.events import NOT_AN_EVENT, VERSION

BLOCK_BYTES = 1 << 18
"""small enough that the events of a block stay in the processor's cache"""
LONGEST_LINE_BYTES = 1 << 24
_HEAD_BYTES = 4096
_FIRST = b'{"v":%d,"kind":"' % VERSION


def line_blocks(
    file: BinaryIO, place: int, until: int | None = None
) -> Iterator[tuple[bytes, int]]:
    """Yield blocks of whole lines and the byte offset after each; truncates extremely long lines.

    `place`: the current offset of the file; nothing after `until` is read.
    """
    partial = b""
    while chunk := file.read(BLOCK_BYTES if until is None else min(BLOCK_BYTES, until - place)):
        place += len(chunk)
        cut = chunk.rfind(b"\n") + 1
        if cut:
            yield partial + chunk[:cut], place - len(chunk) + cut
            partial = chunk[cut:]
        else:
            partial += chunk
            if len(partial) > LONGEST_LINE_BYTES:
                partial = partial[:BLOCK_BYTES]


def describe_line(line: bytes, error: BaseException) -> str:
    """Describe a line that is not an event."""
    if nuls := line.count(b"\0"):
        return f"{nuls} NUL byte{'s' if nuls > 1 else ''} from a lost write"
    try:
        line.decode()
    except UnicodeDecodeError:
        return "not valid UTF-8"
    try:
        value = msgspec.json.decode(line)
    except NOT_AN_EVENT:
        return f"not a whole line of JSON: {error}"
    if not isinstance(value, dict):
        return "JSON, but not an event of a run"
    version = value.get("v")
    if isinstance(version, int) and version > VERSION:
        return f"written by a newer Instar: version {version}, this one reads {VERSION}"
    if version != VERSION or not isinstance(value.get("kind"), str):
        return "JSON, but not an event of a run"
    return f"not an event of a run: {error}"


def no_record(path: Path) -> str:
    """Describe a file without any event: why it is not a record.

    Empty for a record that has no complete line yet.
    """
    with open_regular(path) as file:
        head = file.read(_HEAD_BYTES)
    if not head or (b"\n" not in head and head.startswith(_FIRST[: len(head)])):
        return ""
    return f"{path} is not the record of a run: it looks like {_likeness(head)}"


def _likeness(head: bytes) -> str:
    if not head.strip():
        return "blank lines"
    if not head.strip(b"\0"):
        return "NUL bytes from a lost write"
    if head.startswith(b"\x1f\x8b"):
        return "a compressed file"
    if b"\0" in head or _undecodable(head):
        return "a binary file"
    try:
        value = msgspec.json.decode(head.lstrip().partition(b"\n")[0])
    except NOT_AN_EVENT:
        return "text"
    if not isinstance(value, dict):
        return "JSON lines of something else"
    version = value.get("v")
    if isinstance(version, int) and version > VERSION and "kind" in value:
        return f"the record of a newer Instar: version {version}, this one reads {VERSION}"
    keys = ", ".join(key[:40] for key in list(value)[:4])
    return f"JSON lines of something else, with keys {keys or 'none'}"


def _undecodable(head: bytes) -> bool:
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return error.end < len(head)  # a character may be cut at the very end
    return False
