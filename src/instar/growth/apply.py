"""Plans carried out: new tensors from old ones, for parameters and what is kept beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Literal

import torch
from torch import Tensor

from instar.growth.plan import (
    Edit,
    Fresh,
    Grown,
    GrowthPlan,
    Merged,
    New,
    Old,
    TensorPlan,
    Truncated,
)
from instar.models.initial import named_generator


class Role(Enum):
    """What tensors are to the model. A moving average of parameters is PARAMETER, a momentum
    FIRST_MOMENT."""

    PARAMETER = auto()
    FIRST_MOMENT = auto()
    SECOND_MOMENT = auto()


Key = tuple[int, ...]
"""(the run's seed, number of the operation in its history): what new values are drawn from."""

Read = Callable[[str], Tensor]

Copies = Literal["asymmetric", "mapped"]
"""Moments of copies: m = 0 and the source's v, so that they part; or both as the source's, by which
copies remain copies for ever."""


def apply(
    plan: GrowthPlan,
    tensors: Mapping[str, Tensor],
    role: Role,
    key: Key,
    copies: Copies = "asymmetric",
) -> dict[str, Tensor]:
    """The new model's tensors, in its order.

    A tensor that stays as it is is handed on, not copied. Moments may be missing: where a tensor
    had none, or is wholly new, there are none afterwards. Raises KeyError for a missing parameter.
    """
    like = next(iter(tensors.values()), None)
    made = {}
    for name, tensor_plan in plan.tensors.items():
        if role is Role.PARAMETER or source_of(tensor_plan) in tensors:
            tensor = apply_one(plan, name, tensors.__getitem__, role, key, copies, like)
            if tensor is not None:
                made[name] = tensor
    return made


@torch.no_grad()
def apply_one(
    plan: GrowthPlan,
    name: str,
    read: Read,
    role: Role,
    key: Key,
    copies: Copies = "asymmetric",
    like: Tensor | None = None,
) -> Tensor | None:
    """One tensor of the new model; None for the moments of one that is wholly new.

    Args:
        read: gives an old tensor by its name; asked for none but those that are needed.
        like: has the type and the device of a wholly new parameter; default float32, CPU.
    """
    made = plan.tensors[name]
    if isinstance(made, Grown):
        return _Growing(role, copies, name, key).grow(made, read(made.source))
    if role is not Role.PARAMETER:
        # merging leaves the gradient of the matrix as it was
        return read(made.source) if isinstance(made, Merged) else None
    if isinstance(made, Merged):
        weight, a, b = read(made.source), read(made.a), read(made.b)
        return torch.addmm(weight, b, a, alpha=made.scale)
    if isinstance(made, Truncated):
        return _truncated(made, read(made.a), read(made.b))
    assert isinstance(made, Fresh)
    fresh = torch.empty(made.shape)
    if like is not None:
        fresh = fresh.to(like)
    _fill(fresh, New(1, made.fill, made.std), named_generator(*key, name, "fresh"))
    return fresh


def source_of(made: TensorPlan) -> str | None:
    """The old tensor whose moments the new one goes on with."""
    return made.source if isinstance(made, Grown | Merged) else None


class _Growing:
    """How one tensor's old slices are scaled and its new ones filled, in one role."""

    def __init__(self, role: Role, copies: Copies, name: str, key: Key) -> None:
        self.role, self.copies, self.name, self.key = role, copies, name, key

    def grow(self, made: Grown, tensor: Tensor) -> Tensor:
        for edit in made.edits:
            tensor = self._laid_out(edit, tensor)
        factor = self._factor(made)
        if factor != 1.0:
            return tensor * factor
        return tensor.clone() if made.copied and not made.edits else tensor

    def _factor(self, made: Old | Grown) -> float:
        """A parameter times s has a gradient times 1 / s, and so have the moments (its square)."""
        if self.role is Role.PARAMETER:
            return made.value
        if self.role is Role.SECOND_MOMENT:
            return made.gradient**2
        return 0.0 if made.copied and self.copies == "asymmetric" else made.gradient

    def _laid_out(self, edit: Edit, tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        shape[edit.dim] = sum(len(piece) for piece in edit.pieces)
        out = tensor.new_empty(shape)
        views = torch.split(out, [len(piece) for piece in edit.pieces], edit.dim)
        old, waiting = [], []
        generator = named_generator(*self.key, self.name, edit.dim)
        for piece, view in zip(edit.pieces, views, strict=True):
            if isinstance(piece, Old):
                source = tensor.narrow(edit.dim, piece.start, len(piece))
                factor = self._factor(piece)
                if factor == 1.0:
                    view.copy_(source)
                else:
                    torch.mul(source, factor, out=view)
                old.append(view)
            elif self._takes_mean(piece):
                waiting.append(view)
            elif self.role is Role.PARAMETER:
                _fill(view, piece, generator)
            else:
                view.zero_()
        for view in waiting:
            view.copy_(_mean(old, edit.dim))
        return out

    def _takes_mean(self, piece: New) -> bool:
        """A second moment of zero beside a large step count would make the first updates of new
        slices about 3 learning rates long (β₂ = 0.999)."""
        return self.role is Role.SECOND_MOMENT or (
            self.role is Role.PARAMETER and piece.fill == "mean"
        )


def _mean(views: list[Tensor], dim: int) -> Tensor:
    """Of all slices along a dimension, in float64: nearly always the same on every device."""
    sums = [view.sum(dim, keepdim=True, dtype=torch.float64) for view in views]
    count = sum(view.shape[dim] for view in views)
    return torch.stack(sums).sum(0).div_(count)


def _fill(view: Tensor, new: New, generator: torch.Generator) -> None:
    if new.fill == "normal":
        # drawn where every device draws the same
        values = torch.empty(view.shape, dtype=torch.float32, device="cpu")
        view.copy_(values.normal_(0.0, new.std, generator=generator))
    else:
        view.fill_(1.0 if new.fill == "one" else 0.0)


def _truncated(made: Truncated, a: Tensor, b: Tensor) -> Tensor:
    """The best product of a lower rank (Eckart and Young), of the small matrix between the
    orthogonal parts of both factors: b @ a itself is never made."""
    q_b, r_b = torch.linalg.qr(b.double())
    q_a, r_a = torch.linalg.qr(a.double().mT)
    u, s, v_h = torch.linalg.svd(r_b @ r_a.mT)
    root, rank = s[: made.rank].sqrt(), made.rank
    factor: Tensor = (
        root[:, None] * v_h[:rank] @ q_a.mT if made.side == "a" else q_b @ u[:, :rank] * root
    )
    return factor.to(a.dtype)
