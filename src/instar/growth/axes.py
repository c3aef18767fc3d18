"""Named axes: from the new layout of an axis to the plans of all tensors along it.

An operator gives the layout of an axis once for each `Relation` that a tensor may have to it; the
model's parameter table says which tensor has which relation. No operator depends on a module class.

New indices may be masked: the mask opens from 0 to 1 over some steps and is then removed. New elements under it have
initial values, because the mask is the factor 0 that keeps the function."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from instar.growth.plan import Edit, Grown, GrowthError, GrowthPlan, New, Old, Piece
from instar.models.architecture import Architecture
from instar.models.shape import Growable, Mask, MaskedAxis, Parameter, axis_size, factor_size

Relation = Literal["writes", "reads", "scales", "lists"]
"""What a tensor does with an axis along one of its dimensions: it produces it, consumes it,
multiplies or shifts each of its channels, or has a row for each of its indices."""


@dataclass(frozen=True)
class Use:
    """Dimension `dim` of a parameter of the grown model.

    `summand`: which summand of its axis is meant, e.g. 1 for the keys of fused projections.
    """

    name: str
    entry: Parameter
    dim: int
    summand: int = 0

    @property
    def relation(self) -> Relation:
        axis = self.entry.axes[self.dim]
        if self.entry.kind in ("norm", "post_norm", "channel", "buffer"):
            return "scales"
        is_both = self.entry.writes == self.entry.reads
        if axis == self.entry.writes and not (is_both and self.dim):
            return "writes"
        return "reads" if axis == self.entry.reads else "lists"

    @property
    def part(self) -> str:
        """``query``, ``key`` or ``value``; empty elsewhere."""
        return self.entry.parts[self.summand] if self.entry.parts else ""

    @property
    def is_gain(self) -> bool:
        """Whether it multiplies channels; other tensors that scale shift or convolve them."""
        scales = self.entry.kind in ("norm", "post_norm", "channel", "grouped")
        return scales and self.name.endswith(".weight") and not self.entry.std


Layout = Callable[[Use], tuple[Piece, ...]]
"""Returns the pieces of a simple axis in a tensor that uses it so."""

NewSlices = Callable[[Use, int], New]


def initial_slices(use: Use, count: int) -> New:
    """Return new slices with the initial values of a model of this size."""
    if use.entry.std:
        return New(count, "normal", use.entry.std)
    return New(count, "one" if use.is_gain else "zero")


def zero_in_readers(use: Use, count: int) -> New:
    """Return new slices that are 0 in tensors that read the axis and initial values in all others.

    Exactly one factor of each new product is then 0: the function stays as it is, and the readers
    receive gradients.
    """
    return New(count, "zero") if use.relation == "reads" else initial_slices(use, count)


def layout_of(parts: Sequence[Old | int], new: NewSlices) -> Layout:
    """Return the layout of old ranges and counts of new slices, which `new` fills."""
    return lambda use: tuple(part if isinstance(part, Old) else new(use, part) for part in parts)


def plan_tensors(
    arch: Growable, table: Mapping[str, Parameter], layouts: Mapping[str, Layout]
) -> dict[str, Grown]:
    """Return the plans of the parameters or buffers in the table of a resized `arch`, for new
    layouts of simple axes."""
    sizes = arch.sizes()
    return {
        name: Grown(
            name,
            tuple(
                Edit(dim, _pieces(Use(name, entry, dim), sizes, layouts))
                for dim, axis in enumerate(entry.axes)
                if layouts.keys() & set(factors_of(axis))
            ),
            offset=entry.offset,
        )
        for name, entry in table.items()
    }


def uses(arch: Growable, axis: str) -> list[Use]:
    """Return every dimension along a simple axis, alone or as a factor of a composite axis."""
    return [
        Use(name, entry, dim)
        for name, entry in arch.parameters().items()
        for dim, dim_axes in enumerate(entry.axes)
        if axis in factors_of(dim_axes)
    ]


def factors_of(axis: str) -> list[str]:
    """Return the simple axes and numbers of a composite axis."""
    return axis.replace("+", "*").split("*")


def with_mask(
    arch: Architecture, axis: MaskedAxis, new: Iterable[tuple[int, int]], step: int, steps: int
) -> Architecture:
    """Return `arch` with a mask over new index ranges of an axis, which opens over `steps` steps
    from `step` on.

    Raises:
        ArchitectureError: a range is not within the axis.
    """
    return replace(arch, mask=Mask(axis, tuple(new), step, steps))


def refuse_if_masked(arch: Architecture) -> None:
    """Raise GrowthError while the architecture has a mask."""
    if arch.mask is not None:
        raise GrowthError(
            f"new {arch.mask.axis} are masked until step {arch.mask.end:,}; growth is possible again "
            "from then on"
        )


def fold_masks(
    arch: Architecture, _value: None, _options: Mapping[str, Any], step: int
) -> tuple[Architecture, GrowthPlan]:
    """Remove a mask that is fully open; the tensors stay as they are.

    Raises:
        GrowthError: there is no mask, or it is not fully open yet.
    """
    if arch.mask is None:
        raise GrowthError("the model has no mask to fold")
    if step < arch.mask.end:
        raise GrowthError(
            f"the mask over new {arch.mask.axis} is fully open at step {arch.mask.end:,}, and this is "
            f"step {step:,}"
        )
    without_mask = replace(arch, mask=None)
    return without_mask, GrowthPlan(
        {name: Grown(name) for name in without_mask.parameters()}, "exact"
    )


def _pieces(use: Use, sizes: Mapping[str, int], layouts: Mapping[str, Layout]) -> tuple[Piece, ...]:
    """Return the pieces of a dimension: of each summand, in which one factor at most has a new layout."""
    pieces, start = list[Piece](), 0
    for summand, product in enumerate(use.entry.axes[use.dim].split("+")):
        size = axis_size(sizes, product)
        scaled_pieces: tuple[Piece, ...] = (Old(0, size),)
        for factor in product.split("*"):
            if factor in layouts:
                layout = layouts[factor](replace(use, summand=summand))
                scaled_pieces = _pieces_along(product, factor, sizes, layout)
        pieces += (
            piece
            if isinstance(piece, New)
            else replace(piece, start=piece.start + start, stop=piece.stop + start)
            for piece in scaled_pieces
        )
        start += size
    return tuple(pieces)


def _pieces_along(
    axis: str, factor: str, sizes: Mapping[str, int], pieces: tuple[Piece, ...]
) -> tuple[Piece, ...]:
    """Return the pieces of one factor of a product as pieces of the product."""
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
