"""The moving average that curves are smoothed with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

_BLOCK = 64


def smooth(values: npt.ArrayLike, weight: float) -> Floats:
    """The exponential moving average of `values`, without its bias towards 0 at the beginning.

    With the finite values v₁, v₂, … and aₖ = weight · aₖ₋₁ + (1 − weight) · vₖ, a₀ = 0, the k-th
    of them becomes aₖ / (1 − weightᵏ) (the correction of Adam, arXiv 1412.6980, section 3). What
    is not finite stays as it is, and the average goes on behind it.

    Raises:
        ValueError: `weight` is not in [0, 1).
    """
    if not 0 <= weight < 1:
        raise ValueError(f"weight is at least 0 and below 1, not {weight}")
    smoothed = np.array(values, np.float64)
    if weight == 0:
        return smoothed
    finite = np.isfinite(smoothed)
    known = smoothed[finite]
    bias = -np.expm1(np.arange(1, len(known) + 1) * np.log(weight))
    smoothed[finite] = _decaying_sum((1 - weight) * known, weight) / bias
    return smoothed


def _decaying_sum(values: Floats, decay: float) -> Floats:
    """sₖ = decay · sₖ₋₁ + vₖ, a block at a time: within blocks a product with a triangular
    matrix, and from block to block the same recurrence over their last values."""
    whole = len(values) - len(values) % _BLOCK
    age = np.subtract.outer(np.arange(_BLOCK), np.arange(_BLOCK))
    within = np.tril(decay ** np.maximum(age, 0))
    sums = np.empty_like(values)
    carry = 0.0
    if whole:
        blocks = values[:whole].reshape(-1, _BLOCK) @ within.T
        carried = _decaying_sum(blocks[:, -1], decay**_BLOCK)
        blocks[1:] += np.multiply.outer(carried[:-1], decay ** np.arange(1, _BLOCK + 1))
        sums[:whole] = blocks.ravel()
        carry = carried[-1]
    rest = len(values) - whole
    sums[whole:] = within[:rest, :rest] @ values[whole:] + carry * decay ** np.arange(1, rest + 1)
    return sums
