"""The record of a run, read: metrics as columns, and everything that happened beside them.

Nothing that a run has written is ever deleted. What a later segment superseded, by going on from
an earlier step, is masked (`kept` is false) and can still be had.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from instar.config.errors import ConfigError
from instar.logs.reading import cache
from instar.logs.reading.columns import Lazy, Table, present
from instar.logs.reading.lineage import EVERYTHING, Lineage
from instar.logs.reading.lines import no_record
from instar.logs.reading.scan import Content, scan
from instar.record.events import Event, Placed, RecordError, decode
from instar.record.metrics import TRAIN_METRICS
from instar.record.rundir import RunDir

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]
    Ints = npt.NDArray[np.int64]
    Bools = npt.NDArray[np.bool_]

AXES = ("step", "samples", "tokens", "epoch", "flops", "wall_s", "active_s", "time")
"""What a curve can be drawn over."""

ALIASES = {
    "learning_rate": "lr",
    "eval_loss": "val/loss",
    "val_loss": "val/loss",
    "val": "val/loss",
    "throughput": "tokens_per_s",
    "memory": "memory_bytes",
}
"""Other people's names of metrics."""


class Series:
    """One metric of one run, in the order in which it was written; all arrays have one length.

    A place from which the run's newest segment does not descend, because the run went on from an
    earlier step or from another segment's checkpoint, has `kept` false. Non-finite values are as
    they were. An axis is read when it is asked for. Arrays are shared between series: not to be
    written to.
    """

    def __init__(
        self, name: str, value: Floats, axes: Mapping[str, npt.NDArray[Any]], kept: Bools
    ) -> None:
        """`axes`: those of `AXES`, and `segment`."""
        self.name = name
        self.value = value
        self.kept = kept
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
        """One of `AXES` as floats."""
        return np.asarray(self._axes[name], np.float64)

    def take(self, which: Ints | Bools) -> Series:
        """Of these places only."""
        axes = Lazy([*self._axes], lambda name: self._axes[name][which])
        return Series(self.name, self.value[which], axes, self.kept[which])

    def current(self) -> Series:
        """Without what was superseded: one curve, its steps never falling."""
        return self if self.kept.all() else self.take(self.kept)


@dataclass(frozen=True)
class Logged:
    """An event, and whether it still counts."""

    event: Event
    kept: bool = True


class RunRecord:
    """A run's record as it was when it was read."""

    def __init__(
        self,
        run: RunDir,
        events: Sequence[Logged],
        table: Mapping[str, Series],
        faults: Sequence[str],
        end: int = 0,
    ) -> None:
        self.run = run
        self.events = tuple(events)
        """all but `train`, `eval` and `layers`, in the order in which they were written"""
        self.faults = tuple(faults)
        """what could not be read and was passed over, with its line"""
        self.end = end
        """the byte of the file behind the last line that was read: where a `Follower` goes on"""
        self._table = table

    @property
    def metrics(self) -> tuple[str, ...]:
        """`loss`, `lr`, `val/loss`, `val/accuracy`, `grad_norm/blocks.0`, …"""
        return tuple(self._table)

    def __contains__(self, metric: object) -> bool:
        return ALIASES.get(str(metric), metric) in self._table

    def series(self, metric: str) -> Series:
        """A metric by its name or another tool's, what was superseded included.

        Raises:
            ConfigError: the run has none of that name; suggests one.
        """
        name = ALIASES.get(metric, metric)
        if name not in self._table:
            raise unknown_metric(metric, self.metrics, str(self.run.path))
        return self._table[name]

    def of(self, kind: type[Event]) -> list[Logged]:
        """The events of one kind."""
        return [logged for logged in self.events if isinstance(logged.event, kind)]


def unknown_metric(metric: str, known: Sequence[str], where: str) -> ConfigError:
    from difflib import get_close_matches

    near = get_close_matches(metric, [*known, *ALIASES], n=1)
    listed = ", ".join(known) or "none"
    hint = f"did you mean {near[0]!r}?" if near else f"it has {listed}"
    return ConfigError.one(f"no metric {metric!r} in {where}", hint=hint)


def read(run: RunDir) -> RunRecord:
    """Read a run's record, also while it is written; a large one through its column cache.

    Lines that are no events are passed over and told of in `faults`. An empty record holds
    nothing.

    Raises:
        RecordError: the file cannot be read, or it is not empty and nothing in it is an event.
    """
    folder = run.path / "cache"
    try:
        small = run.events.stat().st_size < cache.SMALL_BYTES
        found = scan(run.events) if small else cache.content(run.events, folder)
        if not found.tables and not found.events and (fault := no_record(run.events)):
            raise RecordError(fault)
    except OSError as error:
        raise RecordError(f"cannot read {run.events}: {error.strerror}") from error
    try:
        return _record(run, found)
    except cache.Damaged:
        return _record(run, _anew(run, found))


def _record(run: RunDir, found: Content) -> RunRecord:
    events = [decode(line) for line in found.events]
    lineage = Lineage()
    for event in events:
        lineage.take(event)
    last_steps = lineage.limits(_first_steps(found.tables))
    logged = [
        Logged(e, not isinstance(e, Placed) or e.step <= last_steps.get(e.segment, EVERYTHING))
        for e in events
    ]
    return RunRecord(run, logged, _Metrics(run, found, last_steps), _faults(run, found), found.end)


class _Metrics(Mapping[str, Series]):
    """Series, each made when it is first asked for."""

    def __init__(self, run: RunDir, found: Content, last_steps: dict[int, int]) -> None:
        self._run = run
        self._found = found
        self._last_steps = last_steps
        self._tables: dict[str, str] = {}
        for table in sorted(found.tables, key=lambda name: name != "train"):
            there = found.tables[table].metrics
            first = [metric for metric in TRAIN_METRICS if table == "train" and metric in there]
            for metric in (*first, *there):
                self._tables.setdefault(metric, table)
        self._kept = Lazy([*found.tables], self._kept_of)
        self._series = Lazy([*self._tables], self._series_of)

    def __getitem__(self, metric: str) -> Series:
        return self._series[metric]  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def _column(self, table: str, part: Literal["axes", "metrics"], name: str) -> Any:
        try:
            return getattr(self._found.tables[table], part)[name]
        except cache.Damaged:
            self._found = _anew(self._run, self._found)
            return getattr(self._found.tables[table], part)[name]

    def _kept_of(self, table: str) -> Bools:
        kept = np.ones(self._found.tables[table].rows, np.bool_)
        for segment, last in self._last_steps.items():
            if last != EVERYTHING:
                written_in, step = (self._column(table, "axes", n) for n in ("segment", "step"))
                kept &= (written_in != segment) | (step <= last)
        return kept

    def _series_of(self, metric: str) -> Series:
        table = self._tables[metric]
        value = self._column(table, "metrics", metric)
        axes = Lazy([*AXES, "segment"], lambda name: self._column(table, "axes", name))
        whole = Series(metric, value, axes, self._kept[table])
        there = present(value)
        return whole if there.all() else whole.take(there)


def _first_steps(tables: Mapping[str, Table]) -> dict[int, int]:
    """The first measured step of each segment."""
    first: dict[int, int] = {}
    for table in tables.values():
        for segment, step in table.first_steps.items():
            first[segment] = min(step, first.get(segment, step))
    return first


def _anew(run: RunDir, found: Content) -> Content:
    """At least the same part of the record, without the cache, which is damaged."""
    cache.discard(run.path / "cache")
    return scan(run.events, until=found.end)


def _faults(run: RunDir, found: Content) -> list[str]:
    told = [f"{run.events}:{line}: {reason}" for line, reason in found.faults]
    if more := found.passed_over - len(told):
        told.append(f"{run.events}: {more:,} more line{'s' if more > 1 else ''} like these")
    return told
