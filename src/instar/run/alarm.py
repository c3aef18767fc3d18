"""Whether what an operation made new learns: its gradients in the first steps after it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from instar.growth.plan import GrowthPlan
from instar.growth.proof import split_norms

WATCHED_STEPS = 3
"""Under a mask the first step gives nothing, and behind a zero factor the second gives more."""


class GradientWatch:
    """Looks at the gradients of so many steps; where those of the new parameters are exactly 0 in
    all of them, the new structure is dead: no gradient will ever arrive there."""

    def __init__(self, plan: GrowthPlan, operation: str) -> None:
        self.plan, self.operation = plan, operation
        self.norms: list[tuple[float, float]] = []
        """of the kept and of the new parameters, one pair for each step"""

    def see(self, gradients: Mapping[str, torch.Tensor]) -> None:
        self.norms.append(split_norms(self.plan, gradients))

    @property
    def over(self) -> bool:
        return len(self.norms) >= WATCHED_STEPS

    @property
    def dead(self) -> bool:
        """Whether nothing has reached the new parameters, though it did the others."""
        return self.over and all(new == 0.0 and old > 0.0 for old, new in self.norms)
