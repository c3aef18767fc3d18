"""The record of a run, read: metrics as columns, and everything that happened beside them.

Nothing that a run has written is ever deleted. What a later segment superseded, by going on from
an earlier step, is masked (`kept` is false) and can still be had.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from instar.config.errors import ConfigError
from instar.record.events import Eval, Event, Layers, Placed, RunStarted, Train, read_events
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

_TRAIN = ("loss", "grad_norm", "lr", "tokens_per_s", "mfu", "data_wait", "memory_bytes")


@dataclass(frozen=True)
class Series:
    """One metric of one run, in the order in which it was written; all arrays have one length.

    A place that was written before a run went on from an earlier step, and lies behind that
    step, has `kept` false. Non-finite values are as they were.
    """

    name: str
    value: Floats
    step: Ints
    samples: Ints
    tokens: Ints
    epoch: Floats
    flops: Floats
    wall_s: Floats
    active_s: Floats
    time: Floats
    """Unix seconds"""
    segment: Ints
    kept: Bools

    def __len__(self) -> int:
        return len(self.value)

    def axis(self, name: str) -> Floats:
        """One of `AXES` as floats."""
        return np.asarray(getattr(self, name), np.float64)

    def take(self, which: Ints | Bools) -> Series:
        """Of these places only."""
        arrays = {f.name: getattr(self, f.name)[which] for f in dataclasses.fields(self)[1:]}
        return Series(self.name, **arrays)

    def current(self) -> Series:
        """Without what was superseded: one curve, its steps never falling."""
        return self.take(self.kept)


@dataclass(frozen=True)
class Logged:
    """An event, and whether it still counts."""

    event: Event
    kept: bool = True


class RunRecord:
    """A run's record as it was when it was read."""

    def __init__(
        self, run: RunDir, events: Sequence[Logged], table: dict[str, Series], faults: Sequence[str]
    ) -> None:
        self.run = run
        self.events = tuple(events)
        """all but `train`, `eval` and `layers`, in the order in which they were written"""
        self.faults = tuple(faults)
        """what could not be read and was passed over, with its line"""
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
    """Read a run's record, also while it is written.

    Raises:
        RecordError: the file cannot be read, or nothing in it is an event.
    """
    rows: dict[str, list[tuple[float, Placed]]] = {}
    events: list[Event] = []
    for event in read_events(run.events):
        if isinstance(event, Train | Eval | Layers):
            for name, value in _values(event):
                rows.setdefault(name, []).append((value, event))
        else:
            events.append(event)
    starts = [e for e in events if isinstance(e, RunStarted)]
    horizon = {
        s.segment: min([t.step for t in starts if t.segment > s.segment], default=2**62)
        for s in starts
    }
    table = {name: _series(name, found, horizon) for name, found in rows.items()}
    logged = [
        Logged(e, not isinstance(e, Placed) or e.step <= horizon.get(e.segment, 2**62))
        for e in events
    ]
    return RunRecord(run, logged, table, ())


def _values(event: Train | Eval | Layers) -> Iterator[tuple[str, float]]:
    if isinstance(event, Train):
        for name in _TRAIN:
            if (value := getattr(event, name)) is not None:
                yield name, value
        yield from event.extra.items()
    elif isinstance(event, Eval):
        yield f"{event.split}/loss", event.loss
        if event.standard_error is not None:
            yield f"{event.split}/loss:error", event.standard_error
        for name, value in event.extra.items():
            yield f"{event.split}/{name}", value
        for name, value in event.errors.items():
            yield f"{event.split}/{name}:error", value
    else:
        for group, value in event.grad_norm.items():
            yield f"grad_norm/{group}", value
        for group, value in event.update_ratio.items():
            yield f"update_ratio/{group}", value


def _series(name: str, found: Sequence[tuple[float, Placed]], horizon: dict[int, int]) -> Series:
    def whole(key: str) -> Ints:
        return np.array([getattr(event, key) for _, event in found], np.int64)

    def real(key: str) -> Floats:
        return np.array([getattr(event, key) for _, event in found], np.float64)

    return Series(
        name,
        np.array([value for value, _ in found], np.float64),
        step=whole("step"),
        samples=whole("samples"),
        tokens=whole("tokens"),
        epoch=real("epoch"),
        flops=real("flops"),
        wall_s=real("wall_s"),
        active_s=real("active_s"),
        time=real("time"),
        segment=whole("segment"),
        kept=np.array([e.step <= horizon.get(e.segment, 2**62) for _, e in found], np.bool_),
    )
