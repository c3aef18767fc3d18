"""A chart as a page that needs nothing else: one can zoom, point at marks and change the axis."""

from __future__ import annotations

from collections.abc import Sequence

import instar
from instar.config.errors import ConfigError, Problem
from instar.logs.plotting.chart import Chart
from instar.logs.plotting.compose import Wanted
from instar.logs.reading.record import ALIASES, RunRecord
from instar.logs.reporting.assets import asset, program, style
from instar.logs.reporting.chartdata import chart_data, printable
from instar.logs.reporting.report import inlined

_MOST_POINTS = 60_000
"""Of all curves."""


def page(records: Sequence[RunRecord], chart: Chart, wanted: Wanted) -> str:
    """The chart as HTML.

    Raises:
        ConfigError: something is wanted that such a page does not draw.
    """
    _check(wanted)
    from jinja2 import Environment

    panels = [[ALIASES.get(metric, metric) for metric in panel] for panel in wanted.panels]
    panels += [["lr"]] if wanted.lr else []
    metrics = [metric for panel in panels for metric in panel]
    points = max(100, min(2000, _MOST_POINTS // (len(metrics) * len(records))))
    named = zip(records, chart.runs, strict=True)
    runs = [chart_data(r, points, metrics=metrics) | {"name": printable(n)} for r, n in named]
    wanted_x = {"x": wanted.axis, "log": wanted.log, "smooth": wanted.weight, "marks": wanted.marks}
    shown = [{"metrics": panel, "log": False, "wide": True} for panel in panels]
    template = Environment(autoescape=True).from_string(asset("plot.html.j2"))
    return template.render(
        title=printable(chart.title),
        subtitle=printable(chart.subtitle),
        data=inlined({"runs": runs, "panels": shown, "wanted": wanted_x}),
        **program("report.js", "plot.js"),
        style=style("report.css", "parts.css", "print.css"),
        panels=[panel.label for panel in chart.panels] + (["learning rate"] if wanted.lr else []),
        version=instar.__version__,
    )


def _check(wanted: Wanted) -> None:
    asked = {
        "--by": wanted.by,
        "--clip": wanted.clip,
        "--log-x": wanted.log_x,
        "--from": wanted.start is not None,
        "--to": wanted.end is not None,
    }
    hint = "draw a part of it larger in the page itself, or write a png, svg or pdf"
    problems = [
        Problem(f"a page of html has no {name}", where=name, hint=hint)
        for name, value in asked.items()
        if value
    ]
    if problems:
        raise ConfigError(*problems)
