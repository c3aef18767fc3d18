"""What is observed of gradients: norms per layer, and new parameters that no gradient reaches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor
from torch.nn import Parameter

from instar.growth.plan import GrowthPlan
from instar.growth.proof import new_slices, split_grad_norms
from instar.models import shape

Norms = Mapping[str, float]
GroupNorms = Callable[[Mapping[str, Sequence[Tensor]]], Norms]
"""Returns the Euclidean norm of each group of tensors; see `Strategy.norms`."""


def group_of(name: str) -> str:
    """Return the layer of a parameter: `blocks.3` for `blocks.3.mlp.up.weight`, else the first part
    of its name.
    """
    first, *rest = name.split(".")
    return f"{first}.{rest[0]}" if rest and rest[0].isdigit() else first


class LayerStats:
    """Gradient norm and update ratio per layer, for one step.

    Call `before` before the update, with reduced gradients that are not clipped yet, and `after`
    after it. A copy of the weights is kept in between.
    """

    def __init__(self, norms: GroupNorms) -> None:
        self._norms = norms
        self.grad_norm: Norms = {}
        self.update_ratio: Norms = {}
        """‖Δw‖ / ‖w‖ per layer"""
        self._weights: dict[str, Tensor] = {}

    def before(self, parameters: Mapping[str, Parameter]) -> None:
        gradients = {n: p.grad for n, p in parameters.items() if p.grad is not None}
        self.grad_norm = self._norms(_grouped(gradients))
        self._weights = {n: parameters[n].detach().clone() for n in gradients}

    def after(self, parameters: Mapping[str, Parameter]) -> None:
        sizes = self._norms(_grouped(self._weights))
        steps = {n: parameters[n].detach() - old for n, old in self._weights.items()}
        moved = self._norms(_grouped(steps))
        self._weights = {}
        self.update_ratio = {g: moved[g] / size for g, size in sizes.items() if size > 0}


def _grouped(tensors: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    groups: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(group_of(name), []).append(tensor)
    return groups


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
        self, plan: GrowthPlan, operation: str, parameters: Mapping[str, shape.Parameter]
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
