"""Smooths, thins and averages curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from instar.logs.read.columns import Floats, Ints

_BLOCK = 64


def smooth(values: npt.ArrayLike, weight: float) -> Floats:
    """Return the bias-corrected exponential moving average of `values`.

    With the finite values v₁, v₂, … and aₖ = weight · aₖ₋₁ + (1 − weight) · vₖ, a₀ = 0, the k-th
    becomes aₖ / (1 − weightᵏ) (the correction of Adam, arXiv 1412.6980, section 3). Non-finite values
    are unchanged and skipped by the average.

    Raises:
        ValueError: `weight` is not in [0, 1).
    """
    if not 0 <= weight < 1:
        raise ValueError(f"weight is out of range [0, 1): {weight}")
    averages = np.array(values, np.float64)
    if weight == 0:
        return averages
    finite = np.isfinite(averages)
    last_value = averages[finite]
    bias = -np.expm1(np.arange(1, len(last_value) + 1) * np.log(weight))
    averages[finite] = _decaying_sum((1 - weight) * last_value, weight) / bias
    return averages


def _decaying_sum(values: Floats, decay: float) -> Floats:
    """Compute sₖ = decay · sₖ₋₁ + vₖ in blocks: a triangular matrix product within blocks, and the
    same recurrence over their last values."""
    full = len(values) - len(values) % _BLOCK
    age = np.subtract.outer(np.arange(_BLOCK), np.arange(_BLOCK))
    within = np.tril(decay ** np.maximum(age, 0))
    sums = np.empty_like(values)
    carry = 0.0
    if full:
        blocks = values[:full].reshape(-1, _BLOCK) @ within.T
        block_sums = _decaying_sum(blocks[:, -1], decay**_BLOCK)
        blocks[1:] += np.multiply.outer(block_sums[:-1], decay ** np.arange(1, _BLOCK + 1))
        sums[:full] = blocks.ravel()
        carry = block_sums[-1]
    remainder = len(values) - full
    sums[full:] = within[:remainder, :remainder] @ values[full:] + carry * decay ** np.arange(
        1, remainder + 1
    )
    return sums


def thin(values: npt.ArrayLike, points: int) -> Ints:
    """Return ascending indices of the values to draw, at most `max(points, 5)`.

    The first and last values are included. Of each of the buckets of equal length, the smallest and
    largest finite value are kept, and the first non-finite value, so that gaps stay visible.
    """
    column = np.ascontiguousarray(values, np.float64)
    points = max(points, 5)
    if len(column) <= points:
        return np.arange(len(column))
    low, high = _extremes(column, (points - 2) // 2)
    indices = [np.array([0, len(column) - 1]), low, high]
    if not (np.isfinite(column[low]).all() and np.isfinite(column[high]).all()):
        indices[1:] = _finite_extremes(column, (points - 2) // 3)
    return np.unique(np.concatenate(indices)).astype(np.int64)


def _buckets(column: Floats, count: int) -> list[Floats]:
    """Return `column` as rows of equal length, and the remainder as another array of one row."""
    length = -(-len(column) // count)
    full = len(column) - len(column) % length
    parts = [column[:full].reshape(-1, length), column[full:].reshape(1, -1)]
    return [part for part in parts if part.size]


def _extremes(column: Floats, count: int) -> tuple[Ints, Ints]:
    """Return the indices of each bucket's minimum and maximum, or of a NaN if it has one."""
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
    """Return `_extremes` of the finite values, and the index of each bucket's first non-finite one."""
    finite = np.isfinite(column)
    low, _ = _extremes(np.where(finite, column, np.inf), count)
    _, high = _extremes(np.where(finite, column, -np.inf), count)
    first, _ = _extremes(finite.astype(np.float64), count)
    return low, high, first[~finite[first]]


@dataclass(frozen=True)
class Band:
    """Mean and deviation of several curves over their common range; all arrays have shape [n]."""

    x: Floats
    mean: Floats
    deviation: Floats
    """sample standard deviation (n - 1); 0 for one curve"""


def band(curves: Sequence[tuple[Floats, Floats]]) -> Band | None:
    """Return the mean of curves (x ascending, y) over their common range, or None without one.

    Curves are interpolated at the places of the one with the fewest points. Non-finite points are
    left out.
    """
    finite_curves = [(x[finite], y[finite]) for x, y in curves if (finite := np.isfinite(y)).any()]
    if not finite_curves or len(finite_curves) < len(curves):
        return None
    low = max(x[0] for x, _ in finite_curves)
    high = min(x[-1] for x, _ in finite_curves)
    if low > high:
        return None
    fewest = min((x for x, _ in finite_curves), key=len)
    places = np.unique(np.concatenate([[low], fewest[(fewest > low) & (fewest < high)], [high]]))
    values = np.stack([np.interp(places, x, y) for x, y in finite_curves])
    deviation = values.std(axis=0, ddof=1) if len(finite_curves) > 1 else np.zeros_like(places)
    return Band(places, values.mean(axis=0), deviation)
