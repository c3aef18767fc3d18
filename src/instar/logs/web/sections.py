"""Builds the sections of a page about runs, other than their curves, as data for the browser.

A section is `{"kind": …}` with a title and the fields that `page/sections.js` draws for its kind:
`facts`, `text`, `table`, `notices`, `matrix`, `scatter`, `samples`, `config` or `pairs`. Numbers are
formatted here, so that pages and command line round alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import msgspec

from instar.config.fields import differing
from instar.config.origins import in_yaml
from instar.logs.query.config import config_lines, config_values
from instar.logs.query.final_test import Scatter, final_test
from instar.logs.query.groups import short_values, warnings_on_data
from instar.logs.query.stages import RunStage, stages
from instar.logs.query.summary import Summary, summarize
from instar.logs.web.curves import printable, shortened
from instar.record.events import (
    Alert,
    Failed,
    OperationEvent,
    Placed,
    RunStarted,
    Saved,
    Skip,
    Stop,
    Warn,
    Wrote,
)
from instar.record.format import bytes_text, duration, scientific, si

if TYPE_CHECKING:
    from instar.logs.read.record import RecordedEvent, RunRecord


Section = dict[str, Any]
Cell = str | dict[str, str]
"""a text, or its parts: `strong`, `text`, `note`, `class`, and `full` if `text` is shortened"""
MAX_ROWS = 400
"""rows of a table"""
ROWS_PER_SAMPLE = 30
"""table rows that take as much room as one text sample"""
HEADLINES = 6
"""held-out metrics among the key figures"""
MAX_SHAPES = 40
"""stages whose architecture is shown in full"""
MAX_FAULTS = 50
MAX_CLASSES = 40
"""classes of a confusion matrix"""
SCATTER_SIDE = 320
_PROOFS = ("exact", "bounded", "lossy")


def sections(part: str, record: RunRecord, rows: int = MAX_ROWS) -> list[Section]:
    """Returns the sections of one of `PARTS`, with tables of the last `rows` rows."""
    return [_printable(each) for each in PARTS[part](record, rows) if each]


def overview(record: RunRecord, rows: int) -> Iterator[Section]:
    """Yields key figures, warnings and alerts, and faults of the record."""
    summary = summarize(record)
    yield _text(*_lead(summary))
    yield {"kind": "facts", "items": list(_facts(summary, stages(record)))}
    yield _notices("Warnings and alerts", list(_warnings(record)), rows)
    faults = [("", None, shortened(fault)) for fault in summary.faults]
    yield _notices("Skipped lines of the record", faults, MAX_FAULTS)


def _lead(summary: Summary) -> Iterator[str]:
    size = f", {si(summary.parameters)} parameters" if summary.parameters else ""
    where = f" on {summary.devices}" if summary.devices else ""
    began = f", started {_date(summary.started)}" if summary.started else ""
    yield f"{summary.model}{size}{where}{began}".strip(" ,")
    yield shortened(summary.reason)
    yield f"Resume with: {summary.go_on}" if summary.go_on else ""
    yield summary.path


def _facts(summary: Summary, found: Sequence[RunStage]) -> Iterator[tuple[str, str, str]]:
    """Yields label, value and note of each key figure."""
    best = [name for name in summary.best if name.startswith("val/")]
    for name in best[:HEADLINES]:
        value = summary.best[name]
        error = "" if value.error is None else f"± {value.error:.2g} "
        last = summary.last.get(name)
        after = "" if last is None or last.step == value.step else f", last {last.value:.4f}"
        yield f"best {name}", f"{value.value:.4f}", f"{error}at step {value.step:,}{after}"
    if (loss := summary.last.get("loss")) is not None:
        lowest = summary.best.get("loss")
        note = "" if lowest is None else f"lowest {lowest.value:.4f} at step {lowest.step:,}"
        yield "training loss", f"{loss.value:.4f}", note
    sizes = [stage.parameters for stage in found if stage.parameters]
    grown = len(sizes) > 1 and sizes[0] != sizes[-1]
    if sizes:
        size = "→".join(map(si, [sizes[0], sizes[-1]] if grown else sizes[-1:]))
        yield "parameters", size, summary.model
    yield "steps", f"{summary.step:,}", f"{summary.epoch:.3g} epochs" if summary.epoch else ""
    yield f"{summary.unit}s", si(summary.tokens), f"{summary.samples:,} samples"
    if summary.flops:
        yield "training FLOPs", _finite(scientific, summary.flops), ""
    yield "training time", duration(summary.active_s), f"{duration(summary.wall_s)} wall time"
    if summary.tokens_per_s:
        per_s = f"{_finite(si, summary.tokens_per_s)}/s"
        yield "throughput", per_s, f"{summary.unit}s, mean over the training time"
    if summary.memory_peak_bytes:
        yield "peak memory", bytes_text(summary.memory_peak_bytes), ""


def _warnings(record: RunRecord) -> Iterator[tuple[str, int | None, str]]:
    for logged in record.events:
        match logged.event:
            case Alert(name=name, message=message, step=step):
                yield "alert", step, f"{name}: {message}"
            case Skip(reason=reason, consecutive=count, step=step):
                again = f", {count} in a row" if count > 1 else ""
                yield "skipped", step, f"update skipped: {reason}{again}"
            case Warn(message=message, step=at):
                yield "warning", at, message
            case Failed(message=message, rank=rank, step=at):
                yield "failed", at, f"rank {rank}: {message}"


def stage_sections(record: RunRecord, rows: int) -> Iterator[Section]:
    """Yields operations, the stages between them, and the architecture of each stage."""
    yield _operations(record.of(OperationEvent), rows)
    found = stages(record)
    unit = summarize(record).unit
    spent = (f"{unit}s>", "FLOPs>", "training>", "last loss>", "val loss>")
    heads = ("steps", "starts with", "shape", "parameters>", *spent)
    yield _table("Stages", heads, map(_stage_row, found), rows)
    shapes = [dict(stage.architecture) for stage in found][-MAX_SHAPES:]
    first = len(found) - len(shapes) + 1
    lines = list[list[Cell]]()
    for key in dict.fromkeys(key for shape in shapes for key in shape):
        values = [shortened(str(msgspec.to_builtins(shape.get(key, "–"))), 200) for shape in shapes]
        cells: list[Cell] = [
            {"text": now, "class": "changed"} if now != before else now
            for before, now in pairwise([values[0], *values])
        ]
        lines.append([key, *cells])
    numbered = (f"stage {first + n}>" for n in range(len(shapes)))
    yield _table("Architecture", ("", *numbered), lines, rows)


def _operations(found: Sequence[RecordedEvent], rows: int) -> Section:
    lines = list[list[Cell]]()
    for logged in found[-rows:]:
        event = cast(OperationEvent, logged.event)
        proof, label = event.proof, event.preserves
        sizes = [proof.get(f"parameters_{when}") for when in ("before", "after")]
        change_of_size = " → ".join(_count(size) for size in sizes)
        lines.append(
            [
                f"{event.step:,}",
                {
                    "strong": shortened(event.name),
                    "text": shortened(event.change),
                    "note": shortened(", ".join(event.notes)),
                },
                shortened(event.reason),
                "settings only" if sizes[1] is None else change_of_size,
                {"text": shortened(label), "class": f"proof {label}" if label in _PROOFS else ""},
                f"{proof['max_logit_diff']:.2g}" if "max_logit_diff" in proof else "",
                f"{proof['delta_loss']:.2g}" if "delta_loss" in proof else "",
                _seconds_text(event.seconds),
            ]
        )
    heads = ("step>", "operation", "reason", "parameters", "function", "max |Δlogit|>", "Δloss>")
    return _table("Operations", (*heads, "duration>"), lines, rows, found)


def _stage_row(stage: RunStage) -> list[Cell]:
    spent = [si(stage.tokens), _finite(scientific, stage.flops), duration(stage.active_s)]
    return [
        f"{stage.from_step:,} – {stage.to_step:,}",
        {"strong": shortened(stage.operation), "note": shortened(stage.reason)}
        if stage.operation
        else "the start",
        stage.model,
        _count(stage.parameters),
        *(spent if stage.steps else ["–"] * 3),
        _number(stage.loss),
        _number(stage.val_loss),
    ]


def results(record: RunRecord, rows: int) -> Iterator[Section]:
    """Yields the final test and text samples."""
    test = final_test(record.run)
    if test is not None:
        yield {"kind": "text", "title": "Final test", "lines": []}
    if test is not None and test.metrics:
        yield _text(f"{test.samples:,} samples, weights of step {test.step:,} ({test.weights}).")
        metrics = [
            [name, _number(value), "" if error is None else f"{error:.2g}"]
            for name, (value, error) in test.metrics.items()
        ]
        yield _table("", ("metric", "value>", "± standard error>"), metrics, rows)
    for target, matrix in test.confusion.items() if test is not None else ():
        if len(matrix) > MAX_CLASSES:
            yield _text(
                f"{target}: {len(matrix)} classes are too many for a table; see result.json"
            )
        else:
            shares = [[n / sum(row) if sum(row) else 0.0 for n in row] for row in matrix]
            yield {"kind": "matrix", "target": target, "counts": matrix, "shares": shares}
    if test is not None:
        yield from map(scatter_section, test.scatters)
        yield _text(*test.notes)
    written = [
        logged.event
        for logged in record.of(Wrote)
        if logged.kept and isinstance(logged.event, Wrote)
    ][-max(1, rows // ROWS_PER_SAMPLE) :]
    samples = [
        {
            "step": event.step,
            "from": shortened(msgspec.json.encode(printable(event.prompt)).decode(), 60),
            "prompt": shortened(event.prompt, 2000),
            "text": shortened(event.text, 4000),
        }
        for event in reversed(written)
    ]
    yield {"kind": "samples", "title": "Text samples", "items": samples} if samples else {}


def scatter_section(scatter: Scatter) -> Section:
    """Returns an SVG path with a dot for each pair in a square, and the values at its corners."""
    low = float(min(scatter.true.min(), scatter.predicted.min()))
    high = float(max(scatter.true.max(), scatter.predicted.max()))
    scale = SCATTER_SIDE / (high - low) if high > low else 0.0
    across = (scatter.true - low) * scale
    up = SCATTER_SIDE - (scatter.predicted - low) * scale
    dots = zip(across.tolist(), up.tolist(), strict=True)
    shown = len(scatter.true)
    part = f", {shown:,} of {scatter.count:,}" if shown < scatter.count else ""
    return {
        "kind": "scatter",
        "target": scatter.target,
        "caption": f"predicted over true{part}",
        "side": SCATTER_SIDE,
        "path": "".join(f"M{x:.1f} {y:.1f}h0" for x, y in dots),
        "low": f"{low:.4g}",
        "high": f"{high:.4g}",
    }


def system(record: RunRecord, rows: int) -> Iterator[Section]:
    """Yields starts and resumes, checkpoints, and the environment."""
    yield _table(
        "Starts and resumes",
        ("segment>", "steps", "started", "from", "on", "end"),
        _segment_rows(record),
        rows,
    )
    yield _checkpoints(record, rows)
    environment = list(_environment(record))
    yield {"kind": "pairs", "title": "Environment", "items": environment} if environment else {}


def _segment_rows(record: RunRecord) -> Iterator[list[Cell]]:
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
    running = summarize(record).state == "running"
    starts = [cast(RunStarted, logged.event) for logged in record.of(RunStarted)]
    for start in starts:
        last, counted = reached.get(start.segment), kept.get(start.segment)
        steps = f"{start.step:,}" + ("" if last is None else f" – {last:,}")
        lost = "" if counted == last else "superseded"
        is_running = running and start is starts[-1]
        yield [
            str(start.segment),
            {
                "text": steps,
                "note": lost if counted is None else lost and f"{lost} after {counted:,}",
            },
            _date(start.time),
            start.resumed_from or "",
            start.devices,
            shortened(ends.get(start.segment, "running" if is_running else "not recorded: killed")),
        ]


def _places(record: RunRecord) -> Iterator[tuple[int, int, bool]]:
    """Yields segment, step and `kept` of all placed events and training steps."""
    for logged in record.events:
        if isinstance(logged.event, Placed):
            yield logged.event.segment, logged.event.step, logged.kept
    if "loss" in record:
        series = record.series("loss")
        columns = (series.segment.tolist(), series.step.tolist(), series.kept.tolist())
        yield from zip(*columns, strict=True)


def _checkpoints(record: RunRecord, rows: int) -> Section:
    found, on_disk = record.of(Saved), summarize(record).checkpoints
    pointers = {kept.name: ", ".join(kept.pointers) or "kept" for kept in on_disk}
    lines = []
    for logged in found[-rows:]:
        event = cast(Saved, logged.event)
        folder = event.path.rpartition("/")[2]
        size = "" if not event.size_bytes else _finite(bytes_text, event.size_bytes)
        times = (_seconds_text(event.seconds), _seconds_text(event.stall_s))
        now = pointers.get(folder, "removed")
        lines.append([f"{event.step:,}", folder, shortened(event.reason), size, *times, now])
    heads = ("step>", "folder", "reason", "size>", "duration>", "training stalled>", "now")
    note = f"{len(found):,} written, {len(on_disk):,} on disk"
    return _table("Checkpoints", heads, lines, rows, found, note=note, folded=len(lines) > 8)


def _environment(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Yields machine and versions; all values of those that changed between starts."""
    rows: dict[str, dict[str, None]] = {}
    for logged in record.of(RunStarted):
        start = cast(RunStarted, logged.event)
        ranks = f"{start.world_size} rank{'s' * (start.world_size != 1)}"
        values: dict[str, object] = {"devices": f"{start.devices}, {ranks}".strip(", ")}
        values |= {**start.machine, **start.versions}
        for name, value in values.items():
            size = name.endswith("_bytes") and isinstance(value, int | float)
            text = _finite(bytes_text, float(str(value))) if size else str(value)
            if value is not None:
                rows.setdefault(name.removesuffix("_bytes").replace("_", " "), {})[text] = None
    for name, texts in rows.items():
        yield name, shortened(" → ".join(texts))


def config(record: RunRecord, rows: int) -> Iterator[Section]:  # noqa: ARG001
    """Yields the resolved config, secrets redacted, with the origin of non-default values."""
    lines = [
        (shortened(line.text, 2000), line.origin if line.chosen and line.text.strip() else "")
        for line in config_lines(record.run)
    ]
    note = "marked: not the default"
    yield {"kind": "config", "title": "Config", "note": note, "lines": lines} if lines else {}


PARTS: dict[str, Callable[[RunRecord, int], Iterator[Section]]] = {
    "overview": overview,
    "stages": stage_sections,
    "results": results,
    "system": system,
    "config": config,
}


def comparison(records: Sequence[RunRecord]) -> list[Section]:
    """Returns sections that compare runs: key figures, config differences, and warnings if losses
    are not comparable."""
    configs, faults = config_values([record.run for record in records])
    summaries = [summarize(record) for record in records]
    facts = [
        {label: (value, note) for label, value, note in _facts(summary, stages(record))}
        for summary, record in zip(summaries, records, strict=True)
    ]
    rows: list[list[Cell]] = [["state", *(summary.state for summary in summaries)]]
    for label in dict.fromkeys(label for each in facts for label in each):
        run_values = [each.get(label, ("–", "")) for each in facts]
        rows.append([label, *({"text": value, "note": note} for value, note in run_values)])
    rows.append(["operations", *(str(len(summary.operations)) for summary in summaries)])
    warnings = [("Warning:", None, text) for text in warnings_on_data(configs)]
    differences = list[list[Cell]]()
    for key, values in differing([each or None for each in configs]).items():
        whole = [in_yaml(each[key]) if key in each else "" for each in configs]
        short = short_values(key, values, whole)
        cells: list[Cell] = [
            {
                "text": shortened_text,
                "full": "" if shortened_text == text else shortened(text, 20_000),
            }
            for shortened_text, text in zip(short, whole, strict=True)
        ]
        differences.append([key, *cells])
    heads = ("", *(folder_name(record) for record in records))
    found = [
        _notices("", warnings, MAX_ROWS),
        _table("Key figures", heads, rows, MAX_ROWS),
        _text(*(f"Not compared: {shortened(fault)}" for fault in faults)),
        _table("Differences between the configs", heads, differences, MAX_ROWS),
    ]
    return [_printable(each) for each in found if each]


def folder_name(record: RunRecord) -> str:
    """Returns the name of a run's folder."""
    return record.run.path.name or record.run.path.absolute().name


def _table(
    title: str,
    heads: Sequence[str],
    lines: Iterable[Sequence[Cell]],
    rows: int,
    source: Sequence[RecordedEvent] = (),
    **more: Any,
) -> Section:
    """Returns a table of the last `rows` lines; a head that ends in `>` marks a column of numbers.

    `source`: the events from which `lines` were made, to mark superseded ones.
    """
    all_lines = list(lines)
    if not all_lines:
        return {}
    shown = all_lines[-rows:]
    superseded = [n for n, logged in enumerate(source[-rows:]) if not logged.kept]
    return {
        "kind": "table",
        "title": title,
        "heads": [head.removesuffix(">") for head in heads],
        "numbers": [n for n, head in enumerate(heads) if head.endswith(">")],
        "rows": shown,
        "superseded": superseded,
        "left_out": max(0, max(len(source), len(all_lines)) - rows),
        **more,
    }


def _notices(title: str, items: Sequence[tuple[str, int | None, str]], rows: int) -> Section:
    if not items:
        return {}
    shown = [
        (kind, "" if step is None else f"step {step:,}", shortened(text, 4000))
        for kind, step, text in items[-rows:]
    ]
    left_out = max(0, len(items) - rows)
    return {"kind": "notices", "title": title, "items": shown, "left_out": left_out}


def _text(*lines: str) -> Section:
    found = [line for line in lines if line]
    return {"kind": "text", "title": "", "lines": found} if found else {}


def _finite(text: Callable[[float], str], value: float) -> str:
    return text(value) if math.isfinite(value) else "?"


def _count(count: float | None) -> str:
    return _finite(si, count) if count else "–"


def _number(value: float | None) -> str:
    """Formats with four decimals, or with an exponent if the value is very small or large."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    plain = value == 0 or 1e-3 <= abs(value) < 1e5
    return f"{value:.4f}" if plain else f"{value:.3e}"


def _seconds_text(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{1000 * seconds:.2g}ms" if 0 <= seconds < 0.0995 else duration(seconds)


def _date(time: float) -> str:
    """Formats Unix seconds as `2026-11-21 22:35 UTC`."""
    try:
        return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M} UTC"
    except (OverflowError, OSError, ValueError):
        return "?"


def _printable(value: Any) -> Any:
    """Returns `value` with all strings encodable as UTF-8."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(str(key)): _printable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(each) for each in value]
    return value
