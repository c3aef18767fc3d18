"""Losses by compute as power laws, and their fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import linear_regression

PER = 1e15
"""FLOPs for which slopes are given."""
_FLOORS = 40
_NEAREST = 0.02
"""Nats that the highest floor of a fit lies below the lowest loss."""


@dataclass(frozen=True)
class PowerLaw:
    """loss = floor + (flops / C) ** exponent after training with C FLOPs, in nats."""

    floor: float
    flops: float
    """C at which the loss is 1 nat above the floor"""
    exponent: float

    def __str__(self) -> str:
        return f"{self.floor:.4g} + ({self.flops:.3g} / FLOPs)^{self.exponent:.3g}"

    def loss(self, flops: float) -> float:
        """Return the loss after training with `flops`; infinite after none."""
        above = self.exponent * (math.log(self.flops) - math.log(flops)) if flops > 0 else math.inf
        return self.floor + (math.exp(above) if above < 700 else math.inf)

    def slope_at(self, loss: float) -> float:
        """Return the fall in nats per 1e15 FLOPs where the loss is `loss`; 0 at or below the floor."""
        if loss <= self.floor or not math.isfinite(loss):
            return 0.0
        power = math.log(PER * self.exponent) - math.log(self.flops)
        power += (1 + 1 / self.exponent) * math.log(loss - self.floor)
        return math.exp(power) if power < 700 else math.inf


def fit_power_law(points: Sequence[tuple[float, float]]) -> PowerLaw:
    """Fit a power law to (FLOPs, loss): for each of a grid of floors a line through the logarithms,
    of which the one with the least squares of losses is taken.

    Raises:
        ValueError: fewer than three points, or the loss does not fall.
    """
    if len(points) < 3:
        raise ValueError(f"{len(points)} evaluations are too few for a curve")
    lowest = min(loss for _, loss in points)
    laws = []
    for number in range(_FLOORS):
        floor = lowest - _NEAREST * (max(lowest, 1.0) / _NEAREST) ** (number / (_FLOORS - 1))
        slope, at_one = linear_regression(
            [math.log(flops) for flops, _ in points], [math.log(loss - floor) for _, loss in points]
        )
        if slope < 0:
            law = PowerLaw(floor, math.exp(-at_one / slope), -slope)
            error = sum((law.loss(flops) - loss) ** 2 for flops, loss in points)
            laws.append((error, number, law))
    if not laws:
        raise ValueError("the loss does not fall")
    return min(laws)[2]
