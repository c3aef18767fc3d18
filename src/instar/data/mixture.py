"""Several sources as one, and orders that draw from each of them in exact shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from instar.data.blocks import permuted_apart
from instar.data.columns import Columns, difference, join, pick
from instar.data.order import Int64Array, Order, check, key_bytes
from instar.data.source import Source

PERIOD = 1024
"""Positions over which the shares of a mixture are exact."""


class Concatenated:
    """Sources end to end: the samples of part k have the numbers offsets[k] … offsets[k+1]-1."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = tuple(sources)
        self.offsets = np.cumsum([0, *map(len, sources)], dtype=np.int64)
        parts = "\n".join(source.fingerprint for source in sources)
        self.fingerprint = xxhash.xxh3_128_hexdigest(parts.encode())

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def read(self, indices: Int64Array, epoch: int = 0) -> Columns:
        """The samples in the order of `indices`.

        Raises:
            IndexError: a sample is outside 0 … len-1.
            ValueError: a part, named by its number, has other columns than the first that is read.
        """
        pieces: list[Columns] = []
        places: list[Int64Array] = []
        for number, rows, own in self._by_part(indices):
            try:
                piece = self.sources[number].read(own, epoch)
            except Exception as error:
                error.add_note(f"in part {number} of the mixture")
                raise
            if pieces and (found := difference(pieces[0], piece)):
                raise ValueError(f"part {number} of the mixture has {found}")
            pieces.append(piece)
            places.append(rows)
        if len(pieces) == 1:
            return pieces[0]
        return pick(join(pieces), np.argsort(np.concatenate(places)))

    def weights(self, indices: Int64Array) -> float:
        return sum(self.sources[number].weights(own) for number, _, own in self._by_part(indices))

    def _by_part(self, indices: Int64Array) -> Iterator[tuple[int, Int64Array, Int64Array]]:
        """Parts that are asked for, each with its rows of `indices` and the part's own numbers."""
        if not indices.size:
            yield 0, indices, indices
            return
        if indices.min() < 0 or indices.max() >= len(self):
            raise IndexError(f"samples {indices.min()}..{indices.max()} of {len(self)}")
        parts = np.searchsorted(self.offsets, indices, side="right") - 1
        for number in np.unique(parts).tolist():
            rows = np.flatnonzero(parts == number)
            yield number, rows, indices[rows] - self.offsets[number]


@dataclass(frozen=True)
class Part:
    """One part of a mixture: its samples' order, the number in the whole of its sample 0, and how
    many positions of each period are its."""

    order: Order
    first: int
    share: int


@dataclass(frozen=True)
class Mixed:
    """Each part in its own order, epoch after epoch of its own, taking turns with the others.

    The turns repeat in periods, each shuffled anew, in which every part has exactly its share. An
    epoch is as long as those of all parts together; the next one goes on where it ends, so a part
    of a greater share than its size has begun its second epoch before others have ended their
    first.
    """

    parts: tuple[Part, ...]
    seed: int

    @property
    def samples_per_epoch(self) -> int:
        return sum(part.order.samples_per_epoch for part in self.parts)

    def indices(self, epoch: int, start: int, stop: int) -> Int64Array:
        check(self, epoch, start, stop)
        count = stop - start
        shares = [part.share for part in self.parts]
        period, skipped = divmod(epoch * self.samples_per_epoch + start, sum(shares))
        turns = self._turns(period, skipped + count)
        earlier = np.bincount(turns[:skipped], minlength=len(shares)).tolist()
        turns = turns[skipped:]
        samples = np.empty(count, dtype=np.int64)
        for number, part in enumerate(self.parts):
            mine = np.flatnonzero(turns == number)
            drawn = period * part.share + earlier[number]
            samples[mine] = part.first + _draws(part.order, drawn, mine.size)
        return samples

    def _turns(self, period: int, count: int) -> NDArray[np.intp]:
        """The parts' numbers at the first `count` positions from the beginning of a period on."""
        shares = [part.share for part in self.parts]
        pattern = np.repeat(np.arange(len(shares)), shares)
        periods, offsets = np.divmod(np.arange(count, dtype=np.uint64), np.uint64(pattern.size))
        key = np.frombuffer(key_bytes("turns", self.seed, 0, 8), dtype="<u8")[0]
        places = permuted_apart(offsets, pattern.size, periods + np.uint64(period), key)
        turns: NDArray[np.intp] = pattern[places]
        return turns


def mixture_order(
    make: Callable[[int, int], Order],
    sizes: Sequence[int],
    weights: Sequence[float] | None,
    seed: int,
) -> Order:
    """An order over `Concatenated` sources.

    Args:
        make: from (n, seed) to an order of n samples.
        sizes: how many samples each source has.
        weights: the parts' shares of what is drawn, relative to each other; None: one order over
            all samples, so that each comes once an epoch.
    """
    if weights is None:
        return make(sum(sizes), seed)
    firsts = np.cumsum([0, *sizes]).tolist()
    return Mixed(
        tuple(
            Part(make(size, _seed_of_part(seed, number)), firsts[number], share)
            for number, (size, share) in enumerate(zip(sizes, shares(weights), strict=True))
        ),
        seed,
    )


def shares(weights: Sequence[float], period: int = PERIOD) -> list[int]:
    """How many of `period` positions each part gets, by the largest remainders, at least one.

    Raises ValueError where a weight is not above 0, or there are more parts than positions.
    """
    if not weights or len(weights) > period or min(weights) <= 0:
        raise ValueError(f"needs 1 to {period} weights above 0, got {list(weights)}")
    quotas = np.array(weights, dtype=np.float64) / sum(weights) * period
    taken = np.maximum(np.floor(quotas), 1)
    while taken.sum() < period:
        taken[np.argmax(quotas - taken)] += 1
    while taken.sum() > period:
        taken[np.argmax(np.where(taken > 1, taken - quotas, -np.inf))] -= 1
    return [int(count) for count in taken]


def _seed_of_part(seed: int, number: int) -> int:
    return int.from_bytes(key_bytes("part", seed, number, 8), "little")


def _draws(order: Order, drawn: int, count: int) -> Int64Array:
    """The next `count` samples of an order gone through over and over, `drawn` of it already."""
    found = [np.empty(0, dtype=np.int64)]
    while count:
        epoch, start = divmod(drawn, order.samples_per_epoch)
        stop = min(start + count, order.samples_per_epoch)
        found.append(order.indices(epoch, start, stop))
        drawn, count = drawn + stop - start, count - (stop - start)
    return np.concatenate(found)
