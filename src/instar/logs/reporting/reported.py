"""What a report says of one run, as the rows of its tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from instar.logs.reporting.stages import Stage, stages
from instar.logs.reporting.tested import FinalTest, final_test
from instar.logs.telling.summary import Summary, summarize
from instar.record.amounts import bytes_text, count_text, flops_text
from instar.record.events import (
    Alert,
    Failed,
    Operation,
    Placed,
    RunStarted,
    Saved,
    Skip,
    Stop,
    Warn,
    Wrote,
)
from instar.record.lines import duration

if TYPE_CHECKING:
    from instar.logs.reading.record import Logged, RunRecord

HEADLINES = 6
"""held-out metrics among the key figures"""
ROWS_OF_A_TEXT = 30
"""A text takes as much room as so many rows."""


@dataclass(frozen=True)
class Fact:
    """One key figure."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Notice:
    """Something that a person should know of."""

    kind: str
    """alert, warning, skipped, failed"""
    step: int | None
    text: str


@dataclass(frozen=True)
class Segment:
    """What a run did between a start and its end."""

    number: int
    from_step: int
    to_step: int | None
    """None: nothing of it is written down"""
    kept_to: int | None
    """what came after was superseded; None: all of it"""
    started: float
    resumed_from: str
    end: str
    devices: str


@dataclass(frozen=True)
class RunView:
    """All that the page of a run says beside its curves and its config."""

    label: str
    summary: Summary
    facts: tuple[Fact, ...]
    stages: tuple[Stage, ...]
    operations: tuple[Logged, ...]
    checkpoints: tuple[Logged, ...]
    notices: tuple[Notice, ...]
    segments: tuple[Segment, ...]
    written: tuple[Wrote, ...]
    """what it wrote, some of it"""
    test: FinalTest | None
    environment: tuple[tuple[str, str], ...]
    left_out: dict[str, int]
    """of a table, how many rows there are beside those shown"""


def view(record: RunRecord, rows: int) -> RunView:
    """What there is to say of a run, in tables of the last `rows` rows."""
    summary = summarize(record)
    every: dict[str, Sequence[Logged]] = {
        "operations": record.of(Operation),
        "checkpoints": record.of(Saved),
    }
    notices = list(_notices(record))
    shown = {name: tuple(each[-rows:]) for name, each in every.items()}
    sizes = {name: len(each) for name, each in every.items()} | {"notices": len(notices)}
    found = stages(record)
    wrote = [each.event for each in record.of(Wrote) if each.kept]
    folder = record.run.path.name or str(record.run.path.absolute().name)
    return RunView(
        label=folder,
        summary=summary,
        facts=tuple(_facts(summary, found)),
        stages=tuple(found),
        operations=shown["operations"],
        checkpoints=shown["checkpoints"],
        notices=tuple(notices[-rows:]),
        segments=tuple(_segments(record)),
        written=tuple(e for e in wrote[-max(1, rows // ROWS_OF_A_TEXT) :] if isinstance(e, Wrote)),
        test=final_test(record.run),
        environment=tuple(_environment(record)),
        left_out={name: max(0, size - rows) for name, size in sizes.items()},
    )


def known(text: Callable[[float], str]) -> Callable[[float], str]:
    """`text`, and a question mark for what is no number."""
    return lambda value: text(value) if math.isfinite(value) else "?"


def _facts(summary: Summary, found: Sequence[Stage]) -> Iterator[Fact]:
    best = [name for name in summary.best if name.startswith("val/")]
    for name in best[:HEADLINES]:
        value = summary.best[name]
        error = "" if value.error is None else f"± {value.error:.2g} "
        last = summary.last.get(name)
        after = "" if last is None or last.step == value.step else f", last {last.value:.4f}"
        yield Fact(f"best {name}", f"{value.value:.4f}", f"{error}at step {value.step:,}{after}")
    if (loss := summary.last.get("loss")) is not None:
        lowest = summary.best.get("loss")
        note = "" if lowest is None else f"lowest {lowest.value:.4f} at step {lowest.step:,}"
        yield Fact("training loss", f"{loss.value:.4f}", note)
    sizes = [stage.parameters for stage in found if stage.parameters]
    grown = len(sizes) > 1 and sizes[0] != sizes[-1]
    size = "→".join(map(count_text, [sizes[0], sizes[-1]] if grown else sizes[-1:]))
    if size:
        yield Fact("parameters", size, summary.model)
    epochs = f"{summary.epoch:.3g} epochs" if summary.epoch else ""
    yield Fact("steps", f"{summary.step:,}", epochs)
    yield Fact(f"{summary.unit}s", count_text(summary.tokens), f"{summary.samples:,} samples")
    if summary.flops:
        yield Fact("training FLOPs", known(flops_text)(summary.flops))
    yield Fact("time training", duration(summary.active_s), f"{duration(summary.wall_s)} in all")
    if summary.tokens_per_s:
        per_s = f"{known(count_text)(summary.tokens_per_s)}/s"
        yield Fact("throughput", per_s, f"{summary.unit}s, over all time training")
    if summary.memory_peak_bytes:
        yield Fact("memory peak", bytes_text(summary.memory_peak_bytes))


def _notices(record: RunRecord) -> Iterator[Notice]:
    for logged in record.events:
        match logged.event:
            case Alert(name=name, message=message, step=step):
                yield Notice("alert", step, f"{name}: {message}")
            case Skip(reason=reason, consecutive=count, step=step):
                again = f", {count} in a row" if count > 1 else ""
                yield Notice("skipped", step, f"update left out: {reason}{again}")
            case Warn(message=message, step=at):
                yield Notice("warning", at, message)
            case Failed(message=message, rank=rank, step=at):
                yield Notice("failed", at, f"rank {rank}: {message}")


def _segments(record: RunRecord) -> Iterator[Segment]:
    reached: dict[int, int] = {}
    kept: dict[int, int] = {}
    ends: dict[int, str] = {}
    for segment, step, counts in _places(record):
        reached[segment] = max(step, reached.get(segment, 0))
        if counts:
            kept[segment] = max(step, kept.get(segment, 0))
    for logged in record.events:
        match logged.event:
            case Stop(segment=segment, reason=reason):
                ends[segment] = reason
            case Failed(segment=segment, rank=rank, message=message):
                ends[segment] = f"rank {rank} failed: {message}"
    for start in (logged.event for logged in record.of(RunStarted)):
        if isinstance(start, RunStarted):
            yield Segment(
                number=start.segment,
                from_step=start.step,
                to_step=reached.get(start.segment),
                kept_to=kept.get(start.segment),
                started=start.time,
                resumed_from=start.resumed_from or "",
                end=ends.get(start.segment, ""),
                devices=start.devices,
            )


def _places(record: RunRecord) -> Iterator[tuple[int, int, bool]]:
    """Segment, step, and whether it counts, of everything that has these."""
    for logged in record.events:
        if isinstance(logged.event, Placed):
            yield logged.event.segment, logged.event.step, logged.kept
    if "loss" in record:
        series = record.series("loss")
        columns = (series.segment.tolist(), series.step.tolist(), series.kept.tolist())
        yield from zip(*columns, strict=True)


def _environment(record: RunRecord) -> Iterator[tuple[str, str]]:
    """What it ran on and with; where that changed from one start to the next, all of it."""
    rows: dict[str, dict[str, None]] = {}
    for logged in record.of(RunStarted):
        start = logged.event
        if not isinstance(start, RunStarted):
            continue
        ranks = f"{start.world_size} rank{'s' * (start.world_size != 1)}"
        told: dict[str, object] = {"devices": f"{start.devices}, {ranks}".strip(", ")}
        told |= {**start.machine, **start.versions}
        for name, value in told.items():
            size = name.endswith("_bytes") and isinstance(value, int | float)
            text = known(bytes_text)(float(str(value))) if size else str(value)
            if value is not None:
                rows.setdefault(name.removesuffix("_bytes").replace("_", " "), {})[text] = None
    for name, texts in rows.items():
        yield name, " → ".join(texts)
