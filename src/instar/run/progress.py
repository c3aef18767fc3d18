"""How far a run has come, and in which units."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """Totals since the run began."""

    step: int = 0
    """optimizer updates, skipped ones included"""
    samples: int = 0
    """the cursor: samples consumed over all ranks"""
    tokens: int = 0
    """loss weight consumed: for language, target tokens"""
    flops: float = 0.0
    """counted from the architecture, forward and backward"""
    active_s: float = 0.0
    """seconds spent in training steps"""

    def __post_init__(self) -> None:
        if min(dataclasses.astuple(self)) < 0:
            raise ValueError(f"totals are never negative: {self}")

    def after_step(self, samples: int, tokens: int, flops: float, seconds: float) -> Progress:
        """The progress one step later."""
        return dataclasses.replace(
            self,
            step=self.step + 1,
            samples=self.samples + samples,
            tokens=self.tokens + tokens,
            flops=self.flops + flops,
            active_s=self.active_s + seconds,
        )
