"""Exact held-out loss: every sample once, nothing padded, the same bits on any number of ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.nn import Module

from instar.data.columns import Columns
from instar.data.order import Int64Array, Shuffled
from instar.data.source import Source
from instar.distributed.tree import exact_sum
from instar.distributed.world import World
from instar.run.safepoint import SafePoint
from instar.run.step import to_device
from instar.tasks.task import Task

EVEN_SHARES = 8
"""Held-out samples are cut into a multiple of so many micro-batches, which 2, 4 or 8 ranks share
evenly."""


@dataclass(frozen=True)
class Evaluation:
    """The mean loss over held-out samples, weighted by their weights."""

    loss: float
    weight: float
    samples: int
    seconds: float


def held_out_indices(total: int, limit: int | None, seed: int) -> Int64Array:
    """The samples an evaluation reads: all, or a fixed random subset of `limit` of them."""
    if limit is None or limit >= total:
        return np.arange(total, dtype=np.int64)
    return np.sort(Shuffled(total, seed).indices(0, 0, limit))


def held_out_batches(indices: Int64Array, batch_size: int) -> list[Int64Array]:
    """The same micro-batches on any number of ranks; their sizes differ by one at most."""
    parts = -(-len(indices) // (batch_size * EVEN_SHARES)) * EVEN_SHARES
    return np.array_split(indices, min(parts, len(indices)))


def evaluate(
    task: Task,
    model: Module,
    source: Source,
    world: World,
    *,
    batch_size: int,
    limit: int | None,
    seed: int,
    autocast: Callable[[], AbstractContextManager[object]],
    safe: SafePoint,
) -> Evaluation | None:
    """Mean loss of `model` over `source`, the same for every world size.

    Each rank takes a stretch of the micro-batches, which have `batch_size` samples at most. All
    ranks make the same number of rounds and meet before each, so that a stop or a failed read is
    everyone's.

    Args:
        limit: number of samples of a fixed random subset; None: the whole source.

    Returns:
        the result, the same on every rank, or None when a stop was requested meanwhile.

    Raises:
        RunFailed: a rank could not read its samples.
    """
    started = time.perf_counter()
    indices = held_out_indices(len(source), limit, seed)
    batches = held_out_batches(indices, batch_size)
    mine = _share(batches, world)
    losses: list[torch.Tensor] = []
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for turn in range(math.ceil(len(batches) / world.size)):
                chosen = mine[turn] if turn < len(mine) else None
                arrays, failure = safe.attempt(partial(_read, source, chosen))
                safe.settle(safe.post(failure), failure)
                if safe.stop_requested:
                    return None
                if arrays is not None:
                    with autocast():
                        losses.append(task.loss_sum(model, to_device(arrays, world.device)))
    finally:
        model.train(was_training)
    loss = exact_sum(world, torch.stack(losses).tolist() if losses else [])
    weight = source.weights(indices)
    return Evaluation(loss / weight, weight, len(indices), time.perf_counter() - started)


def _share(batches: Sequence[Int64Array], world: World) -> Sequence[Int64Array]:
    """This rank's stretch; the ranks' lengths differ by one at most."""
    number = len(batches)
    return batches[number * world.rank // world.size : number * (world.rank + 1) // world.size]


def _read(source: Source, indices: Int64Array | None) -> Columns | None:
    return None if indices is None else source.read(indices)
