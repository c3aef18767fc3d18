"""The reader's own cache folder, where results of reading a record are kept.

A run's folder may belong to another user, so readers never write there. Caches are in
`$INSTAR_CACHE_DIR`, else `$XDG_CACHE_HOME/instar` or `~/.cache/instar`, readable by this user only, in
one folder per record. Their total size is bounded; the least recently used are deleted first.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

import msgspec
import xxhash

from instar.config.files import cache_home, open_regular, read_regular
from instar.record.atomic import atomic_file
from instar.record.rundir import RunDir

MOST_BYTES = 1 << 32
"""limit of all caches together; a larger record is not cached"""
_KEY = re.compile(r"[0-9a-f]{32}")
_WINDOW_BYTES = 4096


def cache_folder(run: RunDir) -> Path | None:
    """Return the folder that caches a run's record, which may not exist yet; None: no caching."""
    home = cache_home("records")
    if home is None:
        return None
    try:
        status = run.path.stat()
        place = os.fsencode(run.path.resolve())
    except (OSError, RuntimeError):
        return None
    text = b"%d %d %b" % (status.st_dev, status.st_ino, place)
    return home / xxhash.xxh3_128_hexdigest(text)


def create_cache_folder(folder: Path, mode: int = 0o700) -> None:
    """Create a `cache_folder`.

    Raises:
        OSError: it cannot be created.
    """
    folder.mkdir(mode, exist_ok=True)


def mark_used(folder: Path) -> None:
    """Mark a `cache_folder` as recently used."""
    with suppress(OSError):
        os.utime(folder)


def evict_caches(current_folder: Path) -> None:
    """Delete the least recently used caches until `MOST_BYTES` suffice; never `current_folder`."""
    with suppress(OSError):
        folders = [
            path
            for path in current_folder.parent.iterdir()
            if _KEY.fullmatch(path.name) and path != current_folder
        ]
        times = {path: path.lstat().st_mtime for path in folders}
        total = _bytes_in(current_folder)
        for path in sorted(folders, key=lambda path: -times[path]):
            total += _bytes_in(path)
            if total > MOST_BYTES:
                shutil.rmtree(path, ignore_errors=True)


def _bytes_in(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*"))


class FileStamp(msgspec.Struct, frozen=True):
    """Identifies a record that has only grown since it was read."""

    inode: int
    size: int
    modified_ns: int
    end: int
    """the byte up to which it was read"""
    window: str
    """checksum of its first bytes, and of the last ones before `end`"""

    def fits(self, record: Path, written_ns: int | None = None) -> bool:
        """Return whether the record still begins with the bytes that were read.

        `written_ns`: when the stamp was written. If given, the record may be a copy with another
        inode and time, but a record of the same size must not have been modified since.
        """
        status = record.stat()
        if written_ns is not None:
            has_changed = status.st_size == self.end and status.st_mtime_ns > written_ns
            if has_changed or not 0 < self.end <= status.st_size:
                return False
            return _window(record, self.end) == self.window
        if status.st_ino != self.inode or status.st_size < self.size:
            return False
        if status.st_size == self.size:
            return status.st_mtime_ns == self.modified_ns
        return _window(record, self.end) == self.window


def stamp_record(record: Path, end: int) -> FileStamp:
    """Return the stamp of a record that was read up to `end`."""
    status = record.stat()
    window = _window(record, end)
    return FileStamp(status.st_ino, status.st_size, status.st_mtime_ns, end, window)


def write_checked(path: Path, text: bytes) -> None:
    """Replace a cache file atomically; its first line is the checksum of the rest."""
    with atomic_file(path, durable=False) as temporary:
        temporary.write_bytes(xxhash.xxh3_128_hexdigest(text).encode() + b"\n" + text)


def read_checked(path: Path) -> bytes:
    """Read what `write_checked` wrote.

    Raises:
        OSError: it cannot be read.
        ValueError: the checksum does not match.
    """
    checksum, _, text = read_regular(path).partition(b"\n")
    if checksum != xxhash.xxh3_128_hexdigest(text).encode():
        raise ValueError(f"{path} is damaged")
    return text


def _window(record: Path, end: int) -> str:
    with open_regular(record) as file:
        first = file.read(min(_WINDOW_BYTES, end))
        file.seek(max(0, end - _WINDOW_BYTES))
        return xxhash.xxh3_128_hexdigest(first + file.read(min(_WINDOW_BYTES, end)))
