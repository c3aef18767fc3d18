"""Small files that are kept beside a record, and belong to it as it was up to some byte."""

from __future__ import annotations

import secrets
from pathlib import Path

import msgspec
import xxhash

_WINDOW_BYTES = 4096


class Mark(msgspec.Struct, frozen=True):
    """By which a record is known again that has at most grown since."""

    inode: int
    size: int
    modified_ns: int
    end: int
    """the byte up to which it was read"""
    window: str
    """checksum of its first bytes, and of the last ones before `end`"""

    def fits(self, record: Path) -> bool:
        """Whether the record still begins with what was read of it."""
        status = record.stat()
        if status.st_ino != self.inode or status.st_size < self.size:
            return False
        if status.st_size == self.size:
            return status.st_mtime_ns == self.modified_ns
        return _window(record, self.end) == self.window


def mark_of(record: Path, end: int) -> Mark:
    """Of a record that was read up to `end`."""
    status = record.stat()
    window = _window(record, end)
    return Mark(status.st_ino, status.st_size, status.st_mtime_ns, end, window)


def write_checked(path: Path, text: bytes) -> None:
    """Replace a file in one go; its first line is the checksum of the rest."""
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        aside.write_bytes(xxhash.xxh3_128_hexdigest(text).encode() + b"\n" + text)
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def read_checked(path: Path) -> bytes:
    """What `write_checked` wrote.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not what was written.
    """
    checksum, _, text = path.read_bytes().partition(b"\n")
    if checksum != xxhash.xxh3_128_hexdigest(text).encode():
        raise ValueError(f"{path} is damaged")
    return text


def _window(record: Path, end: int) -> str:
    with record.open("rb") as file:
        first = file.read(min(_WINDOW_BYTES, end))
        file.seek(max(0, end - _WINDOW_BYTES))
        return xxhash.xxh3_128_hexdigest(first + file.read(min(_WINDOW_BYTES, end)))
