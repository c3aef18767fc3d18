"""Which samples a step takes, and which of them each rank takes. Plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

import numpy as np

from instar.data.order import Int64Array

UNKNOWN = 1 << 62
"""Samples of an epoch whose end nobody has seen yet."""


Places = range | Int64Array
"""Where samples stand within a global batch, ascending."""


@dataclass(frozen=True)
class StepPlan:
    """The samples of one step, over all ranks: positions start … start+count-1 of an epoch.

    `cursor` counts the samples consumed before it, since the order began.
    """

    cursor: int
    epoch: int
    start: int
    count: int


@runtime_checkable
class Laned(Protocol):
    """An order of samples that lie in lanes, each to be read by one rank only."""

    @property
    def lanes(self) -> int: ...

    def lane_of(self, epoch: int, start: int, stop: int) -> Int64Array:
        """The lanes of the samples at positions start … stop-1, int64 [stop - start]."""
        ...


@runtime_checkable
class Costly(Protocol):
    """A source whose samples differ in how much work they are."""

    def costs(self, indices: Int64Array) -> Int64Array:
        """The work of each sample, in any unit, without reading it; int64 [len(indices)]."""
        ...


def plan_step(cursor: int, samples_per_epoch: int, global_batch: int) -> StepPlan:
    """The step at a cursor: global_batch samples, or what is left of the epoch if that is less."""
    epoch, start = divmod(cursor, samples_per_epoch)
    return StepPlan(cursor, epoch, start, min(global_batch, samples_per_epoch - start))


def shares(plan: StepPlan, slices: int, lanes: Laned | None = None) -> Sequence[Places]:
    """The places of each slice's samples.

    Neighbours, in slices whose sizes differ by one at most; or, of an order with lanes enough, those
    in the lanes of the slice: lane k of L belongs to slice k · slices // L.
    """
    if lanes is not None and lanes.lanes >= slices:
        of_place = lanes.lane_of(plan.epoch, plan.start, plan.start + plan.count)
        owner = of_place * slices // lanes.lanes
        return [np.flatnonzero(owner == one) for one in range(slices)]
    ends = [plan.count * one // slices for one in range(slices + 1)]
    return [range(begin, end) for begin, end in pairwise(ends)]


def balanced(costs: Int64Array, slices: int) -> Sequence[Places]:
    """The places of each slice's samples where these are not all the same work.

    They are dealt in turns, there and back, the most work first: slices' counts differ by one at
    most, their work by little, so that no rank waits long for another.
    """
    turn, seat = np.divmod(np.arange(costs.size), slices)
    slice_of = np.empty(costs.size, dtype=np.int64)
    slice_of[np.argsort(-costs, kind="stable")] = np.where(turn % 2, slices - 1 - seat, seat)
    return [np.flatnonzero(slice_of == one) for one in range(slices)]


def at(samples: Int64Array, places: Places) -> Int64Array:
    """Those of a global batch's samples that stand at some places."""
    if isinstance(places, range):
        return samples[places.start : places.stop]
    return samples[places]


def micro_slices(size: int, batch_size: int) -> list[tuple[int, int]]:
    """The fewest slices of at most batch_size samples; their sizes differ by one at most."""
    parts = -(-size // batch_size)
    return [(size * i // parts, size * (i + 1) // parts) for i in range(parts)]
