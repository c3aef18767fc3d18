"""Which samples a step has, and how its slices and micro-batches divide them. No data is read here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

import numpy as np

from instar.data.order import Int64Array

Places = range | Int64Array
"""Indices of samples within a global batch, ascending."""


@dataclass(frozen=True)
class StepPlan:
    """The samples of one step over all ranks: positions start … start+count-1 of an epoch.

    `cursor` is the number of samples before it since the order began, `dropped` the number of those that
    `data.drop_last` leaves out, beside the step: before it, at the end of the epoch before, or after it, at
    the end of its own.
    """

    cursor: int
    epoch: int
    start: int
    count: int
    dropped: int = 0

    @property
    def after(self) -> int:
        """The cursor after the step, at which no sample is that the step left out."""
        return self.cursor + self.count + self.dropped


@runtime_checkable
class Laned(Protocol):
    """An order whose samples belong to lanes, each of which is read by one rank only."""

    @property
    def lanes(self) -> int: ...

    def lane_of(self, epoch: int, start: int, stop: int) -> Int64Array:
        """Return the lanes of the samples at positions start … stop-1, int64 [stop - start]."""
        ...


@runtime_checkable
class Costly(Protocol):
    """A source whose samples differ in cost."""

    def costs(self, indices: Int64Array) -> Int64Array:
        """Return the cost of each sample, in any unit, without reading it; int64 [len(indices)]."""
        ...


def plan_step(
    cursor: int, samples_per_epoch: int, global_batch: int, drop_last: bool = False
) -> StepPlan:
    """Plan the step at a cursor: global_batch samples, or the rest of the epoch if that is less.

    Args:
        drop_last: leave out the rest of an epoch that is less.

    Raises:
        ValueError: that leaves out all of every epoch.
    """
    epoch, start = divmod(cursor, samples_per_epoch)
    remaining = samples_per_epoch - start
    if not drop_last:
        return StepPlan(cursor, epoch, start, min(global_batch, remaining))
    if samples_per_epoch < global_batch:
        raise ValueError(
            f"data.drop_last leaves out every sample: an epoch has {samples_per_epoch:,}, fewer than a global batch "
            f"of {global_batch:,}; lower train.batch_size or gradient_accumulation_steps, or set data.drop_last: false"
        )
    dropped_samples = 0
    if remaining < global_batch:  # the batch has grown since
        epoch, start, remaining, dropped_samples = epoch + 1, 0, samples_per_epoch, remaining
    tail = remaining - global_batch
    dropped_samples += tail if tail < global_batch else 0
    return StepPlan(cursor, epoch, start, global_batch, dropped_samples)


def divide_step(plan: StepPlan, slices: int, lanes: Laned | None = None) -> Sequence[Places]:
    """Divide a step into slices; return the places of each slice's samples.

    Slices are contiguous and their sizes differ by at most one. If the order has at least as many
    lanes as slices, slices follow the lanes instead: lane k of L belongs to slice k · slices // L.
    """
    if lanes is not None and lanes.lanes >= slices:
        of_place = lanes.lane_of(plan.epoch, plan.start, plan.start + plan.count)
        owner = of_place * slices // lanes.lanes
        return [np.flatnonzero(owner == number) for number in range(slices)]
    ends = [plan.count * number // slices for number in range(slices + 1)]
    return [range(begin, end) for begin, end in pairwise(ends)]


def balance_costs(costs: Int64Array, slices: int) -> Sequence[Places]:
    """Divide samples of different costs into slices of similar cost; return each slice's places.

    Samples are dealt by descending cost, back and forth over the slices: their counts differ by at
    most one, their costs by little, so that no rank waits long for another.
    """
    turn, seat = np.divmod(np.arange(costs.size), slices)
    slice_of = np.empty(costs.size, dtype=np.int64)
    slice_of[np.argsort(-costs, kind="stable")] = np.where(turn % 2, slices - 1 - seat, seat)
    return [np.flatnonzero(slice_of == number) for number in range(slices)]


def samples_at(samples: Int64Array, places: Places) -> Int64Array:
    """Return the samples of a global batch at the given places."""
    if isinstance(places, range):
        return samples[places.start : places.stop]
    return samples[places]


def micro_slices(size: int, batch_size: int) -> list[tuple[int, int]]:
    """Cut into the fewest slices of at most batch_size samples; sizes differ by at most one."""
    parts = -(-size // batch_size)
    return [(size * i // parts, size * (i + 1) // parts) for i in range(parts)]
