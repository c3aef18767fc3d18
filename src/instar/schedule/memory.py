"""Forecast of the memory of a rank, and of what it sends, under each strategy of parallel training. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from instar.config.schema import RunConfig
from instar.models.cost import FrozenParameters, state_bytes
from instar.models.shape import Growable, Parameter, layer_of
from instar.schedule.settings import Settings

Strategy = Literal["ddp", "fsdp", "hsdp", "diloco"]
FORECAST_SHARE = 0.9
"""Share of a device's memory that a forecast may take: it leaves out the allocator's."""
PROBE_SAMPLES = 8
"""The largest number of held-out samples on which a grown model is compared with the old one."""
KEPT = ("weights", "gradients", "optimizer", "ema", "outer")
"""parts of a step's memory that only a smaller model, or more shards, reduces"""
_WIDE = 4


@dataclass(frozen=True)
class RankMemory:
    """Peak memory of tensors on one rank, in bytes."""

    shards: int
    """number of ranks that share one copy of the model; 1: every rank has the whole model"""
    step: Mapping[str, int]
    """of a step, by part"""
    growth: int
    """while the model grows into this stage; 0: it does not"""
    sent: int
    """what the rank sends per step, on the mean: weights, gradients and optimizer states. Muon under fsdp
    sends its matrices besides."""

    @property
    def peak(self) -> int:
        """The highest of both."""
        return max(sum(self.step.values()), self.growth)

    @property
    def accumulated_bytes(self) -> int:
        """Whole gradients of the micro-batches of a step, until they are reduced."""
        return self.step.get("accumulated", 0)

    @property
    def kept_bytes(self) -> int:
        """What no smaller micro-batch reduces."""
        return sum(self.step.get(part, 0) for part in KEPT)


@dataclass(frozen=True)
class RankShare:
    """The samples of a step that a rank runs."""

    batch_size: int
    """the maximal number of samples of a micro-batch"""
    passes: int
    """micro-batches of a slice, whose gradients are added before they are reduced"""
    slices: int
    """slices that a rank runs one after the other"""


def share_of(config: RunConfig, settings: Settings, world_size: int) -> RankShare:
    """Return the largest share that any rank has."""
    elastic = config.reproducible == "elastic"
    slices = config.parallel.elastic.virtual_ranks if elastic else world_size
    samples = math.ceil(settings.global_batch / slices)
    size = min(settings.batch_size, samples)
    return RankShare(size, math.ceil(samples / size), max(1, slices // world_size))


def shards_by_strategy(config: RunConfig, world_size: int) -> dict[Strategy, int]:
    """Return the number of ranks that share a model, for each strategy that the ranks could use.

    Without `parallel.fsdp.shards`, `hsdp` has two replicas.
    """
    local = config.parallel.strategy == "diloco"
    shards_of: dict[Strategy, int] = {"ddp": 1, "diloco": 1} if local else {"ddp": 1}
    if world_size == 1:
        return shards_of
    shards_of["fsdp"] = world_size
    shards = config.parallel.fsdp.shards or world_size // 2
    if 1 < shards < world_size and world_size % shards == 0:
        shards_of["hsdp"] = shards
    return shards_of


def in_force(config: RunConfig, world_size: int) -> Strategy:
    """Return the strategy of a config on so many ranks; for `auto`, with which it begins: ddp."""
    shards = config.parallel.shards_of(world_size)
    if shards == 1:
        return "diloco" if config.parallel.strategy == "diloco" else "ddp"
    return "hsdp" if shards < world_size else "fsdp"


@dataclass(frozen=True)
class RankPlan:
    """How the ranks train a model of a stage: what the memory of one of them depends on."""

    config: RunConfig
    architecture: Growable
    frozen: FrozenParameters
    world_size: int
    strategy: Strategy
    shards: int
    """number of ranks that share a model"""
    share: RankShare

    @property
    def held_bytes(self) -> dict[str, int]:
        """Bytes of what a rank keeps between steps, by part."""
        rows = {
            name: _rows(entry, self.shards)
            for name, entry in self.architecture.parameters().items()
        }
        optimizer, ema = self.config.optimizer, self.config.train.ema is not None
        return state_bytes(rows, self.frozen, optimizer=optimizer, ema=ema)


def rank_memory(
    plan: RankPlan, whole_model: Mapping[str, int], before: RankMemory | None = None
) -> RankMemory:
    """Forecast the memory of a rank in a stage.

    Args:
        whole_model: of a step with a whole model, see `TaskSpec.memory`.
        before: of the stage before, if the model grows into this one.
    """
    config, share, state = plan.config, plan.share, plan.held_bytes
    parts = {**whole_model, **state}
    if plan.shards > 1:
        parts |= _sharded_parts(plan)
    if plan.strategy == "diloco":
        parts["outer"] = state["weights"] * (2 if config.parallel.diloco.outer_momentum else 1)
    elif more := _sums(config, plan.world_size, plan.shards, share):
        parts["sums"] = more * state["gradients"]
    growth = (
        0 if before is None else _growth(plan, parts, before, whole_model.get("activations", 0))
    )
    return RankMemory(plan.shards, parts, growth, _sent_bytes(plan, state))


def _sharded_parts(plan: RankPlan) -> dict[str, int]:
    """Return the bytes of whole weights and gradients that a rank has for a while, by part."""
    table, fsdp = plan.architecture.parameters(), plan.config.parallel.fsdp
    root, blocks = _root_and_blocks(table)
    gathered_bytes = _two_blocks(root, blocks) if fsdp.reshard_after_forward else root + sum(blocks)
    trainable = (name for name in table if name not in plan.frozen.now)
    gradients = _by_block(table, trainable)
    # what is sent, what is received, and half of it where pairs are added
    reduced_bytes = gradients.pop(None, 0) + 5 * max(gradients.values(), default=0) // 2
    parts = {"gathered": gathered_bytes + reduced_bytes}
    if plan.share.passes > 1 and not fsdp.reduce_each_micro_batch:
        parts["accumulated"] = sum(gradients.values())
    return parts


def _growth(plan: RankPlan, parts: Mapping[str, int], before: RankMemory, activations: int) -> int:
    """Return the bytes while the model grows: both models, and what one piece or the proof needs."""
    table, local = plan.architecture.parameters(), plan.strategy == "diloco"
    root, blocks = _root_and_blocks(table)
    # between steps, gradients are left in the buckets of DDP, and in the tensors of a tree of sums
    elastic = plan.config.reproducible == "elastic"
    has_gradients = plan.shards == 1 and (plan.world_size > 1 or elastic) and not local
    stay = ("weights", "optimizer", "ema", *(("gradients", "sums") if has_gradients else ()))
    stay = (*stay, *(("outer",) if local else ()))
    kept_bytes = sum(parts.get(part, 0) + before.step.get(part, 0) for part in stay)
    # a proof needs a forward pass, which keeps the activations of one block only
    proof = activations * PROBE_SAMPLES // (plan.share.batch_size * max(1, len(blocks)))
    proof += _two_blocks(root, blocks) if plan.shards > 1 else 0
    return kept_bytes + max(proof, *map(_bytes, table.values()))


def _root_and_blocks(table: Mapping[str, Parameter]) -> tuple[int, tuple[int, ...]]:
    """Return the bytes of the parameters outside the blocks, and of those of each block."""
    blocks = _by_block(table, table)
    return blocks.pop(None, 0), tuple(blocks.values())


def _two_blocks(root: int, blocks: Sequence[int]) -> int:
    # a block arrives in one piece, from which its parameters are copied
    return root + 2 * max(blocks, default=0)


def _sent_bytes(plan: RankPlan, state: Mapping[str, int]) -> int:
    """Return the bytes that a rank sends per step; `state`: of what it holds."""
    config, share, world_size, shards = plan.config, plan.share, plan.world_size, plan.shards
    weights, gradients = state["weights"], state["gradients"]
    share_of_others = (world_size - 1) / world_size
    if plan.strategy == "diloco":
        options = config.parallel.diloco
        compression = 1 if options.exchange == "float32" else 2
        return round(
            2
            * share_of_others
            * (gradients + state["optimizer"])
            / compression
            / options.sync_every
        )
    if plan.strategy == "ddp":
        compression = 1 if config.parallel.ddp.exchange == "float32" else 2
        return round(2 * share_of_others * gradients / compression)
    fsdp, replicas = config.parallel.fsdp, world_size // shards
    gathers = (2 if fsdp.reshard_after_forward else 1) * share.passes
    reductions = share.passes if fsdp.reduce_each_micro_batch else 1
    gathered_bytes = gathers * weights / (2 if fsdp.gather == "bfloat16" else 1)
    inside = (shards - 1) * (gathered_bytes + reductions * gradients)
    return round(inside + 2 * (replicas - 1) / replicas * reductions * gradients)


def _by_block(table: Mapping[str, Parameter], names: Iterable[str]) -> dict[int | None, int]:
    """Return the bytes of the parameters of each block; None: of those outside the blocks."""
    sizes: dict[int | None, int] = {}
    for name in names:
        block = layer_of(name)
        sizes[block] = sizes.get(block, 0) + _bytes(table[name])
    return sizes


def _sums(config: RunConfig, world_size: int, shards: int, share: RankShare) -> int:
    """Return how many gradients a rank has besides the one that the optimizer reads."""
    if config.reproducible == "elastic":
        levels = share.slices.bit_length() - 1  # of the tree of its slices
        return levels if shards > 1 else max(levels, world_size > 1)
    has_buckets = world_size > 1 and shards == 1 and not config.parallel.ddp.gradient_as_bucket_view
    return int(has_buckets)


def _rows(entry: Parameter, shards: int) -> Parameter:
    """Return what a rank holds of a parameter, as many rows as the rank with the most."""
    if not entry.shape:
        return entry
    return replace(entry, shape=(-(-entry.shape[0] // shards), *entry.shape[1:]))


def _bytes(entry: Parameter) -> int:
    return _WIDE * math.prod(entry.shape)
