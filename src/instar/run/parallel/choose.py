"""The strategy of a config: which one it is, and which slices of a step each rank runs."""

from __future__ import annotations

from collections.abc import Sequence

from torch.nn import Module

from instar.config.schema import RunConfig
from instar.distributed.agree import raise_on_all_ranks
from instar.distributed.parallel import copy_from_rank_0
from instar.distributed.world import World
from instar.run.parallel.elastic import VirtualRanks
from instar.run.parallel.replicated import DataParallel
from instar.run.parallel.strategy import Strategy, freeze


def parallelize(
    config: RunConfig, world: World, bare: Module, frozen: Sequence[str] = ()
) -> Strategy:
    """Move a model to its device and prepare it for training on all ranks. A collective.

    Args:
        bare: without wrappers; all ranks get the values that it has on rank 0.
        frozen: patterns of frozen parameters, see `is_frozen`.

    Raises:
        PeerError: a rank failed.
    """
    what = "preparing the model for training"
    shards = shards_of(config, world.size)
    with raise_on_all_ranks(world, what):
        # a sharded model moves to the device one block at a time
        bare = bare if shards > 1 else bare.to(world.device)
    copy_from_rank_0(world, bare)
    with raise_on_all_ranks(world, what):
        freeze(dict(bare.named_parameters()), frozen)
        if shards > 1:
            from instar.run.parallel.sharded import Sharded  # takes a while, and few runs need it

            return Sharded(config, world, bare, shards)
        if config.reproducible == "elastic":
            return VirtualRanks(world, bare, config.parallel.elastic.virtual_ranks)
        return DataParallel(config, world, bare)


def shards_of(config: RunConfig, world_size: int) -> int:
    """Return the number of ranks that share one copy of the model."""
    if config.parallel.strategy == "fsdp":
        return world_size
    if config.parallel.strategy == "hsdp":
        return min(world_size, config.parallel.fsdp.shards or world_size)
    return 1


def slices(config: RunConfig, world_size: int) -> Sequence[range]:
    """Return the slices of a step that each rank runs, in order.

    Ranks with whole models run neighboring slices, whose gradients they add alone. Ranks with shards
    add the gradients of one slice each, and take turns of neighboring slices.
    """
    elastic = config.reproducible == "elastic"
    number = config.parallel.elastic.virtual_ranks if elastic else world_size
    each = number // world_size
    if shards_of(config, world_size) > 1:
        return [range(rank, number, world_size) for rank in range(world_size)]
    return [range(rank * each, (rank + 1) * each) for rank in range(world_size)]
