"""Metrics as columns: one table for each kind of measurement, one array for each of its metrics."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from itertools import starmap
from operator import attrgetter, or_
from typing import Any, cast, get_type_hints

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import astuple

from instar.record.events import (
    TRAIN_METRICS,
    Eval,
    Event,
    ExtensionEvent,
    Layers,
    RecordError,
    Train,
    event_kinds,
    extra,
    metrics,
)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Column = npt.NDArray[Any]
Measured = Sequence[Train] | Sequence[Eval] | Sequence[Layers] | Sequence[ExtensionEvent]

CELLS = 1 << 27
"""Cells that a table may have beyond the bytes of its record. A written number takes several bytes,
but a metric written only once still has a cell for every step."""
AXIS_TYPES = {
    "step": "<i8",
    "samples": "<i8",
    "tokens": "<i8",
    "segment": "<i8",
    "epoch": "<f8",
    "flops": "<f8",
    "wall_s": "<f8",
    "active_s": "<f8",
    "time": "<f8",
}
ABSENT_BITS = 0x7FF8_0000_000A_B5E7
ABSENT: float = np.array([ABSENT_BITS], "<i8").view("<f8")[0].item()
"""A NaN with its own bit pattern: no value was written. `present` tells it from a measured NaN."""
_types = get_type_hints(Train, include_extras=True)
_optional = [field.name for field in msgspec.structs.fields(Train) if field.default is None]
_Step: Any = msgspec.defstruct(
    "_Step",
    [(name, _types[name], ABSENT) for name in _optional],
    bases=(Train,),
    tag="train",
    frozen=True,
    kw_only=True,
    gc=False,
)
"""A `Train` whose missing metrics are `ABSENT` instead of None, so that all fields are numbers."""
_form = {
    name: "d" if AXIS_TYPES.get(name) == "<f8" or name in ("loss", *_optional) else "q"
    for name in Train.__struct_fields__
} | {"extra": "?"}
_row = struct.Struct("@" + "".join(_form.values()) + "0q")
"""One step: eight bytes for each field."""


@dataclass(frozen=True)
class MetricTable:
    """Measurements of one kind, in the order in which they were written.

    All columns have `rows` values. A column may be loaded lazily.
    """

    rows: int
    axes: Mapping[str, Column]
    metrics: Mapping[str, Column]
    first_steps: Mapping[int, int] = field(default_factory=dict)
    """of each segment"""


@dataclass
class TableBuilder:
    """Builds a `MetricTable` from measurements added in parts."""

    rows: int = 0
    axes: dict[str, _Column] = field(default_factory=dict)
    metrics: dict[str, _Column] = field(default_factory=dict)
    first_steps: dict[int, int] = field(default_factory=dict)

    def add(self, events: Measured, max_cells: int = CELLS) -> None:
        """Add measurements.

        Raises:
            RecordError: the table would have more than `max_cells` cells.
        """
        axes, columns = _columns(events, lambda names: self._check(names, len(events), max_cells))
        for name, dtype in AXIS_TYPES.items():
            self.axes.setdefault(name, _Column(dtype)).add(axes[name])
        for name in columns:
            if name not in self.metrics:
                self.metrics[name] = _Column("<f8")
                self.metrics[name].add(absent(self.rows))
        for name, column in self.metrics.items():
            column.add(columns[name] if name in columns else absent(len(events)))
        for segment, place in zip(*np.unique(axes["segment"], return_index=True), strict=True):
            self.first_steps.setdefault(int(segment), int(axes["step"][place]))
        self.rows += len(events)

    def _check(self, names: Iterable[str], more: int, max_cells: int) -> None:
        count, rows = len({*self.metrics, *names}), self.rows + more
        if count * rows > max_cells:
            raise RecordError(
                f"{count:,} metrics of {rows:,} measurements are more than a record of its size "
                "can hold"
            )

    def table(self) -> MetricTable:
        return MetricTable(
            self.rows,
            {name: column.values() for name, column in self.axes.items()},
            {name: column.values() for name, column in self.metrics.items()},
            self.first_steps,
        )


class _Column:
    """An array that grows part by part."""

    def __init__(self, dtype: str) -> None:
        self._parts: list[Column] = [np.empty(0, dtype)]

    def add(self, values: Column) -> None:
        self._parts.append(np.ascontiguousarray(values))

    def values(self) -> Column:
        if len(self._parts) > 1:
            self._parts = [np.concatenate(self._parts)]
        return self._parts[0]


def absent(rows: int) -> Column:
    return np.full(rows, ABSENT, "<f8")


def present(values: Column) -> Column:
    """Return a mask of the values that were written."""
    mask: Column = values.view("<i8") != ABSENT_BITS
    return mask


def is_measured(kind: type[Event]) -> bool:
    """Return whether events of a kind are rows of a table."""
    return issubclass(kind, Train | Eval | Layers) or bool(getattr(kind, "table", ""))


def tables_of(events: Sequence[Event]) -> dict[str, Measured]:
    """Group measurements by the name of their table; each held-out split has its own."""
    if events and set(map(type, events)) == {type(events[0])} and isinstance(events[0], Train):
        return {"train": cast("Sequence[Train]", events)}
    tables: dict[str, Any] = {}
    for event in events:
        if isinstance(event, Train):
            tables.setdefault("train", []).append(event)
        elif isinstance(event, Eval):
            tables.setdefault(f"eval {event.split}", []).append(event)
        elif isinstance(event, Layers):
            tables.setdefault("layers", []).append(event)
        elif isinstance(event, ExtensionEvent) and event.table:
            tables.setdefault(event.table, []).append(event)
    return tables


def join_tables(tables: Sequence[MetricTable]) -> MetricTable:
    """Concatenate tables; columns are joined lazily."""
    if len(tables) == 1:
        return tables[0]

    def join_column(part: str, name: str) -> Column:
        sides: list[Column] = []
        for table in tables:
            columns: Mapping[str, Column] = getattr(table, part)
            if name not in columns:
                sides.append(absent(table.rows))
            elif isinstance(columns, LazyColumns):
                sides.append(columns.once(name))
            else:
                sides.append(columns[name])
        return np.concatenate(sides)

    def lazily(part: str) -> Mapping[str, Column]:
        names = dict.fromkeys(name for table in tables for name in getattr(table, part))
        return LazyColumns(list(names), lambda name: join_column(part, name))

    first_steps: dict[int, int] = {}
    for table in tables:
        first_steps = {**table.first_steps, **first_steps}
    rows = sum(table.rows for table in tables)
    return MetricTable(rows, lazily("axes"), lazily("metrics"), first_steps)


class LazyColumns(Mapping[str, Any]):
    """A mapping that computes values on first access and caches them."""

    def __init__(self, names: Sequence[str], make: Callable[[str], Any]) -> None:
        self._names = dict.fromkeys(names)
        self._make = make
        self._columns: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._columns:
            self._columns[name] = self.once(name)
        return self._columns[name]

    def once(self, name: str) -> Any:
        """Return the value without caching it."""
        if name not in self._names:
            raise KeyError(name)
        return self._columns[name] if name in self._columns else self._make(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _columns(
    events: Measured, check: Callable[[Iterable[str]], None]
) -> tuple[Mapping[str, Column], dict[str, Column]]:
    """Return axes and metrics of measurements of one kind; call `check` with the names first."""
    if isinstance(events[0], Train):
        table = table_of(cast("Sequence[Train]", events))
        axes = {name: table[name] for name in AXIS_TYPES}
        columns = {name: table[name] for name in TRAIN_METRICS if present(table[name]).any()}
        rows = [extra(cast("Train", e)) for e in events] if table["extra"].any() else []
    else:
        axes = {
            name: np.fromiter(map(attrgetter(name), events), dtype, len(events))
            for name, dtype in AXIS_TYPES.items()
        }
        columns, rows = {}, [metrics(event) for event in events]
    names = dict.fromkeys(name for row in rows for name in row)
    check((*columns, *names))
    for name in names:
        columns[name] = np.array([row.get(name, ABSENT) for row in rows], "<f8")
    return axes, columns


@cache
def _decoder() -> Any:
    kinds = [_Step if kind is Train else kind for kind in event_kinds().values()]
    return msgspec.json.Decoder(reduce(or_, kinds), strict=False)


def decode_measurements(block: bytes) -> list[Event]:
    """Decode complete lines, much faster than one by one, with `ABSENT` for missing train metrics; blank lines
    are ignored.

    Raises:
        msgspec.MsgspecError, ValueError, RecursionError: a line is not an event, or of an unknown
            kind, which only `decode_event` supports.
    """
    events: list[Event] = _decoder().decode_lines(block)
    return events


def table_of(steps: Sequence[Train]) -> dict[str, Column]:
    """Return each field of all steps as a column, `ABSENT` for None; for `extra`, whether any is set."""
    try:
        rows = b"".join(starmap(_row.pack, map(astuple, steps)))
    except struct.error:  # a field is None
        rows = b"".join(
            _row.pack(*[ABSENT if field is None else field for field in astuple(step)])
            for step in steps
        )
    columns = np.frombuffer(rows, "f8").reshape(len(steps), len(_form)).T.copy()
    return {
        name: column if code == "d" else column.view("i8")
        for (name, code), column in zip(_form.items(), columns, strict=True)
    }
