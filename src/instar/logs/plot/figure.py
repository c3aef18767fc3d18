"""Draws charts with matplotlib as PNG, SVG or PDF; the same chart gives the same bytes."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np
from matplotlib import dates as typed_dates
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter

from instar.logs.plot.chart import (
    POWERS,
    Annotation,
    Chart,
    Curve,
    Panel,
    axis_base,
    decades,
    metric_text,
    power_of,
    power_text,
    short_names,
    ten_to,
    tick_texts,
)
from instar.logs.plot.legend import (
    ALARM,
    COLOURS,
    DASHED,
    DOTTED,
    FAINT,
    INK,
    RC,
    SIGN_STYLES,
    WIDTH,
    add_legend,
    colour_of,
    colours,
    height_below,
    is_crowded,
    ring,
)

_ROWS = 8
"""maximum rows of labels above the first panel"""
_FIRST, _OTHER = 3.3, 2.0
_ROW = 10
"""height of a row of labels, in points"""
_NO_DATE: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
}


def number_ticks(axis: Any, name: str) -> None:
    """Set round ticks with one unit; durations are round in minutes, hours or days."""
    low, high = sorted(axis.get_view_interval())
    base = axis_base(name, high)
    steps = [1, 2, 3, 6, 10] if base in (60, 3600) and high < 60 * base else [1, 2, 2.5, 5, 10]
    count = 6 if axis.axis_name == "x" else 5
    ticks = base * np.asarray(MaxNLocator(count, steps=steps).tick_values(low / base, high / base))
    if base > 1:
        axis.set_major_locator(FixedLocator([place for place in ticks if low <= place <= high]))
    else:
        axis.set_major_locator(MaxNLocator(count, steps=steps))

    def text(place: float, _: int | None = None) -> str:
        return tick_texts(name, [place, high])[0]

    axis.set_major_formatter(FuncFormatter(text))


def decades_ticks(axis: Any, name: str) -> None:
    """Set powers of ten as ticks of a logarithmic axis; round numbers if there are fewer than two."""
    low, high = sorted(axis.get_view_interval())
    text = power_text if name in POWERS else lambda place: tick_texts(name, [place])[0]
    axis.set_major_locator(FixedLocator(decades(low, high, 7)))
    axis.set_major_formatter(FuncFormatter(lambda place, _: text(place)))
    axis.set_minor_formatter(NullFormatter())


def clock_ticks(axes: Axes) -> None:
    dates: Any = typed_dates
    low, high = axes.get_xlim()
    day = 86400.0
    zone = datetime.fromtimestamp(high).astimezone().tzinfo or UTC
    locator = dates.AutoDateLocator(tz=zone, minticks=4, maxticks=7)
    begin, end = datetime.fromtimestamp(low, zone), datetime.fromtimestamp(high, zone)
    places = np.array(locator.tick_values(begin, end))
    texts = dates.ConciseDateFormatter(locator, tz=zone)
    labels = texts.format_ticks(places)
    axes.xaxis.set_major_locator(FixedLocator(list(places * day)))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda place, _: labels[int(np.abs(places * day - place).argmin())])
    )
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(
        f"time ({zone.tzname(end)}{', ' + texts.get_offset() if texts.get_offset() else ''})"
    )


@dataclass(frozen=True)
class Label:
    """A mark's text above the first panel."""

    mark: Annotation
    row: int
    """counted from below"""
    to_left: bool
    """whether the text ends at its mark instead of starting there"""


def draw_marks(panels: Sequence[Axes], chart: Chart, labels: Sequence[Label]) -> None:
    """Draw lines through all panels, labels above the first, checkpoints at the bottom of the last."""
    has_several_runs = len(chart.runs) > 1
    shade = _shade_of_mark(chart)
    for axes in panels:
        for mark in chart.marks:
            if mark.kind != "checkpoint":
                style = SIGN_STYLES[mark.sign]
                axes.axvline(mark.x, color=shade(mark), lw=0.7, ls=style, alpha=0.55, zorder=1)
    checkpoint_places = [mark.x for mark in chart.marks if mark.kind == "checkpoint"]
    if checkpoint_places and not has_several_runs:
        panels[-1].plot(
            checkpoint_places, [0.012] * len(checkpoint_places), transform=panels[-1].get_xaxis_transform(), ls="",
            marker="^", ms=3.5, color=FAINT, alpha=0.8, markeredgewidth=0, zorder=4,
        )  # fmt: skip
    for label in labels:
        _label(panels[0], label.mark, label.row, shade(label.mark), to_left=label.to_left)


def _shade_of_mark(chart: Chart) -> Callable[[Annotation], Any]:
    """Return a function from mark to colour: of its run if there are several; of danger for alerts."""
    shades = colours(len(chart.runs)) if len(chart.runs) > 1 else [INK]
    return lambda mark: ALARM if mark.kind in ("alert", "failed") else shades[mark.run]


def place_labels(chart: Chart) -> list[Label]:
    """Places labels in rows above a picture; of several runs, each name once for each run.

    Labels are placed from right to left, each in the row above those whose lines it would cover, so
    that no line crosses a label to its left. Labels that do not fit are left out.
    """
    wide = (WIDTH - 1.0) * 72
    is_single = len(chart.runs) == 1
    first: dict[tuple[str, float], Annotation] = {}
    for mark in chart.marks:
        if mark.kind != "checkpoint":
            first.setdefault((mark.name, mark.x if is_single else mark.run), mark)
    labels_placed: list[tuple[float, Label]] = []
    for mark in sorted(first.values(), key=lambda mark: -mark.x):
        at = wide * _share(mark.x, *chart.view, log=chart.log_x)
        length = 4.1 * len(mark.name) + 10
        to_left = at + length > wide + 24
        begin = at - length if to_left else at
        rows_in_use = [label.row for x, label in labels_placed if begin <= x <= begin + length]
        if (row := max(rows_in_use, default=-1) + 1) < _ROWS:
            labels_placed.append((at, Label(mark, row, to_left)))
    return [label for _, label in labels_placed]


def _label(axes: Axes, mark: Annotation, row: int, shade: Any, *, to_left: bool) -> None:
    place: dict[str, Any] = {
        "xy": (mark.x, 1),
        "xycoords": axes.get_xaxis_transform(),
        "textcoords": "offset points",
        "annotation_clip": False,
    }
    leader = {"arrowstyle": "-", "lw": 0.6, "color": shade, "alpha": 0.55}
    straight = {"shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xytext=(0, 13 + 10 * row), arrowprops=leader | straight, **place)
    axes.annotate(
        mark.name, xytext=(-3 if to_left else 3, 5 + 10 * row), ha="right" if to_left else "left",
        va="bottom", fontsize=7, color=shade, zorder=6,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6}, **place,
    )  # fmt: skip


def _share(place: float, low: float, high: float, *, log: bool) -> float:
    if log:
        return float(np.log(place / low) / np.log(high / low))
    return (place - low) / (high - low)


def render_figure(make: Callable[[], Figure], kind: Literal["png", "svg", "pdf"]) -> bytes:
    """Return the figure that `make` draws, in the style of all plots, as the content of a file."""
    file = io.BytesIO()
    with rc_context(RC), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # a name in another script
        make().savefig(file, format=kind, dpi=160, metadata=_NO_DATE[kind])
    return file.getvalue()


def draw_styled(chart: Chart) -> Figure:
    """Return the chart as a figure in the style of all plots."""
    with rc_context(RC):
        return draw(chart)


def draw(chart: Chart) -> Figure:
    """Return the chart as a figure in the style of the caller's `rc_context`."""
    labels = place_labels(chart)
    above = max((1 + label.row for label in labels), default=0) * _ROW
    below = sum(height_below(chart, panel) for panel in chart.panels)
    count = len(chart.panels)
    heights = [_FIRST if count == 1 else _FIRST - 0.5, *[_OTHER] * (count - 1)]
    figure = Figure(figsize=(WIDTH, sum(heights) + (above + below) / 72), layout="constrained")
    ratios = {"height_ratios": heights}
    rows = figure.subplots(count, 1, sharex=True, squeeze=False, gridspec_kw=ratios)[:, 0]
    for axes, panel in zip(rows, chart.panels, strict=True):
        _draw_panel(axes, chart, panel)
    _draw_x(rows[-1], chart)
    draw_marks(list(rows), chart, labels)
    pad = 8 + above
    bold = {"fontsize": 10, "fontweight": "bold", "color": INK}
    rows[0].set_title(chart.title, loc="left", pad=pad, **bold)
    if chart.subtitle:
        rows[0].set_title(chart.subtitle, loc="right", fontsize=8, color=FAINT, pad=pad)
    return figure


def _draw_panel(axes: Axes, chart: Chart, panel: Panel) -> None:
    colour = colour_of(chart, panel)
    dense = is_crowded(panel)
    for curve in panel.curves:
        _draw_curve(axes, curve, colour(curve), dense=dense)
    axes.set_ylabel(panel.label)
    if limits := panel.limits or _single_value_limits(panel):
        axes.set_ylim(*limits)
    else:
        axes.margins(y=0.06)
    if panel.log:
        axes.set_yscale("log")
        decades_ticks(axes.yaxis, "")
    else:
        number_ticks(axes.yaxis, panel.metrics[0] if len(panel.metrics) == 1 else "")
    if len(chart.runs) > 1 and len(panel.curves) <= len(COLOURS):
        _label_ends(axes, chart, panel)
    if panel.right:
        _draw_right(axes, chart, panel)
    add_legend(axes, chart, panel)


def _draw_curve(axes: Axes, curve: Curve, colour: Any, *, dense: bool) -> None:
    has_few_points = curve.held_out and len(curve.line) <= 60
    for line in curve.old_lines:
        marker = "." if has_few_points or len(line) < 2 else None
        axes.plot(line.x, line.y, color=colour, alpha=0.3, lw=0.9, ls=DOTTED, marker=marker, ms=3)
    if curve.raw is not None:
        axes.plot(curve.raw.x, curve.raw.y, color=colour, alpha=0.22, lw=0.8)
    if curve.band is not None:
        axes.fill_between(curve.line.x, *curve.band, color=colour, alpha=0.17, lw=0)
    marker = "o" if has_few_points else None
    axes.plot(
        curve.line.x, curve.line.y, color=colour, marker=marker, ms=3.2, lw=0.7 if dense else None,
        ls=DASHED if curve.held_out else "-", alpha=0.8 if dense else 1,
        markeredgewidth=0, zorder=3,
    )  # fmt: skip
    if len(curve.line) == 1:
        axes.plot(curve.line.x, curve.line.y, color=colour, marker="o", ms=4)
    if curve.best is not None and not dense:
        axes.plot(*[[place] for place in curve.best], zorder=4, **ring(colour))


def _label_ends(axes: Axes, chart: Chart, panel: Panel) -> None:
    """Write each run's name above the end of its first curve, in its colour, apart from the others."""
    colour, names = colour_of(chart, panel), short_names(chart.runs, 20)
    ends = {}
    for curve in panel.curves:
        indices = np.flatnonzero(np.isfinite(curve.line.y))
        if len(indices) and curve.run not in ends:
            ends[curve.run] = curve, curve.line.x[indices[-1]], float(curve.line.y[indices[-1]])
    lowest = -np.inf
    for curve, x, y in sorted(ends.values(), key=lambda end: end[2]):
        at = axes.transData.transform((x, y))[1] * 72 / axes.figure.dpi
        up = max(3.0, lowest + 8 - at)
        lowest = at + up
        axes.annotate(
            names[curve.run], (x, y), (-2, up), textcoords="offset points", ha="right", fontsize=7,
            color=colour(curve), zorder=5, annotation_clip=False,
            path_effects=[withStroke(linewidth=2, foreground="white")],
        )  # fmt: skip


def _single_value_limits(panel: Panel) -> tuple[float, float] | None:
    """Return limits around curves with a single value on a logarithmic axis, else None."""
    values = np.concatenate([curve.line.y for curve in panel.curves])
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    return (low / 1.1, low * 1.1) if panel.log and high <= low * (1 + 1e-6) else None


def _draw_right(axes: Axes, chart: Chart, panel: Panel) -> None:
    right_axes = axes.twinx()
    right_axes.grid(visible=False)
    right_axes.spines["right"].set_visible(True)
    is_single = len(chart.runs) == 1
    shades = colours(len(chart.runs))
    for curve in panel.right:
        shade = FAINT if is_single else shades[curve.run]
        right_axes.plot(curve.line.x, curve.line.y, color=shade, lw=0.9, ls=":", zorder=1)
    right_axes.set_ylim(0, None)
    power = power_of(right_axes.get_ylim()[1])
    unit = f" ({ten_to(power)})" if power else ""
    right_axes.set_ylabel(metric_text("lr") + unit, color=FAINT)
    number_ticks(right_axes.yaxis, "lr")
    axes.set_zorder(right_axes.get_zorder() + 1)
    axes.patch.set_visible(False)


def _draw_x(axes: Axes, chart: Chart) -> None:
    axes.set_xlabel(chart.label)
    if chart.log_x:
        axes.set_xscale("log")
    axes.set_xlim(*chart.view)
    if chart.log_x:
        decades_ticks(axes.xaxis, chart.axis)
    elif chart.axis == "time":
        clock_ticks(axes)
    else:
        number_ticks(axes.xaxis, chart.axis)
