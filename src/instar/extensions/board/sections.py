"""Builds the sections of a page about one run, other than its curves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import msgspec

from instar.config.errors import shorten_text
from instar.extensions.board.blocks import (
    MAX_ROWS,
    Cell,
    Section,
    count_text,
    date_text,
    finite_text,
    image_section,
    notices,
    number_text,
    printable_section,
    seconds_text,
    table_section,
    table_sections,
    text_section,
)
from instar.extensions.board.ending import Scatter, read_final_test, run_failure
from instar.logs.query.config import config_lines
from instar.logs.query.stages import RunStage, stages
from instar.logs.query.summary import Summary, summarize
from instar.logs.read.record import RecordedEvent, RunRecord
from instar.logs.text.summary import family_rows
from instar.record.events import (
    Alert,
    Asked,
    Failed,
    OperationEvent,
    Placed,
    RunStarted,
    SampleText,
    Saved,
    Skip,
    Stop,
    Warn,
)
from instar.record.format import bytes_text, duration, encodable, scientific, si

Figure = tuple[str, str, str, float]
"""label, value, note, and the number to sort by"""
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


def page_sections(part: str, record: RunRecord, rows: int = MAX_ROWS) -> list[Section]:
    """Return the sections of one of `PARTS`, with tables of the last `rows` rows."""
    return [printable_section(section) for section in PARTS[part](record, rows) if section]


def failure_section(record: RunRecord, rows: int) -> Iterator[Section]:  # noqa: ARG001
    """Yield the error of a crashed run."""
    failure = run_failure(record)
    if failure is not None:
        rank = "" if failure.rank is None else f"on rank {failure.rank}"
        step = "" if failure.step is None else f"at step {failure.step:,}"
        yield {
            "kind": "failure",
            "title": "",
            "type": failure.type or "Crashed",
            "where": " ".join(filter(None, (rank, step))),
            "message": shorten_text(failure.message, 4000),
            "resume": failure.resume,
            "log": [shorten_text(line, 400) for line in failure.log],
        }


def overview_sections(record: RunRecord, rows: int) -> Iterator[Section]:
    """Yield key figures, warnings and alerts, and faults of the record."""
    summary = summarize(record)
    yield text_section(*_lead(summary))
    items = [figure[:3] for figure in key_figures(summary, stages(record))]
    yield {"kind": "facts", "items": items}
    heads = ("run", "branch at", "state", "step>", "best val>")
    yield table_section("Family", heads, map(list, family_rows(summary)), rows)
    yield notices("Warnings and alerts", list(_warnings(record)), rows)
    faults = [("", None, shorten_text(fault)) for fault in summary.faults]
    yield notices("Skipped lines of the record", faults, MAX_FAULTS)


def _lead(summary: Summary) -> Iterator[str]:
    size = f", {si(summary.parameters)} parameters" if summary.parameters else ""
    where = f" on {summary.devices}" if summary.devices else ""
    began = f", started {date_text(summary.started)}" if summary.started else ""
    origin = f", imported from {summary.imported_from}" if summary.imported_from else ""
    yield f"{summary.model}{size}{where}{began}{origin}".strip(" ,")
    if summary.state != "crashed":  # the failure says both
        yield shorten_text(summary.reason)
        yield f"Resume with: {summary.go_on}" if summary.go_on else ""
    yield summary.path


def key_figures(summary: Summary, run_stages: Sequence[RunStage]) -> Iterator[Figure]:
    """Yield the key figures of a run."""
    followed = [summary.best_metric] if summary.best_metric in summary.best else []
    best = dict.fromkeys([*followed, *(name for name in summary.best if name.startswith("val/"))])
    for name in [*best][:HEADLINES]:
        value = summary.best[name]
        error = "" if value.error is None else f"± {value.error:.2g} "
        last = summary.last.get(name)
        after = (
            "" if last is None or last.step == value.step else f", last {number_text(last.value)}"
        )
        note = f"{error}at step {value.step:,}{after}"
        yield f"best {name}", number_text(value.value), note, value.value
    if (loss := summary.last.get("loss")) is not None:
        lowest = summary.best.get("loss")
        note = (
            "" if lowest is None else f"lowest {number_text(lowest.value)} at step {lowest.step:,}"
        )
        yield "training loss", number_text(loss.value), note, loss.value
    sizes = [stage.parameters for stage in run_stages if stage.parameters]
    has_grown = len(sizes) > 1 and sizes[0] != sizes[-1]
    if sizes:
        size = "→".join(map(si, [sizes[0], sizes[-1]] if has_grown else sizes[-1:]))
        yield "parameters", size, summary.model, sizes[-1]
    epochs = f"{summary.epoch:.3g} epochs" if summary.epoch else ""
    yield "steps", f"{summary.step:,}", epochs, summary.step
    yield f"{summary.unit}s", si(summary.tokens), f"{summary.samples:,} samples", summary.tokens
    if summary.flops:
        yield "training FLOPs", finite_text(scientific, summary.flops), "", summary.flops
    wall = f"{duration(summary.wall_s)} wall time"
    yield "training time", duration(summary.active_s), wall, summary.active_s
    if per_s := summary.tokens_per_s:
        text = f"{finite_text(si, per_s)}/s"
        yield "throughput", text, f"{summary.unit}s, mean over the training time", per_s
    if peak := summary.memory_peak_bytes:
        yield "peak memory", bytes_text(peak), "", peak


def _warnings(record: RunRecord) -> Iterator[tuple[str, int | None, str]]:
    for entry in record.events:
        match entry.event:
            case Alert(name=name, message=message, step=step):
                yield "alert", step, f"{name}: {message}"
            case Skip(reason=reason, consecutive=count, step=step):
                row_note = f", {count} in a row" if count > 1 else ""
                yield "skipped", step, f"update skipped: {reason}{row_note}"
            case Warn(message=message, step=at):
                yield "warning", at, message
            case Failed(message=message, rank=rank, step=at):
                yield "failed", at, f"rank {rank}: {message}"


def stage_sections(record: RunRecord, rows: int) -> Iterator[Section]:
    """Yield operations, what was asked for, the stages, and the architecture of each stage."""
    yield _operations(record.of(OperationEvent), rows)
    yield _requests(record.of(Asked), rows)
    run_stages = stages(record)
    unit = summarize(record).unit
    cost_heads = (f"{unit}s>", "FLOPs>", "training>", "last loss>", "val loss>")
    heads = ("steps", "starts with", "shape", "parameters>", *cost_heads)
    yield table_section("Stages", heads, map(_stage_row, run_stages), rows)
    shapes = [dict(stage.architecture) for stage in run_stages][-MAX_SHAPES:]
    first = len(run_stages) - len(shapes) + 1
    lines = list[list[Cell]]()
    for key in dict.fromkeys(key for shape in shapes for key in shape):
        values = [
            shorten_text(str(msgspec.to_builtins(shape.get(key, "–"))), 200) for shape in shapes
        ]
        cells: list[Cell] = [
            {"text": now, "class": "changed"} if now != before else now
            for before, now in pairwise([values[0], *values])
        ]
        lines.append([key, *cells])
    stage_heads = (f"stage {first + n}>" for n in range(len(shapes)))
    yield table_section("Architecture", ("", *stage_heads), lines, rows)


def _operations(operations: Sequence[RecordedEvent[OperationEvent]], rows: int) -> Section:
    lines = list[list[Cell]]()
    for entry in operations[-rows:]:
        event = entry.event
        proof, label = event.proof, event.preserves
        sizes = [proof.get(f"parameters_{when}") for when in ("before", "after")]
        change_of_size = " → ".join(count_text(size) for size in sizes)
        lines.append(
            [
                f"{event.step:,}",
                {
                    "strong": shorten_text(event.name),
                    "text": shorten_text(event.change),
                    "note": shorten_text(", ".join(event.notes)),
                },
                shorten_text(event.reason),
                "settings only" if sizes[1] is None else change_of_size,
                {
                    "text": shorten_text(label),
                    "class": f"proof {label}" if label in _PROOFS else "",
                },
                f"{proof['max_logit_diff']:.2g}" if "max_logit_diff" in proof else "",
                f"{proof['delta_loss']:.2g}" if "delta_loss" in proof else "",
                seconds_text(event.seconds),
            ]
        )
    heads = ("step>", "operation", "reason", "parameters", "function", "max |Δlogit|>", "Δloss>")
    return table_section("Operations", (*heads, "duration>"), lines, rows, operations)


def _requests(entries: Sequence[RecordedEvent[Asked]], rows: int) -> Section:
    lines = list[list[Cell]]()
    for event in (entry.event for entry in entries[-rows:]):
        value = "" if event.value is None else str(event.value)
        what: Cell = {"strong": shorten_text(event.operation), "text": shorten_text(value, 60)}
        texts = (shorten_text(text) for text in (event.by, event.outcome, event.reason))
        lines.append([f"{event.step:,}", what, *texts])
    heads = ("step>", "operation", "asked for by", "outcome", "reason")
    return table_section("Asked for", heads, lines, rows, entries)


def _stage_row(stage: RunStage) -> list[Cell]:
    costs = [si(stage.tokens), finite_text(scientific, stage.flops), duration(stage.active_s)]
    return [
        f"{stage.from_step:,} – {stage.to_step:,}",
        {"strong": shorten_text(stage.operation), "note": shorten_text(stage.reason)}
        if stage.operation
        else "the start",
        stage.model,
        count_text(stage.parameters),
        *(costs if stage.steps else ["–"] * 3),
        number_text(stage.loss),
        number_text(stage.val_loss),
    ]


def result_sections(record: RunRecord, rows: int) -> Iterator[Section]:
    """Yield the final test, text samples, and what the run's own code has logged."""
    test = read_final_test(record.run)
    if test is not None:
        yield {"kind": "text", "title": "Final test", "lines": []}
    if test is not None and test.metrics:
        yield text_section(
            f"{test.samples:,} samples, weights of step {test.step:,} ({test.weights})."
        )
        metrics = [
            [name, number_text(value), "" if error is None else f"{error:.2g}"]
            for name, (value, error) in test.metrics.items()
        ]
        yield table_section("", ("metric", "value>", "± standard error>"), metrics, rows)
    for target, matrix in test.confusion.items() if test is not None else ():
        if len(matrix) > MAX_CLASSES:
            yield text_section(
                f"{target}: {len(matrix)} classes are too many for a table; see result.json"
            )
        else:
            shares = [[n / sum(row) if sum(row) else 0.0 for n in row] for row in matrix]
            yield {"kind": "matrix", "target": target, "counts": matrix, "shares": shares}
    if test is not None:
        yield from map(scatter_section, test.scatters)
        yield text_section(*test.notes)
    sample_texts = [entry.event for entry in record.of(SampleText) if entry.is_current]
    sample_texts = sample_texts[-max(1, rows // ROWS_PER_SAMPLE) :]
    samples = [
        {
            "step": event.step,
            "from": shorten_text(msgspec.json.encode(encodable(event.prompt)).decode(), 60),
            "prompt": shorten_text(event.prompt, 2000),
            "text": shorten_text(event.text, 4000),
        }
        for event in reversed(sample_texts)
    ]
    yield {"kind": "samples", "title": "Text samples", "items": samples} if samples else {}
    yield image_section(record, rows / MAX_ROWS)
    yield from table_sections(record, rows)


def scatter_section(scatter: Scatter) -> Section:
    """Return an SVG path with a dot for each pair in a square, and the values at its corners."""
    low = float(min(scatter.true.min(), scatter.predictions.min()))
    high = float(max(scatter.true.max(), scatter.predictions.max()))
    scale = SCATTER_SIDE / (high - low) if high > low else 0.0
    across = (scatter.true - low) * scale
    up = SCATTER_SIDE - (scatter.predictions - low) * scale
    dots = zip(across.tolist(), up.tolist(), strict=True)
    count = len(scatter.true)
    part = f", {count:,} of {scatter.count:,}" if count < scatter.count else ""
    return {
        "kind": "scatter",
        "target": scatter.target,
        "caption": f"predicted over true{part}",
        "side": SCATTER_SIDE,
        "path": "".join(f"M{x:.1f} {y:.1f}h0" for x, y in dots),
        "low": f"{low:.4g}",
        "high": f"{high:.4g}",
    }


def system_sections(record: RunRecord, rows: int) -> Iterator[Section]:
    """Yield starts and resumes, checkpoints, and the environment."""
    yield table_section(
        "Starts and resumes",
        ("segment>", "steps", "started", "from", "on", "end"),
        _segment_rows(record),
        rows,
    )
    yield _checkpoints(record, rows)
    environment = list(_environment(record))
    yield {"kind": "pairs", "title": "Environment", "items": environment} if environment else {}


def _segment_rows(record: RunRecord) -> Iterator[list[Cell]]:
    last_steps: dict[int, int] = {}
    current: dict[int, int] = {}
    ends: dict[int, str] = {}
    for segment, step, counts in _places(record):
        last_steps[segment] = max(step, last_steps.get(segment, 0))
        if counts:
            current[segment] = max(step, current.get(segment, 0))
    for entry in record.events:
        match entry.event:
            case Stop(segment=segment, reason=reason):
                ends[segment] = reason
            case Failed(segment=segment, rank=rank, message=message):
                ends[segment] = f"rank {rank} failed: {message}"
    running = summarize(record).state == "running"
    starts = [start_entry.event for start_entry in record.of(RunStarted)]
    for start in starts:
        last, current_step = last_steps.get(start.segment), current.get(start.segment)
        steps = f"{start.step:,}" + ("" if last is None else f" – {last:,}")
        note = "" if current_step == last else "superseded"
        is_running = running and start is starts[-1]
        yield [
            str(start.segment),
            {
                "text": steps,
                "note": note if current_step is None else note and f"{note} after {current_step:,}",
            },
            date_text(start.time),
            start.resumed_from or "",
            start.devices,
            shorten_text(
                ends.get(start.segment, "running" if is_running else "not recorded: killed")
            ),
        ]


def _places(record: RunRecord) -> Iterator[tuple[int, int, bool]]:
    """Yield segment, step and `is_current` of all placed events and training steps."""
    for entry in record.events:
        if isinstance(entry.event, Placed):
            yield entry.event.segment, entry.event.step, entry.is_current
    if "loss" in record:
        series = record.series("loss")
        columns = (series.segment.tolist(), series.step.tolist(), series.is_current.tolist())
        yield from zip(*columns, strict=True)


def _checkpoints(record: RunRecord, rows: int) -> Section:
    saves, on_disk = record.of(Saved), summarize(record).checkpoints
    pointers = {checkpoint.name: ", ".join(checkpoint.pointers) or "kept" for checkpoint in on_disk}
    lines = []
    for entry in saves[-rows:]:
        event = entry.event
        folder = event.path.rpartition("/")[2]
        size = "" if not event.size_bytes else finite_text(bytes_text, event.size_bytes)
        times = (seconds_text(event.seconds), seconds_text(event.stall_s))
        now = pointers.get(folder, "removed")
        lines.append([f"{event.step:,}", folder, shorten_text(event.reason), size, *times, now])
    heads = ("step>", "folder", "reason", "size>", "duration>", "training stalled>", "now")
    note = f"{len(saves):,} written, {len(on_disk):,} on disk"
    return table_section("Checkpoints", heads, lines, rows, saves, note=note, folded=len(lines) > 8)


def _environment(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield machine and versions; all values of those that changed between starts."""
    rows: dict[str, dict[str, None]] = {}
    for entry in record.of(RunStarted):
        start = entry.event
        ranks = f"{start.world_size} rank{'s' * (start.world_size != 1)}"
        values: dict[str, object] = {"devices": f"{start.devices}, {ranks}".strip(", ")}
        values |= {**start.machine, **start.versions}
        for name, value in values.items():
            size = name.endswith("_bytes") and isinstance(value, int | float)
            text = finite_text(bytes_text, float(str(value))) if size else str(value)
            if value is not None:
                rows.setdefault(name.removesuffix("_bytes").replace("_", " "), {})[text] = None
    for name, texts in rows.items():
        yield name, shorten_text(" → ".join(texts))


def config_section(record: RunRecord, rows: int) -> Iterator[Section]:  # noqa: ARG001
    """Yield the resolved config, secrets redacted, with the origin of non-default values."""
    lines = [
        (shorten_text(line.text, 2000), line.origin if line.chosen and line.text.strip() else "")
        for line in config_lines(record.run)
    ]
    note = "marked: not the default"
    yield {"kind": "config", "title": "Config", "note": note, "lines": lines} if lines else {}


PARTS: dict[str, Callable[[RunRecord, int], Iterator[Section]]] = {
    "failure": failure_section,
    "overview": overview_sections,
    "stages": stage_sections,
    "results": result_sections,
    "system": system_sections,
    "config": config_section,
}


def folder_name(record: RunRecord) -> str:
    """Return the name of a run's folder."""
    return record.run.path.name or record.run.path.absolute().name
