"""From a source and an order to the steps that a feed asks for."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from instar.data.columns import Columns, cut, leaves, nbytes
from instar.data.order import Int64Array, Order
from instar.data.plan import (
    Costly,
    Laned,
    Places,
    StepPlan,
    at,
    balanced,
    micro_slices,
    plan_step,
    shares,
)
from instar.data.source import Source, close

BLOCK_BYTES = 4 << 20
BLOCK_STEPS = 64
BLOCK_S = 0.5
"""A block is read in about so many seconds, or is one step: who waits for a step waits for its block."""
_ORDER_SAMPLES = 1 << 13


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """What a rank runs forward at once; `weight` is its part of the step's weight.

    `rank` is the (virtual) rank whose slice it is cut from, `first` the place of its first sample
    in the global batch.
    """

    arrays: Columns
    weight: float
    samples: int
    rank: int
    first: int


@dataclass(frozen=True, eq=False)
class StepBatch:
    """One rank's part of a step; `weight` is that of the global batch, the same on all ranks.

    `epoch_samples` is how many samples an epoch has as far as is known now, or UNKNOWN.
    """

    plan: StepPlan
    micro_batches: tuple[MicroBatch, ...]
    weight: float
    epoch_samples: int


class Key(NamedTuple):
    """A step as it is asked for: the place in the data, and the sizes in force."""

    cursor: int
    global_batch: int
    batch_size: int


Block = dict[Key, StepBatch | Exception]
"""Steps that follow each other; the last may be why it could not be read."""


class Request(NamedTuple):
    """What a feed wants read: a step, or (`ahead`) that one and some that would follow it.

    `serial` numbers the requests of one feed.
    """

    serial: int
    first: Key
    ahead: bool


class Reader(Protocol):
    """Reads what a feed asks for, in the feed's thread."""

    def read(self, request: Request) -> Block:
        """The steps from `request.first` on. What reading one raises stands in its place."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class OpenEnded(Protocol):
    """An order whose end is not known before it is reached."""

    def explore(self, epoch: int, stop: int) -> object:
        """Have its source read ahead until it is certain what stands before position `stop`, and
        whether more follows; where an epoch ends is known then if that was met."""
        ...


class LocalReader:
    """Reads the samples of some slices from a source of this process.

    Args:
        slices: how many slices a step is cut into.
        own: those to read.
        who: who reads, for the note on an error.
    """

    def __init__(self, source: Source, order: Order, slices: int, own: range, who: str) -> None:
        self._source, self._order = source, order
        # asked once: asking a protocol takes as long as reading a sample
        self._lanes = order if isinstance(order, Laned) else None
        self._open_ended = order if isinstance(order, OpenEnded) else None
        self._costly = source if isinstance(source, Costly) and slices > 1 else None
        self._slices, self._own = slices, own
        self._who = who
        self._sample_bytes = 1
        self._most_steps = 1
        self._known_ids = -1, 0, np.empty(0, dtype=np.int64)

    def read(self, request: Request) -> Block:
        first = request.first
        if not request.ahead:
            return self._steps([first])
        keys = list(self._keys_ahead(first))
        begun = time.perf_counter()
        block = self._steps(keys)
        if len(block) == len(keys):
            self._size_next_block((time.perf_counter() - begun) / len(keys))
            return block
        # one of them is at fault: those before it are whole
        block = {}
        for key in keys:
            block |= self._steps([key])
            if isinstance(block[key], Exception):
                break
        return block

    def close(self) -> None:
        close(self._source)

    def _keys_ahead(self, first: Key) -> Iterator[Key]:
        """The steps from one on, within its epoch and the size of a block."""
        key, samples = first, 0
        epoch_samples = self._order.samples_per_epoch
        plan = plan_step(first.cursor, epoch_samples, first.global_batch)
        epoch, each = plan.epoch, -(-plan.count * len(self._own) // self._slices)
        for _ in range(self._most_steps):
            yield key
            samples += each
            key = key._replace(cursor=key.cursor + plan.count)
            plan = plan_step(key.cursor, epoch_samples, key.global_batch)
            if (samples + each) * self._sample_bytes > BLOCK_BYTES or plan.epoch != epoch:
                return

    def _size_next_block(self, seconds_a_step: float) -> None:
        """Twice as many steps at most, as long as they are read soon."""
        soon = int(BLOCK_S / seconds_a_step) if seconds_a_step > 0 else BLOCK_STEPS
        self._most_steps = max(1, min(2 * self._most_steps, soon, BLOCK_STEPS))

    def _steps(self, keys: list[Key]) -> Block:
        """Steps that follow each other, in one read; or the first's exception."""
        first, last = keys[0], keys[-1]
        try:
            if self._open_ended is not None:
                keys = self._within_reach(keys, self._open_ended)
            return self._cut(keys)
        except Exception as error:
            epoch, start = divmod(first.cursor, self._order.samples_per_epoch)
            end = start + last.cursor - first.cursor + last.global_batch - 1
            error.add_note(
                f"{self._who}: while reading samples at positions {start}..{end} of "
                f"epoch {epoch} (cursor {first.cursor})"
            )
            return {first: error}

    def _within_reach(self, keys: list[Key], order: OpenEnded) -> list[Key]:
        """Those steps that end before the epoch does, now that the source is asked for its end."""
        epoch, start = divmod(keys[0].cursor, self._order.samples_per_epoch)
        stop = start + keys[-1].cursor - keys[0].cursor + keys[-1].global_batch
        order.explore(epoch, stop)
        end = self._order.samples_per_epoch
        return [keys[0], *(key for key in keys[1:] if key.cursor // end == keys[0].cursor // end)]

    def _cut(self, keys: list[Key]) -> Block:
        epoch_samples = self._order.samples_per_epoch
        plans = [plan_step(key.cursor, epoch_samples, key.global_batch) for key in keys]
        begin, end = plans[0].start, plans[-1].start + plans[-1].count
        ids = self._ids(plans[0].epoch, begin, end)
        steps = [ids[plan.start - begin : plan.start - begin + plan.count] for plan in plans]
        places = [self._shared(plan, one) for plan, one in zip(plans, steps, strict=True)]
        own = [
            at(one, places_of[rank]) if len(places_of[rank]) else one[:1]
            for one, places_of in zip(steps, places, strict=True)
            for rank in self._own
        ]
        asked = own[0] if len(own) == 1 else np.concatenate(own)
        arrays = self._source.read(asked, plans[0].epoch)
        rows = asked.size
        _check_length(arrays, rows)
        self._sample_bytes = max(1, nbytes(arrays) // rows)
        block: Block = {}
        row = 0
        for key, plan, one, places_of in zip(keys, plans, steps, places, strict=True):
            micro_batches = []
            for rank in self._own:
                mine = places_of[rank]
                for first, stop in micro_slices(len(mine), key.batch_size) or [(0, 0)]:
                    rows = max(stop - first, 1)
                    micro_batches.append(
                        MicroBatch(
                            arrays=cut(arrays, row, row + rows),
                            weight=self._source.weights(at(one, mine[first:stop])),
                            samples=stop - first,
                            rank=rank,
                            first=int(mine[first]) if len(mine) else 0,
                        )
                    )
                    row += rows
            weight = self._source.weights(one)
            block[key] = StepBatch(plan, tuple(micro_batches), weight, epoch_samples)
        return block

    def _shared(self, plan: StepPlan, samples: Int64Array) -> Sequence[Places]:
        """The places of each slice's samples."""
        if self._costly is not None:
            return balanced(self._costly.costs(samples), self._slices)
        return shares(plan, self._slices, self._lanes)

    def _ids(self, epoch: int, begin: int, end: int) -> Int64Array:
        """The samples at some positions; many are asked of the order at once, which is cheaper."""
        if self._open_ended is not None:
            return self._order.indices(epoch, begin, end)
        known_epoch, first, ids = self._known_ids
        if epoch != known_epoch or begin < first or end > first + ids.size:
            last = min(max(end, begin + _ORDER_SAMPLES), self._order.samples_per_epoch)
            first, ids = begin, self._order.indices(epoch, begin, last)
            self._known_ids = epoch, first, ids
        return ids[begin - first : end - first]


def _check_length(arrays: Columns, rows: int) -> None:
    for name, column in leaves(arrays):
        if len(column) != rows:
            raise ValueError(f"the source gave {len(column)} samples of {name!r}, asked for {rows}")
