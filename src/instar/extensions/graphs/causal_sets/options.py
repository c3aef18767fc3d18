"""The options of generated causal sets: the config section `data.causal_sets`. Imports no numpy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, Strict

from instar.config.sections import Section

Points = Annotated[int, Field(ge=2, le=2**14)]


class CausalSetsConfig(Section):
    """Sprinklings of Minkowski space, and percolation orders with as many relations."""

    sets: Annotated[int, Field(gt=0, le=10**8)] = Field(
        20_000, description="causal sets, about half of them sprinkled"
    )
    min_points: Points = Field(64, description="points of the smallest sets")
    max_points: Points = Field(256, description="points of the largest sets")
    dimensions: Annotated[tuple[Literal[2, 3, 4], ...], Strict(False), Field(min_length=1)] = Field(
        (2, 3, 4), description="dimensions of the spacetimes, equally likely"
    )
    relations: Literal["links", "causal"] = Field(
        "links",
        description="edges of the graph: links (the transitive reduction) or causal (all relations)",
    )
    features: Annotated[
        tuple[Literal["links", "volumes"], ...], Strict(False), Field(min_length=1)
    ] = Field(
        ("links",),
        description="node features: links, log(1 + n) of a point's links to the past and to the "
        "future; volumes, the fractions of the set in its past and in its future, whose mean reveals "
        "the ordering fraction",
    )


Options = CausalSetsConfig

HEADS = (
    {"name": "manifold", "kind": "classification", "classes": 2},
    {"name": "dimension", "kind": "classification", "classes": 3},
    {"name": "ordering_fraction", "kind": "regression", "weight": 10.0},
)
"""The targets of a causal set: whether it is a sprinkling, its dimension (2, 3 or 4), and its
ordering fraction."""


def conflicts(options: CausalSetsConfig, section: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield keys that contradict each other, with a message; `section` is their dotted prefix."""
    fewest_key, largest_key = f"{section}.min_points", f"{section}.max_points"
    if options.min_points > options.max_points:
        message = (
            f"{fewest_key} is {options.min_points}, more than {largest_key}, {options.max_points}"
        )
        yield (fewest_key, largest_key), message
    for name, values in (("dimensions", options.dimensions), ("features", options.features)):
        if len(set(values)) < len(values):
            yield (f"{section}.{name}",), f"{section}.{name} has a duplicate value"
