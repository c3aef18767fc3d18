"""Builds models, and prepares them for training or for an evaluation, with the strategy of a config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import Module

from instar.config.schema import RunConfig
from instar.distributed.agree import raise_on_all_ranks
from instar.distributed.parallel import broadcast_from_rank_0, check_same_layout, copy_from_rank_0
from instar.distributed.world import World
from instar.models.module import is_meta
from instar.run.optimizer import copy_tensors
from instar.run.parallel.diloco import DiLoCo
from instar.run.parallel.replicated import DataParallel, Replicated, VirtualRanks
from instar.run.parallel.strategy import Evaluable, Strategy, freeze
from instar.tasks.task import Task

_WHAT = "preparing the model for training"


def begins_on_meta(config: RunConfig, world: World, task: Task) -> bool:
    """Return whether a model is built without memory: it will be sharded, and the task can set its values
    one tensor at a time."""
    return config.parallel.shards_of(world.size) > 1 and task.initial_values() is not None


def build_meta_model(config: RunConfig, world: World, task: Task) -> Module:
    """Build a model whose parameters may have any values, on the CPU or the meta device."""
    if not begins_on_meta(config, world, task):
        return task.shell()
    with torch.device("meta"):
        return task.shell()


def parallelize(
    config: RunConfig,
    world: World,
    bare: Module,
    frozen: Sequence[str] = (),
    values: Mapping[str, Tensor] | None = None,
) -> Strategy:
    """Move a model to its device and prepare it for training on all ranks. A collective.

    All ranks get the values that rank 0 has, of a model on the meta device one tensor at a time.

    Args:
        bare: without wrappers.
        frozen: patterns of frozen parameters, see `is_frozen`.
        values: of a model on the meta device; only rank 0 reads them. None: the caller sets them.

    Raises:
        PeerError: a rank failed.
    """
    if is_meta(bare):
        check_same_layout(world, bare)
        with raise_on_all_ranks(world, _WHAT):
            evaluable = wrap_for_eval(config, world, bare)
        if values is not None:
            _fill(world, evaluable.parameters, values)
    else:
        with raise_on_all_ranks(world, _WHAT):
            # a sharded model moves to the device one block at a time
            bare = bare if config.parallel.shards_of(world.size) > 1 else bare.to(world.device)
        copy_from_rank_0(world, bare)
        with raise_on_all_ranks(world, _WHAT):
            evaluable = wrap_for_eval(config, world, bare)
    with raise_on_all_ranks(world, _WHAT):
        return wrap_for_training(config, evaluable, frozen)


def _fill(world: World, parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Give all ranks the values that rank 0 has. A collective."""
    for name, parameter in parameters.items():
        with raise_on_all_ranks(world, "making the first weights"):
            tensors = {name: values[name].to(world.device)} if world.is_main else {}
        arrivals = broadcast_from_rank_0(world, tensors, "receiving the weights")
        with raise_on_all_ranks(world, "taking the first weights"):
            copy_tensors({name: parameter}, arrivals)


def wrap_for_eval(config: RunConfig, world: World, bare: Module) -> Evaluable:
    """Move a model to its device, in parts if models are sharded. A collective if they are.

    Args:
        bare: all ranks have the same values, or set them afterwards.
    """
    if (shards := config.parallel.shards_of(world.size)) > 1:
        from instar.run.parallel.sharded import Sharded  # takes a while, and few runs need it

        return Sharded(config, world, bare, shards)
    return Replicated(world, bare.to(world.device))


def wrap_for_training(
    config: RunConfig, evaluable: Evaluable, frozen: Sequence[str] = ()
) -> Strategy:
    """Prepare a placed model for training. Does not communicate."""
    freeze(evaluable.parameters, frozen)
    if not isinstance(evaluable, Replicated):
        return cast(Strategy, evaluable)
    if config.reproducible == "elastic":
        return VirtualRanks(evaluable.world, evaluable.bare, config.parallel.elastic.virtual_ranks)
    strategy = DiLoCo if config.parallel.strategy == "diloco" else DataParallel
    return strategy(config, evaluable.world, evaluable.bare)
