"""How a run gets on under settings that do not change: steps into samples, tokens and epochs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction

from instar.config.budget import Budget


@dataclass(frozen=True)
class Pace:
    """What every step consumes and costs."""

    global_batch: int
    """samples of a step; an epoch's last step takes what is left"""
    weight: int
    """of a sample: its tokens"""
    samples_per_epoch: int | None
    """None: not known, taken for endless"""
    flops_per_token: int


@dataclass(frozen=True)
class Spot:
    """How far a run has come."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    flops: int = 0
    in_order: int = 0
    """samples consumed since the present order began; samples of another length begin a new one"""
    epochs_before: Fraction = Fraction(0)
    """passes through the data in earlier orders"""

    def after(self, pace: Pace, steps: int) -> Spot:
        """So many steps later."""
        samples = _taken(self.in_order, steps, pace.global_batch, pace.samples_per_epoch)
        tokens = samples * pace.weight
        return replace(
            self,
            step=self.step + steps,
            samples=self.samples + samples,
            tokens=self.tokens + tokens,
            flops=self.flops + tokens * pace.flops_per_token,
            in_order=self.in_order + samples,
        )

    def epochs(self, pace: Pace) -> Fraction:
        """Passes through the data so far."""
        if pace.samples_per_epoch is None:
            return self.epochs_before
        return self.epochs_before + Fraction(self.in_order, pace.samples_per_epoch)

    def new_order(self, pace: Pace) -> Spot:
        """The same place where samples of another length begin, `pace` being that before."""
        return replace(self, in_order=0, epochs_before=self.epochs(pace))

    def step_of_tokens(self, pace: Pace, tokens: int) -> int:
        """The first step, this one at the earliest, after which so many tokens are trained on."""
        return self.step + self._steps_for(
            pace, math.ceil(Fraction(tokens - self.tokens, pace.weight))
        )

    def step_of(self, pace: Pace, budget: Budget, share: Fraction = Fraction(1)) -> int | None:
        """The first step, this one at the earliest, after which a share of a budget is used up;
        None for a budget that counts nothing, or epochs of unknown length."""
        # 0.1 epochs of 30 samples are 3, not 3.0000000000000004
        amount = Fraction(str(budget.amount)) * share
        if budget.kind == "steps":
            return max(self.step, math.ceil(amount))
        if budget.kind == "tokens":
            return self.step_of_tokens(pace, math.ceil(amount))
        if budget.kind == "samples":
            return self.step + self._steps_for(pace, math.ceil(amount) - self.samples)
        if budget.kind == "epochs" and pace.samples_per_epoch is not None:
            samples = math.ceil((amount - self.epochs_before) * pace.samples_per_epoch)
            return self.step + self._steps_for(pace, samples - self.in_order)
        return None

    def step_of_first(
        self, pace: Pace, budgets: Iterable[Budget], share: Fraction = Fraction(1)
    ) -> int | None:
        """The same for the tightest of several budgets."""
        steps = [self.step_of(pace, budget, share) for budget in budgets]
        return min((step for step in steps if step is not None), default=None)

    def _steps_for(self, pace: Pace, samples: int) -> int:
        """The fewest steps that consume so many samples more."""
        size, batch = pace.samples_per_epoch, pace.global_batch
        if samples <= 0:
            return 0
        if size is None:
            return -(-samples // batch)
        left = size - self.in_order % size
        if samples <= left:
            return -(-samples // batch)
        epochs, rest = divmod(samples - left, size)
        return -(-left // batch) + epochs * -(-size // batch) + -(-rest // batch)


def _taken(begin: int, steps: int, batch: int, size: int | None) -> int:
    """Samples that `steps` steps consume from place `begin` of an order with epochs of `size`."""
    if size is None:
        return steps * batch
    left = size - begin % size
    to_end = -(-left // batch)
    if steps < to_end:
        return steps * batch
    epochs, rest = divmod(steps - to_end, -(-size // batch))
    return left + epochs * size + rest * batch
