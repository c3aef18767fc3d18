"""Appends the weights of a training to a chain of deltas, in the background while it trains."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from instar.checkpoint.manifest import CheckpointError
from instar.config.errors import InstarError
from instar.extensions.delta.chain import Link, append, links, to_bits, without_aliases
from instar.extensions.delta.events import Delta
from instar.extensions.delta.format.folder import (
    lock_chain,
    missing_steps,
    read_chain_index,
    segment_of,
)
from instar.extensions.delta.format.link import LinkFile, read_link
from instar.extensions.delta.format.state import state_hash
from instar.extensions.delta.format.statistics import LinkStatistics, link_statistics
from instar.record import atomic
from instar.record.device import recorded_event

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""dtypes that weights may be rounded to"""
COPIES = 2
"""Copies of the weights that a `DeltaWriter` holds at most, beside those of the last link: of the one
that is being written, and of one that waits."""


@dataclass(frozen=True)
class Written:
    """A link on disk, and what it cost."""

    link: Link
    seconds: float
    """from the copy of the weights to the file on disk"""
    stall_s: float
    """for which training was blocked"""
    statistics: LinkStatistics | None
    """None for an anchor, and for a link that another process has squashed or removed at once"""

    def event(self, **place: Any) -> Delta:
        """Return the event of the record; `place`: where in the run, see `Placed`."""
        statistics = self.statistics
        return Delta(
            number=self.link.number,
            anchor=self.link.kind == "anchor",
            size_bytes=self.link.size_bytes,
            seconds=self.seconds,
            stall_s=self.stall_s,
            density=None if statistics is None else statistics.whole.density,
            overlap=None if statistics is None else statistics.whole.overlap,
            layers={}
            if statistics is None
            else {n: s.density for n, s in statistics.layers.items()},
            **place,
        )


@dataclass(frozen=True)
class _Copy:
    """The weights after a step, still on the device."""

    step: int
    tensors: Mapping[str, Tensor]
    aliases: Mapping[str, str]
    copy_event: torch.cuda.Event | None
    """recorded after the copies; None on a CPU"""
    began: float
    stall_s: float


class DeltaWriter:
    """Saves the weights of a training as a chain of deltas; one process writes a chain.

    `save` copies the weights and returns; a thread compares, compresses and writes them. It blocks
    only while `COPIES` copies are not written yet. After a failure nothing more is written: the
    caller reads `failure` and ends the training.

    The first link is an anchor, unless the chain ends with the same weights at the same step. So a
    training that resumes from an earlier step leaves the links after it as they are, and never
    mixes them with its own. If the chain ends before that step, the anchor names the steps that are
    missing.
    """

    def __init__(
        self,
        folder: Path,
        every: int = 1,
        anchor_every: int = 50,
        dtype: torch.dtype | None = None,
        limit_s: float = 600.0,
    ) -> None:
        """
        Args:
            every: steps between links.
            anchor_every: links after which one is an anchor.
            dtype: floating-point weights wider than this are rounded to it; None: none are.
            limit_s: longest wait for the disk, in seconds.
        """
        self.folder, self.every, self.anchor_every = folder, every, anchor_every
        self.dtype, self.limit_s = dtype, limit_s
        self.failure: str | None = None
        """why nothing is written any more"""
        self._step: int | None = None
        """step of the last copy"""
        self._room = threading.Semaphore(COPIES)
        self._copies: SimpleQueue[_Copy | threading.Event | None] = SimpleQueue()
        self._finished_links: SimpleQueue[Written] = SimpleQueue()
        # only the thread uses these: the weights of the last link, its file if it is no anchor, and
        # the number of links since the last anchor
        self._base: Mapping[str, Tensor] | None = None
        self._last: Path | None = None
        self._since_anchor = 0
        self._thread = threading.Thread(target=self._work, daemon=True, name="instar-deltas")
        self._thread.start()

    def due(self, step: int, *, last: bool = False) -> bool:
        """Return whether to save the weights after a step: the first, every n-th, and the last ones."""
        if step == self._step or self.failure is not None:
            return False
        return last or self._step is None or step % self.every == 0

    def save(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy the weights after a step, and save them in the background.

        Args:
            tensors: by name; they may change after this returns. Tied tensors are saved once.
        """
        began = time.perf_counter()
        if not self._room.acquire(timeout=self.limit_s):
            self.failure = self._late()
            return
        unique_tensors, aliases = without_aliases(tensors, {})
        copies = {name: _copy(tensor, self.dtype) for name, tensor in unique_tensors.items()}
        device = next((copy.device for copy in copies.values() if copy.is_cuda), None)
        copy_event = None if device is None else recorded_event(device)
        self._step = step
        stall_s = time.perf_counter() - began
        self._copies.put(_Copy(step, copies, aliases, copy_event, began, stall_s))

    def finished_links(self) -> list[Written]:
        """Return the links that were acknowledged since the last call."""
        links = []
        while True:
            try:
                links.append(self._finished_links.get_nowait())
            except Empty:
                return links

    def flush(self) -> None:
        """Wait until every link is on disk.

        Raises:
            CheckpointError: one is not.
        """
        self.barrier()()
        if self.failure is not None:
            raise CheckpointError(self.failure)

    def barrier(self) -> Callable[[], None]:
        """Return a function that waits, in any thread, until the links saved up to now are on disk or
        have failed."""
        is_empty = threading.Event()
        self._copies.put(is_empty)

        def wait() -> None:
            if not is_empty.wait(self.limit_s):
                self.failure = self.failure or self._late()

        return wait

    def close(self, limit_s: float = 1.0) -> None:
        """End the thread; wait at most `limit_s` seconds for links that are not on disk yet."""
        self._copies.put(None)
        self._thread.join(limit_s)

    def _late(self) -> str:
        return (
            f"no delta was saved within {self.limit_s:g} s; check that the disk of {self.folder} "
            "responds"
        )

    def _work(self) -> None:
        while (copy := self._copies.get()) is not None:
            if isinstance(copy, threading.Event):
                copy.set()
                continue
            try:
                if self.failure is None:
                    self._write(copy)
            except Exception as error:
                is_expected = isinstance(error, InstarError)
                what = str(error) if is_expected else f"{type(error).__name__}: {error}"
                begins = f"cannot save step {copy.step:,}"
                self.failure = what if begins in what else f"{begins} in {self.folder}: {what}"
            self._room.release()

    def _write(self, copy: _Copy) -> None:
        tensors = _on_host(copy.tensors, copy.copy_event)
        missing: tuple[int, int] | None = None
        if self._base is None and (last := self._last_link()) is not None:
            if last.step == copy.step and last.result_hash == _hash(tensors):
                self._base = tensors
                return
            missing = missing_steps(last.step, copy.step, self.every)
        anchor = self._since_anchor + 1 >= self.anchor_every
        link = append(
            self.folder,
            copy.step,
            tensors,
            self._base,
            anchor=anchor,
            aliases=copy.aliases,
            missing=missing,
        )
        seconds = time.perf_counter() - copy.began
        before, self._base, self._last, statistics = self._last, tensors, None, None
        self._since_anchor += 1
        if link.kind == "anchor":
            self._since_anchor = 0
        else:
            self._last = link.file
            entries = {name: to_bits(tensor).entry for name, tensor in tensors.items()}
            with lock_chain(self.folder):
                earlier = None if before is None else _own_changes(before)
                if (now := _own_changes(link.file)) is not None:
                    statistics = link_statistics(now, entries, earlier)
        self._finished_links.put(Written(link, seconds, copy.stall_s, statistics))

    def _last_link(self) -> Link | None:
        """Return the last link of an earlier training; remove what a crash of it left behind."""
        if not self.folder.is_dir() or read_chain_index(self.folder) is None:
            return None
        with lock_chain(self.folder):
            atomic.sweep(self.folder)
        if not (chain := links(self.folder)):
            return None
        self._since_anchor = len(segment_of(chain, chain[-1]).links)
        return chain[-1]


def _own_changes(path: Path) -> LinkFile | None:
    """Return a link; None if another process has put one with the changes of several in its place, or removed it."""
    link = read_link(path, check=False) if path.is_file() else None
    return link if link is not None and link.footer.first == link.footer.number else None


def _hash(tensors: Mapping[str, Tensor]) -> str:
    return state_hash({name: to_bits(tensor) for name, tensor in tensors.items()})


def _copy(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a contiguous copy on the tensor's device, rounded if it is wider than `dtype`."""
    tensor = tensor.detach()
    if dtype is None or not tensor.is_floating_point() or tensor.itemsize <= dtype.itemsize:
        dtype = tensor.dtype
    return tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _on_host(
    tensors: Mapping[str, Tensor], copy_event: torch.cuda.Event | None
) -> dict[str, Tensor]:
    """Return the tensors on the CPU; a GPU trains on while they are transferred."""
    if copy_event is None:
        return dict(tensors)
    device = next(tensor.device for tensor in tensors.values() if tensor.is_cuda)
    side_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side_stream):
        side_stream.wait_event(copy_event)
        return {name: tensor.cpu() for name, tensor in tensors.items()}
