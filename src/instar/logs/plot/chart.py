"""Charts as data, and the texts on them: labels, units, and round numbers along the axes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from instar.config.errors import ConfigError
from instar.extensions import metric_names
from instar.logs.query.stages import stages
from instar.logs.read.columns import Floats
from instar.logs.read.record import AXES, RunRecord
from instar.record.events import to_words
from instar.record.format import si

_ROOM = 0.015
Kind = Literal["operation", "checkpoint", "resume", "alert", "failed"]
_NAMES = {
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "mfu": "share of peak FLOPs (MFU)",
    "data_wait": "share of time waiting for data",
    "memory_bytes": "memory",
}
_SPLITS = {"val": "validation", "test": "test"}
_SEPARATOR = re.compile(r"(?<!\d[eE])[-_/ ]")
"""ends a word of a name; in 1e-3 it does not"""
_LABELS = {
    "step": "step",
    "samples": "samples",
    "epoch": "epoch",
    "flops": "training compute (FLOPs)",
    "wall_s": "wall time",
    "active_s": "time spent training",
    "time": "time",
}
_COUNTS = ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
_BYTES = tuple((1024.0**n, f" {unit}iB") for n, unit in ((4, "T"), (3, "G"), (2, "M"), (1, "K")))
_CLOCK = ((86400.0, " d"), (3600.0, " h"), (60.0, " min"), (1.0, " s"))
_SECONDS = ("wall_s", "active_s")
POWERS = ("flops", "lr")
"""axes whose power of ten is part of the label"""
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Polyline:
    """Connected points; a NaN in y breaks the line."""

    x: Floats
    y: Floats

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True)
class Curve:
    """One metric of one run, or of a group of runs."""

    metric: str
    run: int
    """index into the chart's runs"""
    line: Polyline
    """current points, smoothed if requested; the mean of a group"""
    raw: Polyline | None = None
    """the line before smoothing"""
    old_lines: tuple[Polyline, ...] = ()
    band: tuple[Floats, Floats] | None = None
    """low and high around a mean"""
    best: tuple[float, float] | None = None
    """x and value of the best point of a held-out metric"""
    held_out: bool = False
    left_out: int = 0
    """points that cannot be drawn: not finite, absurdly large, or not positive on a logarithmic
    axis"""


@dataclass(frozen=True)
class Panel:
    """Curves over one y axis."""

    label: str
    curves: tuple[Curve, ...]
    right: tuple[Curve, ...] = ()
    """curves on a second y axis"""
    log: bool = False
    limits: tuple[float, float] | None = None
    notes: tuple[str, ...] = ()
    """what is not drawn: `2 points above`"""

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(curve.metric for curve in self.curves))


@dataclass(frozen=True)
class Annotation:
    """An event at a place."""

    kind: Kind
    x: float
    run: int
    text: str
    name: str = ""
    """short form of the text"""
    sign: str = ""
    """its kind; of operations, `growth` or `setting`"""


@dataclass(frozen=True)
class Chart:
    """Panels below each other over one x axis."""

    title: str
    subtitle: str
    axis: str
    label: str
    runs: tuple[str, ...]
    """a unique label per run"""
    panels: tuple[Panel, ...]
    marks: tuple[Annotation, ...] = ()
    log_x: bool = False
    limits: tuple[float, float] = field(default=(0.0, 1.0))

    @property
    def view(self) -> tuple[float, float]:
        """The x limits with a margin."""
        low, high = self.limits
        if self.log_x:
            return low, high * (high / low) ** _ROOM if high > low else high * 1.1
        room = (high - low) * _ROOM or 0.5
        return low - room, high + room

    def to_dict(self) -> dict[str, Any]:
        """Return the chart as JSON-ready data."""
        as_json: dict[str, Any] = to_words(
            {
                "title": self.title,
                "x": self.axis,
                "label": self.label,
                "runs": list(self.runs),
                "panels": [_panel(panel) for panel in self.panels],
                "marks": [
                    {"kind": m.kind, "x": m.x, "run": m.run, "text": m.text} for m in self.marks
                ],
            }
        )
        return as_json


def _panel(panel: Panel) -> dict[str, Any]:
    return {
        "label": panel.label,
        "curves": [_curve(curve) for curve in (*panel.curves, *panel.right)],
        "limits": None if panel.limits is None else list(panel.limits),
        "notes": list(panel.notes),
    }


def _curve(curve: Curve) -> dict[str, Any]:
    low, high = curve.band or (None, None)
    return {
        "metric": curve.metric,
        "run": curve.run,
        **_line(curve.line),
        "raw": None if curve.raw is None else _line(curve.raw),
        "superseded": [_line(line) for line in curve.old_lines],
        "low": None if low is None else low.tolist(),
        "high": None if high is None else high.tolist(),
        "best": None if curve.best is None else {"x": curve.best[0], "value": curve.best[1]},
        "left_out": curve.left_out,
    }


def _line(line: Polyline) -> dict[str, Any]:
    return {"x": line.x.tolist(), "value": line.y.tolist()}


def short_names(names: Sequence[str], max_length: int = 40) -> list[str]:
    """Return names without the words that all begin with, the middle of long ones left out; in full if
    two would become equal. `shortNames` of web/charts/texts.js does the same."""
    shared = names[0] if len(names) > 1 else ""
    while not all(name.startswith(shared) for name in names):
        shared = shared[:-1]
    begins = [0, *(match.end() for match in _SEPARATOR.finditer(shared))]
    if any(re.match(r"\d*( |$)", name[begins[-1] :], re.ASCII) for name in names):
        begins.pop()  # a number alone names nothing
    begin = begins[-1] if begins else 0
    half = max_length // 2
    short = [name[begin:] or name for name in names]
    short = [n if len(n) <= max_length else f"{n[: half - 1]}…{n[-half:]}" for n in short]
    return short if len(set(short)) == len(set(names)) else list(names)


def panel_label(metrics: Sequence[str], units: Sequence[str]) -> str:
    """Return the label of a y axis with its unit: `loss (nats per token)`."""
    different = list(dict.fromkeys(metrics))
    if len(different) == 1:
        return _with_unit(metric_text(different[0]), different[0], units)
    last = {metric.rpartition("/")[2] for metric in different}
    if len(last) == 1:
        return _with_unit(metric_text(last.pop()), different[0], units)
    return ", ".join(map(metric_text, different))


def metric_text(metric: str) -> str:
    """Return `validation loss` for `val/loss`."""
    split, _, name_in_split = metric.partition("/")
    if split in _SPLITS and name_in_split:
        return f"{_SPLITS[split]} {name_in_split.replace('/', ' ')}"
    if metric in (names := metric_names()):
        return names[metric].label
    return _NAMES.get(metric, metric.replace("_", " ") if "/" not in metric else metric)


def curve_text(metric: str) -> str:
    """Return `metric_text`, with `training` where no split is named: `training loss`."""
    return (
        metric_text(metric)
        if "/" in metric or metric in _NAMES or metric in metric_names()
        else f"training {metric_text(metric)}"
    )


def subtitle(records: Sequence[RunRecord]) -> str:
    """Return the models: `2L/128d, 803k → 4L/128d, 1.33M parameters`; empty if runs differ."""
    shapes = list(dict.fromkeys(filter(None, map(_shapes, records))))
    return shapes[0] if len(shapes) == 1 else ""


def _shapes(record: RunRecord) -> str:
    run_stages = [stage for stage in stages(record) if stage.model]
    if not run_stages:
        return ""
    ends = [run_stages[0]] if len(run_stages) == 1 else [run_stages[0], run_stages[-1]]
    texts = [
        stage.model + (f", {si(stage.parameters)}" if stage.parameters else "") for stage in ends
    ]
    return " → ".join(texts) + (" parameters" if ends[-1].parameters else "")


def _with_unit(text: str, metric: str, units: Sequence[str]) -> str:
    different = set(units)
    if metric == "tokens_per_s":
        return " or ".join(f"{unit}s" for unit in sorted(different)) + " per second"
    if metric.rpartition("/")[2] == "loss" and different == {"token"}:
        return f"{text} (nats per token)"
    return text


def axis_label(axis: str, units: Sequence[str], high: float) -> str:
    """Return the label of an axis that ends at `high`; `units`: the runs' token units, e.g. `graph`."""
    if axis == "flops" and power_of(high) and math.isfinite(high):
        return f"training compute ({ten_to(power_of(high))} FLOPs)"
    if axis == "tokens":
        return ", ".join(dict.fromkeys(f"{unit}s" for unit in units))
    return _LABELS[axis]


def check_axis(axis: str, records: Sequence[RunRecord]) -> None:
    """Check that every run has values on this axis.

    Raises:
        ConfigError: a run has none; lists the axes that it has.
    """
    for record in records:
        if _has(record, axis):
            continue
        available = [name for name in AXES if _has(record, name)]
        if available:
            raise ConfigError.of(
                f"{record.run.path} has no values on the axis {axis}",
                where="--x",
                hint=f"it has {', '.join(available)}",
            )


def _has(record: RunRecord, axis: str) -> bool:
    values = (record.series(metric).axis(axis) for metric in record.metrics)
    return any(len(places) and places.max() > 0 for places in values)


def round_places(low: float, high: float, count: int, base: float = 1.0) -> list[float]:
    """Return at most `count` (at least 2) places in [low, high]: multiples of 1, 2 or 5 times a power
    of ten of `base`; `[low]` for a nearly empty range."""
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1e-290):
        return [low]
    rough = (high - low) / max(count, 2) / base
    power = 10.0 ** math.floor(math.log10(rough))
    step = (
        base
        * power
        * next(m for m in (1, 2, 5, 10, 20) if _fits(low, high, base, power * m, count))
    )
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def decades(low: float, high: float, count: int) -> list[float]:
    """Return at most `count` powers of ten (or of 100, 1000, …) in [low, high]; round places if
    there are fewer than two."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last - first < 1:
        return [place for place in round_places(low, high, count) if place > 0]
    stride = -(-(last - first + 1) // max(count, 2))
    return [10.0**power for power in range(first, last + 1, stride)]


def axis_base(axis: str, high: float) -> float:
    """Return the unit of an axis of durations or bytes, e.g. 60 if it ends at some minutes."""
    scales = _BYTES if axis.endswith("_bytes") else _CLOCK if axis in _SECONDS else ()
    return next((size for size, _ in scales if high >= 2 * size), 1.0)


def power_of(high: float) -> int:
    """Return the power of ten, a multiple of three, that scales an axis up to `high`."""
    return 3 * math.floor(math.log10(high) / 3 + 1e-9) if high > 0 else 0


def ten_to(power: int) -> str:
    """Return `10¹²` for 12."""
    return f"10{str(power).translate(_SUPERSCRIPT)}"


def power_text(place: float) -> str:
    """Return a place on a logarithmic axis as `10¹²` or `5·10¹²`."""
    power = math.floor(math.log10(place) + 1e-9)
    factor = f"{place / 10.0**power:.3g}"
    return ten_to(power) if factor == "1" else f"{factor}·{ten_to(power)}"


def tick_texts(axis: str, places: Sequence[float]) -> list[str]:
    """Format places along an axis with one unit: 0, 20M, 40M; 0, 10 min, 20 min; 0.001, 0.01."""
    high = max(map(abs, places), default=0.0)
    if axis in _SECONDS or axis.endswith("_bytes"):
        base = axis_base(axis, high)
        unit = next((unit for size, unit in (*_CLOCK, *_BYTES) if size == base), " B")
        unit = " B" if axis.endswith("_bytes") and base == 1 else unit
        return ["0" if place == 0 else f"{place / base:.6g}{unit}" for place in places]
    if axis in POWERS:
        return [f"{place / 10.0 ** power_of(high):.6g}" for place in places]
    if high >= 10_000:
        size, unit = next((size, unit) for size, unit in _COUNTS if high >= size)
        return ["0" if place == 0 else f"{place / size:.6g}{unit}" for place in places]
    return [f"{place:.6g}" for place in places]


def _fits(low: float, high: float, base: float, step: float, count: int) -> bool:
    return math.floor(high / (base * step) + 1e-9) - math.ceil(low / (base * step) - 1e-9) < max(
        count, 2
    )
