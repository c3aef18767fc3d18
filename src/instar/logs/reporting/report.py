"""A run as one page that needs nothing else: curves, operations with their proofs, stages, config.

The page is a single file of HTML with its styles, its program and its data in it. Its content
security policy lets nothing else run in it and nothing leave it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

import instar
from instar.checkpoint.disk import replace_file
from instar.config.differing import differing
from instar.logs.reading.record import read
from instar.logs.reporting.assets import asset, program, style
from instar.logs.reporting.chartdata import (
    chart_data,
    chart_series,
    printable,
    proof_text,
    shortened,
)
from instar.logs.reporting.configured import config_lines, config_values
from instar.logs.reporting.reported import Fact, RunView, known, view
from instar.record.amounts import bytes_text, count_text, flops_text
from instar.record.lines import duration

if TYPE_CHECKING:
    from pathlib import Path

    from jinja2 import Environment

    from instar.logs.reading.record import RunRecord
    from instar.logs.reporting.tested import Scatter
    from instar.record.rundir import RunDir

DATA_BYTES = 3_600_000
"""that curves may take of a page, about"""
POINT_BYTES = 75
"""of one point over all axes, about"""
MOST_POINTS = 2000
MOST_MARKS = 400
"""of all runs and one kind"""
MOST_ROWS = 400
"""of all runs' tables of one kind"""
MOST_CONFIGS = 8
"""runs that are shown with their whole config"""
MOST_LAYERED = 3
"""runs of which layers are drawn"""
SCATTER_SIDE = 320

_TITLES = {
    "lr": "Learning rate",
    "grad_norm": "Gradient norm, before clipping",
    "memory_bytes": "Memory",
    "mfu": "Model FLOPs utilization",
    "data_wait": "Share of the time spent waiting for samples",
}
_GROUPS = {
    "grad_norm/": "Gradient norm by layer",
    "update_ratio/": "Update ratio by layer",
}
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True)
class Panel:
    """One chart of the page."""

    title: str
    metrics: tuple[str, ...]
    log: bool = False
    wide: bool = False


def write_report(run: RunDir) -> Path:
    """Write a run's `report.html` in its folder, whole or not at all, and return its path.

    Raises:
        RecordError: its record cannot be read.
        OSError: the file cannot be written.
    """
    replace_file(run.report, report_html([read(run)]).encode("utf-8", "backslashreplace"))
    return run.report


def report_html(records: Sequence[RunRecord]) -> str:
    """The page of one run, or of several side by side."""
    rows = max(10, MOST_ROWS // len(records))
    runs = [view(record, rows) for record in records]
    configs = [config_lines(record.run) for record in records]
    charts = panels(records)
    data = {"runs": _charted(records, charts), "panels": charts}
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            title=_title(runs),
            runs=runs,
            configs=configs if len(runs) <= MOST_CONFIGS else [[] for _ in configs],
            **_differences(records),
            facts=_side_by_side(runs),
            panels=charts,
            data=inlined(data),
            **program("report.js"),
            style=style("report.css", "parts.css", "print.css"),
            made=datetime.now(UTC).timestamp(),
            version=instar.__version__,
        )
        .lstrip()
    )


def panels(records: Sequence[RunRecord]) -> list[Panel]:
    """The charts that show all metrics of these runs; of many runs their layers are left out."""
    there = dict.fromkeys(name for record in records for name in record.metrics)
    curves = [n for n in there if not n.endswith(":error") and not n.startswith("test/")]
    losses = tuple(name for name in ("loss", "val/loss") if name in there)
    found = [Panel("Loss", losses, wide=True)] if losses else []
    layered = tuple(name for name in curves if name.startswith(tuple(_GROUPS)))
    for prefix, title in _GROUPS.items():
        members = _numbered(name for name in layered if name.startswith(prefix))
        if members and len(records) <= MOST_LAYERED:
            found.append(Panel(title, members, log=True, wide=True))
    shown = {*losses, *layered}
    single = [Panel(metric_title(name), (name,)) for name in curves if name not in shown]
    held_out = [panel for panel in single if "/" in panel.metrics[0]]
    return [*found[:1], *held_out, *(p for p in single if p not in held_out), *found[1:]]


def _numbered(names: Iterable[str]) -> tuple[str, ...]:
    """`names` in their order, but those that differ only in a number together and counted up:
    a layer that was inserted is between its neighbours."""
    given = list(names)
    stems = list(dict.fromkeys(_DIGITS.sub("", name) for name in given))
    return tuple(
        sorted(
            given,
            key=lambda name: (
                stems.index(_DIGITS.sub("", name)),
                [int(digits) for digits in _DIGITS.findall(name)],
            ),
        )
    )


def metric_title(metric: str) -> str:
    """`Memory` of `memory_bytes`; a metric's own name where there is no better one."""
    if metric == "tokens_per_s":
        return "Throughput, per second"
    return _TITLES.get(metric, metric)


def inlined(data: Any) -> str:
    """`data` as JSON that may stand in an HTML page: nothing in it ends a script or begins a
    comment; numbers that are not finite are null."""
    text = msgspec.json.encode(data).decode()
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _charted(records: Sequence[RunRecord], charts: Sequence[Panel]) -> list[dict[str, Any]]:
    """The data of the curves, as many points of each as the page has room for."""
    # the losses first, then single curves, then the many of layers
    kinds = [[p for p in charts if p.wide and not p.log], [p for p in charts if not p.wide]]
    kinds.append([panel for panel in charts if panel.log])
    groups = [[metric for panel in kind for metric in panel.metrics] for kind in kinds]
    share = DATA_BYTES // POINT_BYTES // max(1, sum(map(bool, groups)))
    found = [chart_data(record, metrics=()) for record in records]
    for metrics in groups:
        points = _points(records, metrics, share)
        for data, record in zip(found, records, strict=True):
            data["series"] |= chart_series(record, points, metrics)
    room = max(10, MOST_MARKS // len(found))
    for data in found:
        names = dict.fromkeys(mark["kind"] for mark in data["marks"])
        of_kind = [[mark for mark in data["marks"] if mark["kind"] == name] for name in names]
        data["marks"] = [mark for marks in of_kind for mark in evenly(marks, room)]
    return found


def _points(records: Sequence[RunRecord], metrics: Sequence[str], room: int) -> int:
    """How many points of each curve there may be so that together they are at most `room`, what
    was superseded included; short curves leave theirs to long ones."""
    lengths = list[int]()
    for record in records:
        for series in (record.series(metric) for metric in metrics if metric in record):
            pieces = np.where(series.kept, 0, series.segment)
            lengths += np.unique(pieces, return_counts=True)[1].tolist()
    for number, length in enumerate(sorted(lengths)):
        share = room // (len(lengths) - number)
        if length > share:
            return min(MOST_POINTS, share)
        room -= length
    return MOST_POINTS


def evenly(items: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of them, the first and the last included."""
    if len(items) <= count:
        return list(items)
    return [items[round(i)] for i in np.linspace(0, len(items) - 1, count)]


def _side_by_side(runs: Sequence[RunView]) -> list[tuple[str, list[Fact | None]]]:
    """Key figures as rows, with a value for each run."""
    tables = [{fact.label: fact for fact in run.facts} for run in runs]
    labels = dict.fromkeys(label for table in tables for label in table)
    return [(label, [table.get(label) for table in tables]) for label in labels]


def _differences(records: Sequence[RunRecord]) -> dict[str, Any]:
    """The keys that configs do not have alike, with the value of each run as it was written, and
    what is wrong with configs; nothing of one run."""
    if len(records) == 1:
        return {"differences": [], "not_compared": []}
    from instar.config.dump import in_yaml

    configs, faults = config_values([record.run for record in records])
    rows = [
        (key, [in_yaml(config[key]) if key in config else "" for config in configs])
        for key in differing([config or None for config in configs])
    ]
    return {"differences": rows, "not_compared": faults}


def _title(runs: Sequence[RunView]) -> str:
    return runs[0].label if len(runs) == 1 else f"{len(runs)} runs"


def scatter_svg(scatter: Scatter) -> dict[str, Any]:
    """A path with a dot for each pair in a square, and what its sides stand for."""
    low = float(min(scatter.true.min(), scatter.predicted.min()))
    high = float(max(scatter.true.max(), scatter.predicted.max()))
    scale = SCATTER_SIDE / (high - low) if high > low else 0.0
    across = (scatter.true - low) * scale
    up = SCATTER_SIDE - (scatter.predicted - low) * scale
    dots = zip(across.tolist(), up.tolist(), strict=True)
    return {
        "target": scatter.target,
        "side": SCATTER_SIDE,
        "path": "".join(f"M{x:.1f} {y:.1f}h0" for x, y in dots),
        "low": f"{low:.4g}",
        "high": f"{high:.4g}",
        "shown": len(scatter.true),
        "count": scatter.count,
    }


def _when(time: float) -> str:
    """Unix seconds as `2026-11-21 22:35 UTC`."""
    try:
        return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M} UTC"
    except (OverflowError, OSError, ValueError):
        return "?"


def _number(value: float | None) -> str:
    """Four decimals, or an exponent where these say too little or too much."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return str(value)
    plain = value == 0 or 1e-3 <= abs(value) < 1e5
    return f"{value:.4f}" if plain else f"{value:.3e}"


def _took(seconds: float) -> str:
    return f"{1000 * seconds:.2g}ms" if 0 <= seconds < 0.0995 else duration(seconds)


def _quoted(text: str) -> str:
    """`text` so that its blanks can be seen: `"def "`."""
    return msgspec.json.encode(printable(text)).decode()


def _share(row: Iterable[int], count: int) -> str:
    """Of a row of a confusion matrix, in percent."""
    total = sum(row)
    return f"{100 * count / total:.0f}%" if total else "0%"


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        autoescape=True,
        loader=FunctionLoader(asset),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "bytes": known(bytes_text),
        "count": known(count_text),
        "duration": duration,
        "flops": known(flops_text),
        "number": _number,
        "printable": printable,
        "proof": proof_text,
        "quoted": _quoted,
        "scatter": scatter_svg,
        "share": _share,
        "shortened": shortened,
        "took": _took,
        "when": _when,
    }
    return environment
