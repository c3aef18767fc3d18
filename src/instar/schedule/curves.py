"""Losses by compute as power laws, and their fit."""

from __future__ import annotations

import math
from dataclasses import dataclass

PER = 1e15
"""FLOPs for which slopes are given."""


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

    def flops_at(self, loss: float) -> float:
        """Return the FLOPs after which the loss is reached; infinite at or below the floor."""
        if loss <= self.floor:
            return math.inf
        power = math.log(self.flops) - math.log(loss - self.floor) / self.exponent
        return math.exp(power) if power < 700 else math.inf

    def slope_at(self, loss: float) -> float:
        """Return the fall in nats per 1e15 FLOPs where the loss is `loss`; 0 at or below the floor."""
        if loss <= self.floor or not math.isfinite(loss):
            return 0.0
        power = math.log(PER * self.exponent) - math.log(self.flops)
        power += (1 + 1 / self.exponent) * math.log(loss - self.floor)
        return math.exp(power) if power < 700 else math.inf
