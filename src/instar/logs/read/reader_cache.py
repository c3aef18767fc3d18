"""The reader's own cache of records: its folders, and in them the summaries of runs for lists, for which only
the new lines of a record are read.

A run's folder may belong to another user, so readers never write there. Caches are in
`$INSTAR_CACHE_DIR`, else `$XDG_CACHE_HOME/instar` or `~/.cache/instar`, readable by this user only, in
one folder per record. Their total size is bounded; the least recently used are deleted first.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

import instar
from instar.config.files import cache_home, open_regular, read_regular
from instar.logs.read.lines import line_blocks, no_record
from instar.logs.read.segments import EVERYTHING, SegmentTree
from instar.record.atomic import atomic_file
from instar.record.events import (
    VERSION,
    BeginsAnew,
    Branched,
    Eval,
    Event,
    Failed,
    OperationEvent,
    Placed,
    RunFinished,
    RunStarted,
    Stop,
    Train,
    decode_event,
    event_kind,
    events_in,
    to_words,
)
from instar.record.rundir import RunDir

SMALL_BYTES = 1 << 15
"""bytes up to which new lines are read again rather than cached"""
_FORM = 6
_FILE = "summary.json"
_MEASUREMENTS = tuple(b'{"v":%d,"kind":"%s"' % (VERSION, kind) for kind in (b"train", b"layers"))
MOST_BYTES = 1 << 32
"""limit of all caches together; a larger record is not cached"""
_KEY = re.compile(r"[0-9a-f]{32}")
_WINDOW_BYTES = 4096


@dataclass(frozen=True)
class CachedSummary:
    """A short summary of a run; unknown values are None or empty."""

    run: RunDir
    id: str
    name: str
    model: str
    unit: str
    """what `tokens` counts"""
    started: float | None
    """Unix seconds of its first start"""
    segments: int
    step: int | None
    tokens: int | None
    loss: float | None
    """of the last training step that was recorded"""
    val: float | None
    """the last validation loss"""
    best: float | None
    """the best value of `best_metric` that is not superseded and comparable with the last one"""
    best_step: int | None
    best_metric: str
    """the held-out metric that `checkpoints/best` follows"""
    best_is_max: bool
    """whether higher values of it are better"""
    kind: str
    """of the last event"""
    seen: float | None
    """Unix seconds of the last event"""
    last: Placed | None
    """the last event with a place"""
    operations: int
    """number of scheduled operations that are not superseded"""
    events: tuple[Event, ...]
    """the newest segment's start, and what ended it: `Stop`, `RunFinished`, `Failed`; first `Branched`"""
    imported_from: str | None
    """what another tool recorded of it; None: Instar trained it"""
    fault: str
    """why the record cannot be read"""


class _ScanState(msgspec.Struct):
    """The state of a scan of a record."""

    lineage: SegmentTree = msgspec.field(default_factory=SegmentTree)
    started: float | None = None
    segments: int = 0
    step: int | None = None
    tokens: int | None = None
    loss: float | str | None = None
    evals: list[tuple[int, int, float | None, float | None]] = []
    """segment, step, loss and value of the metric of each validation; None: not finite, or not known"""
    metric: str = "loss"
    """the held-out metric that `checkpoints/best` follows"""
    better: str = "min"
    anew: list[tuple[int, int, int]] = []
    """segment, step, and the number of evaluations before each change of what is evaluated"""
    operations: list[tuple[int, int]] = []
    """segment and step of each"""
    last: str = ""
    """the line of the last event with a place"""
    kind: str = ""
    time: float | None = None
    about: list[str] = []
    """the lines of the newest segment's start, and of its end"""
    branched: str = ""
    """the line that says of which run it is a branch"""


class _CacheFile(msgspec.Struct):
    form: int
    instar: str
    stamp: FileStamp
    seen: _ScanState


def cached_summary(run: RunDir) -> CachedSummary:
    """Return a run's summary for a list; never raises, whatever its folder contains.

    With a `cache_folder`, only the lines added since the last call are read.
    """
    fault = ""
    try:
        scan_state = _scan(run)
        fault = "" if scan_state.kind else no_record(run.events)
    except OSError as error:
        scan_state, fault = _ScanState(), f"cannot read {run.events}: {error.strerror}"
    lines = [scan_state.branched, *scan_state.about]
    events = tuple(decode_event(line.encode()) for line in lines if line)
    start = next((event for event in events if isinstance(event, RunStarted)), None)
    limits = scan_state.lineage.limits()
    new_starts = [n for segment, at, n in scan_state.anew if at <= limits.get(segment, EVERYTHING)]
    evals = [
        (number, loss, value, at)
        for number, (segment, at, loss, value) in enumerate(scan_state.evals)
        if at <= limits.get(segment, EVERYTHING)
    ]
    losses = [loss for _, loss, _, _ in evals if loss is not None]
    sign = -1.0 if scan_state.better == "max" else 1.0
    comparable = [
        (sign * value, at)
        for number, _, value, at in evals
        if value is not None and number >= (new_starts[-1] if new_starts else 0)
    ]
    best, best_step = min(comparable, default=(None, None))
    last = decode_event(scan_state.last.encode()) if scan_state.last else None
    return CachedSummary(
        run,
        id=run.id,
        name=run.name,
        model=start.model if start else "",
        unit=start.unit if start else "token",
        started=scan_state.started,
        segments=scan_state.segments,
        step=scan_state.step,
        tokens=scan_state.tokens,
        loss=None if scan_state.loss is None else float(scan_state.loss),
        val=losses[-1] if losses else None,
        best=None if best is None else sign * best,
        best_step=best_step,
        best_metric=scan_state.metric,
        best_is_max=scan_state.better == "max",
        kind=scan_state.kind,
        seen=scan_state.time,
        last=last if isinstance(last, Placed) else None,
        operations=sum(
            at <= limits.get(segment, EVERYTHING) for segment, at in scan_state.operations
        ),
        events=events,
        imported_from=start.imported_from if start else None,
        fault=fault,
    )


def _scan(run: RunDir) -> _ScanState:
    folder = cache_folder(run) if run.events.stat().st_size >= SMALL_BYTES else None
    scan_state, begin = _ScanState(), 0
    if folder is not None:
        with suppress(OSError, ValueError, msgspec.MsgspecError):
            cache_file = msgspec.json.decode(read_checked(folder / _FILE), type=_CacheFile)
            same = (cache_file.form, cache_file.instar) == (_FORM, instar.__version__)
            if same and cache_file.stamp.fits(run.events):
                scan_state, begin = cache_file.seen, cache_file.stamp.end
                mark_used(folder)
    end = begin
    with open_regular(run.events) as file:
        file.seek(begin)
        for block, end in line_blocks(file, begin):  # noqa: B007
            _take(scan_state, block)
    if folder is not None and end - begin >= SMALL_BYTES:
        _keep(
            folder, _CacheFile(_FORM, instar.__version__, stamp_record(run.events, end), scan_state)
        )
    return scan_state


def _keep(folder: Path, cache_file: _CacheFile) -> None:
    with suppress(OSError):
        folder.mkdir(0o700, exist_ok=True)
        write_checked(folder / _FILE, msgspec.json.encode(cache_file))


def _take(scan_state: _ScanState, block: bytes) -> None:
    lines = block.split(b"\n")
    for line, event in events_in([line for line in lines if not line.startswith(_MEASUREMENTS)]):
        scan_state.lineage.take(event)
        if isinstance(event, Branched) and not scan_state.branched:
            scan_state.branched = line.decode(errors="replace")
        if isinstance(event, RunStarted):
            scan_state.started = event.time if scan_state.started is None else scan_state.started
            scan_state.segments += 1
            scan_state.step, scan_state.tokens, scan_state.loss, scan_state.last = (
                event.step,
                None,
                None,
                "",
            )
            scan_state.about = [line.decode(errors="replace")]
            if (
                event.best_metric != scan_state.metric
            ):  # its value is not known of earlier evaluations
                scan_state.evals = [
                    (segment, at, loss, None) for segment, at, loss, _ in scan_state.evals
                ]
            scan_state.metric = event.best_metric
            scan_state.better = event.better.get(event.best_metric, "min")
        elif isinstance(event, Stop | RunFinished | Failed):
            scan_state.about.append(line.decode(errors="replace"))
        elif isinstance(event, BeginsAnew):
            scan_state.anew.append((event.segment, event.step, len(scan_state.evals)))
        elif isinstance(event, Eval) and event.split == "val":
            value = (
                event.loss if scan_state.metric == "loss" else event.extra.get(scan_state.metric)
            )
            scan_state.evals.append(
                (event.segment, event.step, _finite(event.loss), _finite(value))
            )
        elif isinstance(event, Eval) and scan_state.metric.startswith(f"{event.split}/"):
            _take_set(scan_state, event)
        elif isinstance(event, OperationEvent):
            scan_state.operations.append((event.segment, event.step))
    _take_last(scan_state, lines)


def _take_set(scan_state: _ScanState, event: Eval) -> None:
    """Take the metric of a held-out set as that of the validation before it, which is of the same step."""
    name = scan_state.metric.removeprefix(f"{event.split}/")
    value = event.loss if name == "loss" else event.extra.get(name)
    if scan_state.evals and scan_state.evals[-1][:2] == (event.segment, event.step):
        scan_state.evals[-1] = (*scan_state.evals[-1][:3], _finite(value))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _take_last(scan_state: _ScanState, lines: list[bytes]) -> None:
    """Take the last event, and the last events with a place and with a loss."""
    has_last = has_place = False
    for line, event in events_in(reversed(lines)):
        if not has_last:
            scan_state.kind, scan_state.time, has_last = event_kind(event), event.time, True
        if isinstance(event, Placed) and not has_place:
            scan_state.step, scan_state.tokens, has_place = event.step, event.tokens, True
            scan_state.last = line.decode(errors="replace")
        if isinstance(event, Train):
            scan_state.loss = to_words(event.loss)
        if isinstance(event, Train | RunStarted):
            return


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
