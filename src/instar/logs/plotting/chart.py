"""A chart as data: what is to be seen, not yet how."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from instar.record.events import to_words

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

_ROOM = 0.015
Kind = Literal["operation", "checkpoint", "resume", "alert", "failed"]


@dataclass(frozen=True)
class Line:
    """Points that belong together; where y is NaN the line is broken."""

    x: Floats
    y: Floats

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True)
class Curve:
    """One metric of one run, or of several that belong together."""

    metric: str
    run: int
    """Which of the chart's runs it is of."""
    line: Line
    """What counts, smoothed if that is wanted; the mean of several runs."""
    raw: Line | None = None
    """What was smoothed."""
    superseded: tuple[Line, ...] = ()
    band: tuple[Floats, Floats] | None = None
    """Low and high around a mean."""
    best: tuple[float, float] | None = None
    """The best place of a held-out metric."""
    held_out: bool = False
    left_out: int = 0
    """Points that cannot be drawn: not finite, beyond all measure, or below 0 on a logarithmic
    axis."""


@dataclass(frozen=True)
class Panel:
    """Curves over one y axis."""

    label: str
    curves: tuple[Curve, ...]
    right: tuple[Curve, ...] = ()
    """Curves over a second y axis."""
    log: bool = False
    limits: tuple[float, float] | None = None
    notes: tuple[str, ...] = ()
    """What is not in the picture: `2 points above`."""

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(curve.metric for curve in self.curves))


@dataclass(frozen=True)
class Mark:
    """Something that happened at a place."""

    kind: Kind
    x: float
    run: int
    text: str


@dataclass(frozen=True)
class Chart:
    """Panels below each other over one x axis."""

    title: str
    subtitle: str
    axis: str
    label: str
    runs: tuple[str, ...]
    """What each run is called in this company."""
    panels: tuple[Panel, ...]
    marks: tuple[Mark, ...] = ()
    log_x: bool = False
    limits: tuple[float, float] = field(default=(0.0, 1.0))

    @property
    def view(self) -> tuple[float, float]:
        """The limits with some room beside them."""
        low, high = self.limits
        if self.log_x:
            return low, high * (high / low) ** _ROOM if high > low else high * 1.1
        room = (high - low) * _ROOM or 0.5
        return low - room, high + room

    def to_dict(self) -> dict[str, Any]:
        """What is drawn, as JSON can say it."""
        told: dict[str, Any] = to_words(
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
        return told


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
        "superseded": [_line(line) for line in curve.superseded],
        "low": None if low is None else low.tolist(),
        "high": None if high is None else high.tolist(),
        "best": None if curve.best is None else {"x": curve.best[0], "value": curve.best[1]},
        "left_out": curve.left_out,
    }


def _line(line: Line) -> dict[str, Any]:
    return {"x": line.x.tolist(), "value": line.y.tolist()}
