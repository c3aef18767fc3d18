"""Data phases: training samples and their order, when the sample length or the weights of a mixture change.

Samples are windows of a number of tokens. When that length changes, the samples and their order
change too; when the parts of a mixture get other weights, each part goes on in its own order. A *phase* is the part
of a run with one length and one mixture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import msgspec
import torch
from numpy.typing import NDArray

from instar.config.errors import ConfigError
from instar.config.schema import RunConfig
from instar.data.broadcast import BroadcastReceiver, BroadcastSender
from instar.data.columns import Columns, Ragged, map_columns
from instar.data.loader import LocalReader, Prefetcher, Reader
from instar.data.mixture import Mixed, MixtureStage
from instar.data.order import UNKNOWN, Laned, Order
from instar.data.source import Source, close
from instar.distributed.agree import P2PChannel, agree, raise_on_all_ranks
from instar.distributed.world import World
from instar.record.system import keep_freed_memory
from instar.schedule.settings import Settings
from instar.tasks.task import Task


@dataclass(frozen=True)
class DataPhase:
    """Part of a run with samples of one length."""

    context: int
    """tokens per sample"""
    samples_per_epoch: int
    """UNKNOWN until the end of a stream is reached"""
    number: int = 0
    since: int = 0
    """cursor at the start of the phase, in samples of the run"""
    epochs_before: float = 0.0
    """passes over the data in earlier phases"""
    epochs_ended: tuple[int, int] = (0, 0)
    """epochs that ended in earlier phases: before the last step, or round, of these, and at its end"""
    course: int = 0
    """changes of the length so far: each has an order of its own"""
    mixture: MixtureStage | None = None
    """None: without weights, or of a run that began before turns were even"""

    def epochs(self, cursor: int) -> float:
        """Passes over the data since step 0."""
        return self.epochs_before + (cursor - self.since) / self.samples_per_epoch

    def place(self, cursor: int) -> int:
        """Return the number of samples consumed since the phase began."""
        return cursor - self.since

    def drawn(self, cursor: int) -> tuple[int, ...]:
        """Return the samples of each part of a mixture with samples of this length; empty where that is not known."""
        return () if self.mixture is None else self.mixture.counts(self.place(cursor))

    def whole_epochs(self, cursor: int) -> int:
        """Return the number of epochs that ended up to a cursor of the run: that of the step before this phase, or later."""
        before, at_start = self.epochs_ended
        place = self.place(cursor)
        return before if place < 0 else at_start + place // self.samples_per_epoch

    def learnt(self, samples_per_epoch: int) -> DataPhase:
        """Return the phase with the length of an epoch, now that it is known."""
        return replace(self, samples_per_epoch=samples_per_epoch)

    def state(self) -> dict[str, Any]:
        """Return as JSON what does not follow from config and history: `since` does, unless the data began again."""
        values: dict[str, Any] = {
            "samples_per_epoch": self.samples_per_epoch,
            "epochs_before": self.epochs_before,
            "since": self.since,
        }
        if any(self.epochs_ended):
            values["epochs_ended"] = self.epochs_ended
        if self.mixture is not None:
            values["mixture"] = asdict(self.mixture)
        return values

    def restore(self, state: Mapping[str, Any]) -> DataPhase:
        """Return the phase with the values of `state()`."""
        return replace(
            self,
            samples_per_epoch=msgspec.convert(state["samples_per_epoch"], int),
            epochs_before=msgspec.convert(state["epochs_before"], float),
            since=msgspec.convert(state.get("since", self.since), int),
            epochs_ended=msgspec.convert(state.get("epochs_ended", (0, 0)), tuple[int, int]),
            mixture=msgspec.convert(state.get("mixture"), MixtureStage | None),
        )


def pin_columns(columns: Columns) -> Columns:
    """Copy arrays to page-locked memory, from which a GPU copies them while it computes."""

    def copied(column: NDArray[Any]) -> NDArray[Any]:
        return torch.from_numpy(column).pin_memory().numpy()

    def either(column: NDArray[Any] | Ragged) -> NDArray[Any] | Ragged:
        if isinstance(column, Ragged):
            return Ragged(copied(column.flat), copied(column.offsets - column.offsets[0]))
        return copied(column)

    return map_columns(columns, either)


class LoaderFactory:
    """Creates this rank's loader: the rank reads its samples, or receives them from rank 0.

    All ranks call its methods in the same order.
    """

    def __init__(self, config: RunConfig, world: World) -> None:
        keep_freed_memory()
        self._config, self._world = config, world
        self._drop_last = config.data.drop_last
        is_dispatched = config.data.strategy == "dispatched" and world.size > 1
        self._parcels = P2PChannel(world) if is_dispatched else None
        self._feeds = 0
        self._own = slices(config, world.size)
        self.slices = sum(map(len, self._own))
        """of every step, see `slices`"""
        self._opened: tuple[Task, int, Source, Order] | None = None

    @property
    def reads(self) -> bool:
        """Whether this rank reads samples itself."""
        return self._parcels is None or self._world.is_main

    def first(self, task: Task, settings: Settings) -> DataPhase:
        """Return the first phase of a run. A collective."""
        per_epoch = self._per_epoch(task, 0)
        return DataPhase(settings.context, per_epoch, mixture=_first_stage(settings))

    def next(
        self,
        phase: DataPhase,
        task: Task,
        settings: Settings,
        cursor: int,
        before: int | None = None,
    ) -> DataPhase:
        """Return the phase after `phase`, which starts at `cursor`. A collective.

        Args:
            task: has samples of the new phase.
            settings: in force from then on.
            before: the cursor before the last step, or round; default: one sample.
        """
        if settings.context != phase.context:
            course = phase.course + 1
            next_phase = DataPhase(settings.context, self._per_epoch(task, course), course=course)
            stage = _first_stage(settings)
        else:
            next_phase = phase
            stage = _first_stage(settings)
            if stage is not None:
                stage = replace(stage, drawn=self._drawn(phase, task, cursor))
        earlier = cursor - 1 if before is None else before
        return replace(
            next_phase,
            number=phase.number + 1,
            since=cursor,
            epochs_before=phase.epochs(cursor),
            epochs_ended=(phase.whole_epochs(earlier), phase.whole_epochs(cursor)),
            mixture=stage,
        )

    def passed(self, phase: DataPhase, settings: Settings, cursor: int) -> DataPhase:
        """Return the phase after `phase` without opening its data, for a phase that is over; the
        length of its epochs is UNKNOWN."""
        course = phase.course + (settings.context != phase.context)
        return DataPhase(settings.context, UNKNOWN, phase.number + 1, cursor, course=course)

    def _drawn(self, phase: DataPhase, task: Task, cursor: int) -> tuple[int, ...]:
        """Return how many samples of each part of the mixture were drawn before a cursor. A collective."""
        if phase.mixture is not None:
            return phase.mixture.counts(phase.place(cursor))
        drawn: tuple[int, ...] = ()
        with raise_on_all_ranks(self._world, "counting what was drawn of the mixture"):
            if self.reads:
                source, order = self._samples(task, phase)
                assert isinstance(order, Mixed)
                drawn = order.counts(phase.place(cursor))
                self._opened = task, phase.course, source, order
        return tuple(cast("list[int]", agree(self._world, list(drawn))))

    def open(self, task: Task, phase: DataPhase) -> Prefetcher:
        """Open this rank's loader of the phase's training samples; the caller must close it."""
        stage = pin_columns if self._world.device.type == "cuda" else None
        reader, prefetch = self._reader(task, phase), self._config.data.prefetch
        # ranks that wait for rank 0 must be able to give up
        return Prefetcher(reader, prefetch, stage, in_caller=self._parcels is None)

    def _reader(self, task: Task, phase: DataPhase) -> Reader:
        has_parcels, rank = self._own, self._world.rank
        self._feeds += 1
        if self._parcels is None:
            samples = self._samples(task, phase)
            return LocalReader(
                *samples, self.slices, has_parcels[rank], f"rank {rank}", self._drop_last
            )
        if not self._world.is_main:
            return BroadcastReceiver(self._parcels, self._feeds)
        everyones = range(self.slices)
        samples = self._samples(task, phase)
        reader = LocalReader(*samples, self.slices, everyones, "rank 0", self._drop_last)
        return BroadcastSender(reader, has_parcels, self._parcels, self._feeds)

    def _per_epoch(self, task: Task, number: int) -> int:
        per_epoch = UNKNOWN
        with raise_on_all_ranks(self._world, "opening the data"):
            if self.reads:
                self._forget()
                source, order = task.train_samples(number)
                self._check_lanes(order)
                self._opened = task, number, source, order
                per_epoch = order.samples_per_epoch
        return int(str(agree(self._world, per_epoch)))

    def _check_lanes(self, order: Order) -> None:
        """Raise ConfigError if there are fewer lanes than slices."""
        in_parcels = self._parcels is None and self._world.size > 1
        if in_parcels and isinstance(order, Laned) and order.lanes < self.slices:
            raise ConfigError.at(
                "data.strategy",
                f"this stream has {order.lanes} shard{'' if order.lanes == 1 else 's'}, too few for "
                f"{self.slices} ranks to read their own",
                "say data.strategy: dispatched, or cut the data into more files",
            )

    def _samples(self, task: Task, phase: DataPhase) -> tuple[Source, Order]:
        if self._opened is not None and self._opened[:2] == (task, phase.course):
            _, _, source, order = self._opened
        else:
            self._forget()
            source, order = task.train_samples(phase.course)
        self._opened = None
        if phase.mixture is not None and isinstance(order, Mixed):
            order = order.at_stage(phase.mixture)
        return source, order

    def _forget(self) -> None:
        """Close a source that was opened and is not used by a loader; ends its worker processes."""
        if self._opened is not None:
            close(self._opened[2])
            self._opened = None


def begins_phase(before: Settings, after: Settings) -> bool:
    """Return whether an operation begins another phase."""
    return (before.context, before.mixture) != (after.context, after.mixture)


def _first_stage(settings: Settings) -> MixtureStage | None:
    count = len(settings.mixture)
    return MixtureStage(settings.mixture, (0,) * count) if count else None


def slices(config: RunConfig, world_size: int) -> Sequence[range]:
    """Return the slices of a step that each rank runs, in order.

    Ranks with whole models run neighbouring slices, whose gradients they add alone. Ranks with shards
    add the gradients of one slice each, and take turns of neighbouring slices.
    """
    elastic = config.reproducible == "elastic"
    number = config.parallel.elastic.virtual_ranks if elastic else world_size
    if config.parallel.shards_of(world_size) > 1:
        return [range(rank, number, world_size) for rank in range(world_size)]
    slices_per_rank = number // world_size
    return [
        range(rank * slices_per_rank, (rank + 1) * slices_per_rank) for rank in range(world_size)
    ]
