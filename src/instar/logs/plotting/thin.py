"""Fewer points that draw the same curve: no spike is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]
    Ints = npt.NDArray[np.int64]


def thin(values: npt.ArrayLike, points: int) -> Ints:
    """Which of `values` to draw, ascending: at most `points`, or 5 where that is less than 5.

    The first and the last are among them. The values are cut into buckets of equal length, and
    of each bucket the smallest and the largest finite value stay; where a bucket holds values
    that are not finite, the first of these stays too, so that the gap is seen.
    """
    column = np.ascontiguousarray(values, np.float64)
    points = max(points, 5)
    if len(column) <= points:
        return np.arange(len(column))
    low, high = _extremes(column, (points - 2) // 2)
    kept = [np.array([0, len(column) - 1]), low, high]
    if not (np.isfinite(column[low]).all() and np.isfinite(column[high]).all()):
        kept[1:] = _finite_extremes(column, (points - 2) // 3)
    return np.unique(np.concatenate(kept)).astype(np.int64)


def _buckets(column: Floats, count: int) -> list[Floats]:
    """`column` as rows of one length, and what is left over as a row of its own."""
    length = -(-len(column) // count)
    full = len(column) - len(column) % length
    parts = [column[:full].reshape(-1, length), column[full:].reshape(1, -1)]
    return [part for part in parts if part.size]


def _extremes(column: Floats, count: int) -> tuple[Ints, Ints]:
    """The places of each bucket's minimum and maximum; of a NaN, where it holds one."""
    low: list[Ints] = []
    high: list[Ints] = []
    start = 0
    for rows in _buckets(column, count):
        starts = start + np.arange(len(rows)) * rows.shape[1]
        low.append(starts + rows.argmin(axis=1))
        high.append(starts + rows.argmax(axis=1))
        start += rows.size
    return np.concatenate(low), np.concatenate(high)


def _finite_extremes(column: Floats, count: int) -> tuple[Ints, Ints, Ints]:
    """As `_extremes` of the finite values, and each bucket's first that is not finite."""
    finite = np.isfinite(column)
    low, _ = _extremes(np.where(finite, column, np.inf), count)
    _, high = _extremes(np.where(finite, column, -np.inf), count)
    first, _ = _extremes(finite.astype(np.float64), count)
    return low, high, first[~finite[first]]
