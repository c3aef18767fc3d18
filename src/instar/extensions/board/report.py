"""Exports the dashboard's page as one file that contains its styles, scripts and data.

The page looks up the responses that the dashboard would send in a block of JSON. Its content
security policy allows only these styles and this script, and no requests.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import instar
from instar.config.errors import ConfigError, ConfigProblem, shorten_text
from instar.config.schema import RunConfig
from instar.extensions import layer_titles
from instar.extensions.board import PLACES
from instar.extensions.board.blocks import MAX_ROWS
from instar.extensions.board.comparison import comparison
from instar.extensions.board.curves import chart_data, chart_groups, chart_series
from instar.extensions.board.sections import PARTS, folder_name, page_sections
from instar.logs.plot.chart import Chart
from instar.logs.plot.compose import ChartRequest
from instar.logs.query.groups import run_labels
from instar.logs.query.summary import summarize
from instar.logs.read.record import RunRecord, metrics_of, read_record
from instar.logs.text.summary import page as summary_lines
from instar.record.atomic import replace_file
from instar.record.format import encodable
from instar.record.rundir import RunDir

CURVE_BYTES = 3_600_000
"""approximate size of all curves of a page"""
POINT_BYTES = 75
"""approximate size of one point over all axes"""
MAX_POINTS = 2000
MAX_PLOT_POINTS = 60_000
"""points of all curves of a plot"""
MAX_MARKS = 400
"""marks of one kind, of all runs"""
MAX_CONFIGS = 8
"""number of runs up to which configs are included"""
MAX_LAYERED = 3
"""number of runs up to which metrics of layers are drawn"""
TEXT_CHARACTERS = 100_000
"""length of the summaries shown without JavaScript"""
logger = logging.getLogger("instar.report")
_GROUPS = {"grad_norm/": "Gradient norm by layer", "update_ratio/": "Update ratio by layer"}
_DIGITS = re.compile(r"\d+")
_STYLE = re.compile(r'<link rel="stylesheet" href="/page/([\w.-]+)">\n')
_MAIN = '<main id="main" tabindex="-1">\n'
_SCRIPT = re.compile(r'<script src="/page/([\w.-]+)" defer></script>\n')


@dataclass(frozen=True)
class ReportPanel:
    """One chart of the page."""

    title: str
    metrics: tuple[str, ...]
    log: bool = False
    wide: bool = False


def write_report(run: RunDir) -> Path:
    """Write a run's `report.html` into its folder atomically, and return its path.

    Raises:
        RecordError: its record cannot be read.
        OSError: the file cannot be written.
    """
    replace_file(run.report, report_html([read_record(run)]).encode("utf-8", "backslashreplace"))
    return run.report


def write_report_of_run(run_dir: RunDir, config: RunConfig) -> None:
    """Write the run's HTML report, unless its config says not to; a failure is only a warning."""
    if not config.record.report:
        return
    try:
        write_report(run_dir)
    except Exception as error:
        logger.warning("no report: %s: %s", type(error).__name__, error)


def report_html(records: Sequence[RunRecord], groups: Mapping[RunDir, str] | None = None) -> str:
    """Return the page of one run, or of several side by side.

    `groups`: names of the groups of some runs, of which the page shows means first; other runs that
    differ only in the seed or the fold can be shown so.
    """
    charts = panels(records)
    rows = max(10, MAX_ROWS // len(records))
    parts = [part for part in PARTS if part != "config" or len(records) <= MAX_CONFIGS]
    answers: dict[str, Any] = {"/api/curves": {"runs": _chart_data(records, charts)}}
    if len(records) > 1:
        answers["/api/compare"] = {"sections": comparison(records)}
        answers["/api/groups"] = {"groups": chart_groups(_by_key(records), "seed", groups)}
    for key, record in enumerate(records):
        for part in parts:
            answers[f"/api/runs/{key}/{part}"] = {"sections": page_sections(part, record, rows)}
    title = folder_name(records[0]) if len(records) == 1 else f"{len(records)} runs"
    texts = ["\n".join(summary_lines(summarize(record), 100)) for record in records]
    data = {
        "title": encodable(title),
        "footer": f"Written by Instar {instar.__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC.",
        "panels": charts,
        "answers": answers,
        "defaults": {"mean": "1" if any((groups or {}).values()) else ""},
    }
    return _page(title, data, "\n\n".join(texts))


def plot_html(records: Sequence[RunRecord], chart: Chart, request: ChartRequest) -> str:
    """Return a page with an interactive plot: zoom, choice of the axis.

    Raises:
        ConfigError: an option is not supported in HTML.
    """
    _check_plot(request)
    panels = [metrics_of(panel, records) for panel in request.panels]
    titles = [panel.label for panel in chart.panels]
    if request.lr:
        panels, titles = [*panels, ["lr"]], [*titles, "learning rate"]
    metrics = [metric for panel in panels for metric in panel]
    points = max(100, min(MAX_POINTS, MAX_PLOT_POINTS // (len(metrics) * len(records))))
    labels = run_labels([record.run for record in records])
    runs = [
        chart_data(record, points, metrics=metrics) | {"key": str(key), "name": encodable(name)}
        for key, (record, name) in enumerate(zip(records, labels, strict=True))
    ]
    groups = chart_groups(_by_key(records), request.by, request.group_names)
    data = {
        "title": encodable(chart.title),
        "lead": encodable(chart.subtitle),
        "panels": [
            ReportPanel(title, tuple(panel), wide=True)
            for title, panel in zip(titles, panels, strict=True)
        ],
        "answers": {"/api/curves": {"runs": runs}, "/api/groups": {"groups": groups}},
        "defaults": {
            "x": request.axis,
            "log": "1" if request.log else "",
            "smooth": str(request.weight),
            "marks": "1" if request.marks else "0",
            "mean": "1",
        },
    }
    return _page(chart.title, data, "")


def _check_plot(request: ChartRequest) -> None:
    options = {
        "--clip": request.clip,
        "--log-x": request.log_x,
        "--from": request.start is not None,
        "--to": request.end is not None,
    }
    hint = "zoom in the page itself, or write a png, svg or pdf"
    problems = [
        ConfigProblem((), f"{name} is not supported in html", hint, place=name)
        for name, value in options.items()
        if value
    ]
    if problems:
        raise ConfigError(*problems)


def _by_key(records: Sequence[RunRecord]) -> dict[str, RunDir]:
    return {str(key): record.run for key, record in enumerate(records)}


def _page(title: str, data: dict[str, Any], text: str) -> str:
    """Return the dashboard's page with everything that it would request from a server."""
    page = _asset("page/index.html")
    style = "\n".join(_any_asset(name) for name in _STYLE.findall(page))
    script = "\n".join(_any_asset(name) for name in _SCRIPT.findall(page))
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    # the script replaces this text; <noscript> would not show it if a policy blocks the script
    plain = (
        '<div class="plain-text"><p>Curves need JavaScript, which is off.</p>'
        f"<pre>{escape(encodable(shorten_text(text, TEXT_CHARACTERS)))}</pre></div>\n"
    )
    block = f'<script type="application/json" id="data">{inline_json(data)}</script>\n'
    page = _SCRIPT.sub("", _STYLE.sub("", page))
    page = page.replace('<meta charset="utf-8">\n', f'<meta charset="utf-8">\n{head}')
    page = page.replace("<title>Instar</title>", f"<title>{escape(encodable(title))}</title>")
    page = page.replace("</head>", f"<style>{style}</style>\n</head>")
    page = page.replace("<body>\n", '<body class="exported">\n')
    page = page.replace(_MAIN, f"{_MAIN}{plain}")
    return page.replace("</body>", f"{block}<script>{script}</script>\n</body>")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _any_asset(name: str) -> str:
    web = files("instar.extensions.board")
    return next(_asset(f"{place}/{name}") for place in PLACES if (web / place / name).is_file())


def _asset(path: str) -> str:
    return (files("instar.extensions.board") / path).read_text(encoding="utf-8")


def inline_json(data: Any) -> str:
    """Return `data` as JSON that is safe inside a script element; non-finite numbers are null."""
    text = msgspec.json.encode(data).decode()
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def panels(records: Sequence[RunRecord]) -> list[ReportPanel]:
    """Return the charts of all metrics of these runs; metrics of layers only for few runs."""
    metrics = dict.fromkeys(name for record in records for name in record.metrics)
    curves = [n for n in metrics if not n.endswith(":error") and not n.startswith("test/")]
    losses = tuple(name for name in ("loss", "val/loss") if name in metrics)
    charts = [ReportPanel("Loss", losses, wide=True)] if losses else []
    titles = {**_GROUPS, **layer_titles()}
    layer_curves = tuple(name for name in curves if name.startswith(tuple(titles)))
    for prefix, title in titles.items():
        members = _sort_by_number(name for name in layer_curves if name.startswith(prefix))
        if members and len(records) <= MAX_LAYERED:
            charts.append(ReportPanel(title, members, log=True, wide=True))
    curves_in_groups = {*losses, *layer_curves}
    single = [ReportPanel(name, (name,)) for name in curves if name not in curves_in_groups]
    held_out = [panel for panel in single if "/" in panel.metrics[0]]
    return [*charts[:1], *held_out, *(p for p in single if p not in held_out), *charts[1:]]


def _sort_by_number(names: Iterable[str]) -> tuple[str, ...]:
    """Sort names that differ only in numbers by these, so that inserted layers are in place; other
    names keep their order."""
    ordered_names = list(names)
    stems = list(dict.fromkeys(_DIGITS.sub("", name) for name in ordered_names))
    return tuple(
        sorted(
            ordered_names,
            key=lambda name: (
                stems.index(_DIGITS.sub("", name)),
                [int(digits) for digits in _DIGITS.findall(name)],
            ),
        )
    )


def _chart_data(
    records: Sequence[RunRecord], charts: Sequence[ReportPanel]
) -> list[dict[str, Any]]:
    """Return the data of the curves, with as many points as fit into `CURVE_BYTES`."""
    # losses, single curves and layers get equal shares
    kinds = [[p for p in charts if p.wide and not p.log], [p for p in charts if not p.wide]]
    kinds.append([panel for panel in charts if panel.log])
    groups = [[metric for panel in kind for metric in panel.metrics] for kind in kinds]
    share = CURVE_BYTES // POINT_BYTES // max(1, sum(map(bool, groups)))
    data_of_runs = [
        chart_data(record, metrics=()) | {"key": str(key)} for key, record in enumerate(records)
    ]
    for metrics in groups:
        points = _points(records, metrics, share)
        for data, record in zip(data_of_runs, records, strict=True):
            data["series"] |= chart_series(record, points, metrics)
    room = max(10, MAX_MARKS // len(data_of_runs))
    for data in data_of_runs:
        names = dict.fromkeys(mark["kind"] for mark in data["marks"])
        of_kind = [[mark for mark in data["marks"] if mark["kind"] == name] for name in names]
        data["marks"] = [mark for marks in of_kind for mark in _evenly(marks, room)]
    return data_of_runs


def _points(records: Sequence[RunRecord], metrics: Sequence[str], room: int) -> int:
    """Return the maximum points per curve so that all together, superseded points included, have at
    most `room`; long curves get what short ones leave."""
    lengths = list[int]()
    for record in records:
        for series in (record.series(metric) for metric in metrics if metric in record):
            pieces = np.where(series.is_current, 0, series.segment)
            lengths += np.unique(pieces, return_counts=True)[1].tolist()
    for number, length in enumerate(sorted(lengths)):
        share = room // (len(lengths) - number)
        if length > share:
            return min(MAX_POINTS, share)
        room -= length
    return MAX_POINTS


def _evenly(items: Sequence[Any], count: int) -> list[Any]:
    """Return at most `count` evenly chosen items, including the first and the last."""
    if len(items) <= count:
        return list(items)
    return [items[round(i)] for i in np.linspace(0, len(items) - 1, count)]
