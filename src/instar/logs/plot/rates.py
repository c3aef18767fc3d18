"""Chart of the final losses of short trainings over their learning rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from instar.logs.plot.chart import Annotation, Chart, Curve, Panel, Polyline, metric_text

_DIVERGED = 1.5
"""losses above this multiple of the lowest one, and infinite ones, are beyond the picture"""


def rates_chart(rounds: Mapping[str, Sequence[tuple[float, float]]], chosen: float) -> Chart:
    """Returns a chart with a curve per round and a mark at the chosen rate.

    Args:
        rounds: (learning rate, final loss) by label, in ascending order of the rate.
    """
    losses = [loss for points in rounds.values() for _, loss in points if np.isfinite(loss)]
    lowest, highest = min(losses), max(losses)
    top = min(highest, lowest + _DIVERGED * abs(lowest))
    room = 0.06 * (top - lowest) or 0.1
    curves = tuple(
        Curve("val/loss", run, Polyline(*_columns(points)), held_out=True)
        for run, points in enumerate(rounds.values())
    )
    panel = Panel(metric_text("val/loss"), curves, limits=(lowest - room, top + room))
    rates = [rate for points in rounds.values() for rate, _ in points]
    text = f"lr {chosen:.2g}"
    return Chart(
        title="Final loss by learning rate",
        subtitle="",
        axis="lr",
        label=metric_text("lr"),
        runs=tuple(rounds),
        panels=(panel,),
        marks=(Annotation("operation", chosen, len(rounds) - 1, text, text, "setting"),),
        log_x=True,
        limits=(min(rates), max(rates)),
    )


def _columns(points: Sequence[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.array(points, dtype=np.float64).T
    return x, np.where(np.isfinite(y), y, np.nan)
