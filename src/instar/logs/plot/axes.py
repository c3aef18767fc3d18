"""Labels, units and round numbers along the axes of a plot."""

from __future__ import annotations

import math
from collections.abc import Sequence

from instar.config.errors import ConfigError
from instar.logs.read.record import AXES, RunRecord

_LABELS = {
    "step": "step",
    "samples": "samples",
    "epoch": "epoch",
    "flops": "training compute (FLOPs)",
    "wall_s": "wall time",
    "active_s": "time spent training",
    "time": "time",
}


def axis_label(axis: str, units: Sequence[str], high: float) -> str:
    """Return the label of an axis that ends at `high`; `units`: the runs' token units, e.g. `graph`."""
    if axis == "flops" and power_of(high) and math.isfinite(high):
        return f"training compute ({ten_to(power_of(high))} FLOPs)"
    if axis == "tokens":
        return ", ".join(dict.fromkeys(f"{unit}s" for unit in units))
    return _LABELS[axis]


def check_axis(axis: str, records: Sequence[RunRecord]) -> None:
    """Check that every run has values on this axis.

    Raises:
        ConfigError: a run has none; lists the axes that it has.
    """
    for record in records:
        if _has(record, axis):
            continue
        available = [name for name in AXES if _has(record, name)]
        if available:
            raise ConfigError.of(
                f"{record.run.path} has no values on the axis {axis}",
                where="--x",
                hint=f"it has {', '.join(available)}",
            )


def _has(record: RunRecord, axis: str) -> bool:
    values = (record.series(metric).axis(axis) for metric in record.metrics)
    return any(len(places) and places.max() > 0 for places in values)


_COUNTS = ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
_BYTES = tuple((1024.0**n, f" {unit}iB") for n, unit in ((4, "T"), (3, "G"), (2, "M"), (1, "K")))
_CLOCK = ((86400.0, " d"), (3600.0, " h"), (60.0, " min"), (1.0, " s"))
_SECONDS = ("wall_s", "active_s")
POWERS = ("flops", "lr")
"""axes whose power of ten is part of the label"""
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def round_places(low: float, high: float, count: int, base: float = 1.0) -> list[float]:
    """Return at most `count` (at least 2) places in [low, high]: multiples of 1, 2 or 5 times a power
    of ten of `base`; `[low]` for a nearly empty range."""
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1e-290):
        return [low]
    rough = (high - low) / max(count, 2) / base
    power = 10.0 ** math.floor(math.log10(rough))
    step = (
        base
        * power
        * next(m for m in (1, 2, 5, 10, 20) if _fits(low, high, base, power * m, count))
    )
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def decades(low: float, high: float, count: int) -> list[float]:
    """Return at most `count` powers of ten (or of 100, 1000, …) in [low, high]; round places if
    there are fewer than two."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last - first < 1:
        return [place for place in round_places(low, high, count) if place > 0]
    stride = -(-(last - first + 1) // max(count, 2))
    return [10.0**power for power in range(first, last + 1, stride)]


def axis_base(axis: str, high: float) -> float:
    """Return the unit of an axis of durations or bytes, e.g. 60 if it ends at some minutes."""
    scales = _BYTES if axis.endswith("_bytes") else _CLOCK if axis in _SECONDS else ()
    return next((size for size, _ in scales if high >= 2 * size), 1.0)


def power_of(high: float) -> int:
    """Return the power of ten, a multiple of three, that scales an axis up to `high`."""
    return 3 * math.floor(math.log10(high) / 3 + 1e-9) if high > 0 else 0


def ten_to(power: int) -> str:
    """Return `10¹²` for 12."""
    return f"10{str(power).translate(_SUPERSCRIPT)}"


def power_text(place: float) -> str:
    """Return a place on a logarithmic axis as `10¹²` or `5·10¹²`."""
    power = math.floor(math.log10(place) + 1e-9)
    factor = f"{place / 10.0**power:.3g}"
    return ten_to(power) if factor == "1" else f"{factor}·{ten_to(power)}"


def tick_texts(axis: str, places: Sequence[float]) -> list[str]:
    """Format places along an axis with one unit: 0, 20M, 40M; 0, 10 min, 20 min; 0.001, 0.01."""
    high = max(map(abs, places), default=0.0)
    if axis in _SECONDS or axis.endswith("_bytes"):
        base = axis_base(axis, high)
        unit = next((unit for size, unit in (*_CLOCK, *_BYTES) if size == base), " B")
        unit = " B" if axis.endswith("_bytes") and base == 1 else unit
        return ["0" if place == 0 else f"{place / base:.6g}{unit}" for place in places]
    if axis in POWERS:
        return [f"{place / 10.0 ** power_of(high):.6g}" for place in places]
    if high >= 10_000:
        size, unit = next((size, unit) for size, unit in _COUNTS if high >= size)
        return ["0" if place == 0 else f"{place / size:.6g}{unit}" for place in places]
    return [f"{place:.6g}" for place in places]


def _fits(low: float, high: float, base: float, step: float, count: int) -> bool:
    return math.floor(high / (base * step) + 1e-9) - math.ceil(low / (base * step) - 1e-9) < max(
        count, 2
    )
