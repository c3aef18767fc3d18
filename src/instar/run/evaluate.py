"""Exact held-out metrics: every sample once, nothing padded, the same bits on any number of ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.nn import Module

from instar.data.columns import Columns
from instar.data.order import Int64Array, Shuffled
from instar.data.source import Source
from instar.distributed.tree import exact_sums
from instar.distributed.world import World
from instar.run.safepoint import SafePoint
from instar.run.step import to_device
from instar.tasks.task import Tally, Task

EVEN_SHARES = 8
"""Held-out samples are cut into a multiple of so many micro-batches, which 2, 4 or 8 ranks share
evenly."""


@dataclass(frozen=True)
class Metric:
    """A mean over held-out samples, weighted by their weights."""

    value: float
    standard_error: float | None
    """None where there are fewer than two units to tell it from"""
    weight: float


@dataclass(frozen=True)
class Evaluation:
    """Every metric of a task over held-out samples."""

    metrics: Mapping[str, Metric]
    samples: int
    seconds: float

    @property
    def loss(self) -> float:
        return self.metrics["loss"].value

    @property
    def weight(self) -> float:
        return self.metrics["loss"].weight

    def values(self) -> dict[str, float]:
        return {name: metric.value for name, metric in self.metrics.items()}


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
    see: Callable[[Int64Array, Columns], None] | None = None,
) -> Evaluation | None:
    """The metrics of `model` over `source`, the same for every world size.

    Each rank takes a stretch of the micro-batches, which have `batch_size` samples at most. All
    ranks make the same number of rounds and meet before each, so that a stop or a failed read is
    everyone's.

    Args:
        limit: number of samples of a fixed random subset; None: the whole source.
        see: gets the numbers of this rank's samples and what the task predicts of them.

    Returns:
        the result, the same on every rank, or None when a stop was requested meanwhile.

    Raises:
        RunFailed: a rank could not read its samples.
    """
    started = time.perf_counter()
    indices = held_out_indices(len(source), limit, seed)
    batches = held_out_batches(indices, batch_size)
    mine = _share(batches, world)
    tallies: list[Mapping[str, Tally]] = []
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
                    batch = to_device(arrays, world.device)
                    with autocast():
                        tallies.append(task.measure(model, batch))
                        predicted = task.predict(model, batch) if see is not None else None
                    if see is not None and predicted and chosen is not None:
                        see(chosen, predicted)
    finally:
        model.train(was_training)
    names = task.metrics
    columns = {name: _sums([tally[name] for tally in tallies]) for name in names}
    flat = {f"{name} {part}": values for name in names for part, values in columns[name].items()}
    sums = exact_sums(world, flat)
    metrics = {
        name: _metric({part: sums[f"{name} {part}"] for part in columns[name]}) for name in names
    }
    return Evaluation(metrics, len(indices), time.perf_counter() - started)


_PARTS = ("v", "w", "vv", "vw", "ww", "n")


def _sums(tallies: Sequence[Tally]) -> dict[str, list[float]]:
    """What a metric's mean and standard error follow from, of each micro-batch."""
    if not tallies:
        return {part: [] for part in _PARTS}
    rows = []
    for values, weights in tallies:
        counted = weights > 0
        # what does not count may be anything, also NaN
        v = torch.where(counted, values, 0).double()
        w = weights.double()
        rows.append(torch.stack([v.sum(), w.sum(), v @ v, v @ w, w @ w, counted.sum().double()]))
    return dict(zip(_PARTS, torch.stack(rows).T.tolist(), strict=True))


def _metric(sums: Mapping[str, float]) -> Metric:
    """The ratio r = Σv / Σw and its standard error, √(n / (n − 1) · Σ(v − r w)²) / Σw (Cochran,
    Sampling Techniques, 1977, equation 6.13)."""
    v, w, n = sums["v"], sums["w"], sums["n"]
    if not w:
        return Metric(math.nan, None, 0.0)
    ratio = v / w
    if n < 2 or not math.isfinite(ratio):
        return Metric(ratio, None, w)
    apart = max(0.0, sums["vv"] - 2 * ratio * sums["vw"] + ratio**2 * sums["ww"])
    return Metric(ratio, math.sqrt(n / (n - 1) * apart) / w, w)


def _share(batches: Sequence[Int64Array], world: World) -> Sequence[Int64Array]:
    """This rank's stretch; the ranks' lengths differ by one at most."""
    number = len(batches)
    return batches[number * world.rank // world.size : number * (world.rank + 1) // world.size]


def _read(source: Source, indices: Int64Array | None) -> Columns | None:
    return None if indices is None else source.read(indices)
