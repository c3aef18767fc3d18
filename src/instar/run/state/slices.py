"""Which slices of a step each rank runs. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from instar.config.schema import RunConfig


def slices(config: RunConfig, world_size: int) -> Sequence[range]:
    """Return the slices of a step that each rank runs, in order.

    Ranks with whole models run neighbouring slices, whose gradients they add alone. Ranks with shards
    add the gradients of one slice each, and take turns of neighbouring slices.
    """
    elastic = config.reproducible == "elastic"
    number = config.parallel.elastic.virtual_ranks if elastic else world_size
    if config.parallel.shards_of(world_size) > 1:
        return [range(rank, number, world_size) for rank in range(world_size)]
    slices_per_rank = number // world_size
    return [
        range(rank * slices_per_rank, (rank + 1) * slices_per_rank) for rank in range(world_size)
    ]
