"""When a run is saved, and how it goes on meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from instar.checkpoint.manifest import CheckpointError, Facts
from instar.checkpoint.patterns import COMPONENTS, Pattern
from instar.checkpoint.retention import Keep, prune
from instar.checkpoint.store import point, publish
from instar.config.errors import InstarError
from instar.config.schema import CheckpointConfig
from instar.distributed.agree import together
from instar.distributed.parallel import same_everywhere
from instar.distributed.world import RunFailed, World, beside
from instar.run.background import in_background
from instar.run.progress import Progress

logger = logging.getLogger(__name__)

MAX_FAILURES = 3
"""So many failed saves in a row end the run."""


@dataclass(frozen=True)
class Snapshot:
    """Everything this rank has to save of one moment."""

    progress: Progress
    components: Mapping[str, Mapping[str, torch.Tensor]]
    state: Mapping[str, Any]
    architecture: Mapping[str, Any]
    history: list[Any]
    facts: Facts
    best: tuple[str, ...] = ()
    """pointers that are to name it: it is the best so far of some metrics"""

    def replicated(self) -> dict[str, torch.Tensor]:
        """What all ranks must hold alike, as `<component>/<name>`."""
        return {
            f"{component}/{name}": tensor
            for component, tensors in self.components.items()
            if COMPONENTS[component].pattern is Pattern.REPLICATED
            for name, tensor in tensors.items()
        }

    def held(self, rank: int) -> Snapshot:
        """A copy, of what this rank writes, that the next step does not change."""
        own = {
            component: {name: tensor.detach().to("cpu", copy=True) for name, tensor in part.items()}
            for component, part in self.components.items()
            if rank == 0 or COMPONENTS[component].pattern is Pattern.PER_RANK
        }
        return replace(self, components=own)


@dataclass(frozen=True)
class Save:
    """How a save came out."""

    snapshot: Snapshot
    path: Path | None
    """None where it failed"""
    seconds: float
    """from the snapshot to the published folder"""
    stall_s: float
    """that training stood still"""
    error: InstarError | None = None

    def size_bytes(self) -> int:
        files = self.path.rglob("*") if self.path else ()
        return sum(file.stat().st_size for file in files if file.is_file())


def reasons(config: CheckpointConfig, before: Progress, now: Progress) -> list[str]:
    """Which counts say that a run which was at `before` a step ago is to be saved `now`."""
    found = []
    if config.every_steps and now.step // config.every_steps > before.step // config.every_steps:
        found.append(f"every {config.every_steps:,} steps")
    every = config.every_tokens
    if every and now.tokens // every > before.tokens // every:
        found.append(f"every {every:,} tokens")
    return found


class Saver:
    """Saves snapshots, one at a time, in the background where the config says so.

    All ranks call it at the same steps. A save that fails is a warning, and the next one is tried
    as usual; `MAX_FAILURES` in a row end the run. Replicas that differ end it before anything is
    written.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        world: World,
        root: Path,
        tell: Callable[[Save], None],
        limit_s: float = 600.0,
    ) -> None:
        """
        Args:
            tell: hears of every save that is over, on the calling thread.
            limit_s: longest wait for a disk.
        """
        self.config, self.world, self.root, self.tell = config, world, root, tell
        self.limit_s = limit_s
        self.keep = Keep(config.keep_last, config.keep_best, config.keep_every)
        # the writers meet on a group of their own, so that training need not wait for them
        self.writers = beside(world) if config.asynchronous else world
        self.last_save = time.monotonic()
        self.failures = 0
        self.pending: Future[Save] | None = None

    def overdue(self) -> bool:
        """Whether `every_minutes` have passed since the last save, by this rank's clock."""
        every = self.config.every_minutes
        return every is not None and time.monotonic() - self.last_save > 60.0 * every

    def save(self, snapshot: Snapshot, *, wait: bool = False, must: bool = False) -> None:
        """Save; unless told to `wait`, return as soon as the next step may change the tensors.

        Raises:
            RunFailed: replicas differ, or too many saves in a row have failed.
            CheckpointError, PeerError: it cannot be saved, and it `must`.
        """
        begun = self.last_save = time.monotonic()
        self.finish()
        same_everywhere(self.world, snapshot.replicated())
        if self.config.asynchronous and not (wait or must):
            held = snapshot.held(self.world.rank)
            stall_s = time.monotonic() - begun
            self.pending = in_background(
                lambda: self._write(held, self.writers, begun, stall_s), "instar-saver"
            )
            return
        saved = self._write(snapshot, self.world, begun)
        self._over(saved)
        if must and saved.error is not None:
            raise saved.error

    def poll(self) -> None:
        """Tell of a background save that has ended well; a failure waits until all can hear it."""
        if self.pending is not None and self.pending.done() and self.pending.exception() is None:
            saved = self.pending.result()
            if saved.error is None:
                self.pending = None
                self._over(saved)

    def finish(self) -> None:
        """Wait for the background save, if there is one.

        Raises:
            RunFailed: it has failed, and so have those before it; or it does not end.
        """
        if self.pending is not None:
            pending, self.pending = self.pending, None
            try:
                saved = pending.result(self.limit_s)
            except futures.TimeoutError as error:
                raise RunFailed(
                    f"the last save has not ended within {self.limit_s:g} s; is the disk of "
                    f"{self.root} there?"
                ) from error
            self._over(saved)

    def abandon(self, limit_s: float = 1.0) -> None:
        """The run has failed: give a save under way so many seconds, and look no further."""
        if self.pending is not None:
            futures.wait([self.pending], limit_s)

    def _over(self, saved: Save) -> None:
        self.tell(saved)
        self.failures = self.failures + 1 if saved.error is not None else 0
        if self.failures >= MAX_FAILURES:
            raise RunFailed(f"{self.failures} saves in a row have failed, the last: {saved.error}")

    def _write(
        self, snapshot: Snapshot, world: World, begun: float, stall_s: float | None = None
    ) -> Save:
        path: Path | None = None
        error: InstarError | None = None
        try:
            path = publish(
                self.root,
                snapshot.progress.step,
                snapshot.components,
                snapshot.state,
                architecture=snapshot.architecture,
                history=snapshot.history,
                facts=snapshot.facts,
                world=world,
                # in the background, training needs the machine more
                files_at_once=4 if stall_s is None else 1,
            )
            with together(world, "tidying up the checkpoints"):
                if world.is_main:
                    for name in snapshot.best:
                        point(self.root, name, path)
                    prune(self.root, self.keep)
        except InstarError as failure:
            if failure.exit_code != CheckpointError.exit_code:
                raise
            error = failure
        seconds = time.monotonic() - begun
        return Save(snapshot, path, seconds, seconds if stall_s is None else stall_s, error)
