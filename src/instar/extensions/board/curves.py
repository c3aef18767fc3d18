"""Builds the JSON that a page draws of a run: thinned curves, superseded points, marks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from instar.logs.plot.transforms import thin
from instar.logs.query.groups import REPEATED, By, given_values, group_indices
from instar.logs.query.stages import WHOLE_AXES, marks
from instar.logs.query.summary import summarize
from instar.logs.read.columns import Floats, Ints
from instar.logs.read.record import AXES, RunRecord, Series, read_record
from instar.record.format import encodable
from instar.record.rundir import RunDir

SIGNIFICANT_FIGURES = 6
"""to which values and FLOPs are rounded"""
_DECIMALS = {"wall_s": 2, "active_s": 2, "time": 1}


def chart_data(
    record: RunRecord, points: int = 2000, *, metrics: Sequence[str] | None = None
) -> dict[str, Any]:
    """Return what `charts.js` draws of one run; non-finite numbers are null.

    Args:
        points: maximum number of points per curve; spikes are preserved.
        metrics: default all but standard errors.
    """
    summary = summarize(record)
    names = [m for m in record.metrics if not m.endswith(":error")] if metrics is None else metrics
    return {
        "id": encodable(summary.id),
        "name": encodable(summary.name),
        "state": summary.state,
        "unit": summary.unit,
        "series": chart_series(record, points, names),
        "marks": marks(record),
    }


def chart_series(record: RunRecord, points: int, metrics: Sequence[str]) -> dict[str, Any]:
    """Return the curves of those metrics that the run has, by name; see `curve`."""
    present = [name for name in metrics if name in record]
    return {encodable(name): curve(record.series(name), points) for name in present}


def curve(series: Series, points: int) -> dict[str, Any]:
    """Return `{x: {axis: […]}, value: […], superseded: [{segment, x, value}, …]}`, thinned.

    Of a thinned curve, up to a quarter of the points are evenly spaced, wherever its extremes are, and
    `even` has their positions: means over curves are made of these, as extremes would overstate the
    deviation. The spacing is a power of two, so that curves of different lengths have places in common.
    """
    old_points = series.take(~series.is_current)
    current = series.current()
    indices = thin(current.value, points)
    even: dict[str, list[int]] = {}
    if len(indices) < len(current):
        stride = 1 << math.ceil(math.log2(len(current) / max(1, points // 4)))
        even_indices = np.unique(np.append(np.arange(0, len(current), stride), len(current) - 1))
        indices = np.union1d(even_indices, thin(current.value, points - len(even_indices)))
        even = {"even": np.searchsorted(indices, even_indices).tolist()}
    return (
        _columns(current.take(indices))
        | even
        | {
            "superseded": [
                {"segment": int(segment)} | _columns(piece.take(thin(piece.value, points)))
                for segment in np.unique(old_points.segment)
                for piece in [old_points.take(old_points.segment == segment)]
            ]
        }
    )


def chart_groups(
    runs: Mapping[str, RunDir], by: By, group_names: Mapping[RunDir, str] | None = None
) -> list[dict[str, Any]]:
    """Return the groups of runs over which a page draws means: `{name, runs, of}`, see `group_indices`.

    Args:
        runs: by the key that the page knows them by; `of` is "seeds" or "folds" if no two runs of a group
            have the same one, else "runs".
    """
    keys, every = list(runs), list(runs.values())
    values = given_values(every)
    return [
        {
            "name": encodable(name),
            "runs": [keys[n] for n in group],
            "of": _repeats([values[n] for n in group]),
        }
        for name, group in group_indices(every, by, group_names, values=values).items()
    ]


def _repeats(values: Sequence[Mapping[str, str]]) -> str:
    """Return what no two runs of a group share: "seeds", "folds", or else "runs"."""
    for key, name in zip(REPEATED, ("seeds", "folds"), strict=True):
        if len({run_values.get(key) for run_values in values} - {None}) == len(values):
            return name
    return "runs"


def _columns(series: Series) -> dict[str, Any]:
    return {
        "x": {axis: _axis(series, axis) for axis in AXES},
        "value": _numbers(_round_values(series.value)),
    }


def _axis(series: Series, axis: str) -> list[Any]:
    if axis in WHOLE_AXES:
        numbers: Ints = getattr(series, axis)
        return list(numbers.tolist())
    values = series.axis(axis)
    if axis in _DECIMALS:
        return _numbers(np.round(values, _DECIMALS[axis]))
    return _numbers(_round_values(values))


def _numbers(values: Floats) -> list[float | None]:
    if np.isfinite(values).all():
        return list(values.tolist())
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _round_values(values: Floats) -> Floats:
    """Round to `SIGNIFICANT_FIGURES`."""
    mask = np.isfinite(values) & (values != 0)
    size = np.floor(np.log10(np.abs(np.where(mask, values, 1.0))))
    up = 10.0 ** np.clip(SIGNIFICANT_FIGURES - 1 - size, 0, 300)
    down = 10.0 ** np.clip(size - SIGNIFICANT_FIGURES + 1, 0, 300)
    return np.where(mask, np.round(values / down * up) / up * down, values)


POINTS = 2000
"""most points of a curve that a page draws"""


def curves_of_run(
    key: str, run: RunDir, metrics: Sequence[str], points: int = POINTS
) -> dict[str, Any]:
    """Return `{key, offset, names, series, marks}`, without metrics that the run lacks; `offset`: up to
    where its record was read.

    Raises:
        RecordError: the record cannot be read.
    """
    record = read_record(run)
    present = [name for name in dict.fromkeys(metrics) if name in record]
    series_by_name = {name: record.series(name) for name in present}
    return {
        "key": key,
        "offset": record.end,
        "names": [name for name in record.metrics if not name.endswith(":error")],
        "series": {
            name: curve(series, points) | {"segment": _last_segment(series)}
            for name, series in series_by_name.items()
        },
        "marks": marks(record),
    }


def _last_segment(series: Series) -> int:
    current = np.flatnonzero(series.is_current)
    return int(series.segment[current[-1]]) if len(current) else 0
