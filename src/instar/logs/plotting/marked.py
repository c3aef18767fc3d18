"""What happened on the way, at its place on the chart's x axis."""

from __future__ import annotations

from collections.abc import Sequence

from instar.logs.plotting.chart import Kind, Mark
from instar.logs.reading.record import RunRecord
from instar.logs.reporting.chartdata import marks

_KINDS: dict[str, Kind] = {
    "operation": "operation",
    "checkpoint": "checkpoint",
    "resume": "resume",
    "alert": "alert",
    "failed": "failed",
}
_LONGEST = 36


def marked(
    members: Sequence[Sequence[RunRecord]], axis: str, limits: tuple[float, float]
) -> tuple[Mark, ...]:
    """Operations, checkpoints, resumes, alerts and failures of what counts, within the limits, in
    their order; what a run that goes on sets anew is told by its resume."""
    found = [
        Mark(_KINDS[told["kind"]], told["x"][axis], run, _short(told["title"]))
        for run, group in enumerate(members)
        for record in group
        for told in marks(record, (axis,))
        if told["kind"] in _KINDS
        and not told["superseded"]
        and not told["title"].startswith("override ")
        and told["x"][axis] is not None
        and limits[0] <= told["x"][axis] <= limits[1]
    ]
    return tuple(sorted(dict.fromkeys(found), key=lambda mark: mark.x))


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
