"""Formats single values of runs: metrics in their units, dates, and `-` for none."""

from __future__ import annotations

import math
import time

from instar.extensions import metric_names
from instar.record.format import bytes_text, loss, percent, scientific, si

NONE = "-"


def metric_value_text(name: str, value: float | None) -> str:
    """Format a metric's value in the unit of the metric: `3.9865`, `3.0e-4`, `1.02M`, `647 MiB`, `41%`."""
    if value is None:
        return NONE
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    if name == "lr":
        return scientific(value)
    if name == "tokens_per_s":
        return si(value)
    if name == "memory_bytes" or ((m := metric_names().get(name)) and m.is_bytes):
        return bytes_text(value)
    if name in ("mfu", "data_wait"):
        return percent(value)
    return scientific(value, 2) if 0 < abs(value) < 1e-2 else loss(value, 4)


def best_text(metric: str, value: float | None) -> str:
    """Format a best value; metrics other than the loss are named: `4.2071`, `0.9312 accuracy`."""
    text = metric_value_text(f"val/{metric}", value)
    return text if metric == "loss" or value is None else f"{text} {metric}"


def date(seconds: float) -> str:
    """Return local time, to the second; `-` for none."""
    if seconds <= 0:
        return NONE
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return NONE
