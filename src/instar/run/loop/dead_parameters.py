"""Dead parameters: new parameters of an operation that no gradient reaches in the first steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from instar.growth.plan import GrowthPlan
from instar.growth.proof import new_slices, split_grad_norms
from instar.models.shape import Parameter

WATCHED_STEPS = 3
"""Under a mask the first step has zero gradients; behind a zero factor the second has more."""
MAX_WATCHED_STEPS = 5
"""Each zero factor in front of a parameter, e.g. of an adapter in a new block, delays its gradient
by one step. Parameters without a gradient by then are dead."""


class GradientWatch:
    """Watches the gradients of the steps after an operation. New parameters whose gradients are
    exactly 0 in all of them are dead: they will never get a gradient.

    Rows and columns are checked one by one, except along an embedding's rows, whose gradients
    depend on which rows the samples look up.
    """

    def __init__(
        self, plan: GrowthPlan, operation: str, parameters: Mapping[str, Parameter]
    ) -> None:
        """
        Args:
            parameters: of the grown model.
        """
        self.plan, self.operation = plan, operation
        self._axes = {name: entry.axes for name, entry in parameters.items()}
        self._embedding_axes = {
            entry.axes[0] for entry in parameters.values() if entry.kind == "embedding"
        }
        self.norms: list[tuple[float, float]] = []
        """gradient norms (kept parameters, new parameters) of each step"""
        self._unreached: dict[tuple[str, int], Tensor] = {}
        """by tensor and dimension: bool mask of new slices without a gradient so far"""
        self._steps = 0

    def update(self, gradients: Mapping[str, Tensor]) -> None:
        """Add the gradients of a step; ignored if not finite, as they make no update."""
        self.norms.append(split_grad_norms(self.plan, gradients))
        if not all(map(math.isfinite, self.norms[-1])):
            return
        self._steps += 1
        for name, gradient in gradients.items():
            for dim, new in new_slices(self.plan.tensors[name], gradient.shape):
                if self._axes[name][dim] in self._embedding_axes:
                    continue
                others = [each for each in range(gradient.ndim) if each != dim]
                reached = gradient.ne(0).any(dim=others).cpu()
                without_gradient = self._unreached.get((name, dim), new)
                self._unreached[name, dim] = without_gradient & ~reached

    @property
    def is_over(self) -> bool:
        """Whether the watch ends: after `WATCHED_STEPS`, or later if a parameter is unreached."""
        if self._steps < WATCHED_STEPS:
            return False
        return self._steps >= MAX_WATCHED_STEPS or not (self.unreached or self._new_norm_is_zero)

    @property
    def dead(self) -> bool:
        """Whether no new parameter had a gradient, although the kept ones had."""
        return self.is_over and all(new == 0.0 and old > 0.0 for old, new in self.norms)

    @property
    def unreached(self) -> dict[str, int]:
        """Number of new rows, or columns, of each tensor without a gradient so far."""
        found: dict[str, int] = {}
        for (name, _), without_gradient in self._unreached.items():
            found[name] = max(found.get(name, 0), int(without_gradient.sum()))
        return {name: count for name, count in found.items() if count}

    @property
    def _new_norm_is_zero(self) -> bool:
        return all(new == 0.0 for _, new in self.norms)


def dead_ranks(names: Iterable[str], read: Callable[[str], Tensor]) -> str:
    """Return a warning about ranks of adapters that no gradient can reach; empty if there are none.

    Args:
        names: names of a model's parameters.
        read: returns a parameter by name.
    """
    dead: dict[str, int] = {}
    for name in names:
        if name.endswith(".lora_a"):
            weight = name.removesuffix(".lora_a")
            a, b = read(name), read(f"{weight}.lora_b")
            if count := int((a.eq(0).all(dim=1) & b.eq(0).all(dim=0)).sum()):
                dead[weight] = count
    if not dead:
        return ""
    return (
        f"{sum(dead.values())} ranks of adapters ({', '.join(list(dead)[:3])}"
        f"{', …' if len(dead) > 3 else ''}) are zero in both factors: no gradient will ever reach "
        "them; set_lora_rank of these weights to a lower rank and back draws new values"
    )
