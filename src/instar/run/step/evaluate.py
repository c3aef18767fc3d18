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
from instar.record.progress import track_items
from instar.run.state.generators import EVALUATION, generators_kept, seed_generators
from instar.run.state.sync_point import Stopped, SyncPoint
from instar.run.step.stepper import to_device
from instar.tasks.basis import Basis
from instar.tasks.images import Pixels
from instar.tasks.logged import Logged, TableData, recording, weighted
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


@dataclass(frozen=True)
class EvaluationOptions:
    """How a model is evaluated."""

    batch_size: int
    """maximum number of samples per micro-batch"""
    seed: int
    """of the subset and of the random generators"""
    limit: int | None = None
    """number of samples of a fixed random subset; None: the whole source"""
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext
    forward_is_collective: bool = False
    """ranks synchronize before each forward pass, and one without samples in a round runs a stand-in"""
    parts: Mapping[str, range] = field(default_factory=dict)
    """samples whose loss is told separately, as `<name>/loss`"""


def evaluate_source(
    task: Task,
    model: Module,
    source: Source,
    options: EvaluationOptions,
    sync: SyncPoint,
    on_predictions: Callable[[Int64Array, Columns], None] | None = None,
) -> Evaluation | None:
    """Evaluate `model` over `source`; the result does not depend on the world size. A collective.

    Each rank evaluates a contiguous part of the micro-batches. A rank that has to stop, or fails, skips
    the rest of its part until the ranks synchronize: after `ROUNDS_PER_REPORT` micro-batches and at the
    end. Random generators are seeded per micro-batch and restored at the end.

    Args:
        on_predictions: called with the numbers of this rank's samples and the task's predictions for them.

    Returns:
        the result, the same on every rank, or None if a stop was requested meanwhile.

    Raises:
        RunFailed, PeerError: a rank could not read or measure its samples.
    """
    if sync.stop_requested:
        return None
    began = time.perf_counter()
    indices = held_out_indices(len(source), options.limit, options.seed)
    share = _Share(task, model, source, options, sync, indices, on_predictions)
    try:
        share.measure()
    except Stopped:
        return None
    names = [name for name in task.metrics if name not in share.set_metrics]
    parts = {f"{name}/loss": members for name, members in options.parts.items()}
    tallies = [_with_parts(tally, first, indices, parts) for tally, first in share.tallies]
    metrics = _reduce(sync.world, [*names, *parts], task.cluster, tallies)
    for name, value in compute(sync.world, share.set_metrics).items():
        metrics[name] = Metric(value, None, float(len(indices)))
    # of a random subset, a part may have no sample
    told = [name for name in parts if metrics[name].weight]
    metrics = {name: metrics[name] for name in (*task.metrics, *told)}
    weight = metrics["loss"].weight
    for name, value in task.derived({n: m.value for n, m in metrics.items()}).items():
        metrics[name] = Metric(value, None, weight)
    logged_values = share.logged_values
    numbers = {name: v for name, v in logged_values.numbers().items() if name not in metrics}
    seconds = time.perf_counter() - began
    return Evaluation(
        metrics, len(indices), seconds, numbers, logged_values.images, logged_values.tables
    )


def _with_parts(
    tallies: Mapping[str, Tally], first: int, indices: Int64Array, parts: Mapping[str, range]
) -> tuple[Mapping[str, Tally], int]:
    """Add to the tallies of a micro-batch, which begins at evaluated sample `first`, its losses by parts of the source.

    Args:
        parts: the samples of each, by the name of its loss.
    """
    if not parts:
        return tallies, first
    loss = tallies["loss"]
    numbers = torch.from_numpy(indices[first : first + len(loss.weights)]).to(loss.weights.device)
    of_parts = {
        name: Tally(
            loss.values,
            torch.where((numbers >= members.start) & (numbers < members.stop), loss.weights, 0),
        )
        for name, members in parts.items()
    }
    return {**tallies, **of_parts}, first


class _Share:
    """What one rank measures: its part of the micro-batches."""

    def __init__(
        self,
        task: Task,
        model: Module,
        source: Source,
        options: EvaluationOptions,
        sync: SyncPoint,
        indices: Int64Array,
        on_predictions: Callable[[Int64Array, Columns], None] | None,
    ) -> None:
        self._task, self._model, self._source = task, model, source
        self._options, self._sync, self._on_predictions = options, sync, on_predictions
        self._world = world = sync.world
        self._batches = held_out_batches(indices, options.batch_size)
        self._share = _share(self._batches, world)
        self._first = sum(map(len, self._batches[: _begin(self._batches, world, world.rank)]))
        """number of the next held-out sample"""
        self._failure: Exception | None = None
        self._gives_up = False
        self.tallies: list[tuple[Mapping[str, Tally], int]] = []
        """with the number of the first held-out sample"""
        self.set_metrics = set_metrics(task.set_metrics, world.device, len(indices))
        self.logged_values = Logged(world)

    def measure(self) -> None:
        """Measure all micro-batches of this rank. A collective.

        Raises:
            Stopped: a stop was requested.
            RunFailed, PeerError: a rank could not read or measure its samples.
        """
        device = self._world.device
        generators = generators_kept(device) if self._task.random else nullcontext()
        # as many rounds on every rank, also on one with a shorter part: the ranks synchronize in them
        rounds = range(math.ceil(len(self._batches) / self._world.size))
        with evaluating(self._model), torch.no_grad(), generators, recording(self.logged_values):
            for number in track_items(rounds, "evaluating", "micro-batches", len(rounds)):
                self._world.note_progress()
                self._measure_round(number)
        self._synchronize()

    def _measure_round(self, number: int) -> None:
        batch = self._share[number] if number < len(self._share) else None
        counts, collective = batch is not None, self._options.forward_is_collective
        if collective and batch is None:
            batch = self._batches[0][:1]
        if batch is not None and self._task.random:
            # random numbers must depend neither on the number of ranks nor on training
            seed_generators(self._options.seed, EVALUATION, int(batch[0]), self._world.device)
        arrays = None
        self._gives_up = self._gives_up or self._sync.wants_to_stop()
        if self._failure is None and not self._gives_up:
            arrays, self._failure = self._sync.attempt(partial(_read, self._source, batch))
        if collective:  # later the others would wait in the forward pass, not for a report
            self._synchronize()
        if arrays is not None and batch is not None:
            forward = partial(self._forward, batch, arrays, counts=counts)
            if collective:
                forward()
            else:
                _, self._failure = self._sync.attempt(forward)
            self._first += len(batch) if counts else 0
        if not collective and (number + 1) % ROUNDS_PER_REPORT == 0:
            self._synchronize()

    def _forward(self, indices: Int64Array, arrays: Columns, *, counts: bool) -> None:
        batch = to_device(arrays, self._world.device)
        predict = self._on_predictions is not None
        with self._options.autocast(), weighted(len(indices) if counts else 0):
            measurement = self._task.measure(self._model, batch, predict=predict)
        if not counts:
            return
        self.tallies.append((measurement.tallies, self._first))
        update(self.set_metrics, measurement.inputs)
        if self._on_predictions is not None and measurement.predictions:
            self._on_predictions(indices, measurement.predictions)

    def _synchronize(self) -> None:
        """Tell the other ranks whether this one has failed or stops, and raise if any has. A collective."""
        pending = self._sync.report(self._failure, giving_up=self._gives_up)
        self._sync.finish(pending, self._failure)


def _reduce(
    world: World,
    names: Sequence[str],
    cluster: int,
    tallies: Sequence[tuple[Mapping[str, Tally], int]],
) -> dict[str, Metric]:
    """Return the weighted means of all ranks' samples, in sums that no order of addition changes. A collective.

    Args:
        cluster: number of consecutive samples that are one unit of the standard error.
        tallies: of this rank's micro-batches, with the number of their first held-out sample.
    """
    units = {
        name: [_to_units(tally[name], first, cluster) for tally, first in tallies] for name in names
    }
    columns = {name: _columns([batch.complete for batch in units[name]]) for name in names}
    if cluster > 1:
        pieces = {
            name: [piece for batch in units[name] for piece in batch.pieces] for name in names
        }
        for name, joined_columns in _join(world, pieces).items():
            # every rank has all of them: count them once
            if world.is_main:
                columns[name] = {p: [*columns[name][p], *joined_columns[p]] for p in _PARTS}
    flat = {f"{name} {part}": values for name in names for part, values in columns[name].items()}
    sums = exact_sums(world, flat)
    return {
        name: _metric({part: sums[f"{name} {part}"] for part in columns[name]}) for name in names
    }


_PARTS = ("v", "w", "vv", "vw", "ww", "n")


@dataclass(frozen=True)
class _Units:
    """A micro-batch's samples as units of the standard error. Its first and its last unit may
    continue in other micro-batches."""

    complete: Tensor
    """`_PARTS` summed over these units"""
    pieces: list[tuple[int, float, float]]
    """(number of the unit, Σ values, Σ weights) of each unit that is not"""


def _to_units(tally: Tally, first: int, size: int) -> _Units:
    """Return the units, each of `size` consecutive samples, of a micro-batch that starts at the
    held-out sample `first`."""
    has_weight = tally.weights > 0
    # values of weight 0 may be anything, also NaN
    v, w = torch.where(has_weight, tally.values, 0).double(), tally.weights.double()
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
    pieces_json: Json = {
        name: [[n, repr(v), repr(w)] for n, v, w in units] for name, units in pieces.items()
    }
    parts_by_unit: dict[str, dict[int, list[tuple[float, float]]]] = {name: {} for name in pieces}
    for from_rank in cast(list[dict[str, list[tuple[int, str, str]]]], gather(world, pieces_json)):
        for name, rank_pieces in from_rank.items():
            for number, v, w in rank_pieces:
                parts_by_unit[name].setdefault(number, []).append((float(v), float(w)))
    return {
        name: _columns([_parts(*_add_exactly(parts)) for parts in units.values()])
        for name, units in parts_by_unit.items()
    }


def _add_exactly(parts: Sequence[tuple[float, float]]) -> tuple[Tensor, Tensor]:
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
