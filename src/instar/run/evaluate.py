"""Exact held-out loss: every sample once, sums and counts over all ranks, nothing padded."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.nn import Module

from instar.data.feed import MicroBatch
from instar.data.order import Shuffled
from instar.data.source import Source
from instar.distributed.agree import reduce_sums
from instar.distributed.world import World
from instar.run.safepoint import SafePoint
from instar.run.step import to_device
from instar.tasks.task import Task


@dataclass(frozen=True)
class Evaluation:
    """The mean loss over held-out samples, weighted by their weights."""

    loss: float
    weight: float
    samples: int
    seconds: float


def held_out_indices(total: int, limit: int | None, seed: int) -> np.ndarray:
    """The samples an evaluation reads: all, or a fixed random subset of `limit` of them."""
    if limit is None or limit >= total:
        return np.arange(total, dtype=np.int64)
    return np.sort(Shuffled(total, seed).indices(0, 0, limit))


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
    """Mean loss of `model` over `source`, equal for every world size up to rounding.

    Each rank reads a contiguous slice in micro-batches of `batch_size`. All ranks make the same
    number of rounds and meet before each, so that a stop or a failed read is everyone's.

    Args:
        limit: number of samples of a fixed random subset; None: the whole source.

    Returns:
        the result, the same on every rank, or None when a stop was requested meanwhile.

    Raises:
        RunFailed: a rank could not read its samples.
    """
    started = time.perf_counter()
    indices = held_out_indices(len(source), limit, seed)
    total = len(indices)
    begin, end = total * world.rank // world.size, total * (world.rank + 1) // world.size
    rounds = math.ceil(math.ceil(total / world.size) / batch_size)
    loss = torch.zeros((), dtype=torch.float64, device=world.device)
    weight = 0.0
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for first in range(begin, begin + rounds * batch_size, batch_size):
                chosen = indices[first : min(first + batch_size, end)]
                micro, failure = safe.attempt(partial(_read, source, chosen))
                safe.settle(safe.post(failure), failure)
                if safe.stop_requested:
                    return None
                if micro is None:
                    continue
                with autocast():
                    loss += task.loss_sum(model, to_device(micro, world.device))
                weight += micro.weight
    finally:
        model.train(was_training)
    sums = reduce_sums(world, {"loss": loss.item(), "weight": weight})
    return Evaluation(
        sums["loss"] / sums["weight"], sums["weight"], total, time.perf_counter() - started
    )


def _read(source: Source, indices: np.ndarray) -> MicroBatch | None:
    if len(indices) == 0:
        return None
    return MicroBatch(source.read(indices), source.weights(indices), len(indices))
