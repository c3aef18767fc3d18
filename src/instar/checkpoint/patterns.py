"""What a checkpoint is made of: who holds each component, who saves it, what its loss means."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

SUFFIX = ".safetensors"
STATE = "state.json"


class Pattern(StrEnum):
    """Who holds a component, and so who saves it."""

    REPLICATED = "REPLICATED"
    """all ranks hold the same, which is checked by hash; rank 0 saves it"""
    GLOBAL = "GLOBAL"
    """one for the whole run; rank 0 saves it"""
    PER_RANK = "PER_RANK"
    """each rank holds and saves its own; of no use to another number of ranks"""


@dataclass(frozen=True)
class Component:
    """A part of a run's state."""

    name: str
    pattern: Pattern
    lost: str = ""
    """what a run goes on without if this is left out; empty: no run goes on without it"""

    def file(self, rank: int = 0) -> str:
        """Where it is saved, relative to the checkpoint's folder."""
        if self.pattern is Pattern.GLOBAL:
            return f"{self.name}.json"
        if self.pattern is Pattern.PER_RANK:
            return f"{self.name}/rank-{rank}{SUFFIX}"
        return f"{self.name}{SUFFIX}"


COMPONENTS = {
    component.name: component
    for component in (
        Component("model", Pattern.REPLICATED),
        Component(
            "optimizer",
            Pattern.REPLICATED,
            lost="the optimizer's moments start at zero: expect a rise of the loss for some "
            "hundred steps",
        ),
        Component(
            "ema", Pattern.REPLICATED, lost="the moving average starts again from the weights"
        ),
        Component("state", Pattern.GLOBAL),
        Component(
            "rng",
            Pattern.PER_RANK,
            lost="the generators are seeded anew from the seed, the step and the rank",
        ),
    )
}
"""Every component that a run may save, by name."""
