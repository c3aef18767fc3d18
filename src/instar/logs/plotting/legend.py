"""The legend of a panel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from instar.logs.plotting.chart import Chart, Panel
from instar.logs.plotting.style import DASHED, DOTTED, FAINT, ring
from instar.logs.plotting.words import curve_text, metric_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

_MOST_LABELLED, _FROM_MANY = 10, 5


def crowded(panel: Panel) -> bool:
    """Whether there are too many curves to look at each."""
    return len(panel.curves) > 20


def legend(axes: Axes, chart: Chart, panel: Panel, colour: Any) -> None:
    """Runs by colour and metrics by line, as far as either needs telling; what all panels have
    alike stands in the first."""
    several, first = len(chart.runs) > 1, panel is chart.panels[0]
    handles = [*_runs(chart, panel, colour)] if several and first else []
    if len(panel.metrics) > 1:
        for metric in panel.metrics:
            curve = next(curve for curve in panel.curves if curve.metric == metric)
            shade = FAINT if several else colour(curve)
            look = {"ls": DASHED, "marker": "o", "ms": 3.2} if curve.held_out else {}
            handles.append(_sample(curve_text(metric), color=shade, **look))
    if panel.right:
        handles.append(_sample(metric_text("lr"), color=FAINT, lw=0.9, ls=":"))
    best = [curve for curve in panel.curves if curve.best is not None and not crowded(panel)]
    if best and (first or not several):
        shade = FAINT if several else colour(best[0])
        told = (
            f"best, {best[0].best[1]:.4g}"
            if len(best) == 1 and not several and best[0].best
            else "best"
        )
        handles.append(_sample(told, ls="", **ring(shade)))
    if first:
        handles += _alike(chart)
    if handles:
        columns = 1 + (len(handles) > 6)
        axes.legend(handles=handles, loc="best", ncols=columns).set_zorder(5)


def _runs(chart: Chart, panel: Panel, colour: Any) -> Iterator[Line2D]:
    """All of some runs, an even choice of many."""
    shades = {curve.run: colour(curve) for curve in panel.curves}
    runs = list(shades)
    rest = 0
    if len(runs) > _MOST_LABELLED:
        rest = len(runs) - _FROM_MANY
        runs = [runs[n * (len(runs) - 1) // (_FROM_MANY - 1)] for n in range(_FROM_MANY)]
    for run in runs:
        yield _sample(chart.runs[run], color=shades[run])
    if rest:
        yield _sample(f"and {rest} more", ls="")


def _alike(chart: Chart) -> Iterator[Line2D]:
    curves = [curve for panel in chart.panels for curve in panel.curves]
    if any(curve.band is not None for curve in curves):
        yield _sample("mean ± standard deviation", color=FAINT, alpha=0.25, lw=6)
    if any(curve.raw is not None for curve in curves):
        yield _sample("before smoothing", color=FAINT, alpha=0.4, lw=0.8)
    if any(curve.superseded for curve in curves):
        yield _sample("superseded", color=FAINT, alpha=0.6, lw=0.9, ls=DOTTED)
    if len(chart.runs) == 1 and any(mark.kind == "checkpoint" for mark in chart.marks):
        yield _sample("checkpoint", ls="", marker="^", ms=3.5, color=FAINT, markeredgewidth=0)


def _sample(text: str, **look: Any) -> Line2D:
    """How a curve looks, for the legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=text, **look)
