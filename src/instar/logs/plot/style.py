"""Colours, line styles and fonts of all plots."""

from __future__ import annotations

from typing import Any

from matplotlib import colormaps

COLOURS = (
    "#2e5c7b", "#c34d00", "#008561", "#e06d9b", "#4c3919", "#5595f4", "#7523ff", "#000074",
)  # fmt: skip
"""differ by at least 15 ΔE in pairs, also under deuteranopia and protanopia; the same as on the pages"""
INK = "#222222"
FAINT = "#767676"
GRID = "#e8e8e8"
ALARM = "#b3001b"

WIDTH = 7.2
"""inches; the text width of a page"""
DASHED, DOTTED = (0, (4, 1.6)), (0, (2, 1.5))
SIGN_STYLES: dict[str, Any] = {
    "growth": (0, (5, 3)),
    "setting": (0, (5, 2, 1, 2)),
    "resume": (0, (1, 2)),
    "alert": "-",
    "failed": "-",
}
"""line styles of marks"""

RC: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.linewidth": 0.6,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.labelsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.minor.width": 0.4,
    "ytick.minor.width": 0.4,
    "lines.linewidth": 1.3,
    "lines.solid_joinstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.handlelength": 2.2,
    "text.parse_math": False,
    "svg.hashsalt": "instar",
    "path.simplify_threshold": 0.2,
}


def colours(count: int) -> list[Any]:
    """Return `count` distinct colours, or a scale from dark to light for many."""
    if count <= len(COLOURS):
        return list(COLOURS[:count])

    scale = colormaps["viridis"]
    return [scale(0.92 * number / (count - 1)) for number in range(count)]


def ring(colour: Any) -> dict[str, Any]:
    """Return the style of a best point."""
    edge = {"markeredgecolor": colour, "markeredgewidth": 1.4}
    return {"marker": "o", "ms": 6, "color": "white", **edge}
