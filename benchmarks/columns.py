"""What `growth.py` asks, one column of its table each: the final shape, the optimizer, the horizon, and what is tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from study import Arm, Change, Run, Shape, flops_per_step


@dataclass(frozen=True)
class Column:
    """One horizon of one final size under one optimizer."""

    name: str
    scratch: tuple[Arm, ...]
    """ways to train the final size, of which the trial seed's lowest loss decides"""
    fixed: tuple[Arm, ...]
    """smaller sizes that do not grow; tried at equal FLOPs"""
    grown: tuple[Arm, ...]
    """tried at `share` of the FLOPs"""
    tokens_per_parameter: int
    seeds: tuple[int, ...]
    bar: float
    """most of the final size's FLOPs that growing may need"""
    clear: float | None = None
    """what the whole interval must be below"""
    ramps: tuple[tuple[str, Arm], ...] = ()
    """further ways for every seed, by name"""
    barred: str = "grown"
    """the arm that has the bar"""
    share: float = 0.7
    shorter: float = 0.7
    """share of the FLOPs of a second budget of the final size"""
    budgets: tuple[float, ...] = (0.62, 0.8)
    """of grown runs, as shares of the FLOPs of the final size"""
    trial_seed: int = 100

    @property
    def shape(self) -> Shape:
        return self.scratch[0].shape

    @property
    def flops(self) -> float:
        """Of the final size's whole run."""
        tokens = self.tokens_per_parameter * self.shape.parameters
        return tokens / (self.shape.batch * self.shape.context) * flops_per_step(self.shape)

    def trials(self) -> dict[str, list[Run]]:
        """With the trial seed."""
        tried = {"scratch": (self.scratch, 1.0), "fixed": (self.fixed, 1.0)}
        tried |= {"grown": (self.grown, self.share)}
        return {
            part: [Run(arm, self.trial_seed, arm.steps(share * self.flops)) for arm in arms]
            for part, (arms, share) in tried.items()
            if arms
        }

    def runs(self, best: Mapping[str, Arm], seed: int) -> dict[str, list[Run]]:
        """Of a seed, by the name of their arm: two budgets each of what the trials chose."""
        arms = {"scratch": best["scratch"], "grown": best["grown"], **dict(self.ramps)}
        return {
            name: [
                Run(arm, seed, arm.steps(share * self.flops))
                for share in ((self.shorter, 1.0) if name == "scratch" else self.budgets)
            ]
            for name, arm in arms.items()
        }


def column(
    name: str,
    optimizer: str,
    final: Shape,
    tokens_per_parameter: int,
    rates: Sequence[float],
    seeds: Sequence[int],
    bar: float,
    *,
    clear: float | None = None,
    fewer: bool = False,
) -> Column:
    """One with the trials that all have.

    Args:
        rates: of the final size from scratch; the second one is that of all growth.
        fewer: try only growths that were among the best in the first column.
    """
    quarter, half = (replace(final, layers=final.layers // k) for k in (4, 2))

    def grown(first: Shape, decay: float, *changes: Change) -> Arm:
        return Arm(optimizer, first, rates[1], decay, changes, final.context)

    def stack(share: float, factor: int, after: int, options: str = "") -> Change:
        return Change(share, f"stack_layers {factor}", options, layers=after)

    n = final.layers
    best = (
        grown(quarter, 0.3, stack(0.7, 4, n)),
        grown(quarter, 0.2, stack(0.8, 4, n)),
        grown(quarter, 0.3, stack(0.4, 2, n // 2), stack(0.7, 2, n)),
    )
    others = (
        grown(quarter, 0.15, stack(0.8, 4, n)),
        grown(quarter, 0.4, stack(0.6, 4, n)),
        grown(quarter, 0.3, stack(0.7, 4, n, "lr: {rewarm_new: 50}")),
        grown(quarter, 0.3, stack(0.7, 4, n, "how: interleave")),
        grown(quarter, 0.2, stack(0.6, 2, n // 2), stack(0.8, 2, n)),
        grown(half, 0.3, stack(0.7, 2, n)),
        grown(
            quarter,
            0.3,
            Change(0.7, f"insert_layers {n - quarter.layers}", "where: even", layers=n),
        ),
    )
    return Column(
        name,
        tuple(
            Arm(optimizer, final, r, d, read=final.context) for r, d in product(rates, (0.15, 0.3))
        ),
        tuple(grown(size, 0.3) for size in (quarter, half)),
        best if fewer else best + others,
        tokens_per_parameter,
        tuple(seeds),
        bar,
        clear,
    )
