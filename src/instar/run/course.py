"""Which samples come next: a run's way through its data, while their length may change.

Samples are windows of so many tokens. When the length changes there are other samples, in another
order; a *course* is a stretch of the run in which it stays the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from instar.config.errors import ConfigError
from instar.config.schema import RunConfig
from instar.data.allocator import keep_freed_memory
from instar.data.dispatch import Receiver, Sender
from instar.data.feed import Feed
from instar.data.order import Order
from instar.data.plan import UNKNOWN, Laned
from instar.data.reader import LocalReader, Reader
from instar.data.source import Source
from instar.distributed.agree import agree, together
from instar.distributed.parcels import Parcels
from instar.distributed.world import World
from instar.tasks.task import Task


@dataclass(frozen=True)
class Course:
    """Samples of one length, from the `since`-th sample of the run on."""

    context: int
    samples_per_epoch: int
    """UNKNOWN until the end of a stream is met"""
    number: int = 0
    since: int = 0
    epochs_before: float = 0.0

    def epochs(self, cursor: int) -> float:
        """Passes through the data, since the run began."""
        return self.epochs_before + (cursor - self.since) / self.samples_per_epoch

    def place(self, cursor: int) -> int:
        """Samples consumed since the course began."""
        return cursor - self.since

    def learnt(self, samples_per_epoch: int) -> Course:
        """The same, now that somebody knows how long an epoch is."""
        return replace(self, samples_per_epoch=samples_per_epoch)

    def state(self) -> dict[str, Any]:
        """What config and history do not tell, as JSON."""
        return {"samples_per_epoch": self.samples_per_epoch, "epochs_before": self.epochs_before}

    def restored(self, state: Mapping[str, Any]) -> Course:
        """The same with what `state` gave."""
        return replace(
            self,
            samples_per_epoch=msgspec.convert(state["samples_per_epoch"], int),
            epochs_before=msgspec.convert(state["epochs_before"], float),
        )


class Supply:
    """How this rank comes by its samples: it reads them, or rank 0 sends them.

    All ranks use it together, in the same order.
    """

    def __init__(self, config: RunConfig, world: World) -> None:
        keep_freed_memory()
        self._config, self._world = config, world
        dispatched = config.data.strategy == "dispatched" and world.size > 1
        self._parcels = Parcels(world) if dispatched else None
        self._feeds = 0
        elastic = config.reproducible == "elastic"
        self._slices = config.parallel.elastic.virtual_ranks if elastic else world.size
        self._opened: tuple[Task, int, Source, Order] | None = None

    @property
    def reads(self) -> bool:
        """Whether this rank reads samples itself."""
        return self._parcels is None or self._world.is_main

    def first(self, task: Task, context: int) -> Course:
        """The course in which a run begins."""
        return Course(context, self._per_epoch(task, 0))

    def next(self, course: Course, task: Task, context: int, cursor: int) -> Course:
        """The course that begins where one is left; `task` has its samples."""
        number = course.number + 1
        return Course(context, self._per_epoch(task, number), number, cursor, course.epochs(cursor))

    def to_read_again(self, course: Course, cursor: int) -> int:
        """About how many samples some rank must read only to get to a place."""
        if not self._config.data.read_from_start:
            return 0
        passed = course.place(cursor) % course.samples_per_epoch
        return passed if self._parcels is not None else passed // self._world.size

    def open(self, task: Task, course: Course) -> Feed:
        """This rank's feed of the task's training samples, in the course's order; to be closed."""
        return Feed(self._reader(task, course), self._config.data.prefetch)

    def _reader(self, task: Task, course: Course) -> Reader:
        size, rank = self._world.size, self._world.rank
        each = self._slices // size
        own = [range(one * each, (one + 1) * each) for one in range(size)]
        self._feeds += 1
        if self._parcels is None:
            return LocalReader(
                *self._samples(task, course), self._slices, own[rank], f"rank {rank}"
            )
        if not self._world.is_main:
            return Receiver(self._parcels, self._feeds)
        everyones = range(self._slices)
        reader = LocalReader(*self._samples(task, course), self._slices, everyones, "rank 0")
        return Sender(reader, own, self._parcels, self._feeds)

    def _per_epoch(self, task: Task, number: int) -> int:
        known = UNKNOWN
        with together(self._world, "opening the data"):
            if self.reads:
                source, order = task.train_samples(number)
                self._check_lanes(order)
                self._opened = task, number, source, order
                known = order.samples_per_epoch
        return int(str(agree(self._world, known)))

    def _check_lanes(self, order: Order) -> None:
        """Raises ConfigError where some slices would have no lane to read."""
        own = self._parcels is None and self._world.size > 1
        if own and isinstance(order, Laned) and order.lanes < self._slices:
            raise ConfigError.one(
                f"this stream has {order.lanes} shard{'' if order.lanes == 1 else 's'}, too few for "
                f"{self._slices} ranks to read their own",
                where="data.strategy",
                hint="say data.strategy: dispatched, or cut the data into more files",
                key="data.strategy",
            )

    def _samples(self, task: Task, course: Course) -> tuple[Source, Order]:
        if self._opened is not None and self._opened[:2] == (task, course.number):
            _, _, source, order = self._opened
        else:
            source, order = task.train_samples(course.number)
        self._opened = None
        return source, order
