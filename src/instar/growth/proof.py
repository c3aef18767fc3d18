"""What an operation did to the function, measured on a probe batch before and after."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from instar.growth.plan import Fresh, Grown, GrowthPlan, Label, Merged, Old, Truncated

TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.bfloat16: 5e-2,
    torch.float16: 1e-2,
}
"""The most that rounding may move the logits, relative to the largest, where a model computes in
this type; and the loss, in nats."""


@dataclass(frozen=True)
class Probe:
    """A model's answer to a batch: logits (…, V), and the mean loss in nats."""

    logits: Tensor
    loss: float


@dataclass(frozen=True)
class Proof:
    """How far the function moved, and whether that is within what the label says."""

    label: Label
    max_logit_diff: float
    max_logit_diff_relative: float
    """to the largest logit before"""
    delta_loss: float
    holds: bool

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return asdict(self)


def compare(
    plan: GrowthPlan, before: Probe, after: Probe, dtype: torch.dtype = torch.float32
) -> Proof:
    """Hold two answers to the same batch against what a plan promises.

    Args:
        dtype: in which the models computed.

    New tokens' logits have nothing to be compared with. What is not finite never holds.
    """
    columns = min(before.logits.shape[-1], after.logits.shape[-1])
    old, new = (probe.logits[..., :columns].double() for probe in (before, after))
    apart = (new - old).abs().max().item()
    relative = apart / max(old.abs().max().item(), torch.finfo(torch.float64).tiny)
    delta, rounding = after.loss - before.loss, TOLERANCE[dtype]
    rounded_nats = rounding * max(1.0, abs(before.loss))
    holds = math.isfinite(apart) and math.isfinite(delta)
    if plan.label == "exact":
        holds = holds and relative <= rounding and abs(delta) <= rounded_nats
    elif plan.bound_nats is not None:
        holds = holds and delta <= plan.bound_nats + rounded_nats
    return Proof(plan.label, apart, relative, delta, holds)


def split_norms(plan: GrowthPlan, gradients: Mapping[str, Tensor]) -> tuple[float, float]:
    """Norms of the gradients of what the plan kept, and of what it made.

    Copies are made, and so is every element in a new slice along any dimension. A norm of zero
    of what was made means that it cannot learn.
    """
    kept = made = 0.0
    for name, gradient in gradients.items():
        of_kept, of_all = _squares(plan, name, gradient)
        kept += of_kept
        made += of_all
    return math.sqrt(kept), math.sqrt(made)


def _squares(plan: GrowthPlan, name: str, gradient: Tensor) -> tuple[float, float]:
    """Sums of squares over the kept elements and over the others."""
    how = plan.tensors[name]
    squares = gradient.double().square()
    if isinstance(how, Fresh | Truncated) or (isinstance(how, Grown) and how.copied):
        return 0.0, squares.sum().item()
    if isinstance(how, Merged):
        return squares.sum().item(), 0.0
    kept = torch.ones((1,) * gradient.ndim, dtype=torch.bool)
    for edit in how.edits:
        flags = [
            torch.full((len(piece),), isinstance(piece, Old) and not piece.copied)
            for piece in edit.pieces
        ]
        along = [1] * gradient.ndim
        along[edit.dim] = -1
        kept = kept & torch.cat(flags).view(along)
    kept = kept.to(gradient.device)
    # apart, so that what is zero sums to zero and not to a difference of roundings
    return (squares * kept).sum().item(), (squares * ~kept).sum().item()
