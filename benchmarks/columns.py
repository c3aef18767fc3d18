"""What `growth.py` asks, one column of its table each: the final shape, the optimizer, the horizon, and what is tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
        steps = round(tokens / (self.shape.batch * self.shape.context))
        return steps * flops_per_step(self.shape)

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


@dataclass(frozen=True)
class Way:
    """How a fraction of the final size's layers becomes all of them."""

    divisor: int
    """of the layers, for those to begin with"""
    copied: tuple[tuple[float, int], ...] = ()
    """shares of the steps, and by what factor copies multiply the layers there"""
    inserted: float | None = None
    """share of the steps at which all missing layers are inserted with zeros, as a control"""
    options: str = ""
    """of the operations"""
    rate: float | None = None
    """default: the final size's"""
    decay: float | None = None

    def arm(self, like: Arm) -> Arm:
        """Into the final size that another arm trains from scratch."""
        final = like.shape.layers
        first = layers = final // self.divisor
        changes = []
        for share, factor in self.copied:
            layers *= factor
            changes.append(Change(share, f"stack_layers {factor}", self.options, layers=layers))
        if self.inserted is not None:
            operation = f"insert_layers {final - layers}"
            changes.append(Change(self.inserted, operation, "where: even", layers=final))
        return replace(
            like,
            shape=replace(like.shape, layers=first),
            rate=self.rate or like.rate,
            decay=self.decay or like.decay,
            changes=tuple(changes),
        )


def column(
    name: str,
    optimizer: str,
    final: Shape,
    tokens_per_parameter: int,
    scratch: Sequence[tuple[float, float]],
    ways: Sequence[Way],
    seeds: Sequence[int],
    bar: float,
    clear: float | None = None,
) -> Column:
    """One of a final size.

    Args:
        scratch: rates and decays to try for it; all other arms have the first ones unless they say otherwise.
    """
    arms = [Arm(optimizer, final, rate, decay, read=final.context) for rate, decay in scratch]
    return Column(
        name,
        tuple(arms),
        tuple(Way(divisor).arm(arms[0]) for divisor in (2, 4)),
        tuple(way.arm(arms[0]) for way in ways),
        tokens_per_parameter,
        tuple(seeds),
        bar,
        clear,
    )
