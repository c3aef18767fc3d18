"""Saving snapshots of a run, in the foreground or asynchronously while training continues."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch

from instar.checkpoint.layout import SavedRows
from instar.checkpoint.listing import RetentionPolicy, prune_checkpoints, update_pointer
from instar.checkpoint.manifest import COMPONENTS, CheckpointError, Pattern
from instar.checkpoint.store import CheckpointContent, Tensors, publish_checkpoint, tensors_to_write
from instar.checkpoint.tensor_file import allocate, outlines_of
from instar.config.budget import Counters
from instar.config.errors import InstarError
from instar.config.schema import CheckpointConfig, Direction
from instar.distributed.agree import raise_on_all_ranks
from instar.distributed.failure import RunFailed
from instar.distributed.parallel import check_replicas_equal
from instar.distributed.world import World, with_own_group
from instar.record.device import recorded_event

logger = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Number of consecutive failed saves that ends the run."""


@dataclass(frozen=True)
class Snapshot(CheckpointContent):
    """Everything that this rank saves at one step."""

    progress: Counters = field(kw_only=True)
    best: tuple[str, ...] = ()
    """best pointers to set to this checkpoint, one per metric whose best value so far it has"""
    request_ids: frozenset[str] = frozenset()
    """the requests of people that are in it"""

    def check_replicas(self, world: World) -> None:
        """Check that ranks that hold the same tensors, or the same rows, have equal ones. A collective.

        Raises:
            RunFailed: they differ.
        """
        tensors_by_name, rows = dict[str, torch.Tensor](), dict[str, SavedRows]()
        for component, tensors in self.components.items():
            if COMPONENTS[component].pattern is Pattern.REPLICATED:
                for name, tensor in tensors.items():
                    if isinstance(tensor, SavedRows):
                        rows[f"{component}/{name}"] = tensor
                    else:
                        tensors_by_name[f"{component}/{name}"] = tensor
        check_replicas_equal(world, tensors_by_name)
        if any(part.shards < world.size for part in rows.values()):
            (shard,) = {part.shard for part in rows.values()}
            check_replicas_equal(world, {name: part.tensor for name, part in rows.items()}, shard)

    def copy_for_rank(self, rank: int, spare: Snapshot | None = None) -> Snapshot:
        """Return a CPU copy of what this rank writes, so that the next step may change it.

        That of tensors on a GPU is complete when an event is that is recorded afterwards.

        Args:
            spare: an earlier copy that nobody reads any more. Its components are overwritten if their names,
                shapes and dtypes match: most of the time of a new copy goes into the page faults of
                fresh memory.
        """
        earlier = spare.components if spare is not None else {}
        copies = {
            component: _copy_part(part, earlier.get(component, {}))
            for component, part in self.components.items()
            if rank == 0
            or COMPONENTS[component].pattern is Pattern.PER_RANK
            or any(isinstance(tensor, SavedRows) for tensor in part.values())
        }
        return replace(self, components=copies)


def _copy_part(part: Tensors, spare: Tensors) -> dict[str, torch.Tensor | SavedRows]:
    """Return a copy of what a rank writes of a component, in the memory of `spare` if that matches.

    Rows that another rank saves are left out.
    """
    tensors, targets = tensors_to_write(part), tensors_to_write(spare)
    if outlines_of(targets) != outlines_of(tensors):
        targets = allocate(tensors)
    for name, tensor in tensors.items():
        targets[name].copy_(tensor, non_blocking=True)
    copies: dict[str, torch.Tensor | SavedRows] = {}
    for name, source in part.items():
        if isinstance(source, SavedRows):
            rows = (
                targets[name]
                if name in targets
                else torch.empty_like(source.tensor[:0], device="cpu")
            )
            copies[name] = replace(source, tensor=rows)
        elif name in targets:
            copies[name] = targets[name]
    return copies


@dataclass(frozen=True)
class SaveResult:
    """Result of a save."""

    snapshot: Snapshot
    """the next background save overwrites the tensors of a background save's"""
    path: Path | None
    """None: the save failed"""
    seconds: float
    """duration from the snapshot to the published folder"""
    stall_s: float
    """duration for which training was blocked"""
    error: InstarError | None = None

    def size_bytes(self) -> int:
        files = self.path.rglob("*") if self.path else ()
        return sum(file.stat().st_size for file in files if file.is_file())


class Saver:
    """Saves snapshots, one at a time, in the background if `checkpoint.asynchronous` is set.

    All ranks call `save` at the same steps. A failed save is a warning, and the next one is tried
    as usual; `MAX_FAILURES` in a row end the run. If replicas differ, the run ends before anything
    is written.

    The copy that a background save wrote is kept, and the next one overwrites it. That does not raise
    the most memory that saves need, since each needs a copy; what else needs memory calls `free`.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        world: World,
        root: Path,
        on_saved: Callable[[SaveResult], None],
        limit_s: float = 600.0,
        better: Direction = "min",
    ) -> None:
        """
        Args:
            on_saved: called with the result of every save, on the calling thread.
            limit_s: longest wait for a background save, in seconds.
            better: direction in which the first metric of `best_of` improves.
        """
        self.config, self.world, self.root, self.on_saved = config, world, root, on_saved
        self.limit_s = limit_s
        self.keep = RetentionPolicy(
            config.keep_last, config.keep_best, config.keep_every, config.best_of[0], better
        )
        # background saves use their own process group, so that training does not wait for them
        self.writers = with_own_group(world) if config.asynchronous else world
        self.last_save = time.monotonic()
        self.failures = 0
        self.pending: Future[SaveResult] | None = None
        self.spare: Snapshot | None = None
        """the copy of the last background save, after it has ended without an error"""

    def overdue(self) -> bool:
        """Return whether `every_minutes` have passed since the last save, by this rank's clock."""
        every = self.config.every_minutes
        return every is not None and time.monotonic() - self.last_save > 60.0 * every

    def save(
        self,
        snapshot: Snapshot,
        *,
        wait: bool = False,
        must: bool = False,
        after: Callable[[], None] | None = None,
    ) -> None:
        """Save a snapshot. A collective.

        Args:
            after: waits for what must be on disk before the checkpoint: a run that resumes from it
                does not save that again.
            wait: return after the save; by default a background save returns as soon as the next
                step may change the tensors.
            must: like `wait`, and raise if the save fails.

        Raises:
            RunFailed: replicas differ, or too many consecutive saves have failed.
            CheckpointError, PeerError: the save failed, and `must` is set.
        """
        start = self.last_save = time.monotonic()
        self.finish()
        snapshot.check_replicas(self.world)
        if self.config.asynchronous and not (wait or must):
            spare, self.spare = self.spare, None
            with raise_on_all_ranks(self.world, "copying what is saved"):
                copy = snapshot.copy_for_rank(self.world.rank, spare)
            del spare  # what the new copy has not taken over is freed
            copy_event = recorded_event(self.world.device)
            stall_s = time.monotonic() - start

            def write() -> SaveResult:
                if copy_event is not None:
                    copy_event.synchronize()
                if after is not None:
                    after()
                return self._write(copy, self.writers, start, stall_s)

            self.pending = in_background(write, "instar-saver")
            return
        if after is not None:
            after()
        save_result = self._write(snapshot, self.world, start)
        self._over(save_result)
        if must and save_result.path is None and save_result.error is not None:
            raise save_result.error

    def poll(self) -> None:
        """Report a background save that has succeeded; `finish` reports failures, on all ranks."""
        if self.pending is not None and self.pending.done() and self.pending.exception() is None:
            save_result = self.pending.result()
            if save_result.error is None:
                self.pending = None
                self.spare = save_result.snapshot
                self._over(save_result)

    def finish(self) -> None:
        """Wait for the background save, if there is one.

        Raises:
            RunFailed: too many consecutive saves have failed, or this one exceeds `limit_s`.
        """
        if self.pending is not None:
            pending, self.pending = self.pending, None
            try:
                save_result = pending.result(self.limit_s)
            except futures.TimeoutError as error:
                raise RunFailed(
                    f"the last save has not ended within {self.limit_s:g} s; check that the disk of "
                    f"{self.root} responds"
                ) from error
            if save_result.error is None:
                self.spare = save_result.snapshot
            self._over(save_result)

    def free(self) -> None:
        """Free the copy that is kept for the next background save."""
        self.spare = None

    def abandon(self) -> None:
        """Wait at most a second for a background save; ignore its result (failed run)."""
        if self.pending is not None:
            futures.wait([self.pending], 1.0)

    def _over(self, save_result: SaveResult) -> None:
        self.on_saved(save_result)
        # what is published is saved, whatever could not be tidied up after it
        self.failures = self.failures + 1 if save_result.path is None else 0
        if self.failures >= MAX_FAILURES:
            raise RunFailed(
                f"{self.failures} saves in a row have failed, the last: {save_result.error}"
            )

    def _write(
        self, snapshot: Snapshot, world: World, began: float, stall_s: float | None = None
    ) -> SaveResult:
        path: Path | None = None
        error: InstarError | None = None
        try:
            path = publish_checkpoint(
                self.root,
                snapshot.progress.step,
                snapshot,
                world=world,
                # a background save leaves disk and CPU to training
                files_at_once=4 if stall_s is None else 1,
            )
            with raise_on_all_ranks(world, "tidying up the checkpoints"):
                if world.is_main:
                    for name in snapshot.best:
                        update_pointer(self.root, name, path)
                    prune_checkpoints(self.root, self.keep)
        except InstarError as failure:
            if failure.exit_code != CheckpointError.exit_code:
                raise
            error = failure
        seconds = time.monotonic() - began
        return SaveResult(snapshot, path, seconds, seconds if stall_s is None else stall_s, error)


T = TypeVar("T")


def in_background(work: Callable[[], T], name: str) -> Future[T]:
    """Run `work` in a daemon thread, which unlike an executor's does not delay process exit."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=name).start()
    return future
