"""Named axes: from what becomes of an axis to what becomes of every tensor along it.

What changes with an axis is told once for each thing that a tensor may do with it (`Relation`);
the model's own table says which tensor does what. No operator knows a module or a class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from instar.growth.plan import Edit, Grown, New, Old, Piece, TensorPlan
from instar.models.shape import Growable, Parameter

Relation = Literal["writes", "reads", "scales", "lists"]
"""What a tensor does with an axis along one of its dimensions: produce it, consume it, multiply or
shift each channel of it, have a row for each of its indices."""


@dataclass(frozen=True)
class Use:
    """Dimension `dim` of a parameter of the new model, seen from an axis along it."""

    name: str
    entry: Parameter
    dim: int

    @property
    def relation(self) -> Relation:
        axis = self.entry.axes[self.dim]
        if self.entry.kind == "norm":
            return "scales"
        both = self.entry.writes == self.entry.reads
        if axis == self.entry.writes and not (both and self.dim):
            return "writes"
        return "reads" if axis == self.entry.reads else "lists"

    @property
    def is_gain(self) -> bool:
        """Multiplies channels; what else scales shifts them."""
        return self.entry.kind == "norm" and self.name.endswith(".weight")


Layout = Callable[[Use], tuple[Piece, ...]]
"""The pieces of which a simple axis is made, in a tensor that uses it so."""

NewSlices = Callable[[Use, int], New]


def born(use: Use, count: int) -> New:
    """New slices like those of a model that begins at this size."""
    if use.entry.std:
        return New(count, "normal", use.entry.std)
    return New(count, "one" if use.is_gain else "zero")


def zero_read(use: Use, count: int) -> New:
    """The master rule, that exactly one factor of a new product is zero, for what is written
    inside a block: readers begin at zero, so that the writers' first values do not matter and
    the readers' gradients do not vanish."""
    return New(count, "zero") if use.relation == "reads" else born(use, count)


def laid_out(parts: Sequence[Old | int], new: NewSlices) -> Layout:
    """Old ranges, and counts of what comes between them, filled as `new` says."""
    return lambda use: tuple(part if isinstance(part, Old) else new(use, part) for part in parts)


def relaid(arch: Growable, grown: Growable, layouts: Mapping[str, Layout]) -> dict[str, TensorPlan]:
    """Every tensor of `grown`, a resized `arch`, with the given simple axes laid out anew."""
    sizes = arch.sizes()
    tensors: dict[str, TensorPlan] = {}
    for name, entry in grown.parameters().items():
        edits = [
            Edit(dim, _along(axis, factor, sizes, layouts[factor](Use(name, entry, dim))))
            for dim, axis in enumerate(entry.axes)
            for factor in axis.split("*")
            if factor in layouts
        ]
        tensors[name] = Grown(name, tuple(edits))
    return tensors


def uses(arch: Growable, axis: str) -> list[Use]:
    """Every dimension along a simple axis, alone or as a factor."""
    return [
        Use(name, entry, dim)
        for name, entry in arch.parameters().items()
        for dim, along in enumerate(entry.axes)
        if axis in along.split("*")
    ]


def _along(
    axis: str, factor: str, sizes: Mapping[str, int], pieces: tuple[Piece, ...]
) -> tuple[Piece, ...]:
    """Pieces of one factor of a composite axis as pieces of the whole."""
    factors = axis.split("*")
    at = factors.index(factor)
    outer = math.prod(sizes[name] for name in factors[:at])
    inner = math.prod(sizes[name] for name in factors[at + 1 :])
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
