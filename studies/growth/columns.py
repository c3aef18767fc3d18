"""What `growth.py` asks, one column of its table each: the final shape, the horizon, and the dials that are tuned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from search import Choice
from study import Arm, Change, Run, Shape, flops_per_step


@dataclass(frozen=True)
class Plan:
    """How a fraction of the final size's layers becomes all of them."""

    divisor: int
    """of the layers, for those to begin with"""
    copied: tuple[tuple[float, int], ...]
    """shares of the steps, and by what factor copies multiply the layers there"""

    def arm(self, final: Arm) -> Arm:
        """Into the final size that another arm trains from scratch."""
        layers = final.shape.layers // self.divisor
        shape, changes = replace(final.shape, layers=layers), []
        for share, factor in self.copied:
            layers *= factor
            changes.append(Change(share, f"stack_layers {factor}", layers=layers))
        return replace(final, shape=shape, changes=tuple(changes))


RATES = (0.01, 0.015, 0.02, 0.03, 0.04)
REST = (0.0025, 0.005, 0.01, 0.02, 0.04)
DECAYS = (0.15, 0.3, 0.5, 0.7, 0.85)
PLANS = (
    Plan(2, ((0.6, 2),)),
    Plan(2, ((0.75, 2),)),
    Plan(4, ((0.3, 2), (0.6, 2))),
    Plan(4, ((0.4, 2), (0.7, 2))),
    Plan(4, ((0.5, 2), (0.8, 2))),
    Plan(4, ((0.6, 4),)),
)
"""Those near each other in the list are near each other in cost. What else was tried for the first edition did not help."""
SCRATCH, GROWN, FIRST = "scratch", "grown", "first edition"
FIRST_RATES = {"rate": 0.02, "rest": 0.005, "decay": 0.5}
"""With which the first edition trained the final size; it tuned rate and decay."""


@dataclass(frozen=True)
class Column:
    """One horizon of one final size."""

    name: str
    shape: Shape
    tokens_per_parameter: int
    seeds: tuple[int, ...]
    goal: float
    """most of the final size's FLOPs that growing should need"""
    trials: int
    """choices that are tried for each way to train"""
    plans: tuple[Plan, ...] = PLANS
    start: int = 3
    """plan to begin with"""
    share: float = 0.7
    """of the FLOPs, for trials of growth"""
    shorter: float = 0.7
    """share of the FLOPs of a second budget of the final size"""
    budgets: tuple[float, float] = (0.62, 0.8)
    """of grown runs, as shares of the FLOPs of the final size"""
    trial_seeds: tuple[int, ...] = (100, 101)
    """seeds of the trials, used for nothing else"""

    @property
    def flops(self) -> float:
        """Of the final size's whole run."""
        tokens = self.tokens_per_parameter * self.shape.parameters
        steps = round(tokens / (self.shape.batch * self.shape.context))
        return steps * flops_per_step(self.shape)

    def dials(self, way: str) -> tuple[Sequence[Any], ...]:
        """What is tuned: the rate of matrices, that of the rest, the decay, the depth for which rates are meant, and of
        growth the plan. Equally many values of each for both ways."""
        layers = self.shape.layers
        if way == SCRATCH:
            return RATES, REST, DECAYS, (2 * layers, None, layers // 2, layers // 4)
        return RATES, REST, DECAYS, (None, layers, layers // 2, layers // 4), self.plans

    def first_choice(self, way: str) -> Choice:
        """Where the search begins."""
        first: Choice = (0.02, 0.01, 0.5, None)
        return first if way == SCRATCH else (*first, self.plans[self.start])

    def arm(self, choice: Choice) -> Arm:
        """What a choice trains."""
        rate, rest, decay, base_depth, *plans = choice
        values: dict[str, Any] = {"rate": rate, "rest": rest, "decay": decay}
        arm = Arm(self.shape, **values, base_depth=base_depth)  # type: ignore[arg-type]
        for plan in plans:
            assert isinstance(plan, Plan)
            arm = plan.arm(arm)
        return arm

    def trial(self, way: str, choice: Choice) -> list[Run]:
        """The runs that try a choice, one for each seed of the trials."""
        arm = self.arm(choice)
        steps = arm.steps((1.0 if way == SCRATCH else self.share) * self.flops)
        return [Run(arm, seed, steps) for seed in self.trial_seeds]

    def runs(self, best: Mapping[str, Arm], seed: int) -> dict[str, list[Run]]:
        """Of a seed, by way: two budgets each of what the trials chose, and of what the first edition compared with."""
        arms = {**best, FIRST: Arm(self.shape, **FIRST_RATES)}
        return {
            way: [
                Run(arm, seed, arm.steps(share * self.flops))
                for share in (self.budgets if way == GROWN else (self.shorter, 1.0))
            ]
            for way, arm in arms.items()
        }
