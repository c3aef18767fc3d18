"""Reads the record of a run: metrics as columns, all other events as objects.

Written events are never deleted. Steps superseded by a resume from an earlier step are masked
(`is_current` is false) but still available.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, cast

import numpy as np

from instar.config.errors import ConfigError, nearest_hint
from instar.logs.read import cache
from instar.logs.read.columns import Bools, Column, Floats, Ints, LazyColumns, MetricTable, present
from instar.logs.read.lines import no_record
from instar.logs.read.reader_cache import cache_folder
from instar.logs.read.scan import Content, scan
from instar.logs.read.segments import EVERYTHING, SegmentTree
from instar.record.events import (
    NOT_AN_EVENT,
    TRAIN_METRICS,
    BeginsAnew,
    Event,
    Placed,
    RecordError,
    RunStarted,
    decode_event,
)
from instar.record.progress import track_items
from instar.record.rundir import RunDir

AXES = ("step", "samples", "tokens", "epoch", "flops", "wall_s", "active_s", "time")
"""x axes of curves"""

ALIASES = {
    "learning_rate": "lr",
    "eval_loss": "val/loss",
    "val_loss": "val/loss",
    "val": "val/loss",
    "throughput": "tokens_per_s",
    "memory": "memory_bytes",
}
"""other names of metrics"""
E = TypeVar("E", bound=Event, covariant=True)
K = TypeVar("K", bound=Event)
Direction = Literal["min", "max"]
_LOW = re.compile(
    "loss|mae|mse|rmse|msle|nll|bpb|bpc|cer|wer|error|perplexity|ppl|brier|ece|regret"
)
_HIGH = re.compile(
    "accuracy|acc|r2|auc|auroc|auprc|ap|map|f1|precision|recall|mcc|kappa|iou|dice|bleu|rouge|"
    "correlation|pearson|spearman|reward|return|score|variance"
)


class Series:
    """One metric of one run in the order of writing; all arrays have shape [n].

    `is_current` is false for superseded points: the run was resumed from an earlier step or from another
    segment's checkpoint. Non-finite values are unchanged. Axes are loaded lazily. Arrays are shared
    between series; do not write to them.
    """

    def __init__(
        self,
        name: str,
        value: Floats,
        axes: Mapping[str, Column],
        is_current: Bools,
        better: Direction | None = None,
        since: tuple[int, float] | None = None,
    ) -> None:
        """
        Args:
            axes: by name: `AXES` and `segment`.
            better: the direction that the run declares; None: inferred from the name.
            since: from when values are comparable with the last one: segment, and Unix seconds by the clock of its
                machine; None: all are.
        """
        self.name = name
        self.since = since
        self.better = better or direction(name)
        """`min`, `max`, or None: the metric has no direction"""
        self.value = value
        self.is_current = is_current
        self._axes = axes

    def __len__(self) -> int:
        return len(self.value)

    @property
    def step(self) -> Ints:
        return self._axes["step"]

    @property
    def samples(self) -> Ints:
        return self._axes["samples"]

    @property
    def tokens(self) -> Ints:
        return self._axes["tokens"]

    @property
    def segment(self) -> Ints:
        return self._axes["segment"]

    @property
    def epoch(self) -> Floats:
        return self._axes["epoch"]

    @property
    def flops(self) -> Floats:
        return self._axes["flops"]

    @property
    def wall_s(self) -> Floats:
        return self._axes["wall_s"]

    @property
    def active_s(self) -> Floats:
        return self._axes["active_s"]

    @property
    def time(self) -> Floats:
        """Unix seconds."""
        return self._axes["time"]

    def axis(self, name: str) -> Floats:
        """Return one of `AXES` as floats."""
        return np.asarray(self._axes[name], np.float64)

    def take(self, rows: Ints | Bools) -> Series:
        """Return the series at these indices, or where the mask is true."""
        axes = LazyColumns([*self._axes], lambda name: self._axes[name][rows])
        return Series(
            self.name, self.value[rows], axes, self.is_current[rows], self.better, self.since
        )

    def best(self, usable: Bools) -> int | None:
        """Return the index of the first best of the usable values that are comparable with the last one;
        None: there is none, or no direction."""
        if self.since is not None:
            segment, seconds = self.since
            is_later = (self.segment == segment) & (self.time >= seconds)
            usable = usable & ((self.segment > segment) | is_later)
        if self.better is None or not usable.any():
            return None
        values = np.where(usable, self.value, np.inf if self.better == "min" else -np.inf)
        return int(values.argmin() if self.better == "min" else values.argmax())

    def current(self) -> Series:
        """Return the series without superseded points; its steps never decrease."""
        return self if self.is_current.all() else self.take(self.is_current)


@dataclass(frozen=True)
class RecordedEvent(Generic[E]):
    """An event; `is_current` is false if it was superseded."""

    event: E
    is_current: bool = True


class RunRecord:
    """A snapshot of a run's record."""

    def __init__(
        self,
        run: RunDir,
        events: Sequence[RecordedEvent[Event]],
        table: Mapping[str, Series],
        faults: Sequence[str],
        end: int = 0,
    ) -> None:
        self.run = run
        self.events = tuple(events)
        """all but `train`, `eval` and `layers`, in the order in which they were written"""
        self.faults = tuple(faults)
        """lines that could not be read and were skipped, with the reason"""
        self.end = end
        """the byte offset after the last line read, where a `Follower` continues"""
        self._table = table

    @property
    def metrics(self) -> tuple[str, ...]:
        """`loss`, `lr`, `val/loss`, `val/accuracy`, `grad_norm/blocks.0`, …"""
        return tuple(self._table)

    def __contains__(self, metric: object) -> bool:
        return metric_of(str(metric), self._table) in self._table

    def series(self, metric: str) -> Series:
        """Return a metric by its name or an alias, superseded points included.

        Raises:
            ConfigError: the run has no such metric; suggests one.
        """
        name = metric_of(metric, self._table)
        if name not in self._table:
            raise unknown_metric(metric, self.metrics, str(self.run.path))
        return self._table[name]

    def of(self, kind: type[K]) -> list[RecordedEvent[K]]:
        """Return the events of one kind."""
        return [
            cast("RecordedEvent[K]", entry)
            for entry in self.events
            if isinstance(entry.event, kind)
        ]


def metric_of(name: str, metrics: Container[str]) -> str:
    """Return the metric that a name means: the one recorded under it, else the one that has it as another name."""
    return name if name in metrics else ALIASES.get(name, name)


def metrics_of(names: Iterable[str], records: Iterable[RunRecord]) -> list[str]:
    """Return the metrics that names mean in records; see `metric_of`."""
    recorded = {metric for record in records for metric in record.metrics}
    return [metric_of(name, recorded) for name in names]


def unknown_metric(metric: str, metrics: Sequence[str], where: str) -> ConfigError:
    available = ", ".join(metrics) or "none"
    hint = nearest_hint(metric, [*metrics, *ALIASES], f"it has {available}")
    return ConfigError.of(f"no metric {metric!r} in {where}", hint=hint)


def read_record(run: RunDir) -> RunRecord:
    """Read a run's record, also while it is being written; a large one from its cached columns.

    Lines that are not events are skipped and listed in `faults`. An empty record has no events.

    Raises:
        RecordError: the file cannot be read, or is not empty and contains no event.
    """
    try:
        small = run.events.stat().st_size < cache.SMALL_BYTES
        content = scan(run.events) if small else cache.read_content(run)
        if not content.tables and not content.events and (fault := no_record(run.events)):
            raise RecordError(fault)
    except OSError as error:
        raise RecordError(f"cannot read {run.events}: {error.strerror}") from error
    return _record(run, content)


def _record(run: RunDir, content: Content, attempt: int = 0) -> RunRecord:
    try:
        return _decode_record(run, content, attempt)
    except (cache.Damaged, *NOT_AN_EVENT):
        if attempt > 1:
            raise
        return _record(run, _reread(run, content, attempt + 1), attempt + 1)


def _decode_record(run: RunDir, content: Content, attempt: int) -> RunRecord:
    events = [decode_event(line) for line in content.events]
    lineage = SegmentTree()
    for event in events:
        lineage.take(event)
    last_steps = lineage.limits(_first_steps(content.tables))
    entries = [
        RecordedEvent(
            e, not isinstance(e, Placed) or e.step <= last_steps.get(e.segment, EVERYTHING)
        )
        for e in events
    ]
    better: dict[str, Direction] = {}
    for event in events:
        if isinstance(event, RunStarted):
            better |= {name: "max" if b == "max" else "min" for name, b in event.better.items()}
    changes = [
        entry.event for entry in entries if entry.is_current and isinstance(entry.event, BeginsAnew)
    ]
    since = (changes[-1].segment, changes[-1].time) if changes else None
    table = _Metrics(run, content, last_steps, better, since, attempt)
    return RunRecord(run, entries, table, _faults(run, content), content.end)


class _Metrics(Mapping[str, Series]):
    """Series by name, each created on first access."""

    def __init__(
        self,
        run: RunDir,
        content: Content,
        last_steps: dict[int, int],
        better: Mapping[str, Direction],
        since: tuple[int, float] | None,
        attempt: int,
    ) -> None:
        self._better, self._since = better, since
        self._attempt = attempt
        self._run = run
        self._content = content
        self._last_steps = last_steps
        self._tables: dict[str, str] = {}
        for table in sorted(content.tables, key=lambda name: name != "train"):
            columns = content.tables[table].metrics
            first = [metric for metric in TRAIN_METRICS if table == "train" and metric in columns]
            for metric in (*first, *columns):
                # a number that training logged as `val/loss` hides no evaluation
                if table.startswith("eval ") or metric not in self._tables:
                    self._tables[metric] = table
        self._is_current = LazyColumns([*content.tables], self._currents_of)
        self._series = LazyColumns([*self._tables], self._series_of)

    def __getitem__(self, metric: str) -> Series:
        return self._series[metric]  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def _column(self, table: str, part: Literal["axes", "metrics"], name: str) -> Any:
        try:
            return getattr(self._content.tables[table], part)[name]
        except cache.Damaged:
            self._attempt += 1
            self._content = _reread(self._run, self._content, self._attempt)
            return self._column(table, part, name)
        except KeyError as error:
            raise RecordError(
                f"{self._run.path / cache.COLUMNS} does not match the record beside it: delete it"
            ) from error

    def _currents_of(self, table: str) -> Bools:
        is_current = np.ones(self._content.tables[table].rows, np.bool_)
        for segment, last in self._last_steps.items():
            if last != EVERYTHING:
                segments, step = (self._column(table, "axes", n) for n in ("segment", "step"))
                is_current &= (segments != segment) | (step <= last)
        return is_current

    def _series_of(self, metric: str) -> Series:
        table = self._tables[metric]
        value = self._column(table, "metrics", metric)
        axes = LazyColumns([*AXES, "segment"], lambda name: self._column(table, "axes", name))
        better = self._better.get(metric.partition("/")[2]) if "/" in metric else None
        is_compared = table.startswith("eval ") and table != "eval test"
        since = self._since if is_compared else None
        all_values = Series(metric, value, axes, self._is_current[table], better, since)
        is_present = present(value)
        return all_values if is_present.all() else all_values.take(is_present)


def _first_steps(tables: Mapping[str, MetricTable]) -> dict[int, int]:
    """Return the first measured step of each segment."""
    first: dict[int, int] = {}
    for table in tables.values():
        for segment, step in table.first_steps.items():
            first[segment] = min(step, first.get(segment, step))
    return first


def _reread(run: RunDir, content: Content, attempt: int) -> Content:
    """Read the same part of the record from another source, because columns are damaged.

    `attempt` 1: from the reader's own cache, created if missing, so that damaged columns in a run's
    folder cost one scan, not one per reading. 2: from the record alone.
    """
    if attempt == 1:
        return cache.read_cached_content(run, until=content.end)
    if (folder := cache_folder(run)) is not None:
        cache.discard_columns(folder)
    return scan(run.events, until=content.end)


def _faults(run: RunDir, content: Content) -> list[str]:
    lines = [f"{run.events}:{line}: {reason}" for line, reason in content.faults]
    if more := content.passed_over - len(lines):
        lines.append(f"{run.events}: {more:,} more line{'s' if more > 1 else ''} like these")
    return lines


def direction(metric: str) -> Direction | None:
    """Return `min` for losses and errors, `max` for accuracies and scores, else None.

    Any word in the last part of the name decides: `val/kind/accuracy`, `test/top5_acc`.
    """
    last = metric.rpartition("/")[2].lower()
    if ":" in last:
        return None  # a standard error
    words = [last.partition("@")[0], *last.split("_")]
    if any(map(_LOW.fullmatch, words)):
        return "min"
    return "max" if any(map(_HIGH.fullmatch, words)) else None


def losses_of_parts(metrics: Iterable[str]) -> tuple[str, ...]:
    """Return the losses beside `val/loss` on held-out samples: of `eval.sets`, as `german/loss`, and of parts, `val/books/loss`."""
    losses = (name for name in metrics if name.endswith("/loss") and name != "val/loss")
    return tuple(name for name in losses if not name.startswith(("train/", "test/")))


def read_records(runs: Sequence[RunDir]) -> list[RunRecord]:
    """Read many runs, in order; uncached records are parsed by one process per core.

    Raises:
        RecordError: see `read`.
    """
    cache.fill_caches(runs)
    return [read_record(run) for run in track_items(runs, "reading records", "runs", len(runs))]


@dataclass(frozen=True)
class RecordsRead:
    """Records of runs, and the errors of runs whose record cannot be read."""

    records: tuple[RunRecord, ...]
    faults: tuple[str, ...]


def read_all(runs: Sequence[RunDir]) -> RecordsRead:
    """Read the records of runs, in order.

    Raises:
        RecordError: none of them can be read.
    """
    with suppress(RecordError):
        return RecordsRead(tuple(read_records(runs)), ())
    records, faults = [], []
    for run in runs:
        try:
            records.append(read_record(run))
        except RecordError as error:
            faults.append(str(error))
    if not records:
        raise RecordError("\n".join(faults))
    return RecordsRead(tuple(records), tuple(faults))
