"""The look of all plots: colours, line styles and fonts, and the legend and notes below each panel."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.transforms import ScaledTranslation

from instar.logs.plot.chart import Chart, Curve, Panel, curve_text, metric_text, short_names

Entry = tuple[str, dict[str, Any]]
"""a text, and the look of its sample"""
_ROW, _NOTE_ROW = 13, 10
"""heights of a row, in points"""
_NOTE_WIDTH = 100
_MAX_LABELLED, _FROM_MANY = 10, 5
_BELOW_AXIS, _BELOW_PANEL = 32, 7
"""points below the x axis with its label, and below one without"""
_MEANINGS = {
    "growth": "growth",
    "setting": "settings change",
    "resume": "resume",
    "alert": "alert",
    "failed": "failure",
}
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


def colour_of(chart: Chart, panel: Panel) -> Callable[[Curve], Any]:
    """Return a function from curve to colour: by run if there are several, else by metric."""
    if len(chart.runs) > 1:
        shades = colours(len(chart.runs))
        return lambda curve: shades[curve.run]
    shades = colours(max(2, len(panel.metrics)))
    return lambda curve: shades[panel.metrics.index(curve.metric)]


def is_crowded(panel: Panel) -> bool:
    """Return whether there are too many curves to tell apart."""
    return len(panel.curves) > 20


def height_below(chart: Chart, panel: Panel) -> int:
    """Return the height of the legend and the notes of a panel in points."""
    return _legend_height(chart, panel) + _NOTE_ROW * len(_notes(panel))


def add_legend(axes: Axes, chart: Chart, panel: Panel) -> None:
    """Add the legend of a panel and its notes below it, unless they would be empty."""
    down = _BELOW_AXIS if panel is chart.panels[-1] else _BELOW_PANEL
    if handles := legend_entries(chart, panel):
        shift = ScaledTranslation(0, -down / 72, axes.figure.dpi_scale_trans)
        axes.legend(
            handles=[Line2D([], [], label=text, **look) for text, look in handles],
            loc="upper left",
            bbox_to_anchor=(0, 0),
            bbox_transform=axes.transAxes + shift,
            borderaxespad=0,
            ncols=_columns([text for text, _ in handles]),
        )
    if notes := _notes(panel):
        axes.annotate(
            "\n".join(notes), (0, 0), (4, -down - _legend_height(chart, panel)),
            xycoords="axes fraction", textcoords="offset points", va="top", annotation_clip=False,
            fontsize=7.5, color=FAINT, style="italic",
        )  # fmt: skip


def _notes(panel: Panel) -> list[str]:
    return [line for note in panel.notes for line in textwrap.wrap(note, _NOTE_WIDTH)]


def _legend_height(chart: Chart, panel: Panel) -> int:
    texts = [text for text, _ in legend_entries(chart, panel)]
    return _ROW * -(-len(texts) // _columns(texts)) if texts else 0


def _columns(texts: list[str]) -> int:
    """Return how many columns of a legend fit side by side, with about 5 points a character."""
    widest = 42 + 5 * max(map(len, texts))
    return max(1, min(len(texts), int((WIDTH - 1) * 72 / widest)))


def legend_entries(chart: Chart, panel: Panel) -> list[Entry]:
    """Return the entries of a panel's legend: runs by colour and metrics by line style, if there are
    several; those common to all panels are in the first."""
    colour = colour_of(chart, panel)
    has_several_runs, first = len(chart.runs) > 1, panel is chart.panels[0]
    handles = [*_runs(chart, panel, colour)] if has_several_runs and first else []
    if len(panel.metrics) > 1:
        for metric in panel.metrics:
            curve = next(curve for curve in panel.curves if curve.metric == metric)
            shade = FAINT if has_several_runs else colour(curve)
            look = {"ls": DASHED, "marker": "o", "ms": 3.2} if curve.held_out else {}
            handles.append((curve_text(metric), {"color": shade, **look}))
    if panel.right:
        handles.append((metric_text("lr"), {"color": FAINT, "lw": 0.9, "ls": ":"}))
    best = [curve for curve in panel.curves if curve.best is not None and not is_crowded(panel)]
    if best and (first or not has_several_runs):
        shade = FAINT if has_several_runs else colour(best[0])
        has_one_best = len(best) == 1 and not has_several_runs and best[0].best
        label = f"best, {has_one_best[1]:.4g}" if has_one_best else "best"
        handles.append((label, {"ls": "", **ring(shade)}))
    return [*handles, *_shared(chart)] if first else handles


def _runs(chart: Chart, panel: Panel, colour: Callable[[Curve], Any]) -> Iterator[Entry]:
    """Yield an entry per run; of many runs, an even choice."""
    shades = {curve.run: colour(curve) for curve in panel.curves}
    runs = list(shades)
    n_omitted = 0
    if len(runs) > _MAX_LABELLED:
        n_omitted = len(runs) - _FROM_MANY
        runs = [runs[n * (len(runs) - 1) // (_FROM_MANY - 1)] for n in range(_FROM_MANY)]
    names = short_names(chart.runs)
    for run in runs:
        yield names[run], {"color": shades[run]}
    if n_omitted:
        yield f"and {n_omitted} more", {"ls": ""}


def _shared(chart: Chart) -> Iterator[Entry]:
    curves = [curve for panel in chart.panels for curve in panel.curves]
    if any(curve.band is not None for curve in curves):
        yield "mean ± standard deviation", {"color": FAINT, "alpha": 0.25, "lw": 6}
    if any(curve.raw is not None for curve in curves):
        yield "before smoothing", {"color": FAINT, "alpha": 0.4, "lw": 0.8}
    if any(curve.old_lines for curve in curves):
        yield "superseded", {"color": FAINT, "alpha": 0.6, "lw": 0.9, "ls": DOTTED}
    has_several_runs = len(chart.runs) > 1
    signs = {mark.sign for mark in chart.marks}
    for sign, meaning in _MEANINGS.items():
        if sign in signs:
            shade = ALARM if sign in ("alert", "failed") else FAINT if has_several_runs else INK
            yield meaning, {"color": shade, "lw": 0.8, "ls": SIGN_STYLES[sign]}
    if not has_several_runs and "checkpoint" in signs:
        look = {"ls": "", "marker": "^", "ms": 3.5, "color": FAINT, "markeredgewidth": 0}
        yield "checkpoint", look


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
