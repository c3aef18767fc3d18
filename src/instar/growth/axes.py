"""Named axes: from the new layout of an axis to the plans of all tensors along it.

An operator gives the layout of an axis once for each `Relation` that a tensor may have to it; the
model's parameter table says which tensor has which relation. No operator depends on a module class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from instar.growth.plan import Edit, Grown, New, Old, Piece
from instar.models.shape import Growable, Parameter, factor_size

Relation = Literal["writes", "reads", "scales", "lists"]
"""What a tensor does with an axis along one of its dimensions: it produces it, consumes it,
multiplies or shifts each of its channels, or has a row for each of its indices."""


@dataclass(frozen=True)
class Use:
    """Dimension `dim` of a parameter of the grown model."""

    name: str
    entry: Parameter
    dim: int

    @property
    def relation(self) -> Relation:
        axis = self.entry.axes[self.dim]
        if self.entry.kind in ("norm", "channel", "buffer"):
            return "scales"
        both = self.entry.writes == self.entry.reads
        if axis == self.entry.writes and not (both and self.dim):
            return "writes"
        return "reads" if axis == self.entry.reads else "lists"

    @property
    def is_gain(self) -> bool:
        """Whether it multiplies channels; other tensors that scale shift them."""
        scales = self.entry.kind in ("norm", "channel", "grouped")
        return scales and self.name.endswith(".weight")


Layout = Callable[[Use], tuple[Piece, ...]]
"""Returns the pieces of a simple axis in a tensor that uses it so."""

NewSlices = Callable[[Use, int], New]


def initial_slices(use: Use, count: int) -> New:
    """Returns new slices with the initial values of a model of this size."""
    if use.entry.std:
        return New(count, "normal", use.entry.std)
    return New(count, "one" if use.is_gain else "zero")


def zero_in_readers(use: Use, count: int) -> New:
    """Returns new slices that are 0 in tensors that read the axis and initial values in all others.

    Exactly one factor of each new product is then 0: the function stays as it is, and the readers
    receive gradients.
    """
    return New(count, "zero") if use.relation == "reads" else initial_slices(use, count)


def layout_of(parts: Sequence[Old | int], new: NewSlices) -> Layout:
    """Returns the layout of old ranges and counts of new slices, which `new` fills."""
    return lambda use: tuple(part if isinstance(part, Old) else new(use, part) for part in parts)


def plan_tensors(
    arch: Growable, table: Mapping[str, Parameter], layouts: Mapping[str, Layout]
) -> dict[str, Grown]:
    """Returns the plans of the parameters or buffers in the table of a resized `arch`, for new
    layouts of simple axes."""
    sizes, tensors = arch.sizes(), dict[str, Grown]()
    for name, entry in table.items():
        edits = [
            Edit(dim, _along(axis, factor, sizes, layouts[factor](Use(name, entry, dim))))
            for dim, axis in enumerate(entry.axes)
            for factor in axis.split("*")
            if factor in layouts
        ]
        tensors[name] = Grown(name, tuple(edits))
    return tensors


def uses(arch: Growable, axis: str) -> list[Use]:
    """Returns every dimension along a simple axis, alone or as a factor of a composite axis."""
    return [
        Use(name, entry, dim)
        for name, entry in arch.parameters().items()
        for dim, along in enumerate(entry.axes)
        if axis in along.split("*")
    ]


def _along(
    axis: str, factor: str, sizes: Mapping[str, int], pieces: tuple[Piece, ...]
) -> tuple[Piece, ...]:
    """Returns the pieces of one factor of a composite axis as pieces of the composite axis."""
    factors = axis.split("*")
    at = factors.index(factor)
    outer = math.prod(factor_size(sizes, name) for name in factors[:at])
    inner = math.prod(factor_size(sizes, name) for name in factors[at + 1 :])
    if outer == inner == 1:
        return pieces
    return tuple(
        replace(piece, count=piece.count * inner)
        if isinstance(piece, New)
        else replace(
            piece,
            start=(index * sizes[factor] + piece.start) * inner,
            stop=(index * sizes[factor] + piece.stop) * inner,
        )
        for index in range(outer)
        for piece in pieces
    )
