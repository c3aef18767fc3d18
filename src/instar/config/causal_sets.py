"""What a config says of causal sets that are generated."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict

from instar.config.clash import Clash
from instar.config.section import PositiveInt, Section

Points = Annotated[int, Field(ge=2)]


class CausalSetsConfig(Section):
    """Sprinklings of Minkowski space, and percolation orders with as many relations."""

    sets: PositiveInt = Field(20_000, description="causal sets, about half of them sprinkled")
    min_points: Points = Field(64, description="points of the smallest sets")
    max_points: Points = Field(256, description="points of the largest sets")
    dimensions: Annotated[tuple[Literal[2, 3, 4], ...], Strict(False), Field(min_length=1)] = Field(
        (2, 3, 4), description="dimensions of the spacetimes, each as likely"
    )
    relations: Literal["links", "causal"] = Field(
        "links",
        description="edges of the graph: links, the relations that follow from no others, or causal, "
        "all of them",
    )
    features: Annotated[
        tuple[Literal["links", "volumes"], ...], Strict(False), Field(min_length=1)
    ] = Field(
        ("links",),
        description="of each point: links, log(1 + n) of its links to the past and to the future; "
        "volumes, the shares of the set in its past and in its future, whose mean gives the ordering "
        "fraction away",
    )


def causal_set_checks(options: CausalSetsConfig, section: str) -> list[Clash]:
    """Everything in the section, called by its dotted name, that contradicts itself."""
    clashes = []
    least, most = f"{section}.min_points", f"{section}.max_points"
    if options.min_points > options.max_points:
        clashes.append(
            Clash(
                (least, most),
                f"{least} is {options.min_points}, more than {most}, {options.max_points}",
            )
        )
    for name, values in (("dimensions", options.dimensions), ("features", options.features)):
        if len(set(values)) < len(values):
            clashes.append(Clash((f"{section}.{name}",), f"{section}.{name} names one twice"))
    return clashes
