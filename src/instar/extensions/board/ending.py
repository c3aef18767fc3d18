"""How a run has ended: of a crashed one, what ended it; and its final test, from `test/result.json` and
`test/predictions.parquet`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from instar.checkpoint.manifest import (
    CheckpointError,
    CheckpointId,
    file_entry,
    identify,
    line_of,
    read_manifest,
    superseded_at,
)
from instar.config.files import open_regular, read_regular
from instar.logs.query.summary import summarize
from instar.logs.query.tail import last_lines
from instar.logs.read.columns import Floats
from instar.logs.read.record import RunRecord
from instar.record.events import Failed
from instar.record.rundir import RunDir

MAX_LINES = 40
_SENTENCE = re.compile(r"rank (\d{1,9}) failed(?: at step ([\d,]{1,20}))?: (.+)", re.DOTALL)
_TYPE = re.compile(r"([A-Za-z_][\w.]{0,99}): (?=\S)|([A-Z]\w{0,99})$")
_ERROR = re.compile(rb" (?:ERROR|CRITICAL): |Fatal Python error: ")
_PREDICTED = ".predicted"
NO_PYARROW = "Predictions are not plotted: pyarrow is not installed (pip install 'instar[hf]')."


class _Metric(msgspec.Struct):
    value: float
    standard_error: float | None = None


class _Result(msgspec.Struct):
    step: int
    weights: str
    samples: int
    metrics: dict[str, _Metric]
    confusion: dict[str, list[list[int]]] = {}
    checkpoint: CheckpointId | None = None
    predictions_xxh3_128: str | None = None


@dataclass(frozen=True)
class Scatter:
    """True and predicted values of a numeric target."""

    target: str
    true: Floats
    predictions: Floats
    count: int
    """number of all pairs, from which these are sampled"""


@dataclass(frozen=True)
class FinalTest:
    """The results of a run's final test."""

    step: int
    weights: str
    """`best`, `last`, or the name of a checkpoint"""
    samples: int
    metrics: dict[str, tuple[float, float | None]]
    """value and standard error"""
    confusion: dict[str, list[list[int]]]
    """confusion matrix by target: counts by true class (row) and predicted class (column)"""
    scatters: tuple[Scatter, ...]
    notes: tuple[str, ...]
    """what could not be shown, in sentences"""


def read_final_test(run: RunDir, points: int = 3000) -> FinalTest | None:
    """Return the final test of `run`, or None; `points`: maximum number of pairs of a scatter."""
    folder = run.path / "test"
    try:
        content = read_regular(folder / "result.json")
    except OSError:
        return None
    notes: list[str] = []
    try:
        result = msgspec.json.decode(content, type=_Result, strict=False)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return FinalTest(0, "", 0, {}, {}, (), (f"test/result.json cannot be read: {error}",))
    notes += _stale(run, result)
    scatters = _scatters(folder / "predictions.parquet", points, notes, result.predictions_xxh3_128)
    return FinalTest(
        step=result.step,
        weights=result.weights,
        samples=result.samples,
        metrics={name: (m.value, m.standard_error) for name, m in result.metrics.items()},
        confusion=result.confusion,
        scatters=scatters,
        notes=tuple(notes),
    )


def _stale(run: RunDir, result: _Result) -> Iterator[str]:
    """Yield why a result is not of the run as it is now."""
    if (checkpoint := result.checkpoint) is None:
        return
    path = run.checkpoints / checkpoint.name
    try:
        if identify(path) != checkpoint:
            yield f"The test is of an earlier {checkpoint.name}; another checkpoint has that name now."
        elif (step := superseded_at(read_manifest(path), line_of(run.path))) is not None:
            yield f"The test is of {checkpoint.name}, which lies on a branch that the run left at step {step:,}."
    except CheckpointError:
        yield f"{checkpoint.name}, of which the test is, is no longer on disk."


def _scatters(
    file: Path, points: int, notes: list[str], checksum: str | None
) -> tuple[Scatter, ...]:
    if not os.path.lexists(file):
        return ()
    if find_spec("pyarrow") is None:
        notes.append(NO_PYARROW)
        return ()
    from pyarrow import ArrowException, parquet, types

    try:
        if checksum is not None and file_entry(file, "").xxh3_128 != checksum:
            notes.append("test/predictions.parquet is not of the test of test/result.json.")
            return ()
        with open_regular(file) as stream, parquet.ParquetFile(stream) as table:
            names = [name for name in table.schema_arrow.names if name.endswith(_PREDICTED)]
            scatters = [
                _scatter(types, table, name.removesuffix(_PREDICTED), points) for name in names
            ]
    except (OSError, ArrowException) as error:
        notes.append(f"test/predictions.parquet cannot be read: {error}")
        return ()
    return tuple(scatter for scatter in scatters if scatter is not None)


def _scatter(types: Any, table: Any, target: str, points: int) -> Scatter | None:
    """Sample pairs of a target evenly from the whole file, read in batches; `types`: the module of pyarrow."""
    schema, names = table.schema_arrow, [target, target + _PREDICTED]
    if target not in schema.names:
        return None
    if not all(types.is_floating(_inner(types, schema.field(name).type)) for name in names):
        return None
    every = max(1, table.metadata.num_rows // points)
    parts, count = list[Any](), 0
    for batch in table.iter_batches(columns=names, batch_size=1 << 16):
        pair = np.stack([_flat(types, batch.column(name)) for name in names])
        count += pair.shape[1]
        parts.append(pair[:, ::every])
    pairs = np.concatenate(parts, axis=1) if parts else np.zeros((2, 0))
    pairs = pairs[:, np.isfinite(pairs).all(axis=0)]
    pairs = pairs[:, :: max(1, -(-pairs.shape[1] // points))]
    return Scatter(target, pairs[0], pairs[1], count) if pairs.size else None


def _inner(types: Any, kind: Any) -> Any:
    nested = types.is_list(kind) or types.is_fixed_size_list(kind)
    return kind.value_type if nested else kind


def _flat(types: Any, column: Any) -> Floats:
    nested = _inner(types, column.type) != column.type
    flat = column.flatten() if nested else column
    return np.asarray(flat.to_numpy(zero_copy_only=False), np.float64)


@dataclass(frozen=True)
class RunFailure:
    """The error of a crashed run."""

    type: str
    """of the exception; empty if unknown, e.g. of a killed process"""
    message: str
    rank: int | None
    step: int | None
    resume: str
    """command that resumes the run; empty if it cannot be resumed"""
    log: tuple[str, ...]
    """the end of the rank's log, from its last error on if there is one"""


def run_failure(record: RunRecord) -> RunFailure | None:
    """Return what ended a run; None unless it has crashed."""
    summary = summarize(record)
    if summary.state != "crashed":
        return None
    message, rank, step = summary.reason, None, None
    if match := _SENTENCE.fullmatch(summary.reason):
        rank, message = int(match[1]), match[3]
        step = int(match[2].replace(",", "")) if match[2] else None
    failures = record.of(Failed)
    if failures and failures[-1].event.segment == summary.segments:
        rank, step = failures[-1].event.rank, failures[-1].event.step
    kind = ""
    if match := _TYPE.match(message):
        kind, message = match[1] or match[2], message[match.end() :]
    log = _end_of_log(record, rank or 0)
    return RunFailure(kind, message, rank, step, summary.go_on, log)


def _end_of_log(record: RunRecord, rank: int) -> tuple[str, ...]:
    lines: list[bytes] = []
    with suppress(OSError):
        lines, _ = last_lines(record.run.log(rank), 4 * MAX_LINES)
    errors = [number for number, line in enumerate(lines) if _ERROR.search(line)]
    # a line of context before the error
    excerpt = lines[max(0, errors[-1] - 1) :][:MAX_LINES] if errors else lines[-MAX_LINES:]
    return tuple(line.decode("utf-8", "replace").rpartition("\r")[2] for line in excerpt)
