"""Evaluation: exact held-out metrics, every sample once, bit-identical for any number of ranks."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

from instar.checkpoint.manifest import CheckpointId
from instar.data.columns import Columns
from instar.data.order import Int64Array, Shuffled
from instar.data.source import Source
from instar.distributed.agree import Json, gather
from instar.distributed.all_reduce import exact_sums, total
from instar.distributed.failure import exits_fail
from instar.distributed.world import World
from instar.models.module import evaluating
from instar.record.progress import tracked
from instar.run.loop.generators import EVALUATION, generators_kept, seed_generators
from instar.run.loop.step import to_device
from instar.run.loop.sync_point import Stopped, SyncPoint
from instar.tasks.basis import Basis
from instar.tasks.logged import Logged, Pixels, TableData, recording, weighted
from instar.tasks.metrics import compute, set_metrics, update
from instar.tasks.task import Tally, Task

EVEN_SHARES = 8
"""The number of micro-batches is a multiple of this, so that 2, 4 or 8 ranks get equal shares."""

ROUNDS_PER_REPORT = 16
"""Micro-batches of a rank between two synchronizations of all ranks, each of which takes as long as the
network's latency."""


@dataclass(frozen=True)
class Metric:
    """Weighted mean over held-out samples, or a metric of the whole set."""

    value: float
    standard_error: float | None
    """None with fewer than two units to estimate it from, and for a metric of the whole set"""
    weight: float


@dataclass(frozen=True)
class Evaluation:
    """All metrics of a task over held-out samples."""

    metrics: Mapping[str, Metric]
    samples: int
    seconds: float
    numbers: Mapping[str, float] = field(default_factory=dict)
    """logged by the task's code"""
    images: Mapping[str, Pixels] = field(default_factory=dict)
    """logged by the task's code, on rank 0"""
    tables: Mapping[str, TableData] = field(default_factory=dict)
    """logged by the task's code, on rank 0"""

    @property
    def loss(self) -> float:
        return self.metrics["loss"].value

    @property
    def weight(self) -> float:
        return self.metrics["loss"].weight

    def values(self) -> dict[str, float]:
        return {name: metric.value for name, metric in self.metrics.items()}


@dataclass(frozen=True)
class TestResult:
    """Result of a test, and the weights that it used."""

    step: int
    weights: str
    """best, last, or the name of a checkpoint"""
    evaluation: Evaluation
    checkpoint: CheckpointId
    """that has these weights"""
    basis: Basis
    """on which it was measured"""

    def to_dict(
        self, confusions: Mapping[str, Any], predictions: int, checksum: str = ""
    ) -> dict[str, Any]:
        """Return the result as JSON values.

        Args:
            confusions: confusion matrices by target, [true class][predicted class].
            predictions: number of samples with predictions.
            checksum: xxh3-128 of the file of predictions; empty: there is none.
        """
        metrics = {n: dataclasses.asdict(m) for n, m in self.evaluation.metrics.items()}
        return {
            "step": self.step,
            "weights": self.weights,
            "checkpoint": msgspec.to_builtins(self.checkpoint),
            "basis": dict(self.basis),
            "samples": self.evaluation.samples,
            "predictions": predictions,
            "predictions_xxh3_128": checksum,
            "seconds": self.evaluation.seconds,
            "metrics": metrics,
            "confusion": dict(confusions),
        }


def held_out_indices(total: int, limit: int | None, seed: int) -> Int64Array:
    """Return the samples of an evaluation: all, or a fixed random subset of `limit` samples."""
    if limit is None or limit >= total:
        return np.arange(total, dtype=np.int64)
    return np.sort(Shuffled(total, seed).indices(0, 0, limit))


def held_out_batches(indices: Int64Array, batch_size: int) -> list[Int64Array]:
    """Split samples into micro-batches, the same for any number of ranks, with sizes within one."""
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
    safe: SyncPoint,
    together: bool = False,
    on_predictions: Callable[[Int64Array, Columns], None] | None = None,
) -> Evaluation | None:
    """Evaluate `model` over `source`; the result does not depend on the world size. A collective.

    Each rank evaluates a contiguous part of the micro-batches. A rank that has to stop, or fails, skips
    the rest of its part until the ranks synchronize: after `ROUNDS_PER_REPORT` micro-batches and at the
    end. Random generators are seeded per micro-batch and restored at the end.

    Args:
        batch_size: maximum number of samples per micro-batch.
        limit: number of samples of a fixed random subset; None: the whole source.
        seed: of the subset and of the random generators.
        together: forward passes are collectives: ranks synchronize before each, and one without samples
            in a round runs a stand-in.
        on_predictions: called with the numbers of this rank's samples and the task's predictions for them.

    Returns:
        the result, the same on every rank, or None if a stop was requested meanwhile.

    Raises:
        RunFailed, PeerError: a rank could not read or measure its samples.
    """
    if safe.stop_requested:
        return None
    started = time.perf_counter()
    indices = held_out_indices(len(source), limit, seed)
    batches = held_out_batches(indices, batch_size)
    own_batches = _share(batches, world)
    first = sum(map(len, batches[: _begin(batches, world, world.rank)]))
    tallies: list[tuple[Mapping[str, Tally], int]] = []
    """with the number of the first held-out sample"""
    wholes = set_metrics(task.set_metrics, world.device, len(indices))
    logged = Logged(world)

    def measure(chosen: Int64Array, arrays: Columns, place: int, *, counts: bool) -> None:
        batch = to_device(arrays, world.device)
        with autocast(), weighted(len(chosen) if counts else 0):
            measured = task.measure(model, batch, predict=on_predictions is not None)
        if not counts:
            return
        tallies.append((measured.tallies, place))
        update(wholes, measured.inputs)
        if on_predictions is not None and measured.predictions:
            on_predictions(chosen, measured.predictions)

    failure: Exception | None = None
    gives_up = False

    def synchronize() -> None:
        safe.finish(safe.report(failure, giving_up=gives_up), failure)

    kept = generators_kept(world.device) if task.random else nullcontext()
    rounds = range(math.ceil(len(batches) / world.size))
    try:
        with evaluating(model), torch.no_grad(), kept, recording(logged):
            for number in tracked(rounds, "evaluating", "micro-batches", len(rounds)):
                world.moved()
                chosen = own_batches[number] if number < len(own_batches) else None
                counts = chosen is not None
                if together and not counts:
                    chosen = batches[0][:1]
                if chosen is not None and task.random:
                    # random numbers must depend neither on the number of ranks nor on training
                    seed_generators(seed, EVALUATION, int(chosen[0]), world.device)
                arrays = None
                gives_up = gives_up or safe.wants_to_stop()
                if failure is None and not gives_up:
                    arrays, failure = safe.attempt(partial(_read, source, chosen))
                if together:  # later the others would wait in the forward pass, not for a report
                    synchronize()
                if arrays is not None and chosen is not None:
                    run = partial(measure, chosen, arrays, first, counts=counts)
                    if together:
                        run()
                    else:
                        _, failure = safe.attempt(run)
                    first += len(chosen) if counts else 0
                if not together and (number + 1) % ROUNDS_PER_REPORT == 0:
                    synchronize()
        synchronize()
    except Stopped:
        return None
    names = [name for name in task.metrics if name not in wholes]
    cut = {
        name: [_to_units(tally[name], place, task.cluster) for tally, place in tallies]
        for name in names
    }
    columns = {name: _columns([units.whole for units in cut[name]]) for name in names}
    if task.cluster > 1:
        pieces = {name: [piece for units in cut[name] for piece in units.pieces] for name in names}
        for name, joined in _join(world, pieces).items():
            # every rank has all of them: count them once
            if world.is_main:
                columns[name] = {p: [*columns[name][p], *joined[p]] for p in _PARTS}
    flat = {f"{name} {part}": values for name in names for part, values in columns[name].items()}
    sums = exact_sums(world, flat)
    metrics = {
        name: _metric({part: sums[f"{name} {part}"] for part in columns[name]}) for name in names
    }
    for name, value in compute(world, wholes).items():
        metrics[name] = Metric(value, None, float(len(indices)))
    metrics = {name: metrics[name] for name in task.metrics}
    weight = metrics["loss"].weight
    for name, value in task.derived({n: m.value for n, m in metrics.items()}).items():
        metrics[name] = Metric(value, None, weight)
    numbers = {name: v for name, v in logged.numbers().items() if name not in metrics}
    seconds = time.perf_counter() - started
    return Evaluation(metrics, len(indices), seconds, numbers, logged.images, logged.tables)


_PARTS = ("v", "w", "vv", "vw", "ww", "n")


@dataclass(frozen=True)
class _Units:
    """A micro-batch's samples as units of the standard error. Its first and its last unit may
    continue in other micro-batches."""

    whole: Tensor
    """`_PARTS` summed over the units that are complete"""
    pieces: list[tuple[int, float, float]]
    """(number of the unit, Σ values, Σ weights) of each unit that is not"""


def _to_units(tally: Tally, first: int, size: int) -> _Units:
    """Return the units, each of `size` consecutive samples, of a micro-batch that starts at the
    held-out sample `first`."""
    counted = tally.weights > 0
    # values of weight 0 may be anything, also NaN
    v, w = torch.where(counted, tally.values, 0).double(), tally.weights.double()
    before = first % size
    if size > 1:
        after = -(before + len(v)) % size
        v, w = (F.pad(x, (before, after)).view(-1, size).sum(1) for x in (v, w))
        # the last unit of the split may have fewer samples: then it is a piece on its own
        open_ = {0} if before else set()
        open_ |= {len(v) - 1} if after else set()
        pieces = [(first // size + n, v[n].item(), w[n].item()) for n in sorted(open_)]
        keep = torch.tensor([n for n in range(len(v)) if n not in open_], dtype=torch.int64)
        v, w = v[keep.to(v.device)], w[keep.to(w.device)]
    else:
        pieces = []
    return _Units(_parts(v, w), pieces)


def _parts(v: Tensor, w: Tensor) -> Tensor:
    """Return the sums, in the order of `_PARTS`, from which `_metric` computes mean and error.

    Args:
        v, w: Σ values and Σ weights of each unit, [units].
    """
    return torch.stack([v.sum(), w.sum(), v @ v, v @ w, w @ w, w.gt(0).sum().double()])


def _columns(rows: Sequence[Tensor]) -> dict[str, list[float]]:
    if not rows:
        return {part: [] for part in _PARTS}
    return dict(zip(_PARTS, torch.stack(list(rows)).T.tolist(), strict=True))


def _join(
    world: World, pieces: Mapping[str, list[tuple[int, float, float]]]
) -> dict[str, dict[str, list[float]]]:
    """Join units that span several micro-batches, on any ranks; return their `_PARTS`.

    A collective.
    """
    # floats as text, because JSON has no NaN
    own: Json = {name: [[n, repr(v), repr(w)] for n, v, w in each] for name, each in pieces.items()}
    found: dict[str, dict[int, list[tuple[float, float]]]] = {name: {} for name in pieces}
    for from_rank in cast(list[dict[str, list[tuple[int, str, str]]]], gather(world, own)):
        for name, each in from_rank.items():
            for number, v, w in each:
                found[name].setdefault(number, []).append((float(v), float(w)))
    return {
        name: _columns([_parts(*_added(parts)) for parts in units.values()])
        for name, units in found.items()
    }


def _added(parts: Sequence[tuple[float, float]]) -> tuple[Tensor, Tensor]:
    """Return Σ values and Σ weights of one unit, independent of the order of its parts."""
    v, w = (total(column) for column in zip(*parts, strict=True))
    return torch.tensor([v], dtype=torch.float64), torch.tensor([w], dtype=torch.float64)


def _metric(sums: Mapping[str, float]) -> Metric:
    """Compute the ratio r = Σv / Σw and its standard error, √(n / (n − 1) · Σ(v − r w)²) / Σw
    (Cochran, Sampling Techniques, 1977, equation 6.13)."""
    v, w, n = sums["v"], sums["w"], sums["n"]
    if not w:
        return Metric(math.nan, None, 0.0)
    ratio = v / w
    if n < 2 or not math.isfinite(ratio):
        return Metric(ratio, None, w)
    squares = max(0.0, sums["vv"] - 2 * ratio * sums["vw"] + ratio**2 * sums["ww"])
    return Metric(ratio, math.sqrt(n / (n - 1) * squares) / w, w)


def _share(batches: Sequence[Int64Array], world: World) -> Sequence[Int64Array]:
    """Return this rank's contiguous part; the ranks' lengths differ by at most one."""
    return batches[_begin(batches, world, world.rank) : _begin(batches, world, world.rank + 1)]


def _begin(batches: Sequence[Int64Array], world: World, rank: int) -> int:
    """Return where a rank's part begins. Rank 0 has the first batch, also if there is no other."""
    return -(-len(batches) * rank // world.size)


def _read(source: Source, indices: Int64Array | None) -> Columns | None:
    with exits_fail("reading samples"):
        return None if indices is None else source.read(indices)
