"""What several runs that differ in their seed come to: mean and spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Band:
    """Over places that all of the curves have; all arrays have one length."""

    x: Floats
    mean: Floats
    deviation: Floats
    """The standard deviation of a sample, divided by n - 1; 0 of one curve."""


def band(curves: Sequence[tuple[Floats, Floats]]) -> Band | None:
    """The mean of curves (x ascending, y) within their common range; None: they have none.

    Its places are those of the curve with the fewest; the others are interpolated between theirs.
    Points that are not finite are left out.
    """
    known = [(x[finite], y[finite]) for x, y in curves if (finite := np.isfinite(y)).any()]
    if not known or len(known) < len(curves):
        return None
    low = max(x[0] for x, _ in known)
    high = min(x[-1] for x, _ in known)
    if low > high:
        return None
    fewest = min((x for x, _ in known), key=len)
    places = np.unique(np.concatenate([[low], fewest[(fewest > low) & (fewest < high)], [high]]))
    values = np.stack([np.interp(places, x, y) for x, y in known])
    deviation = values.std(axis=0, ddof=1) if len(known) > 1 else np.zeros_like(places)
    return Band(places, values.mean(axis=0), deviation)
