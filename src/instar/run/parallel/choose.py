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
    with raise_on_all_ranks(world, what):
        bare = bare.to(world.device)
    copy_from_rank_0(world, bare)
    with raise_on_all_ranks(world, what):
        freeze(bare, frozen)
        if config.reproducible == "elastic":
            return VirtualRanks(world, bare, config.parallel.elastic.virtual_ranks)
        return DataParallel(config, world, bare)


def slices(config: RunConfig, world_size: int) -> Sequence[range]:
    """Return the slices of a step that each rank runs."""
    number = (
        config.parallel.elastic.virtual_ranks if config.reproducible == "elastic" else world_size
    )
    each = number // world_size
    return [range(one * each, (one + 1) * each) for one in range(world_size)]
