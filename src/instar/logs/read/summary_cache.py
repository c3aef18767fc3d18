"""Summaries of runs for lists, cached so that only the new lines of a record are read."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

import instar
from instar.config.files import open_regular
from instar.logs.read.filters import event_kind
from instar.logs.read.lineage import EVERYTHING, SegmentTree
from instar.logs.read.scan import line_blocks, no_record
from instar.logs.read.sidecar import (
    FileStamp,
    cache_folder,
    create_cache_folder,
    mark_used,
    read_checked,
    stamp_record,
    write_checked,
)
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
    events_in,
    to_words,
)
from instar.record.rundir import RunDir

SMALL_BYTES = 1 << 15
"""bytes up to which new lines are read again rather than cached"""
_FORM = 4
_FILE = "summary.json"
_MEASUREMENTS = tuple(b'{"v":%d,"kind":"%s"' % (VERSION, kind) for kind in (b"train", b"layers"))


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
    """Returns a run's summary for a list; never raises, whatever its folder contains.

    With a `cache_folder`, only the lines added since the last call are read.
    """
    fault = ""
    try:
        seen = _scan(run)
        fault = "" if seen.kind else no_record(run.events)
    except OSError as error:
        seen, fault = _ScanState(), f"cannot read {run.events}: {error.strerror}"
    lines = [seen.branched, *seen.about]
    events = tuple(decode_event(line.encode()) for line in lines if line)
    start = next((event for event in events if isinstance(event, RunStarted)), None)
    limits = seen.lineage.limits()
    anew = [n for segment, at, n in seen.anew if at <= limits.get(segment, EVERYTHING)]
    evals = [
        (number, loss, value, at)
        for number, (segment, at, loss, value) in enumerate(seen.evals)
        if at <= limits.get(segment, EVERYTHING)
    ]
    losses = [loss for _, loss, _, _ in evals if loss is not None]
    sign = -1.0 if seen.better == "max" else 1.0
    comparable = [
        (sign * value, at)
        for number, _, value, at in evals
        if value is not None and number >= (anew[-1] if anew else 0)
    ]
    best, best_step = min(comparable, default=(None, None))
    last = decode_event(seen.last.encode()) if seen.last else None
    return CachedSummary(
        run,
        id=run.id,
        name=run.name,
        model=start.model if start else "",
        unit=start.unit if start else "token",
        started=seen.started,
        segments=seen.segments,
        step=seen.step,
        tokens=seen.tokens,
        loss=None if seen.loss is None else float(seen.loss),
        val=losses[-1] if losses else None,
        best=None if best is None else sign * best,
        best_step=best_step,
        best_metric=seen.metric,
        best_is_max=seen.better == "max",
        kind=seen.kind,
        seen=seen.time,
        last=last if isinstance(last, Placed) else None,
        operations=sum(at <= limits.get(segment, EVERYTHING) for segment, at in seen.operations),
        events=events,
        fault=fault,
    )


def _scan(run: RunDir) -> _ScanState:
    folder = cache_folder(run) if run.events.stat().st_size >= SMALL_BYTES else None
    seen, begin = _ScanState(), 0
    if folder is not None:
        with suppress(OSError, ValueError, msgspec.MsgspecError):
            kept = msgspec.json.decode(read_checked(folder / _FILE), type=_CacheFile)
            same = (kept.form, kept.instar) == (_FORM, instar.__version__)
            if same and kept.stamp.fits(run.events):
                seen, begin = kept.seen, kept.stamp.end
                mark_used(folder)
    end = begin
    with open_regular(run.events) as file:
        file.seek(begin)
        for block, end in line_blocks(file, begin):  # noqa: B007
            _take(seen, block)
    if folder is not None and end - begin >= SMALL_BYTES:
        _keep(folder, _CacheFile(_FORM, instar.__version__, stamp_record(run.events, end), seen))
    return seen


def _keep(folder: Path, kept: _CacheFile) -> None:
    with suppress(OSError):
        create_cache_folder(folder)
        write_checked(folder / _FILE, msgspec.json.encode(kept))


def _take(seen: _ScanState, block: bytes) -> None:
    lines = block.split(b"\n")
    for line, event in events_in(line for line in lines if not line.startswith(_MEASUREMENTS)):
        seen.lineage.take(event)
        if isinstance(event, Branched) and not seen.branched:
            seen.branched = line.decode(errors="replace")
        if isinstance(event, RunStarted):
            seen.started = event.time if seen.started is None else seen.started
            seen.segments += 1
            seen.step, seen.tokens, seen.loss, seen.last = event.step, None, None, ""
            seen.about = [line.decode(errors="replace")]
            if event.best_metric != seen.metric:  # its value is not known of earlier evaluations
                seen.evals = [(segment, at, loss, None) for segment, at, loss, _ in seen.evals]
            seen.metric = event.best_metric
            seen.better = event.better.get(event.best_metric, "min")
        elif isinstance(event, Stop | RunFinished | Failed):
            seen.about.append(line.decode(errors="replace"))
        elif isinstance(event, BeginsAnew):
            seen.anew.append((event.segment, event.step, len(seen.evals)))
        elif isinstance(event, Eval) and event.split == "val":
            value = event.loss if seen.metric == "loss" else event.extra.get(seen.metric)
            seen.evals.append((event.segment, event.step, _finite(event.loss), _finite(value)))
        elif isinstance(event, OperationEvent):
            seen.operations.append((event.segment, event.step))
    _take_last(seen, lines)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _take_last(seen: _ScanState, lines: list[bytes]) -> None:
    """Takes the last event, and the last events with a place and with a loss."""
    has_last = has_place = False
    for line, event in events_in(reversed(lines)):
        if not has_last:
            seen.kind, seen.time, has_last = event_kind(event), event.time, True
        if isinstance(event, Placed) and not has_place:
            seen.step, seen.tokens, has_place = event.step, event.tokens, True
            seen.last = line.decode(errors="replace")
        if isinstance(event, Train):
            seen.loss = to_words(event.loss)
        if isinstance(event, Train | RunStarted):
            return
