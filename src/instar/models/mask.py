"""A mask as data: structure that enters a model little by little (Masked Structural Growth, arXiv
2305.02869, section 3.2); torch-free.

What is new is multiplied by an opening c that goes from 0 to 1. At 0 the model computes what it did
before it grew; at 1 the mask does nothing and is folded away.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

MaskedAxis = Literal["layers", "mlp", "heads", "embed"]


@dataclass(frozen=True)
class Mask:
    """Indices of an axis that are new, as ranges start … stop-1, and the steps in which they enter."""

    axis: MaskedAxis
    new: tuple[tuple[int, int], ...]
    begin: int
    """step at which it is closed"""
    steps: int

    @property
    def end(self) -> int:
        """Step from which on it is open."""
        return self.begin + self.steps

    def opening(self, step: int) -> float:
        """c after so many steps of the run."""
        return min(1.0, max(0.0, (step - self.begin) / self.steps))

    def has(self, axis: MaskedAxis, index: int) -> bool:
        """Whether this index of that axis is new."""
        return axis == self.axis and any(start <= index < stop for start, stop in self.new)


def mask_of(arch: object) -> Mask | None:
    """What of a model is still entering; None where nothing is, or where it has no masks."""
    mask: Mask | None = getattr(arch, "mask", None)
    return mask


def problems(mask: Mask, sizes: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """What is wrong with a mask of a model of these sizes: (what, what instead)."""
    if mask.axis not in get_args(MaskedAxis):
        yield f"{mask.axis!r} cannot be masked", f"one of {', '.join(get_args(MaskedAxis))}"
        return
    whole = [mask.begin, mask.steps, *(bound for part in mask.new for bound in part)]
    if any(type(number) is not int for number in whole) or mask.begin < 0 or mask.steps < 1:
        yield f"begin, steps and ranges must be whole numbers, steps above 0, not {mask}", ""
        return
    size, last = sizes[mask.axis], 0
    for start, stop in mask.new:
        if not last <= start < stop <= size:
            yield f"{start} … {stop - 1} is no range of {size} {mask.axis} after {last}", ""
        last = stop
    if not mask.new or sum(stop - start for start, stop in mask.new) >= size:
        yield f"some of the {size} {mask.axis} must be new, and some old", ""


def from_json(values: Mapping[str, Any]) -> Mask:
    """A mask of what `dataclasses.asdict` made of it. Raises TypeError, ValueError for another thing."""
    return Mask(**{**values, "new": tuple((start, stop) for start, stop in values["new"])})
