"""Metrics as one table: a row for each step, a column for each metric."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from instar.logs.read.columns import Bools, Column, Ints
from instar.logs.read.record import Series

PLACES = ("step", "samples", "tokens", "epoch", "flops", "wall_s", "active_s", "time", "segment")
_TIMES_BITS, _STEP_BITS = 10, 40


@dataclass(frozen=True)
class Rows:
    """Places and metrics by name; `is_measured` masks the rows in which each metric has a value."""

    values: dict[str, Column]
    is_measured: dict[str, Bools]

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.values)

    def __len__(self) -> int:
        return len(self.values["step"])

    def texts(self, name: str) -> list[str]:
        """Return a column as text: the shortest that reads back equal; empty where not measured."""
        values = self.values[name].tolist()
        if name not in self.is_measured:
            return [_text(value) for value in values]
        column_measured = self.is_measured[name].tolist()
        return [
            _text(value) if is_measured else ""
            for value, is_measured in zip(values, column_measured, strict=True)
        ]


def rows_of(series: Sequence[Series]) -> Rows:
    """Return one table of several metrics of one run, sorted by segment, then by step.

    A metric measured more than once at a step, as before and after an operation, adds rows for that
    step. The place of a row is that of its first metric.
    """
    keys = [_keys(metric) for metric in series]
    all_keys, inverse = np.unique(
        np.concatenate([*keys, np.empty(0, np.int64)]), return_inverse=True
    )
    positions = (
        np.split(inverse, np.cumsum([len(metric_keys) for metric_keys in keys])[:-1])
        if keys
        else []
    )
    values: dict[str, Column] = {}
    for place in PLACES:
        kind = np.int64 if place in ("step", "samples", "tokens", "segment") else np.float64
        values[place] = np.zeros(len(all_keys), kind)
        for curve, rows in zip(reversed(series), reversed(positions), strict=True):
            values[place][rows] = getattr(curve, place)
    is_measured: dict[str, Bools] = {}
    for curve, rows in zip(series, positions, strict=True):
        name = curve.name if curve.name not in PLACES else f"{curve.name} (measured)"
        values[name] = np.full(len(all_keys), np.nan)
        values[name][rows] = curve.value
        is_measured[name] = np.zeros(len(all_keys), np.bool_)
        is_measured[name][rows] = True
    return Rows(values, is_measured)


def _keys(series: Series) -> Ints:
    """Return sort keys: segment, step and count of earlier measurements there, packed in one int."""
    place = (series.segment << _STEP_BITS) | series.step
    order = np.argsort(place, kind="stable")
    ordered_places = place[order]
    first = np.searchsorted(ordered_places, ordered_places)
    times = np.empty(len(place), np.int64)
    times[order] = np.minimum(np.arange(len(place)) - first, (1 << _TIMES_BITS) - 1)
    return (place << _TIMES_BITS) | times


def _text(value: float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return repr(value)
