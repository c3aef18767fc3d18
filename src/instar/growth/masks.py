"""Growth that enters little by little: a mask is put over what is new, and folded away when open.

What is under a mask is filled as a model that was born this size would be: the mask is the zero
factor, so nothing else has to be one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from instar.growth.plan import Grown, GrowthError, GrowthPlan
from instar.models.architecture import Architecture
from instar.models.mask import Mask, MaskedAxis


def enter(
    arch: Architecture, axis: MaskedAxis, new: Iterable[tuple[int, int]], step: int, steps: int
) -> Architecture:
    """A grown architecture with a mask over the new indices of an axis, which opens from `step` on
    over so many steps. Raises ArchitectureError where the ranges are none of this axis."""
    return replace(arch, mask=Mask(axis, tuple(new), step, steps))


def refuse_open(arch: Architecture) -> None:
    """Raises GrowthError while a mask is open: one growth at a time."""
    if arch.mask is not None:
        raise GrowthError(
            f"new {arch.mask.axis} are still entering through a mask, until step {arch.mask.end:,}; "
            "growth is possible again from then on"
        )


def fold_masks(
    arch: Architecture, value: None, options: Mapping[str, Any], step: int
) -> tuple[Architecture, GrowthPlan]:
    """The same tensors without the mask, once it does nothing. Raises GrowthError before that."""
    del value, options
    if arch.mask is None:
        raise GrowthError("no mask is open, so there is none to fold")
    if step < arch.mask.end:
        raise GrowthError(
            f"the mask over new {arch.mask.axis} is open in full at step {arch.mask.end:,} only, "
            f"and this is step {step:,}"
        )
    folded = replace(arch, mask=None)
    return folded, GrowthPlan({name: Grown(name) for name in folded.parameters()}, "exact")
