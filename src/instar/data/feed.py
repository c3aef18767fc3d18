"""From a cursor to a rank's micro-batches: plan a step, slice it, read it ahead of time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from instar.data.order import Int64Array, Order
from instar.data.source import Source

_BLOCK_BYTES = 4 << 20
_BLOCK_STEPS = 64
_ORDER_SAMPLES = 1 << 13
_LONGEST_READ_S = 0.2
_GLANCE_S = 0.05


@dataclass(frozen=True)
class StepPlan:
    """The samples of one step, over all ranks: positions start … start+count-1 of an epoch.

    `cursor` counts the samples consumed before it, since the order began.
    """

    cursor: int
    epoch: int
    start: int
    count: int


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """What a rank runs forward at once; `weight` is its part of the step's weight.

    `rank` is the (virtual) rank whose slice it is cut from, `first` the place of its first sample
    in the global batch.
    """

    arrays: dict[str, NDArray[Any]]
    weight: float
    samples: int
    rank: int
    first: int


@dataclass(frozen=True, eq=False)
class StepBatch:
    """One rank's part of a step; `weight` is that of the global batch, the same on all ranks."""

    plan: StepPlan
    micro_batches: tuple[MicroBatch, ...]
    weight: float


def plan_step(cursor: int, samples_per_epoch: int, global_batch: int) -> StepPlan:
    """The step at a cursor: global_batch samples, or what is left of the epoch if that is less."""
    epoch, start = divmod(cursor, samples_per_epoch)
    return StepPlan(cursor, epoch, start, min(global_batch, samples_per_epoch - start))


def rank_slice(plan: StepPlan, rank: int, world_size: int) -> tuple[int, int]:
    """Begin and end of a rank's positions; the ranks' sizes differ by one at most."""
    begin = plan.start + plan.count * rank // world_size
    return begin, plan.start + plan.count * (rank + 1) // world_size


def micro_slices(begin: int, end: int, batch_size: int) -> list[tuple[int, int]]:
    """The fewest slices of at most batch_size positions; their sizes differ by one at most."""
    size = end - begin
    parts = -(-size // batch_size)
    return [(begin + size * i // parts, begin + size * (i + 1) // parts) for i in range(parts)]


class GaveUp(Exception):  # noqa: N818
    """The samples had not come when waiting for them was no longer wanted."""


Key = tuple[StepPlan, int]
Block = dict[Key, StepBatch | Exception]


class Feed:
    """Brings a rank its slice of each step.

    With prefetch, one thread reads the next block of steps while this one's are consumed, on the
    guess that the cursor and the sizes go on as they are. A guess that fails is dropped: what was
    read ahead was never consumed, and the cursor stays the caller's.
    """

    def __init__(
        self,
        source: Source,
        order: Order,
        rank: int = 0,
        world_size: int = 1,
        prefetch: bool = True,
        virtual_ranks: int | None = None,
    ) -> None:
        """`virtual_ranks`: cut steps into so many slices, a multiple of the world size, and bring
        each rank as many neighbouring ones; None: one slice for each rank."""
        self._source, self._order = source, order
        self._rank, self._world_size = rank, world_size
        self._slices = virtual_ranks or world_size
        each = self._slices // world_size
        self._own = range(rank * each, (rank + 1) * each)
        self._prefetch = prefetch
        self._ready: Block = {}
        self._coming: Future[Block] | None = None
        self._coming_first: Key | None = None
        self._global_batch = 0
        self._sample_bytes = 1
        self._jobs: SimpleQueue[tuple[Future[Block], Key] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._known_ids = -1, 0, np.empty(0, dtype=np.int64)
        self._closed = False

    def take(
        self, plan: StepPlan, batch_size: int, give_up: Callable[[], bool] = lambda: False
    ) -> StepBatch:
        """This rank's micro-batches of a step, of batch_size samples at most.

        A slice that is empty has one stand-in of weight 0 and samples 0, the first sample of the
        step, so that its rank can take part in the backward pass. What reading raises is raised
        here, with a note of the positions.

        Raises:
            GaveUp: what is read ahead did not come, and `give_up`, asked again and again, said so.
        """
        key = plan, batch_size
        step = self._ready.pop(key, None) or self._take_from_next_block(key, give_up)
        if isinstance(step, Exception):
            raise step
        return step

    def sample_ids(self, plan: StepPlan) -> Int64Array:
        """The samples of a step over all ranks, int64 [plan.count]."""
        return self._order.indices(plan.epoch, plan.start, plan.start + plan.count)

    def close(self) -> None:
        """Ends the thread. Closing twice is allowed."""
        self._closed = True
        self._ready, self._coming = {}, None
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(_LONGEST_READ_S)
            self._thread = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _take_from_next_block(self, key: Key, give_up: Callable[[], bool]) -> StepBatch | Exception:
        if self._closed:
            raise RuntimeError("the feed is closed")
        plan, batch_size = key
        if plan.start + plan.count < self._order.samples_per_epoch or not self._global_batch:
            self._global_batch = plan.count
        if self._coming is not None and self._coming_first == key:
            while not wait([self._coming], _GLANCE_S).done:
                if give_up():
                    raise GaveUp
            self._ready = self._coming.result()
            last = next(reversed(self._ready))[0]
            step = self._ready.pop(key)
        else:
            self._ready = {}
            step = self._read([plan], batch_size)[key]
            last = plan
        if self._prefetch:
            self._read_ahead(last.cursor + last.count, batch_size)
        return step

    def _read_ahead(self, cursor: int, batch_size: int) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="instar-feed", daemon=True)
            self._thread.start()
        first = plan_step(cursor, self._order.samples_per_epoch, self._global_batch)
        self._coming, self._coming_first = Future(), (first, batch_size)
        self._jobs.put((self._coming, self._coming_first))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, (first, batch_size) = job
            if self._closed or future is not self._coming:
                continue
            try:
                future.set_result(self._read_block(first, batch_size))
            except BaseException as error:  # or take() would wait for ever
                future.set_exception(error)

    def _read_block(self, first: StepPlan, batch_size: int) -> Block:
        """The steps from one on; where reading them fails, those before the one at fault."""
        plans = list(self._plans_of_block(first))
        block = self._read(plans, batch_size)
        if len(block) == len(plans):
            return block
        block = {}
        for plan in plans:
            block |= self._read([plan], batch_size)
            if isinstance(block[plan, batch_size], Exception):
                break
        return block

    def _plans_of_block(self, first: StepPlan) -> Iterator[StepPlan]:
        """The steps from one on, within its epoch and the size of a block."""
        plan, samples = first, 0
        samples_of_rank = -(-first.count // self._world_size)
        for _ in range(_BLOCK_STEPS):
            yield plan
            samples += samples_of_rank
            plan = plan_step(plan.cursor + plan.count, self._order.samples_per_epoch, first.count)
            full = (samples + samples_of_rank) * self._sample_bytes > _BLOCK_BYTES
            if full or plan.epoch != first.epoch:
                return

    def _read(self, plans: list[StepPlan], batch_size: int) -> Block:
        """Steps that follow each other within an epoch, in one read; or the first's exception."""
        begin, end = plans[0].start, plans[-1].start + plans[-1].count
        try:
            return self._cut(plans, batch_size, self._ids(plans[0].epoch, begin, end))
        except Exception as error:
            error.add_note(
                f"rank {self._rank}: while reading samples at positions {begin}..{end - 1} of "
                f"epoch {plans[0].epoch} (cursor {plans[0].cursor})"
            )
            return {(plans[0], batch_size): error}

    def _ids(self, epoch: int, begin: int, end: int) -> Int64Array:
        """The samples at some positions; many are asked of the order at once, which is cheaper."""
        known_epoch, first, ids = self._known_ids
        if epoch != known_epoch or begin < first or end > first + ids.size:
            last = min(max(end, begin + _ORDER_SAMPLES), self._order.samples_per_epoch)
            first, ids = begin, self._order.indices(epoch, begin, last)
            self._known_ids = epoch, first, ids
        return ids[begin - first : end - first]

    def _cut(self, plans: list[StepPlan], batch_size: int, ids: Int64Array) -> Block:
        """`ids` are the samples of all the plans over all ranks."""
        origin = plans[0].start
        slices = [
            (plan, rank, *rank_slice(plan, rank, self._slices))
            for plan in plans
            for rank in self._own
        ]
        to_read = [
            (begin, end) if begin < end else (plan.start, plan.start + 1)
            for plan, _, begin, end in slices
        ]
        own = np.concatenate([ids[begin - origin : end - origin] for begin, end in to_read])
        arrays = self._source.read(own)
        for name, array in arrays.items():
            if len(array) != own.size:
                raise ValueError(
                    f"the source gave {len(array)} samples of {name!r}, asked for {own.size}"
                )
        self._sample_bytes = max(1, sum(array.nbytes for array in arrays.values()) // own.size)

        micro_batches: dict[StepPlan, list[MicroBatch]] = {plan: [] for plan in plans}
        row = 0
        for plan, rank, begin, end in slices:
            for first, stop in micro_slices(begin, end, batch_size) or [(begin, begin)]:
                rows = max(stop - first, 1)
                micro_batches[plan].append(
                    MicroBatch(
                        arrays={name: array[row : row + rows] for name, array in arrays.items()},
                        weight=self._source.weights(ids[first - origin : stop - origin]),
                        samples=stop - first,
                        rank=rank,
                        first=first - plan.start,
                    )
                )
                row += rows
        block: Block = {}
        for plan in plans:
            everyone = ids[plan.start - origin : plan.start - origin + plan.count]
            block[plan, batch_size] = StepBatch(
                plan, tuple(micro_batches[plan]), self._source.weights(everyone)
            )
        return block
