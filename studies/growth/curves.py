"""From a few fully decayed runs to the compute at a loss, and what chance may have to do with it.

Over a small range of budgets the loss falls by about as much with every doubling: loss = a + b ·
log(compute), fitted for each seed by least squares, is inverted at the target. Ratios of compute are
paired by seed; the interval of their geometric mean comes from drawing seeds with replacement.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

DRAWS = 10_000
MOST = 10.0
"""A ratio beyond this says no more than that the target is out of reach."""


@dataclass(frozen=True)
class Point:
    """A run whose rate has fully decayed."""

    flops: float
    loss: float


@dataclass(frozen=True)
class Curve:
    """loss = at_one + slope · log(flops)."""

    at_one: float
    slope: float

    def loss(self, flops: float) -> float:
        return self.at_one + self.slope * math.log(flops)

    def flops_at(self, loss: float) -> float:
        """Compute at which the loss is reached; infinite on a curve that does not fall."""
        if self.slope >= 0:
            return math.inf
        exponent = (loss - self.at_one) / self.slope
        return math.exp(exponent) if exponent < 700 else math.inf


@dataclass(frozen=True)
class Interval:
    """A mean, and where it lies with 95 % confidence."""

    mean: float
    low: float
    high: float


def fit_curve(points: Sequence[Point]) -> Curve:
    """The curve of least squares through at least two budgets."""
    logs = [math.log(point.flops) for point in points]
    slope, at_one = statistics.linear_regression(logs, [point.loss for point in points])
    return Curve(at_one, slope)


def needed_compute(arm: Sequence[Point], reference: Sequence[Point]) -> float:
    """Compute that an arm needs for the loss that the reference reaches at its largest budget, as a
    multiple of that budget."""
    full = max(point.flops for point in reference)
    return min(MOST, fit_curve(arm).flops_at(fit_curve(reference).loss(full)) / full)


def spread(values: Sequence[float], seed: int = 0) -> Interval:
    """Mean, and the percentiles 2.5 and 97.5 of `DRAWS` means of drawn values."""
    draw = random.Random(seed)
    means = sorted(statistics.fmean(draw.choices(values, k=len(values))) for _ in range(DRAWS))
    low, high = means[round(0.025 * DRAWS)], means[round(0.975 * DRAWS) - 1]
    return Interval(statistics.fmean(values), low, high)


def interval(ratios: Sequence[float], seed: int = 0) -> Interval:
    """Of ratios: `spread` of their logarithms, so that the mean is geometric."""
    logs = spread([math.log(ratio) for ratio in ratios], seed)
    return Interval(*map(math.exp, (logs.mean, logs.low, logs.high)))
