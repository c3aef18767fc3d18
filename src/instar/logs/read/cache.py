"""Caches the columns of a large record on disk, so that it is parsed only once; safe to delete.

Columns are in two places: in the run's own `columns/`, written by the run while it trains (`extend`),
and in the reader's `cache_folder`, written by readers if the run's columns are missing or outdated.
Readers never write into the run, and trust neither.

```
columns.json        a checksum, then which record was read, up to which byte, and every column's
                    file with its checksums
columns-<token>/    one file per column: its numbers
```

One process at a time appends to a column's file, after the bytes that the last `columns.json` counts,
and then replaces `columns.json`; a concurrent reader sees the previous state. If the record has only
grown, the new part is appended; if it was cut or replaced, or a checksum does not match, the columns
are written from scratch. Without a folder, nothing is cached.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

import instar
from instar.config.errors import InstarError
from instar.config.files import open_regular, own_regular
from instar.logs.read.columns import AXIS_TYPES, CELLS, LazyColumns, MetricTable, absent
from instar.logs.read.reader_cache import (
    MOST_BYTES,
    FileStamp,
    cache_folder,
    evict_caches,
    mark_used,
    read_checked,
    stamp_record,
    write_checked,
)
from instar.logs.read.scan import AT_ONCE_BYTES, MAX_FAULTS, Content, pieces, scan
from instar.processes.cores import usable_cores
from instar.processes.pool import WorkerLost, Workers
from instar.record.progress import track_items
from instar.record.rundir import RunDir

SMALL_BYTES = 1 << 20
"""size up to which parsing a record is as fast as reading its columns"""
GROWN_SHARE = 128
"""new lines are added to the columns once they are this fraction (1 / n) of the record"""
PARALLEL_BYTES = 1 << 26
"""uncached bytes from which several processes are faster"""
EVERY_S = 30.0
"""interval at which a run updates its columns"""
FORM = 1
"""version of the columns that events become; a run's columns outlive versions of Instar"""
COLUMNS = "columns"
"""the columns' folder inside a run's"""
_FOLDER = re.compile(r"columns-[0-9a-f]{8}")
_NAME = re.compile(r"events\.jsonl|\d+-[a-z0-9_]+")


class Damaged(Exception):  # noqa: N818
    """A column's file does not match its checksum."""


class _File(msgspec.Struct):
    """A file, and the size in bytes and checksum of each part that was appended to it."""

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
    stamp: FileStamp
    lines: int
    passed_over: int
    faults: list[tuple[int, str]]
    events: _File
    tables: dict[str, _Table]


def read_content(run: RunDir, workers: int | None = None) -> Content:
    """Read a record from columns in the run's folder or the reader's cache, and scan the rest.

    A long rest is added to the cache. Columns are loaded lazily and raise `Damaged` on access if a
    checksum does not match. `workers`: see `pieces`.

    Raises:
        RecordError: the record cannot be read.
    """
    if run_columns := _run_columns(run, _size(run.events)):
        return run_columns.extended_by(*pieces(run.events, run_columns, workers))
    return read_cached_content(run, workers)


def _run_columns(run: RunDir, size: int) -> Content | None:
    """Return the columns in a run's folder, if the rest of its record is short enough to be scanned each time."""
    columns = load_columns(run.events, run.path / COLUMNS, portable=True)
    return columns if columns and size - columns.end <= _min_new_bytes(columns.end) else None


def read_cached_content(
    run: RunDir, workers: int | None = None, until: int | None = None
) -> Content:
    """Read a record, up to the byte `until` if given, from the reader's own cache; the rest is
    scanned. Columns in the run's folder are ignored.

    Raises:
        RecordError: the record cannot be read.
    """
    record, folder = run.events, cache_folder(run)
    cache_content = last_added = last = load_columns(record, folder) if folder else None
    begin = cache_content.end if cache_content else 0
    size = _size(record) if until is None else until
    if begin > size:  # another reader has cached more
        return scan(record, until=until)
    adding = _min_new_bytes(begin) < size - begin and size <= MOST_BYTES
    new_contents: list[Content] = []
    for more in pieces(record, cache_content, workers, until):
        if last and last.inode != more.inode:
            return scan(record, until=until)
        if folder is None or not (adding and more.end > begin):
            adding = False
        else:
            adding = _add(record, folder, last_added, more)
        if adding:
            last_added, begin = more, more.end
        else:
            new_contents.append(more)
        last = more
    if folder and last_added is not cache_content:
        evict_caches(folder)
        cache_content = load_columns(record, folder)
        if cache_content is None or cache_content.end != begin:  # another process has replaced it
            return scan(record, until=until)
    return (cache_content or Content()).extended_by(*new_contents)


@contextmanager
def columns_written(run: RunDir, every_s: float = EVERY_S) -> Iterator[None]:
    """Write the columns of a run's record into its folder, in a thread, while the record grows.

    Only the process that writes the record may use this. The rest is written when the context is
    left, after the record has been closed.
    """
    folder = run.path / COLUMNS
    if load_columns(run.events, folder, portable=True) is None and not folder.is_symlink():
        discard_columns(folder)  # once the record has grown, they might seem to be its own
    leaving = threading.Event()

    def work() -> None:
        while not leaving.wait(every_s):
            extend_columns(run, leaving)

    thread = threading.Thread(target=work, name="columns", daemon=True)
    thread.start()
    try:
        yield
    finally:
        leaving.set()
        thread.join()
        extend_columns(run, finished=True)


def extend_columns(
    run: RunDir, leaving: threading.Event | None = None, *, finished: bool = False
) -> None:
    """Append new lines of the record to the columns in the run's folder, if they are enough.

    Failures are ignored: the columns end earlier, and readers scan the rest.

    Args:
        leaving: set to stop early.
        finished: append even a few last lines, unless that would take seconds.
    """
    folder = run.path / COLUMNS
    columns = load_columns(run.events, folder, portable=True)
    begin = columns.end if columns else 0
    size = _size(run.events)
    if size < SMALL_BYTES or size - begin <= (0 if finished else _min_new_bytes(begin)):
        return
    if finished and size - begin > AT_ONCE_BYTES:
        return
    with suppress(InstarError, OSError):
        for more in pieces(run.events, columns, workers=1):
            if more.end == (columns.end if columns else 0) or more.passed_over:
                return
            if not _add(run.events, folder, columns, more, portable=True):
                return
            if leaving is not None and leaving.is_set():
                return
            columns = more


def _min_new_bytes(end: int) -> int:
    """Return the number of new bytes from which columns are extended."""
    return max(SMALL_BYTES, end // GROWN_SHARE)


def load_columns(record: Path, folder: Path, *, portable: bool = False) -> Content | None:
    """Load the columns on disk if they match the record as it is now, else return None.

    `portable`: for the run's folder, which may be a copy and is not trusted.
    """
    try:
        index = _index(record, folder, portable)
        if index is None:
            return None
        if not portable:
            mark_used(folder)
        place = folder / index.folder
        if portable and not _is_plausible(place, index):
            return None
        events = bytes(_read(place, index.events, "u1")).split(b"\n")[:-1]
        inode = record.stat().st_ino if portable else index.stamp.inode
    except (OSError, ValueError, msgspec.MsgspecError, Damaged):
        return None
    tables = {name: _read_table(place, table) for name, table in index.tables.items()}
    faults = tuple(index.faults)
    return Content(
        tables, tuple(events), index.stamp.end, index.lines, faults, index.passed_over, inode
    )


def _is_plausible(place: Path, index: _Index) -> bool:
    """Check, before allocating memory, that a record of its size can have such columns."""
    end, tables = index.stamp.end, index.tables.values()
    if index.passed_over or index.faults or not stat.S_ISDIR(place.lstat().st_mode):
        return False
    if _bytes_of(index.events) > end or any(not 0 < table.rows <= end for table in tables):
        return False
    if sum(len(table.metrics) * table.rows for table in tables) > CELLS + end:
        return False
    if any(table.axes.keys() != AXIS_TYPES.keys() for table in tables):
        return False
    files = [(file, "<f8", table) for table in tables for file in table.metrics.values()]
    files += [
        (table.axes[name], kind, table) for table in tables for name, kind in AXIS_TYPES.items()
    ]
    return all(
        _bytes_of(file) == np.dtype(kind).itemsize * table.rows for file, kind, table in files
    )


def _bytes_of(file: _File) -> int:
    return sum(length for length, _ in file.parts)


def discard_columns(folder: Path) -> None:
    """Delete columns, index first: files that cannot be deleted are ignored without it."""
    with suppress(OSError):
        (folder / "columns.json").unlink()
    for place in folder.glob("columns-*"):
        shutil.rmtree(place, ignore_errors=True)


def cached_bytes(record: Path, folder: Path) -> int:
    """Return how many bytes of a record are cached."""
    try:
        index = _index(record, folder, portable=False)
    except (OSError, ValueError, msgspec.MsgspecError):
        return 0
    return index.stamp.end if index else 0


def _size(record: Path) -> int:
    try:
        return record.stat().st_size
    except OSError:
        return 0


def _index(record: Path, folder: Path, portable: bool) -> _Index | None:
    if portable and not stat.S_ISDIR(folder.lstat().st_mode):
        return None
    path = folder / "columns.json"
    index = msgspec.json.decode(read_checked(path), type=_Index)
    if index.form != FORM or not (portable or index.instar == instar.__version__):
        return None
    if not (_FOLDER.fullmatch(index.folder) and all(_NAME.fullmatch(n) for n in _names(index))):
        return None
    written_ns = path.lstat().st_mtime_ns if portable else None
    return index if index.stamp.fits(record, written_ns) else None


def _names(index: _Index) -> Iterator[str]:
    yield index.events.name
    for table in index.tables.values():
        yield from (file.name for part in (table.axes, table.metrics) for file in part.values())


def _read_table(place: Path, table: _Table) -> MetricTable:
    def column(file: _File, dtype: str) -> Any:
        values = _read(place, file, dtype)
        if len(values) != table.rows:
            raise Damaged(place / file.name)
        return values

    axes = LazyColumns([*table.axes], lambda name: column(table.axes[name], AXIS_TYPES[name]))
    metrics = LazyColumns([*table.metrics], lambda name: column(table.metrics[name], "<f8"))
    return MetricTable(table.rows, axes, metrics, table.first_steps)


def _read(place: Path, file: _File, dtype: str) -> Any:
    size = _bytes_of(file)
    try:
        with open_regular(place / file.name) as stream:
            if (
                min((length for length, _ in file.parts), default=0) < 0
                or size > os.fstat(stream.fileno()).st_size
            ):
                raise Damaged(place / file.name)
            values = np.empty(size // np.dtype(dtype).itemsize, dtype)
            raw = values.view("u1").data
            bytes_read = stream.readinto(raw)
    except OSError as error:
        raise Damaged(place / file.name) from error
    if bytes_read != size:
        raise Damaged(place / file.name)
    start = 0
    for length, checksum in file.parts:
        if xxhash.xxh3_64_hexdigest(raw[start : start + length]) != checksum:
            raise Damaged(place / file.name)
        start += length
    return values


def _add(
    record: Path, folder: Path, columns: Content | None, more: Content, *, portable: bool = False
) -> bool:
    """Append `more`, which follows `columns`, to the columns; return whether it was written."""
    mode = 0o666 if portable else 0o600
    try:
        folder.mkdir(0o777 if portable else 0o700, exist_ok=True)
        if folder.is_symlink():
            return False
        with os.fdopen(own_regular(folder / "lock", mode=mode), "r+b") as lock:
            # one process at a time writes; another one gives up
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            index = _index(record, folder, portable) if columns else None
            if columns and (index is None or index.stamp.end != columns.end):
                return False
            stamp = stamp_record(record, more.end)
            if stamp.inode != more.inode or stamp.size < more.end:
                return False
            if _cells(index, more) > CELLS + more.end:
                return False
            index = index or _new_index(folder, stamp)
            _append(folder / index.folder, index, more, mode)
            index.stamp, index.lines = stamp, more.lines
            index.passed_over += more.passed_over
            index.faults = [*index.faults, *more.faults][:MAX_FAULTS]
            write_checked(folder / "columns.json", msgspec.json.encode(index))
            if not columns:
                for other in folder.glob("columns-*"):
                    if other.name != index.folder:
                        shutil.rmtree(other, ignore_errors=True)
    except (OSError, msgspec.MsgspecError):
        return False
    return True


def _cells(index: _Index | None, more: Content) -> int:
    """Return the count of numbers after adding `more`."""
    cached_tables = index.tables if index else {}
    total = 0
    for name in {*cached_tables, *more.tables}:
        parts = [
            part for part in (cached_tables.get(name), more.tables.get(name)) if part is not None
        ]
        metrics = {metric for part in parts for metric in part.metrics}
        total += len(metrics) * sum(part.rows for part in parts)
    return total


def _new_index(folder: Path, stamp: FileStamp) -> _Index:
    place = f"columns-{secrets.token_hex(4)}"
    (folder / place).mkdir()
    version = instar.__version__
    return _Index(FORM, version, place, stamp, 0, 0, [], _File("events.jsonl"), {})


def _append(place: Path, index: _Index, more: Content, mode: int) -> None:
    _write(place, index.events, b"".join(line + b"\n" for line in more.events), mode)
    for name, table in more.tables.items():
        cached_table = index.tables.setdefault(name, _Table(0, {}, {}, {}))
        number = list(index.tables).index(name)
        for axis, values in table.axes.items():
            file = cached_table.axes.setdefault(axis, _File(f"{number}-{axis}"))
            _write(place, file, values, mode)
        for metric in {**cached_table.metrics, **dict.fromkeys(table.metrics)}:
            if metric not in cached_table.metrics:
                cached_table.metrics[metric] = _File(f"{number}-{len(cached_table.metrics)}")
                _write(place, cached_table.metrics[metric], absent(cached_table.rows), mode)
            has_metric = metric in table.metrics
            values = table.metrics[metric] if has_metric else absent(table.rows)
            _write(place, cached_table.metrics[metric], values, mode)
        cached_table.rows += table.rows
        cached_table.first_steps = {**table.first_steps, **cached_table.first_steps}


def _write(place: Path, file: _File, values: Any, mode: int) -> None:
    data = np.frombuffer(values, "u1") if len(values) else np.empty(0, "u1")
    start = _bytes_of(file)
    with os.fdopen(own_regular(place / file.name, mode=mode), "r+b") as stream:
        stream.seek(start)
        stream.write(data.data)
    if data.nbytes:
        file.parts.append((data.nbytes, xxhash.xxh3_64_hexdigest(data.data)))


def fill_caches(runs: Sequence[RunDir]) -> None:
    """Bring the caches of many runs up to date, with one process per core.

    Faults of a record are reported when it is read.
    """
    unread = {run: size for run in runs if (size := _unread_bytes(run)) >= SMALL_BYTES}
    count = min(len(unread), usable_cores())
    if count < 2 or sum(unread.values()) < PARALLEL_BYTES:
        return
    with suppress(WorkerLost), Workers(_Filler, count) as workers:
        largest = sorted(unread, key=lambda run: -unread[run])
        pending = [workers.call(n % count, "fill", run) for n, run in enumerate(largest)]
        for answer in track_items(pending, "reading records", "runs", len(pending)):
            answer.result()


class _Filler:
    """Fills caches in a worker process."""

    def fill(self, run: RunDir) -> None:
        with suppress(InstarError):
            read_content(run, workers=1)


def _unread_bytes(run: RunDir) -> int:
    size, folder = _size(run.events), cache_folder(run)
    if size < SMALL_BYTES or size > MOST_BYTES or folder is None or _run_columns(run, size):
        return 0
    return max(0, size - cached_bytes(run.events, folder))
