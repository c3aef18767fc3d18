"""Gradual growth: a mask over new indices opens from 0 to 1 over some steps and is then removed.

New elements under a mask have initial values: the mask is the factor 0 that keeps the function.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from instar.growth.plan import Grown, GrowthError, GrowthPlan
from instar.models.architecture import Architecture, Mask, MaskedAxis


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
    arch: Architecture, value: None, options: Mapping[str, Any], step: int
) -> tuple[Architecture, GrowthPlan]:
    """Remove a mask that is fully open; the tensors stay as they are.

    Raises:
        GrowthError: there is no mask, or it is not fully open yet.
    """
    del value, options
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
