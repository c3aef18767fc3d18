"""Metrics as one table: a row for each step, a column for each metric."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from instar.logs.read.record import Series


PLACES = ("step", "samples", "tokens", "epoch", "flops", "wall_s", "active_s", "time", "segment")
_TIMES_BITS, _STEP_BITS = 10, 40


@dataclass(frozen=True)
class Rows:
    """Places and metrics by name; `there` says of each metric in which rows it was measured."""

    values: dict[str, npt.NDArray[Any]]
    there: dict[str, npt.NDArray[np.bool_]]

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.values)

    def __len__(self) -> int:
        return len(self.values["step"])

    def texts(self, name: str) -> list[str]:
        """A column as text: the shortest that is read back equal; empty where nothing is."""
        values = self.values[name].tolist()
        if name not in self.there:
            return [_text(value) for value in values]
        there = self.there[name].tolist()
        return [_text(value) if has else "" for value, has in zip(values, there, strict=True)]


def rows_of(series: Sequence[Series]) -> Rows:
    """One table of several metrics of one run, in the order of its segments, then its steps.

    A metric that was measured more than once at a step, as before and after an operation, takes
    further rows of that step. The place of a row is that of the first metric in it.
    """
    keys = [_keys(each) for each in series]
    every, inverse = np.unique(np.concatenate([*keys, np.empty(0, np.int64)]), return_inverse=True)
    where = np.split(inverse, np.cumsum([len(each) for each in keys])[:-1]) if keys else []
    values: dict[str, npt.NDArray[Any]] = {}
    for place in PLACES:
        kind = np.int64 if place in ("step", "samples", "tokens", "segment") else np.float64
        values[place] = np.zeros(len(every), kind)
        for each, rows in zip(reversed(series), reversed(where), strict=True):
            values[place][rows] = getattr(each, place)
    there: dict[str, npt.NDArray[np.bool_]] = {}
    for each, rows in zip(series, where, strict=True):
        name = each.name if each.name not in PLACES else f"{each.name} (measured)"
        values[name] = np.full(len(every), np.nan)
        values[name][rows] = each.value
        there[name] = np.zeros(len(every), np.bool_)
        there[name][rows] = True
    return Rows(values, there)


def _keys(series: Series) -> npt.NDArray[np.int64]:
    """Segment, step and how often it was measured there before, as one number each."""
    place = (series.segment << _STEP_BITS) | series.step
    order = np.argsort(place, kind="stable")
    ordered = place[order]
    first = np.searchsorted(ordered, ordered)
    times = np.empty(len(place), np.int64)
    times[order] = np.minimum(np.arange(len(place)) - first, (1 << _TIMES_BITS) - 1)
    return (place << _TIMES_BITS) | times


def _text(value: float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return repr(value)
