"""What a list of runs says of each, without reading its whole record again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

import instar
from instar.logs.reading.aside import Mark, mark_of, read_checked, write_checked
from instar.logs.reading.lineage import EVERYTHING, Lineage
from instar.logs.reading.lines import blocks, no_record
from instar.record.events import (
    NOT_AN_EVENT,
    VERSION,
    Eval,
    Event,
    Failed,
    Placed,
    RunFinished,
    RunStarted,
    Stop,
    Train,
    Unrecognised,
    decode,
    to_words,
)
from instar.record.rundir import RunDir

SMALL_BYTES = 1 << 15
"""What was added to a record up to here is read again rather than written down."""
_FORM = 1
_MANY = tuple(b'{"v":%d,"kind":"%s"' % (VERSION, kind) for kind in (b"train", b"layers"))


@dataclass(frozen=True)
class Glance:
    """A run in short; what is not known is None, or empty."""

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
    val_step: int | None
    best: float | None
    """the lowest validation loss that is not superseded"""
    best_step: int | None
    kind: str
    """of the last event"""
    seen: float | None
    """Unix seconds of the last event"""
    events: tuple[Event, ...]
    """the newest segment's start, and what ended it: `Stop`, `RunFinished`, `Failed`"""
    fault: str
    """why nothing can be said"""


class _Seen(msgspec.Struct):
    """What has been seen of a record so far."""

    lineage: Lineage = msgspec.field(default_factory=Lineage)
    started: float | None = None
    segments: int = 0
    step: int | None = None
    tokens: int | None = None
    loss: float | str | None = None
    evals: list[tuple[int, int, float]] = []
    """segment, step and loss of each validation with a finite loss"""
    kind: str = ""
    time: float | None = None
    about: list[str] = []
    """the lines of the newest segment's start, and of its end"""


class _Kept(msgspec.Struct):
    form: int
    instar: str
    mark: Mark
    seen: _Seen


def glance(run: RunDir) -> Glance:
    """What a list says of a run; raises nothing, whatever stands in its folder.

    Only what was added to the record since the last look is read, if the run's folder can be
    written to.
    """
    fault = ""
    try:
        seen = _look(run)
        fault = "" if seen.kind else no_record(run.events)
    except OSError as error:
        seen, fault = _Seen(), f"cannot read {run.events}: {error.strerror}"
    events = tuple(decode(line.encode()) for line in seen.about)
    start = next((event for event in events if isinstance(event, RunStarted)), None)
    limits = seen.lineage.limits()
    evals = [
        (loss, at) for segment, at, loss in seen.evals if at <= limits.get(segment, EVERYTHING)
    ]
    last, best = (evals[-1], min(evals)) if evals else ((None, None), (None, None))
    return Glance(
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
        val=last[0],
        val_step=last[1],
        best=best[0],
        best_step=best[1],
        kind=seen.kind,
        seen=seen.time,
        events=events,
        fault=fault,
    )


def _look(run: RunDir) -> _Seen:
    place = run.path / "cache" / "glance.json"
    seen, begin = _Seen(), 0
    if run.events.stat().st_size >= SMALL_BYTES:
        with suppress(OSError, ValueError, msgspec.MsgspecError):
            kept = msgspec.json.decode(read_checked(place), type=_Kept)
            same = (kept.form, kept.instar) == (_FORM, instar.__version__)
            if same and kept.mark.fits(run.events):
                seen, begin = kept.seen, kept.mark.end
    end = begin
    with run.events.open("rb") as file:
        file.seek(begin)
        for block, behind in blocks(file, begin):
            _take(seen, block)
            end = behind
    if end - begin >= SMALL_BYTES:
        _keep(place, _Kept(_FORM, instar.__version__, mark_of(run.events, end), seen))
    return seen


def _keep(place: Path, kept: _Kept) -> None:
    with suppress(OSError):  # a folder that cannot be written does without
        place.parent.mkdir(exist_ok=True)
        write_checked(place, msgspec.json.encode(kept))


def _take(seen: _Seen, block: bytes) -> None:
    lines = block.split(b"\n")
    for line, event in _events(line for line in lines if not line.startswith(_MANY)):
        seen.lineage.take(event)
        if isinstance(event, RunStarted):
            seen.started = event.time if seen.started is None else seen.started
            seen.segments += 1
            seen.step, seen.tokens, seen.loss = event.step, None, None
            seen.about = [line.decode(errors="replace")]
        elif isinstance(event, Stop | RunFinished | Failed):
            seen.about.append(line.decode(errors="replace"))
        elif isinstance(event, Eval) and event.split == "val" and math.isfinite(event.loss):
            seen.evals.append((event.segment, event.step, event.loss))
    _take_last(seen, lines)


def _take_last(seen: _Seen, lines: list[bytes]) -> None:
    """Where the run is: its last event, and the last ones that have a place and a loss."""
    told = placed = False
    for _, event in _events(reversed(lines)):
        if not told:
            seen.kind, seen.time, told = _kind(event), event.time, True
        if isinstance(event, Placed) and not placed:
            seen.step, seen.tokens, placed = event.step, event.tokens, True
        if isinstance(event, Train):
            seen.loss = to_words(event.loss)
        if isinstance(event, Train | RunStarted):
            return


def _events(lines: Iterable[bytes]) -> Iterator[tuple[bytes, Event]]:
    for line in lines:
        try:
            event = decode(line)
        except NOT_AN_EVENT:
            continue
        yield line, event


def _kind(event: Event) -> str:
    tag = type(event).__struct_config__.tag
    return event.name if isinstance(event, Unrecognised) else str(tag)
