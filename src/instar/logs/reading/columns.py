"""Metrics as columns: one table for each kind of measurement, one array for each of its metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from instar.record.events import Eval, Event, Layers, Train
from instar.record.metrics import TRAIN_METRICS, extra, metrics

if TYPE_CHECKING:
    import numpy.typing as npt

    Column = npt.NDArray[Any]
    Measured = Sequence[Train] | Sequence[Eval] | Sequence[Layers]

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
_ABSENT_BITS = 0x7FF8_0000_000A_B5E7
ABSENT: float = np.array([_ABSENT_BITS], "<i8").view("<f8")[0].item()
"""A NaN of its own: no value was written there. `present` tells it from one that was measured."""


@dataclass(frozen=True)
class Table:
    """Measurements of one kind, in the order in which they were written.

    All columns have `rows` places. A column may be read only when it is asked for.
    """

    rows: int
    axes: Mapping[str, Column]
    metrics: Mapping[str, Column]
    first_steps: Mapping[int, int] = field(default_factory=dict)
    """of each segment"""


@dataclass
class Growing:
    """A table that measurements are added to."""

    rows: int = 0
    axes: dict[str, _Column] = field(default_factory=dict)
    metrics: dict[str, _Column] = field(default_factory=dict)
    first_steps: dict[int, int] = field(default_factory=dict)

    def add(self, events: Measured) -> None:
        for name, dtype in AXIS_TYPES.items():
            column = self.axes.setdefault(name, _Column(dtype))
            column.add(np.fromiter(map(attrgetter(name), events), dtype, len(events)))
        found = dict(_metrics(events))
        for name in found:
            if name not in self.metrics:
                self.metrics[name] = _Column("<f8")
                self.metrics[name].add(absent(self.rows))
        for name, column in self.metrics.items():
            column.add(found[name] if name in found else absent(len(events)))
        for segment in {event.segment for event in events}.difference(self.first_steps):
            first = next(event for event in events if event.segment == segment)
            self.first_steps[segment] = first.step
        self.rows += len(events)

    def table(self) -> Table:
        return Table(
            self.rows,
            {name: column.values() for name, column in self.axes.items()},
            {name: column.values() for name, column in self.metrics.items()},
            self.first_steps,
        )


class _Column:
    """An array that grows in place."""

    def __init__(self, dtype: str) -> None:
        self._room: Column = np.empty(0, dtype)
        self._rows = 0

    def add(self, values: Column) -> None:
        rows = self._rows + len(values)
        if rows > len(self._room):
            self._room.resize(max(rows, len(self._room) * 5 // 4), refcheck=False)
        self._room[self._rows : rows] = values
        self._rows = rows

    def values(self) -> Column:
        return self._room[: self._rows]


def absent(rows: int) -> Column:
    return np.full(rows, ABSENT, "<f8")


def present(values: Column) -> Column:
    """Where a metric's column holds what was written."""
    there: Column = values.view("<i8") != _ABSENT_BITS
    return there


def tables_of(events: Sequence[Event]) -> dict[str, Measured]:
    """The measurements among events by the name of their table; each held-out split has one."""
    trained = [event for event in events if type(event) is Train]
    found: dict[str, Any] = {"train": trained} if trained else {}
    if len(trained) < len(events):
        for event in events:
            if isinstance(event, Eval):
                found.setdefault(f"eval {event.split}", []).append(event)
            elif isinstance(event, Layers):
                found.setdefault("layers", []).append(event)
    return found


def join(first: Table, second: Table) -> Table:
    """One table after another; a column is joined when it is asked for."""
    rows = first.rows + second.rows

    def joined(part: str, name: str) -> Column:
        sides: list[Column] = []
        for table in (first, second):
            columns: Mapping[str, Column] = getattr(table, part)
            if name not in columns:
                sides.append(absent(table.rows))
            elif isinstance(columns, Lazy):
                sides.append(columns.once(name))
            else:
                sides.append(columns[name])
        return np.concatenate(sides)

    def lazily(part: str) -> Mapping[str, Column]:
        names = dict.fromkeys([*getattr(first, part), *getattr(second, part)])
        return Lazy(list(names), lambda name: joined(part, name))

    first_steps = {**second.first_steps, **first.first_steps}
    return Table(rows, lazily("axes"), lazily("metrics"), first_steps)


class Lazy(Mapping[str, Any]):
    """A mapping whose values are made when they are first asked for, and kept."""

    def __init__(self, names: Sequence[str], make: Callable[[str], Any]) -> None:
        self._names = dict.fromkeys(names)
        self._make = make
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = self.once(name)
        return self._made[name]

    def once(self, name: str) -> Any:
        """Without keeping it."""
        if name not in self._names:
            raise KeyError(name)
        return self._made[name] if name in self._made else self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _metrics(events: Measured) -> Iterator[tuple[str, Column]]:
    if isinstance(events[0], Train):
        for name in TRAIN_METRICS:
            values = np.fromiter(map(attrgetter(name), events), "<f8", len(events))
            if np.isnan(values).any():  # measured as a NaN, or a None
                missing = [getattr(event, name) is None for event in events]
                if all(missing):
                    continue
                values[missing] = ABSENT
            yield name, values
        if not any(map(attrgetter("extra"), events)):
            return
    rows = [extra(e) if isinstance(e, Train) else metrics(e) for e in events]
    for name in dict.fromkeys(name for row in rows for name in row):
        yield name, np.array([row.get(name, ABSENT) for row in rows], "<f8")
