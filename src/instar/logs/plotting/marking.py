"""Marks on a picture: lines through its panels, their labels above the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from instar.logs.plotting.chart import Chart, Mark
from instar.logs.plotting.style import ALARM, FAINT, INK, WIDTH, colours

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROWS = 8
"""Of labels above the first panel."""


@dataclass(frozen=True)
class Label:
    """A mark's text above the first panel."""

    mark: Mark
    row: int
    """From below."""
    left: bool
    """Whether it ends at its mark instead of beginning there."""


def draw_marks(panels: Sequence[Axes], chart: Chart, labels: Sequence[Label]) -> None:
    """Lines through all panels, labels above the first, ticks at the foot of the last."""
    several = len(chart.runs) > 1
    shades = colours(len(chart.runs))
    for axes in panels:
        for mark in chart.marks:
            if mark.kind == "checkpoint":
                continue
            shade = ALARM if mark.kind in ("alert", "failed") else INK
            shade = shades[mark.run] if several and shade == INK else shade
            style = {"operation": (0, (5, 3)), "resume": (0, (1, 2))}.get(mark.kind, "-")
            axes.axvline(mark.x, color=shade, lw=0.7, ls=style, alpha=0.55, zorder=1)
    saved = [mark.x for mark in chart.marks if mark.kind == "checkpoint"]
    if saved and not several:
        panels[-1].plot(
            saved, [0.012] * len(saved), transform=panels[-1].get_xaxis_transform(), ls="",
            marker="^", ms=3.5, color=FAINT, alpha=0.8, markeredgewidth=0, zorder=4,
        )  # fmt: skip
    for label in labels:
        _label(panels[0], label.mark, label.row, left=label.left)


def place_labels(chart: Chart) -> list[Label]:
    """Labels in rows above a picture, each text once.

    From right to left, each in the row above all those whose lines it would cover, so that no line
    crosses a label to its left; labels that find no room are left out.
    """
    wide = (WIDTH - 1.0) * 72
    first: dict[str, Mark] = {}
    for mark in chart.marks:
        if mark.kind != "checkpoint":
            first.setdefault(mark.text, mark)
    placed: list[tuple[float, Label]] = []
    for mark in sorted(first.values(), key=lambda mark: -mark.x):
        at = wide * _share(mark.x, *chart.view, log=chart.log_x)
        length = 4.1 * len(mark.text) + 10
        left = at + length > wide + 24
        begin = at - length if left else at
        covered = [label.row for x, label in placed if begin <= x <= begin + length]
        if (row := max(covered, default=-1) + 1) < _ROWS:
            placed.append((at, Label(mark, row, left)))
    return [label for _, label in placed]


def _label(axes: Axes, mark: Mark, row: int, *, left: bool) -> None:
    shade = {"alert": ALARM, "failed": ALARM, "resume": FAINT}.get(mark.kind, INK)
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
        mark.text, xytext=(-3 if left else 3, 5 + 10 * row), ha="right" if left else "left",
        va="bottom", fontsize=7, color=shade, zorder=6,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6}, **place,
    )  # fmt: skip


def _share(place: float, low: float, high: float, *, log: bool) -> float:
    if log:
        return float(np.log(place / low) / np.log(high / low))
    return (place - low) / (high - low)
