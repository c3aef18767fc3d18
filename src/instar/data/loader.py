"""Loading: read the samples of each step, and prefetch them in a thread.

A step's samples follow from the cursor and the global batch size; each rank takes its slice. A
`Prefetcher` reads blocks of several steps ahead.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from instar.data.columns import Columns, Ragged, cut, leaves, nbytes
from instar.data.order import (
    Costly,
    Int64Array,
    Laned,
    Order,
    Places,
    StepPlan,
    balance_costs,
    divide_step,
    micro_slices,
    plan_step,
    samples_at,
)
from instar.data.source import Source, close, measure_of
from instar.distributed.failure import exits_fail

logger = logging.getLogger(__name__)


BLOCK_BYTES = 4 << 20
BLOCK_STEPS = 64
BLOCK_S = 0.5
"""Target time to read one block of steps, in seconds; a step is available when its block is."""
_ORDER_SAMPLES = 1 << 13


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """The samples of one forward pass of a rank; `weight` is its part of the step's weight.

    `rank` is the (virtual) rank whose slice it is cut from, `first` the place of its first sample
    in the global batch.
    """

    arrays: Columns
    weight: float
    samples: int
    rank: int
    first: int
    weights: NDArray[np.float64] | None = None
    """of each sample, where they are measured, see `Measure`"""


@dataclass(frozen=True, eq=False)
class StepBatch:
    """One rank's part of a step; `weight` is that of the global batch, equal on all ranks.

    `passes` is the number of micro-batches of every slice of the step, of this rank or not.
    `epoch_samples` is the number of samples per epoch as far as it is known, or UNKNOWN.
    """

    plan: StepPlan
    micro_batches: tuple[MicroBatch, ...]
    weight: float
    passes: tuple[int, ...]
    epoch_samples: int
    own_weight: float | None = None
    """where samples are measured and other ranks read some: the weight of this rank's part, whose sum over
    ranks is the step's; `weight` is NaN until then"""


class StepKey(NamedTuple):
    """The key of a step: the cursor, and the current batch sizes."""

    cursor: int
    global_batch: int
    batch_size: int


Block = dict[StepKey, StepBatch | Exception]
"""Successive steps; the last may be the exception raised by reading it."""


class ReadRequest(NamedTuple):
    """A request for one step or, if `read_ahead`, for that step and some that follow it.

    `serial` numbers the requests of one prefetcher.
    """

    serial: int
    first: StepKey
    read_ahead: bool


class Reader(Protocol):
    """Reads the steps that a prefetcher requests, in the prefetcher's thread."""

    def read(self, request: ReadRequest) -> Block:
        """Return the steps from `request.first` on; a failed step is replaced by its exception."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class OpenEnded(Protocol):
    """An order whose length is unknown until its end is reached."""

    def explore(self, start: int, stop: int) -> object:
        """Make the source read ahead until the samples at positions start … stop-1 are determined,
        and whether more follow; afterwards the epoch's length is known if its end was reached."""
        ...


class LocalReader:
    """Reads the samples of some slices from a source in this process.

    Args:
        slices: the number of slices per step.
        rank_slices: the slices to read.
        reader_name: the reader's name, for the note on an error.
        drop_last: see `plan_step`.
    """

    def __init__(
        self,
        source: Source,
        order: Order,
        slices: int,
        rank_slices: range,
        reader_name: str,
        drop_last: bool = False,
    ) -> None:
        self._source, self._order, self._drop_last = source, order, drop_last
        # isinstance() with a protocol takes as long as reading a sample, so check once
        self._lanes = order if isinstance(order, Laned) else None
        self._open_ended = order if isinstance(order, OpenEnded) else None
        self._costly = source if isinstance(source, Costly) and slices > 1 else None
        self._measure = measure_of(source)
        self._slices, self._rank_slices = slices, rank_slices
        self._reader_name = reader_name
        self._sample_bytes = 1
        self._most_steps = 1
        self._known_ids = -1, 0, np.empty(0, dtype=np.int64)

    def read(self, request: ReadRequest) -> Block:
        first = request.first
        if not request.read_ahead:
            return self._steps([first])
        keys = list(self._keys_ahead(first))
        start_time = time.perf_counter()
        block = self._steps(keys)
        if len(block) == len(keys):
            self._size_next_block((time.perf_counter() - start_time) / len(keys))
            return block
        # one of the steps failed: return those before it
        block = {}
        for key in keys:
            block |= self._steps([key])
            if isinstance(block[key], Exception):
                break
        return block

    def close(self) -> None:
        close(self._source)

    def _keys_ahead(self, first: StepKey) -> Iterator[StepKey]:
        """Yield the keys of successive steps, within the epoch and the size of a block."""
        key, samples = first, 0
        plan = self._plan(first)
        epoch, ranks = plan.epoch, len(self._rank_slices)
        samples_per_step = -(-plan.count * ranks // self._slices)
        for _ in range(self._most_steps):
            yield key
            samples += samples_per_step
            key = key._replace(cursor=plan.after)
            plan = self._plan(key)
            next_bytes = (samples + samples_per_step) * self._sample_bytes
            if next_bytes > BLOCK_BYTES or plan.epoch != epoch:
                return

    def _size_next_block(self, seconds_a_step: float) -> None:
        """Set the next block's steps by their reading time, at most to twice this block's."""
        steps_in_time = int(BLOCK_S / seconds_a_step) if seconds_a_step > 0 else BLOCK_STEPS
        self._most_steps = max(1, min(2 * self._most_steps, steps_in_time, BLOCK_STEPS))

    def _steps(self, keys: list[StepKey]) -> Block:
        """Read successive steps at once; return the first step's exception if it fails."""
        first, last = keys[0], keys[-1]
        try:
            with exits_fail("reading samples"):
                if self._open_ended is not None:
                    keys = self._within_reach(keys, self._open_ended)
                return self._cut(keys)
        except Exception as error:
            epoch, start = divmod(first.cursor, self._order.samples_per_epoch)
            end = start + last.cursor - first.cursor + last.global_batch - 1
            error.add_note(
                f"{self._reader_name}: while reading samples at positions {start}..{end} of "
                f"epoch {epoch} (cursor {first.cursor})"
            )
            return {first: error}

    def _within_reach(self, keys: list[StepKey], order: OpenEnded) -> list[StepKey]:
        """Return the steps that end within the epoch, after the source has looked for its end."""
        start = keys[0].cursor % self._order.samples_per_epoch
        stop = start + keys[-1].cursor - keys[0].cursor + keys[-1].global_batch
        # whether a step is the last of its epoch depends on whether a whole batch follows
        order.explore(start, stop + self._drop_last * keys[-1].global_batch)
        plan = self._plan(keys[0])
        reachable, epoch = [keys[0]], plan.epoch
        for key in keys[1:]:
            cursor, plan = plan.after, self._plan(key)
            if key.cursor != cursor or plan.epoch != epoch:
                break
            reachable.append(key)
        return reachable

    def _plan(self, key: StepKey) -> StepPlan:
        return plan_step(
            key.cursor, self._order.samples_per_epoch, key.global_batch, self._drop_last
        )

    def _cut(self, keys: list[StepKey]) -> Block:
        epoch_samples = self._order.samples_per_epoch
        plans = [self._plan(key) for key in keys]
        begin, end = plans[0].start, plans[-1].start + plans[-1].count
        ids = self._ids(plans[0].epoch, begin, end)
        steps = [ids[plan.start - begin : plan.start - begin + plan.count] for plan in plans]
        places = [self._divide(plan, step_ids) for plan, step_ids in zip(plans, steps, strict=True)]
        slice_ids = [
            samples_at(step_ids, places_of[rank]) if len(places_of[rank]) else step_ids[:1]
            for step_ids, places_of in zip(steps, places, strict=True)
            for rank in self._rank_slices
        ]
        read_ids = slice_ids[0] if len(slice_ids) == 1 else np.concatenate(slice_ids)
        arrays = self._source.read(read_ids, plans[0].epoch)
        rows = read_ids.size
        _check_length(arrays, rows)
        self._sample_bytes = max(1, nbytes(arrays) // rows)
        sample_weights = None if self._measure is None else self._measure.weights(arrays)
        block: Block = {}
        row = 0
        for key, plan, step_ids, places_of in zip(keys, plans, steps, places, strict=True):
            weight, own_weight = math.nan, None
            if sample_weights is None:  # else the source may read the samples of all ranks for it
                weight = float(self._source.weights(step_ids))
            micro_batches = []
            for rank in self._rank_slices:
                slice_places = places_of[rank]
                for first, stop in micro_slices(len(slice_places), key.batch_size) or [(0, 0)]:
                    rows, samples = max(stop - first, 1), stop - first
                    weights = (
                        None if sample_weights is None else sample_weights[row : row + samples]
                    )
                    if weights is not None:
                        part = float(weights.sum())
                    elif samples == step_ids.size:
                        part = weight
                    else:
                        samples_of_part = samples_at(step_ids, slice_places[first:stop])
                        part = float(self._source.weights(samples_of_part))
                    micro_batches.append(
                        MicroBatch(
                            arrays=cut(arrays, row, row + rows),
                            weight=part,
                            samples=samples,
                            rank=rank,
                            first=int(slice_places[first]) if len(slice_places) else 0,
                            weights=weights,
                        )
                    )
                    row += rows
            passes = tuple(max(1, -(-len(samples) // key.batch_size)) for samples in places_of)
            if sample_weights is not None:
                own_weight = sum(micro.weight for micro in micro_batches)
                if len(self._rank_slices) == self._slices:
                    weight, own_weight = own_weight, None
            block[key] = StepBatch(
                plan, tuple(micro_batches), weight, passes, epoch_samples, own_weight
            )
        return block

    def _divide(self, plan: StepPlan, samples: Int64Array) -> Sequence[Places]:
        """Return the places of each slice's samples."""
        if self._costly is not None:
            return balance_costs(self._costly.costs(samples), self._slices)
        return divide_step(plan, self._slices, self._lanes)

    def _ids(self, epoch: int, begin: int, end: int) -> Int64Array:
        """Return the samples at some positions, from a cached larger query, which is cheaper."""
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
        values = column.values if isinstance(column, Ragged) else column
        if isinstance(values, np.ma.MaskedArray) or not values.dtype.isnative:
            dtype = values.dtype
            what = "a masked array" if dtype.isnative else f"of byte order {dtype.str}"
            raise ValueError(f"the source gave {name!r} as {what}: give plain arrays")


_LONGEST_READ_S = 0.2
_GLANCE_S = 0.05


class WaitCancelled(Exception):  # noqa: N818
    """`Prefetcher.take` was cancelled before the samples arrived."""


@dataclass(frozen=True, eq=False)
class _Job:
    request: ReadRequest
    answer: SimpleQueue[Block | BaseException] = field(default_factory=SimpleQueue)
    """the block, once; a queue wakes its reader several times faster than a Future"""


class Prefetcher:
    """Reads a rank's steps ahead, with a reader in a thread.

    With prefetch, the next block of steps is read while the current one is consumed, assuming that
    the cursor advances and the batch sizes stay unchanged. Otherwise the block is dropped; the
    caller owns the cursor, so no sample is lost. The requests to the reader and their order depend
    only on the steps taken, so they are the same on all ranks.
    """

    def __init__(
        self,
        reader: Reader,
        prefetch: bool = True,
        stage: Callable[[Columns], Columns] | None = None,
        *,
        in_caller: bool = False,
    ) -> None:
        """
        Args:
            stage: applied to the arrays of every micro-batch, where they are read.
            in_caller: without prefetch, read in the thread that calls `take`, which then cannot give
                up. Waking another thread takes longer than reading some windows of tokens.
        """
        self._reader, self._prefetch, self._stage = reader, prefetch, stage
        self._in_caller = in_caller and not prefetch
        self._ready: Block = {}
        self._coming: _Job | None = None
        self._serial = 0
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def take(
        self,
        cursor: int,
        global_batch: int,
        batch_size: int,
        give_up: Callable[[], bool] = lambda: False,
    ) -> StepBatch:
        """Return this rank's micro-batches, of at most batch_size samples, of the step at a cursor.

        An empty slice has one placeholder micro-batch of weight 0 and samples 0, the first sample
        of the step, so that its rank can take part in the backward pass. Exceptions of the reader
        are raised here, with a note of the positions.

        Raises:
            WaitCancelled: `give_up`, polled while waiting for the thread, returned True.
        """
        if self._closed:
            raise RuntimeError("the prefetcher is closed")
        key = StepKey(cursor, global_batch, batch_size)
        step = self._ready.pop(key, None) or self._take_from_next_block(key, give_up)
        if isinstance(step, Exception):
            raise step
        return step

    def close(self, limit_s: float = _LONGEST_READ_S) -> None:
        """Stop the thread; wait for it at most `limit_s` seconds, and warn if it takes longer.

        Closing again waits again.
        """
        was_closed, self._closed = self._closed, True
        self._ready, self._coming = {}, None
        if self._thread is None:
            if not was_closed:
                self._reader.close()
            return
        if not was_closed:
            self._jobs.put(None)
        self._thread.join(limit_s)
        if not self._thread.is_alive():
            self._thread = None
        elif not was_closed:
            logger.warning(
                "a read has not ended within %g s; its thread and its workers stay until it has",
                limit_s,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_from_next_block(
        self, key: StepKey, give_up: Callable[[], bool]
    ) -> StepBatch | Exception:
        if self._in_caller:
            self._serial += 1
            request = ReadRequest(self._serial, key, read_ahead=False)
            block = self._apply_stage(self._reader.read(request))
            return block[key]
        job = self._coming
        if job is None or job.request.first != key:
            self._ready = {}
            job = self._ask(key, read_ahead=False)
        self._ready = self._wait_for(job, give_up)
        last = self._ready[next(reversed(self._ready))]
        step = self._ready.pop(key)
        self._coming = None
        if self._prefetch and isinstance(last, StepBatch):
            self._ask(key._replace(cursor=last.plan.after), read_ahead=True)
        return step

    def _wait_for(self, job: _Job, give_up: Callable[[], bool]) -> Block:
        while True:
            try:
                answer = job.answer.get(timeout=_GLANCE_S)
                break
            except Empty:
                if give_up():
                    raise WaitCancelled from None
        if isinstance(answer, BaseException):
            job.answer.put(answer)  # to ask for the same step again raises the same
            raise answer
        return answer

    def _ask(self, first: StepKey, *, read_ahead: bool) -> _Job:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="instar-prefetch", daemon=True)
            self._thread.start()
        self._serial += 1
        self._coming = _Job(ReadRequest(self._serial, first, read_ahead))
        self._jobs.put(self._coming)
        return self._coming

    def _apply_stage(self, block: Block) -> Block:
        stage = self._stage
        if stage is None:
            return block

        def stage_step(step: StepBatch) -> StepBatch:
            parts = (replace(part, arrays=stage(part.arrays)) for part in step.micro_batches)
            return replace(step, micro_batches=tuple(parts))

        return {key: stage_step(s) if isinstance(s, StepBatch) else s for key, s in block.items()}

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._closed or job is not self._coming:
                continue
            try:
                job.answer.put(self._apply_stage(self._reader.read(job.request)))
            except BaseException as error:  # otherwise take() would wait forever
                job.answer.put(error)
        self._reader.close()
