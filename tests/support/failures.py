"""Ranks to which something happens; `forks.Child` runs these instead of the bare command line."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from instar.checkpoint import disk
from instar.cli.main import main
from instar.data.columns import Columns
from instar.data.feed import Feed
from instar.data.order import Int64Array, Order
from instar.data.reader import StepBatch
from instar.data.source import Source
from instar.run.trainer import Trainer
from instar.tasks.language import LanguageTask
from instar.tasks.task import Batch

FAILING_STEP = 8
GLOBAL_BATCH = 39
"""of tiny_run's config"""
ROOM_BYTES = 30_000
"""enough for a log, not for the weights"""


def is_rank(rank: int) -> bool:
    """Whether this process is that rank; -1 is the last."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    return int(os.environ.get("RANK", "0")) == rank % size


def before_step(number: int, act: Callable[[], None]) -> None:
    """Do something once this rank comes to a step."""
    step = Trainer.step

    def acted(self: Trainer) -> None:
        if self.progress.step + 1 == number:
            act()
        step(self)

    Trainer.step = acted  # type: ignore[method-assign]


def full_from_step_8(argv: Sequence[str]) -> int:
    """On rank 0, no file can be larger than a log from step 8 on."""
    if is_rank(0):
        before_step(FAILING_STEP, lambda: _limit_files(ROOM_BYTES))
    return main(argv)


def full_at_step_10(argv: Sequence[str]) -> int:
    """On rank 0, no file can be larger than a log from step 8 to 11."""
    if is_rank(0):
        before_step(FAILING_STEP, lambda: _limit_files(ROOM_BYTES))
        before_step(12, lambda: _limit_files(resource.RLIM_INFINITY))
    return main(argv)


def rank_1_cannot_write(argv: Sequence[str]) -> int:
    """On rank 1, a checkpoint's files cannot be written from step 8 on."""

    def refuse(path: Path, *_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    if is_rank(1):
        before_step(FAILING_STEP, lambda: setattr(disk, "write_synced", refuse))
        before_step(FAILING_STEP, lambda: setattr(disk, "sync_file", refuse))
    return main(argv)


def rank_1_cannot_read(argv: Sequence[str]) -> int:
    """On rank 1, the samples of step 8 cannot be read."""
    take = Feed.take

    def failing(self: Feed, cursor: int, *arguments: Any, **named: Any) -> StepBatch:
        if cursor == (FAILING_STEP - 1) * GLOBAL_BATCH:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return take(self, cursor, *arguments, **named)

    if is_rank(1):
        Feed.take = failing  # type: ignore[method-assign]
    return main(argv)


def rank_1_grows_otherwise(argv: Sequence[str]) -> int:
    """On rank 1, what an operation makes new has other values."""
    from instar.run import reshape

    def otherwise(plan: Any, tensors: Any, role: Any, key: tuple[int, ...]) -> Any:
        return apply(plan, tensors, role, (*key, 1))

    apply = reshape.apply
    if is_rank(1):
        reshape.apply = otherwise  # type: ignore[assignment]
    return main(argv)


def rank_1_has_no_memory_to_grow(argv: Sequence[str]) -> int:
    """On rank 1, there is no room for a second model."""
    from instar.run import reshape

    def refuse(*_: Any) -> None:
        raise MemoryError("no room for another model")

    if is_rank(1):
        reshape.apply = refuse  # type: ignore[assignment]
    return main(argv)


def last_rank_has_nan_once(argv: Sequence[str]) -> int:
    """On the last rank, the loss of step 8 is not a number."""
    return _with_nan(argv, -1, lambda step: step == FAILING_STEP)


def rank_1_has_nan_for_good(argv: Sequence[str]) -> int:
    """On rank 1, no loss is a number from step 8 on."""
    return _with_nan(argv, 1, lambda step: step >= FAILING_STEP)


def keeps_little(argv: Sequence[str]) -> int:
    """Of a stream, only the newest samples stay in memory: each pass reads it again."""
    from instar.data import counting, reader

    counting._KEPT_BYTES = 300 * 34  # samples of 17 tokens
    reader.BLOCK_STEPS = 2
    return main(argv)


def data_block_in_epoch_2(argv: Sequence[str]) -> int:
    """On the last rank, reading the second epoch never ends, as from a file server gone away.

    It says so on the terminal that it was started on, once it waits.
    """
    train_samples, take = LanguageTask.train_samples, Feed.take
    terminal, epoch_samples = os.dup(1), 0

    def blocking(self: LanguageTask, course: int = 0) -> tuple[Source, Order]:
        nonlocal epoch_samples
        source, order = train_samples(self, course)
        epoch_samples = order.samples_per_epoch
        return _NeverTwice(source), order

    def telling(self: Feed, cursor: int, *arguments: Any, **named: Any) -> StepBatch:
        if cursor == epoch_samples:
            os.write(terminal, b"waiting for data\n")
        return take(self, cursor, *arguments, **named)

    if is_rank(-1):
        LanguageTask.train_samples = blocking  # type: ignore[method-assign]
        Feed.take = telling  # type: ignore[method-assign]
    return main(argv)


class _NeverTwice:
    """A source that never comes back with a sample which was read before."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._read: set[int] = set()
        self.fingerprint = source.fingerprint

    def __len__(self) -> int:
        return len(self._source)

    def weights(self, indices: Int64Array) -> float:
        return self._source.weights(indices)

    def read(self, indices: Int64Array, epoch: int = 0) -> Columns:
        asked = set(indices.tolist())
        if asked & self._read:
            threading.Event().wait()
        self._read |= asked
        return self._source.read(indices, epoch)


def _limit_files(room_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, hard))


def _with_nan(argv: Sequence[str], rank: int, at: Callable[[int], bool]) -> int:
    steps = [0]
    step, loss_sum = Trainer.step, LanguageTask.loss_sum

    def counted(self: Trainer) -> None:
        steps[0] = self.progress.step + 1
        step(self)

    def poisoned(self: LanguageTask, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        loss = loss_sum(self, model, batch)
        return loss * float("nan") if model.training and at(steps[0]) else loss

    if is_rank(rank):
        Trainer.step = counted  # type: ignore[method-assign]
        LanguageTask.loss_sum = poisoned  # type: ignore[method-assign]
    return main(argv)
