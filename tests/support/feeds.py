"""Sources of numbers and texts, and the feeds of ranks that read or are sent their samples."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instar.data.broadcast import BroadcastReceiver, BroadcastSender
from instar.data.loader import LocalReader, Prefetcher
from instar.data.order import Int64Array, Order
from instar.data.source import Source


class Numbers:
    """Sample i holds the number i and weighs i % 3; reading `broken` fails."""

    fingerprint = "numbers"

    def __init__(self, count: int, broken: int | None = None) -> None:
        self.count = count
        self.broken = broken
        self.reads: list[tuple[str, int]] = []

    def __len__(self) -> int:
        return self.count

    def read(self, indices: Int64Array, epoch: int = 0) -> dict[str, np.ndarray]:  # noqa: ARG002
        self.reads.append((threading.current_thread().name, indices.size))
        if self.broken in indices:
            raise OSError(f"sample {self.broken} cannot be read")
        return {"number": indices.copy(), "twice": np.stack([indices, 2 * indices], axis=1)}

    def weights(self, indices: Int64Array) -> float:
        return float((indices % 3).sum())


def local_feed(
    source: Source,
    order: Order,
    rank: int = 0,
    world_size: int = 1,
    prefetch: bool = True,
    virtual_ranks: int | None = None,
    drop_last: bool = False,
) -> Prefetcher:
    slices = virtual_ranks or world_size
    per_rank = slices // world_size
    share = range(rank * per_rank, (rank + 1) * per_rank)
    reader = LocalReader(source, order, slices, share, f"rank {rank}", drop_last)
    return Prefetcher(reader, prefetch, in_caller=not prefetch)


class Queues:
    """Parcels within one process; a receiver waits as it would for a socket."""

    def __init__(self, ranks: int) -> None:
        self.of: list[SimpleQueue[tuple[list[int], NDArray[np.uint8]]]] = [
            SimpleQueue() for _ in range(ranks)
        ]

    def send(self, label: Sequence[int], parcel: NDArray[np.uint8], to: int) -> None:
        self.of[to].put((list(label), parcel.copy()))


class Side:
    def __init__(self, queues: Queues, rank: int) -> None:
        self._queues, self._rank = queues, rank

    def receive(self) -> tuple[list[int], NDArray[np.uint8]]:
        return self._queues.of[self._rank].get()


def dispatched_feeds(
    source: Source,
    order: Order,
    world: int,
    *,
    queues: Queues | None = None,
    number: int = 1,
    drop_last: bool = False,
) -> list[Prefetcher]:
    """The feeds of all ranks, of which the first one reads for all."""
    queues = queues or Queues(world)
    shares = [range(rank, rank + 1) for rank in range(world)]
    reader = LocalReader(source, order, world, range(world), "rank 0", drop_last)
    feeds = [Prefetcher(BroadcastSender(reader, shares, queues, number))]
    return feeds + [
        Prefetcher(BroadcastReceiver(Side(queues, rank), number)) for rank in range(1, world)
    ]


def texts() -> Iterator[str]:
    """Sixty documents, from empty to long."""
    for number in range(60):
        yield f"document {number} " * (number * 7 % 13)


def masked(sample: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
    """Some targets are none; of many samples all."""
    targets = sample["targets"]
    targets[generator.random(targets.size) < generator.choice([0.1, 0.6, 1.0])] = -1
    return sample


def noisy(sample: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
    """Some tokens are replaced by others."""
    inputs = sample["inputs"].copy()
    hidden = generator.random(inputs.size) < 0.2
    inputs[hidden] = generator.integers(0, 256, hidden.sum())
    return {**sample, "inputs": inputs}
