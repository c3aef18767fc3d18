"""The columns of a large record on the disk, so that it is not parsed again; disposable.

```
<run>/cache/columns.json        a checksum, then what follows: which record it was, up to which
                                byte it was read, and every column's file with its checksums
<run>/cache/columns-<token>/    one file for each column, numbers one after another
```

A column's file is only ever added to, behind what the last `columns.json` counts, by one process
at a time; then `columns.json` is replaced. So whoever reads meanwhile sees what was there before.
Of a record that only grew, the rest is read and added; for one that was cut or replaced, and where
a checksum is wrong, everything is made anew. A folder that cannot be written has no cache.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

import instar
from instar.logs.reading.aside import Mark, mark_of, read_checked, write_checked
from instar.logs.reading.columns import Lazy, Table, absent
from instar.logs.reading.scan import FAULTS_TOLD, Content, scan
from instar.logs.reading.spread import pieces
from instar.logs.reading.steps import AXIS_TYPES

SMALL_BYTES = 1 << 20
"""Of a record up to here, parsing is as fast."""
GROWN_SHARE = 128
"""What was added to a record is written down once it is one part in so many."""
FORM = 1


class Damaged(Exception):  # noqa: N818
    """A file of the cache is not what it was."""


class _File(msgspec.Struct):
    """A file, and the checksum of each part that was added to it, with its bytes."""

    name: str
    parts: list[tuple[int, str]] = []


class _Table(msgspec.Struct):
    rows: int
    axes: dict[str, _File]
    metrics: dict[str, _File]
    first_steps: dict[int, int]


class _Index(msgspec.Struct):
    form: int
    instar: str
    folder: str
    mark: Mark
    lines: int
    passed_over: int
    faults: list[tuple[int, str]]
    events: _File
    tables: dict[str, _Table]


def content(record: Path, folder: Path, workers: int | None = None) -> Content:
    """All of a record, with the cache in `folder`, which is made or added to where that is worth it.

    Columns are read when they are asked for, and then raise `Damaged` if they are not what was
    written. `workers`: see `pieces`.

    Raises:
        RecordError: the record cannot be read.
    """
    held = added = last = load(record, folder)
    begin = held.end if held else 0
    adding = _size(record) - begin > max(SMALL_BYTES, begin // GROWN_SHARE)
    rest: list[Content] = []
    for more in pieces(record, held, workers):
        if last and last.inode != more.inode:
            return scan(record)
        adding = adding and more.end > begin and _add(record, folder, added, more)
        if adding:
            added, begin = more, more.end
        else:
            rest.append(more)
        last = more
    if added is not held:
        held = load(record, folder)
        if held is None or held.end != begin:  # another process has made it anew
            return scan(record)
    return (held or Content()).then(*rest)


def load(record: Path, folder: Path) -> Content | None:
    """What the cache holds of a record as it is now, or None."""
    try:
        index = _index(record, folder)
        if index is None:
            return None
        place = folder / index.folder
        events = bytes(_read(place, index.events, "u1")).split(b"\n")[:-1]
    except (OSError, ValueError, msgspec.MsgspecError, Damaged):
        return None
    tables = {name: _stored(place, table) for name, table in index.tables.items()}
    faults = tuple(index.faults)
    return Content(
        tables,
        tuple(events),
        index.mark.end,
        index.lines,
        faults,
        index.passed_over,
        index.mark.inode,
    )


def discard(folder: Path) -> None:
    """Take the cache away; what cannot be taken away is made useless by a missing index."""
    with suppress(OSError):
        (folder / "columns.json").unlink()
    for place in folder.glob("columns-*"):
        shutil.rmtree(place, ignore_errors=True)


def held_bytes(record: Path, folder: Path) -> int:
    """How many of a record's bytes need not be read again."""
    try:
        index = _index(record, folder)
    except (OSError, ValueError, msgspec.MsgspecError):
        return 0
    return index.mark.end if index else 0


def _size(record: Path) -> int:
    try:
        return record.stat().st_size
    except OSError:
        return 0


def _index(record: Path, folder: Path) -> _Index | None:
    index = msgspec.json.decode(read_checked(folder / "columns.json"), type=_Index)
    if (index.form, index.instar) != (FORM, instar.__version__):
        return None
    return index if index.mark.fits(record) else None


def _stored(place: Path, table: _Table) -> Table:
    def axis(name: str) -> Any:
        return _column(place, table.axes[name], AXIS_TYPES[name], table.rows)

    def metric(name: str) -> Any:
        return _column(place, table.metrics[name], "<f8", table.rows)

    axes, metrics = Lazy([*table.axes], axis), Lazy([*table.metrics], metric)
    return Table(table.rows, axes, metrics, table.first_steps)


def _column(place: Path, file: _File, dtype: str, rows: int) -> Any:
    values = _read(place, file, dtype)
    if len(values) != rows:
        raise Damaged(place / file.name)
    return values


def _read(place: Path, file: _File, dtype: str) -> Any:
    size = sum(length for length, _ in file.parts)
    try:
        with (place / file.name).open("rb") as opened:
            values = np.empty(size // np.dtype(dtype).itemsize, dtype)
            raw = values.view("u1").data
            got = opened.readinto(raw)
    except OSError as error:
        raise Damaged(place / file.name) from error
    if got != size:
        raise Damaged(place / file.name)
    start = 0
    for length, checksum in file.parts:
        if xxhash.xxh3_64_hexdigest(raw[start : start + length]) != checksum:
            raise Damaged(place / file.name)
        start += length
    return values


def _add(record: Path, folder: Path, held: Content | None, more: Content) -> bool:
    """Write down `more`, which follows `held`; False if this is not to be."""
    try:
        folder.mkdir(exist_ok=True)
        with _alone(folder):
            index = _index(record, folder) if held else None
            if held and (index is None or index.mark.end != held.end):
                return False
            mark = mark_of(record, more.end)
            if mark.inode != more.inode or mark.size < more.end:
                return False
            index = index or _new(folder, mark)
            _append(folder / index.folder, index, more)
            index.mark, index.lines = mark, more.lines
            index.passed_over += more.passed_over
            index.faults = [*index.faults, *more.faults][:FAULTS_TOLD]
            write_checked(folder / "columns.json", msgspec.json.encode(index))
            if not held:
                for other in folder.glob("columns-*"):
                    if other.name != index.folder:
                        shutil.rmtree(other, ignore_errors=True)
    except (OSError, msgspec.MsgspecError):
        return False
    return True


def _new(folder: Path, mark: Mark) -> _Index:
    place = f"columns-{secrets.token_hex(4)}"
    (folder / place).mkdir()
    version = instar.__version__
    return _Index(FORM, version, place, mark, 0, 0, [], _File("events.jsonl"), {})


def _append(place: Path, index: _Index, more: Content) -> None:
    _write(place, index.events, b"".join(line + b"\n" for line in more.events))
    for name, table in more.tables.items():
        stored = index.tables.setdefault(name, _Table(0, {}, {}, {}))
        number = list(index.tables).index(name)
        for axis, values in table.axes.items():
            file = stored.axes.setdefault(axis, _File(f"{number}-{axis}"))
            _write(place, file, values)
        for metric in {**stored.metrics, **dict.fromkeys(table.metrics)}:
            if metric not in stored.metrics:
                stored.metrics[metric] = _File(f"{number}-{len(stored.metrics)}")
                _write(place, stored.metrics[metric], absent(stored.rows))
            given = metric in table.metrics
            values = table.metrics[metric] if given else absent(table.rows)
            _write(place, stored.metrics[metric], values)
        stored.rows += table.rows
        stored.first_steps = {**table.first_steps, **stored.first_steps}


def _write(place: Path, file: _File, values: Any) -> None:
    data = np.frombuffer(values, "u1") if len(values) else np.empty(0, "u1")
    start = sum(length for length, _ in file.parts)
    descriptor = os.open(place / file.name, os.O_WRONLY | os.O_CREAT, 0o644)
    with open(descriptor, "wb") as opened:  # noqa: PTH123
        opened.seek(start)
        opened.write(data.data)
    if data.nbytes:
        file.parts.append((data.nbytes, xxhash.xxh3_64_hexdigest(data.data)))


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Be the one process that writes the cache.

    Raises:
        BlockingIOError: another one does.
    """
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
