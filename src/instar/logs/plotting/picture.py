"""A chart drawn by matplotlib: PNG, SVG or PDF, the same bytes for the same chart."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from instar.config.errors import ConfigError
from instar.logs.plotting.chart import Chart, Curve, Panel
from instar.logs.plotting.legend import crowded, legend
from instar.logs.plotting.marking import draw_marks, place_labels
from instar.logs.plotting.numbers import power_of, ten_to
from instar.logs.plotting.style import DASHED, DOTTED, FAINT, INK, RC, WIDTH, colours, ring
from instar.logs.plotting.ticks import clock_ticks, decades_ticks, number_ticks
from instar.logs.plotting.words import metric_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FIRST, _OTHER = 3.3, 2.0
_ROW = 10
"""Points that a row of labels takes."""
_NO_DATE: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
}


def picture(chart: Chart, kind: Literal["png", "svg", "pdf"]) -> bytes:
    """The chart as a file.

    Raises:
        ConfigError: matplotlib is not installed; names the extra.
    """
    try:
        from matplotlib import rc_context
    except ImportError as error:
        raise ConfigError.one(
            "plots need matplotlib, which is not installed",
            hint="pip install 'instar[plot]'; without it: --format json",
        ) from error
    file = io.BytesIO()
    with rc_context(RC), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # a name in another script
        draw(chart).savefig(file, format=kind, dpi=160, metadata=_NO_DATE[kind])
    return file.getvalue()


def draw(chart: Chart) -> Figure:
    """The chart as a figure; its style is that of the caller's `rc_context`."""
    from matplotlib.figure import Figure

    labels = place_labels(chart)
    above = max((1 + label.row for label in labels), default=0) * _ROW
    count = len(chart.panels)
    heights = [_FIRST if count == 1 else _FIRST - 0.5, *[_OTHER] * (count - 1)]
    figure = Figure(figsize=(WIDTH, sum(heights) + above / 72), layout="constrained")
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
    colour = _colour_of(chart, panel)
    dense = crowded(panel)
    for curve in panel.curves:
        _draw_curve(axes, curve, colour(curve), dense=dense)
    axes.set_ylabel(panel.label)
    if limits := panel.limits or _of_one_value(panel):
        axes.set_ylim(*limits)
    else:
        axes.margins(y=0.06)
    if panel.log:
        axes.set_yscale("log")
        decades_ticks(axes.yaxis, "")
    else:
        number_ticks(axes.yaxis, panel.metrics[0] if len(panel.metrics) == 1 else "")
    if panel.notes:
        axes.text(
            0.995, 0.975, "\n".join(panel.notes), transform=axes.transAxes, ha="right", va="top",
            fontsize=7.5, color=FAINT, style="italic",
        )  # fmt: skip
    if panel.right:
        _draw_right(axes, chart, panel)
    legend(axes, chart, panel, colour)


def _draw_curve(axes: Axes, curve: Curve, colour: Any, *, dense: bool) -> None:
    few = curve.held_out and len(curve.line) <= 60
    for line in curve.superseded:
        marker = "." if few or len(line) < 2 else None
        axes.plot(line.x, line.y, color=colour, alpha=0.3, lw=0.9, ls=DOTTED, marker=marker, ms=3)
    if curve.raw is not None:
        axes.plot(curve.raw.x, curve.raw.y, color=colour, alpha=0.22, lw=0.8)
    if curve.band is not None:
        axes.fill_between(curve.line.x, *curve.band, color=colour, alpha=0.17, lw=0)
    marker = "o" if few else None
    axes.plot(
        curve.line.x, curve.line.y, color=colour, marker=marker, ms=3.2, lw=0.7 if dense else None,
        ls=DASHED if curve.held_out else "-", alpha=0.8 if dense else 1,
        markeredgewidth=0, zorder=3,
    )  # fmt: skip
    if len(curve.line) == 1:
        axes.plot(curve.line.x, curve.line.y, color=colour, marker="o", ms=4)
    if curve.best is not None and not dense:
        axes.plot(*[[place] for place in curve.best], zorder=4, **ring(colour))


def _of_one_value(panel: Panel) -> tuple[float, float] | None:
    """Limits around curves on a logarithmic axis that have only one value; None where they have
    more."""
    values = np.concatenate([curve.line.y for curve in panel.curves])
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    return (low / 1.1, low * 1.1) if panel.log and high <= low * (1 + 1e-6) else None


def _draw_right(axes: Axes, chart: Chart, panel: Panel) -> None:
    beside = axes.twinx()
    beside.grid(visible=False)
    beside.spines["right"].set_visible(True)
    one = len(chart.runs) == 1
    shades = colours(len(chart.runs))
    for curve in panel.right:
        shade = FAINT if one else shades[curve.run]
        beside.plot(curve.line.x, curve.line.y, color=shade, lw=0.9, ls=":", zorder=1)
    beside.set_ylim(0, None)
    power = power_of(beside.get_ylim()[1])
    unit = f" ({ten_to(power)})" if power else ""
    beside.set_ylabel(metric_text("lr") + unit, color=FAINT)
    number_ticks(beside.yaxis, "lr")
    axes.set_zorder(beside.get_zorder() + 1)
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


def _colour_of(chart: Chart, panel: Panel) -> Any:
    """By run where there are several, by metric where there is one."""
    if len(chart.runs) > 1:
        shades = colours(len(chart.runs))
        return lambda curve: shades[curve.run]
    shades = colours(max(2, len(panel.metrics)))
    return lambda curve: shades[panel.metrics.index(curve.metric)]
