"""The lines of a record as they stand, and what looks like a line or a record and is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from instar.record.events import NOT_AN_EVENT, VERSION

BLOCK_BYTES = 1 << 18
"""Few enough that the events of a block stay in the processor's cache."""
LONGEST_LINE_BYTES = 1 << 24
_HEAD_BYTES = 4096
_FIRST = b'{"v":%d,"kind":"' % VERSION


def blocks(file: BinaryIO, place: int, until: int | None = None) -> Iterator[tuple[bytes, int]]:
    """Blocks of whole lines, and the byte behind each; of a line without measure only a part.

    `place`: the byte at which the file stands; nothing behind `until` is read.
    """
    rest = b""
    while chunk := file.read(BLOCK_BYTES if until is None else min(BLOCK_BYTES, until - place)):
        place += len(chunk)
        cut = chunk.rfind(b"\n") + 1
        if cut:
            yield rest + chunk[:cut], place - len(chunk) + cut
            rest = chunk[cut:]
        else:
            rest += chunk
            if len(rest) > LONGEST_LINE_BYTES:
                rest = rest[:BLOCK_BYTES]


def what_it_is(line: bytes, error: BaseException) -> str:
    """Of a line that is no event, what it looks like."""
    if nuls := line.count(b"\0"):
        return f"{nuls} NUL byte{'s' if nuls > 1 else ''}: a write that was lost"
    try:
        line.decode()
    except UnicodeDecodeError:
        return "not text in UTF-8"
    try:
        value = msgspec.json.decode(line)
    except NOT_AN_EVENT:
        return f"not a whole line of JSON: {error}"
    if not isinstance(value, dict):
        return "JSON, but no event of a run"
    version = value.get("v")
    if isinstance(version, int) and version > VERSION:
        return f"written by a newer Instar: version {version}, this one reads {VERSION}"
    if version != VERSION or not isinstance(value.get("kind"), str):
        return "JSON, but no event of a run"
    return f"not an event of a run: {error}"


def no_record(path: Path) -> str:
    """Of a file in which nothing is an event, why it is no record: what it looks like.

    Empty if it is one in which nothing stands yet, but perhaps a part of its first line.
    """
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if not head or (b"\n" not in head and head.startswith(_FIRST[: len(head)])):
        return ""
    return f"{path} is not the record of a run: it looks like {_likeness(head)}"


def _likeness(head: bytes) -> str:
    if not head.strip():
        return "blank lines"
    if not head.strip(b"\0"):
        return "NUL bytes, as a lost write leaves them behind"
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
        return f"that of a newer Instar: version {version}, this one reads {VERSION}"
    keys = ", ".join(key[:40] for key in list(value)[:4])
    return f"JSON lines of something else, with {keys or 'nothing'} in them"


def _undecodable(head: bytes) -> bool:
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return error.end < len(head)  # a letter may be cut at the very end
    return False
