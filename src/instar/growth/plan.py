"""Plans: what becomes of every tensor when a model grows, as data that knows no tensor library.

A plan says for each tensor of the new model how it is made from those of the old one. The same
plan grows parameters, what an optimizer remembers of them, and a moving average: `apply.py`
reads it in the role that fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Label = Literal["exact", "bounded", "lossy"]
"""How much of the function is preserved: all of it up to rounding; up to a stated bound; not all."""

Fill = Literal["zero", "one", "normal", "mean"]
"""Values of what is new: `normal` draws with mean 0 and the standard deviation `std`; `mean` is the
mean of the old slices along the dimension that grows, as they are laid out."""


class GrowthError(ValueError):
    """An operation that cannot be made of this model; says what would be possible."""


@dataclass(frozen=True)
class Old:
    """Old slices start … stop-1 along a dimension.

    Their values are multiplied by `value`; the gradients that they will get are `gradient` times
    those they got. `copied` marks another copy of slices that are there already.
    """

    start: int
    stop: int
    value: float = 1.0
    gradient: float = 1.0
    copied: bool = False

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class New:
    """So many slices that were not there."""

    count: int
    fill: Fill
    std: float = 0.0

    def __len__(self) -> int:
        return self.count


Piece = Old | New


@dataclass(frozen=True)
class Edit:
    """A dimension laid out anew, from pieces one after the other."""

    dim: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Grown:
    """The old tensor `source`, its dimensions edited in turn; as a whole times `value`.

    `copied`: a copy of a tensor that lives on elsewhere, as in a stacked layer.
    """

    source: str
    edits: tuple[Edit, ...] = ()
    value: float = 1.0
    gradient: float = 1.0
    copied: bool = False


@dataclass(frozen=True)
class Fresh:
    """A tensor that was not there."""

    shape: tuple[int, ...]
    fill: Fill
    std: float = 0.0


@dataclass(frozen=True)
class Merged:
    """`source` + `scale` · `b` @ `a`: an adapter folded into its matrix."""

    source: str
    a: str
    b: str
    scale: float


@dataclass(frozen=True)
class Truncated:
    """One factor, `side`, of the best product of `rank` to `b` @ `a`; singular values are shared
    evenly by both."""

    a: str
    b: str
    rank: int
    side: Literal["a", "b"]


TensorPlan = Grown | Fresh | Merged | Truncated


@dataclass(frozen=True)
class GrowthPlan:
    """Every tensor of the new model by name, in the new model's order."""

    tensors: Mapping[str, TensorPlan]
    label: Label
    bound_nats: float | None = None
    """of a bounded one: the most that the mean loss may rise"""
    notes: tuple[str, ...] = ()
    """what a person should know of how it was made, in a few words each"""

    @property
    def makes_new(self) -> bool:
        """Whether any element of any tensor was not there before."""
        return any(
            not isinstance(made, Grown | Merged)
            or (isinstance(made, Grown) and (made.copied or any(map(_has_new, made.edits))))
            for made in self.tensors.values()
        )


def _has_new(edit: Edit) -> bool:
    return any(isinstance(piece, New) or piece.copied for piece in edit.pieces)
