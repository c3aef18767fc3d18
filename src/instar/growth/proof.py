"""Measures how far growth changed the function, on a probe batch before and after."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from instar.growth.plan import (
    Averaged,
    Edit,
    Fresh,
    Grown,
    GrowthPlan,
    Label,
    Merged,
    Old,
    Reindexed,
    Stacked,
    TensorPlan,
    Truncated,
)

TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.bfloat16: 5e-2,
    torch.float16: 1e-2,
}
"""The largest change of the logits, relative to the largest logit, and of the loss in nats, that
rounding explains in a model of this dtype."""


_COMPARED = 1 << 20
"""elements that are compared at once"""


@dataclass(frozen=True)
class Probe:
    """A model's output for a batch: logits (…, V), and the mean loss in nats."""

    logits: Tensor
    loss: float


@dataclass(frozen=True)
class Proof:
    """How far the function changed, and whether that is within the bounds of the label."""

    label: Label
    max_logit_diff: float
    max_logit_diff_relative: float
    """relative to the largest logit before"""
    delta_loss: float
    holds: bool

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


def compare(
    plan: GrowthPlan, before: Probe, after: Probe, dtype: torch.dtype = torch.float32
) -> Proof:
    """Compares outputs for the same batch before and after growth with the label of the plan.

    Logits of new tokens are not compared. Non-finite outputs never hold.

    Args:
        dtype: in which the models computed.
    """
    columns = min(before.logits.shape[-1], after.logits.shape[-1])
    old, new = (probe.logits[..., :columns] for probe in (before, after))
    difference, largest = _differences(old, new)
    relative = difference / max(largest, torch.finfo(torch.float64).tiny)
    delta, rounding = after.loss - before.loss, TOLERANCE[dtype]
    rounded_nats = rounding * max(1.0, abs(before.loss))
    holds = math.isfinite(difference) and math.isfinite(delta)
    if plan.label == "exact":
        holds = holds and relative <= rounding and abs(delta) <= rounded_nats
    elif plan.bound_nats is not None:
        holds = holds and delta <= plan.bound_nats + rounded_nats
    return Proof(plan.label, difference, relative, delta, holds)


def _differences(old: Tensor, new: Tensor) -> tuple[float, float]:
    """Returns the largest difference and the largest magnitude of `old`, in float64; a few rows at a time,
    because those of a large vocabulary take much memory."""
    rows = max(1, _COMPARED // old.shape[-1])
    pairs = [torch.split(each.reshape(-1, old.shape[-1]), rows) for each in (old, new)]
    found = [
        torch.stack(((after.double() - before.double()).abs().max(), before.abs().max().double()))
        for before, after in zip(*pairs, strict=True)
    ]
    difference, largest = torch.stack(found).amax(0).tolist()
    return difference, largest


def split_grad_norms(plan: GrowthPlan, gradients: Mapping[str, Tensor]) -> tuple[float, float]:
    """Returns the gradient norms of kept elements and of new ones.

    Copies count as new, and so does every element of a new slice along any dimension. A norm of 0
    over the new elements means that they cannot learn.
    """
    if not gradients:
        return 0.0, 0.0
    # one by one: a difference of sums would not be exactly 0
    norms = torch.stack(
        [_split_norm(plan.tensors[name], gradient) for name, gradient in gradients.items()]
    )
    kept, new = torch.linalg.vector_norm(norms, dim=0).tolist()
    return kept, new


def new_slices(how: TensorPlan, shape: Sequence[int]) -> list[tuple[int, Tensor]]:
    """Returns (dimension, mask of its new slices) for each dimension with new slices or copies.

    All slices of a wholly new tensor are new. A vector has none: its slices are single numbers.
    """
    if len(shape) < 2 or isinstance(how, Merged | Stacked):
        return []
    if isinstance(how, Reindexed):
        return [(0, ~_kept_rows(how))]
    if not isinstance(how, Grown) or how.copied:
        return [(dim, torch.ones(size, dtype=torch.bool)) for dim, size in enumerate(shape)]
    found = [(edit.dim, ~_kept(edit)) for edit in how.edits]
    return [(dim, new) for dim, new in found if new.any()]


def _split_norm(how: TensorPlan, gradient: Tensor) -> Tensor:
    """Returns the norms over the kept elements and over the new ones: (2,), in float64."""
    zero = gradient.new_zeros((), dtype=torch.float64)
    if isinstance(how, Averaged | Fresh | Truncated) or (isinstance(how, Grown) and how.copied):
        return torch.stack((zero, _norm(gradient)))
    kept, new = gradient, [zero]
    for dim, is_kept in _kept_slices(how).items():
        if not is_kept.all():
            index = is_kept.to(gradient.device)
            new.append(_norm(kept.index_select(dim, (~index).nonzero().flatten())))
            kept = kept.index_select(dim, index.nonzero().flatten())
    return torch.stack((_norm(kept), _norm(torch.stack(new))))


def _kept_slices(how: TensorPlan) -> dict[int, Tensor]:
    """Returns the mask of the kept slices along each dimension that may have others."""
    if isinstance(how, Reindexed):
        return {0: _kept_rows(how)}
    found: dict[int, Tensor] = {}
    for edit in how.edits if isinstance(how, Grown) else ():
        kept = _kept(edit)
        found[edit.dim] = found[edit.dim] & kept if edit.dim in found else kept
    return found


def _norm(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    return norm


def _kept(edit: Edit) -> Tensor:
    """Returns the mask of kept slices along an edited dimension."""
    return torch.cat(
        [
            torch.full((len(piece),), isinstance(piece, Old) and not piece.copied)
            for piece in edit.pieces
        ]
    )


def _kept_rows(how: Reindexed) -> Tensor:
    return torch.tensor([row in how.kept for row in range(len(how.rows))])
