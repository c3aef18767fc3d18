"""Prepares a model for training, or for an evaluation, with the strategy of its config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch.nn import Module

from instar.config.schema import RunConfig
from instar.distributed.agree import raise_on_all_ranks
from instar.distributed.parallel import copy_from_rank_0
from instar.distributed.world import World
from instar.run.parallel.elastic import VirtualRanks
from instar.run.parallel.replicated import DataParallel, Replicated
from instar.run.parallel.strategy import Evaluable, Strategy, freeze


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
    shards = config.parallel.shards_of(world.size)
    with raise_on_all_ranks(world, what):
        # a sharded model moves to the device one block at a time
        bare = bare if shards > 1 else bare.to(world.device)
    copy_from_rank_0(world, bare)
    with raise_on_all_ranks(world, what):
        return trained(config, place(config, world, bare), frozen)


def place(config: RunConfig, world: World, bare: Module) -> Evaluable:
    """Move a model to its device, in parts if models are sharded. A collective if they are.

    Args:
        bare: all ranks have the same values, or load them afterwards.
    """
    if (shards := config.parallel.shards_of(world.size)) > 1:
        from instar.run.parallel.sharded import Sharded  # takes a while, and few runs need it

        return Sharded(config, world, bare, shards)
    return Replicated(world, bare.to(world.device))


def trained(config: RunConfig, placed: Evaluable, frozen: Sequence[str] = ()) -> Strategy:
    """Prepare a placed model for training. Does not communicate."""
    freeze(placed.parameters, frozen)
    if not isinstance(placed, Replicated):
        return cast(Strategy, placed)
    if config.reproducible == "elastic":
        return VirtualRanks(placed.world, placed.bare, config.parallel.elastic.virtual_ranks)
    return DataParallel(config, placed.world, placed.bare)
