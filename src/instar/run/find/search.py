"""Successive halving over a geometric grid of learning rates, and the minimum of a fitted parabola.

A range test (Smith, arXiv 1506.01186) raises the rate within one training and reads off where the
loss falls fastest. That is a property of the first steps and often far from the rate with the
lowest *final* loss. Here every candidate is a training of its own, with its whole schedule:
successive halving (Jamieson and Talwalkar, arXiv 1502.07943) spends most steps on the best ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

FinalLoss = Callable[[float, int], float]
"""(learning rate, steps) → final loss; infinity if the training diverges"""

_SIDE = 3
"""Rates of the first round on either side of the given one, a factor 4 apart."""
_KEPT = 3
"""Rates that go on to the next round."""
BUDGET = 10
"""Default budget, in trainings of full length. A search without detours needs 7.25 to 9.25."""


@dataclass(frozen=True)
class ShortRun:
    """One short training."""

    lr: float
    steps: int
    loss: float
    """final loss; infinity if it diverged"""


@dataclass(frozen=True)
class FoundRate:
    """Result of a search."""

    lr: float
    """minimum of the parabola through the best of the longest trainings and its neighbours"""
    runs: tuple[ShortRun, ...]
    """in the order in which they were trained"""
    finished: bool
    """whether worse rates were tried, for all steps, on both sides of the best; False: the budget
    was used up before"""

    @property
    def steps(self) -> int:
        """Steps of all trainings together."""
        return sum(run.steps for run in self.runs)

    def rounds(self) -> dict[int, list[ShortRun]]:
        """Return the runs of each number of steps, in ascending order of both."""
        ordered = sorted(self.runs, key=lambda run: (run.steps, run.lr))
        return {steps: list(runs) for steps, runs in groupby(ordered, lambda run: run.steps)}


def search(
    loss: FinalLoss,
    start: float,
    steps: int,
    budget: int,
    on_run: Callable[[ShortRun], None] = lambda _: None,
) -> FoundRate:
    """Find the learning rate with the lowest loss after `steps` steps.

    Three rounds train for a quarter of the steps, a half, and all: rates a factor 4 apart from
    `start` / 64 to `start` · 64; the best three of them and those between; the best three of these.
    While the best rate of a round is at the edge of those that were tried, the next one is tried as
    well. Rates are always `start` times a power of 2.

    Args:
        loss: of trainings that differ in nothing but the rate: on the same samples, in the same
            order, from the same initial weights.
        budget: maximum steps of all trainings together.
        on_run: called after each training.

    Raises:
        ValueError: every training diverged, or the budget allows none.
    """
    searched = _Search(loss, start, budget, on_run)
    finished = False
    try:
        kept = searched.round(range(-2 * _SIDE, 2 * _SIDE + 1, 2), max(1, steps // 4), stride=2)
        kept = searched.round(_with_middles(kept), max(1, steps // 2))
        searched.round(kept, steps)
        finished = True
    except _OverBudget:
        pass
    return FoundRate(start * 2.0 ** _minimum(searched.losses), tuple(searched.runs), finished)


class _OverBudget(Exception):  # noqa: N818
    """The next training would exceed the budget."""


class _Search:
    """Trains and remembers. A rate is `start` times 2 to the power of its exponent."""

    def __init__(
        self, loss: FinalLoss, start: float, budget: int, on_run: Callable[[ShortRun], None]
    ) -> None:
        self.loss, self.start, self.left, self.on_run = loss, start, budget, on_run
        self.runs: list[ShortRun] = []
        self.losses: dict[int, float] = {}
        """finite losses of the last whole round, or of the first, by exponent"""

    def round(self, exponents: Iterable[int], steps: int, stride: int = 1) -> list[int]:
        """Train with `exponents`, and with further ones while the best is at the edge; return the
        best, in ascending order."""
        losses: dict[int, float] = {}
        waiting = list(exponents)
        try:
            while waiting:
                for exponent in waiting:
                    losses[exponent] = self._train(exponent, steps)
                best = _best(losses)
                waiting = [e for e in (best - stride, best + stride) if e not in losses][:1]
        finally:
            if not (waiting and self.losses):
                self.losses = {e: loss for e, loss in losses.items() if math.isfinite(loss)}
        return sorted(sorted(self.losses, key=self.losses.__getitem__)[:_KEPT])

    def _train(self, exponent: int, steps: int) -> float:
        if steps > self.left:
            raise _OverBudget
        self.left -= steps
        lr = self.start * 2.0**exponent
        run = ShortRun(lr, steps, self.loss(lr, steps))
        self.runs.append(run)
        self.on_run(run)
        return run.loss


def _best(losses: Mapping[int, float]) -> int:
    """Return the exponent with the lowest loss, the smallest one of several."""
    return min(losses, key=lambda exponent: (losses[exponent], exponent))


def _with_middles(exponents: list[int]) -> list[int]:
    """Return the exponents, and those in the middle of two that are a stride apart."""
    return sorted({*exponents, *(e + 1 for e in exponents if e + 2 in exponents)})


def _minimum(losses: Mapping[int, float]) -> float:
    """Return the exponent of the minimum, between two that were tried.

    Raises:
        ValueError: there are none.
    """
    if not losses:
        raise ValueError("no training had a finite loss within the budget")
    best = _best(losses)
    if not {best - 1, best + 1} <= losses.keys():
        return best
    below, above = losses[best - 1] - losses[best], losses[best + 1] - losses[best]
    # the vertex of the parabola, at most half a stride from the best
    return best + 0.5 * (below - above) / (below + above) if below + above > 0 else best
