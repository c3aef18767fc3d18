"""The x axes that curves are drawn over, their units, and places on them as text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import datetime
from difflib import get_close_matches

from instar.config.errors import ConfigError
from instar.logs.plotting.numbers import power_of, ten_to
from instar.logs.reading.record import AXES, RunRecord

FRIENDLY = {
    "steps": "step",
    "iteration": "step",
    "iterations": "step",
    "epochs": "epoch",
    "flop": "flops",
    "compute": "flops",
    "wall": "wall_s",
    "active": "active_s",
    "date": "time",
}
SECONDS = ("wall_s", "active_s")
_LABELS = {
    "step": "step",
    "samples": "samples",
    "epoch": "epoch",
    "flops": "training compute (FLOPs)",
    "wall_s": "wall time",
    "active_s": "time spent training",
    "time": "time",
}
_SCALES = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12, "P": 1e15}
_DURATIONS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = re.compile(r"(-?\d[\d_]*\.?\d*(?:[eE][+-]?\d+)?)\s*([a-zA-Z]*)", re.ASCII)


def axis_named(text: str) -> str:
    """One of `AXES` by its name or a friendlier one.

    Raises:
        ConfigError: there is none of that name; suggests one.
    """
    name = FRIENDLY.get(text, text)
    if name in AXES:
        return name
    near = get_close_matches(text, [*AXES, *FRIENDLY], n=1)
    hint = (
        f"did you mean {FRIENDLY.get(near[0], near[0])!r}?"
        if near
        else f"there are {', '.join(AXES)}"
    )
    raise ConfigError.one(f"no x axis {text!r}", where="--x", hint=hint)


def axis_label(axis: str, units: Sequence[str], high: float) -> str:
    """What stands below an axis that ends at `high`; `units` are what the runs' tokens are, such as
    `graph`."""
    if axis == "flops" and power_of(high) and math.isfinite(high):
        return f"training compute ({ten_to(power_of(high))} FLOPs)"
    if axis == "tokens":
        return ", ".join(dict.fromkeys(f"{unit}s" for unit in units))
    return _LABELS[axis]


def place_on(axis: str, text: str, option: str) -> float:
    """A place such as `2000`, `20M`, `1.5e18`, `10min` or `2026-01-31T12:00` on an axis.

    Raises:
        ConfigError: it is none; names the forms.
    """
    found = _NUMBER.fullmatch(text.strip())
    units = _DURATIONS if axis in SECONDS else _SCALES
    if found and (found[2] in units or (axis in SECONDS and not found[2])):
        return float(found[1]) * units.get(found[2], 1.0)
    if axis == "time":
        try:
            return datetime.fromisoformat(text).timestamp()
        except ValueError:
            pass
    forms = {"time": "2026-01-31T12:00", **dict.fromkeys(SECONDS, "90s, 10min or 1.5h")}
    raise ConfigError.one(
        f"{text!r} is no place on the axis {axis}",
        where=option,
        hint=f"write it like {forms.get(axis, '2000, 20M or 1.5e9')}",
    )


def check_axis(axis: str, records: Sequence[RunRecord]) -> None:
    """See that every run has this axis.

    Raises:
        ConfigError: one has not; names it, and the axes that it has.
    """
    for record in records:
        if _has(record, axis):
            continue
        there = [name for name in AXES if _has(record, name)]
        if there:
            raise ConfigError.one(
                f"{record.run.path} has no {axis}: nothing of it was counted",
                where="--x",
                hint=f"it has {', '.join(there)}",
            )


def _has(record: RunRecord, axis: str) -> bool:
    every = (record.series(metric).axis(axis) for metric in record.metrics)
    return any(len(places) and places.max() > 0 for places in every)
