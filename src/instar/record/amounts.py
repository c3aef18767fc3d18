"""Counts, FLOPs and bytes as a person reads them."""

from __future__ import annotations

import math


def count_text(count: float) -> str:
    """A number in three figures: 999, 12.6k, 124M, 1.05B."""
    return _scaled(count, 1000, ("", "k", "M", "B", "T", "P"))


def flops_text(flops: float) -> str:
    """FLOPs in two figures: 3.4e15."""
    figures, _, exponent = f"{flops:.1e}".partition("e")
    return f"{figures}e{int(exponent)}"


def bytes_text(size: float) -> str:
    """Bytes in three figures: 999 B, 1.20 GiB."""
    return _scaled(size, 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


def _scaled(value: float, base: int, units: tuple[str, ...]) -> str:
    for unit in units:
        if value < 999.5 or unit == units[-1]:
            break
        value /= base
    digits = 0 if unit == units[0] else max(0, 2 - math.floor(math.log10(max(value, 1))))
    return f"{value:.{digits}f}{unit}"
