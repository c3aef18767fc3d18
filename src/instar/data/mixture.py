"""Mixtures: sources end to end, and the order in which the samples of each part take turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

import numpy as np
import xxhash
from numpy.typing import NDArray

from instar.data.columns import Columns, difference, join_columns, pick
from instar.data.order import Int64Array, Order, check_positions, key_bytes, permuted_apart
from instar.data.source import Source, check_indices

PERIOD = 1024
"""The number of positions over which the shares of a shuffled mixture are exact."""
LONGEST_PERIOD = 1 << 16
"""of even turns; weights without a shorter one are rounded to so many parts"""


class Concatenated:
    """Concatenated sources: samples offsets[k] … offsets[k+1]-1 are those of part k."""

    def __init__(self, sources: Sequence[Source], names: Sequence[str] = ()) -> None:
        """
        Args:
            names: names of the parts in errors; default: their numbers.
        """
        self.sources = tuple(sources)
        self._names = names or [f"part {number} of the mixture" for number in range(len(sources))]
        self.offsets = np.cumsum([0, *map(len, sources)], dtype=np.int64)
        parts = "\n".join(source.fingerprint for source in sources)
        self.fingerprint = xxhash.xxh3_128_hexdigest(parts.encode())

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def read(self, indices: Int64Array, epoch: int = 0) -> Columns:
        """Return the samples in the order of `indices`.

        Raises:
            IndexError: a sample is outside 0 … len-1.
            ValueError: a part, given by its number, has other columns than the first that is read.
        """
        pieces: list[Columns] = []
        places: list[Int64Array] = []
        for number, rows, part_indices in self._by_part(indices):
            try:
                piece = self.sources[number].read(part_indices, epoch)
            except Exception as error:
                error.add_note(f"in {self._names[number]}")
                raise
            if pieces and (mismatch := difference(pieces[0], piece)):
                raise ValueError(f"{self._names[number]} has {mismatch}")
            pieces.append(piece)
            places.append(rows)
        if len(pieces) == 1:
            return pieces[0]
        return pick(join_columns(pieces), np.argsort(np.concatenate(places)))

    def weights(self, indices: Int64Array) -> float:
        parts = self._by_part(indices)
        return sum(self.sources[number].weights(part_indices) for number, _, part_indices in parts)

    def _by_part(self, indices: Int64Array) -> Iterator[tuple[int, Int64Array, Int64Array]]:
        """Yield the parts in use, each with its rows of `indices` and its own indices."""
        if not indices.size:
            yield 0, indices, indices
            return
        check_indices(indices, len(self))
        parts = np.searchsorted(self.offsets, indices, side="right") - 1
        for number in np.unique(parts).tolist():
            rows = np.flatnonzero(parts == number)
            yield number, rows, indices[rows] - self.offsets[number]


@dataclass(frozen=True)
class PartOrder:
    """One part of a mixture: the order of its samples, the index of its first sample in the
    concatenation, and its number of positions per period."""

    order: Order
    first: int
    share: int


@dataclass(frozen=True)
class MixtureStage:
    """A stage of a run with a mixture: what its parts weigh, and how many samples of each were drawn before."""

    weights: tuple[float, ...]
    drawn: tuple[int, ...]

    def counts(self, position: int) -> tuple[int, ...]:
        """Return how many samples of each part were drawn before a position of the stage."""
        shares = exact_shares(self.weights)
        return _counts(shares, even_turns(tuple(shares)), self.drawn, position)


@dataclass(frozen=True)
class Mixed:
    """Interleaves the parts of a mixture; each part has its own order and its own epochs.

    The turns of the parts repeat in periods, in which every part has exactly its share. They are shuffled, differently
    in each period; or *even*: at every position the samples of each part are within one of its share. An
    epoch is as long as those of all parts together, and the next one continues where it ends: a part whose share
    exceeds its size starts its second epoch before others end their first.
    """

    parts: tuple[PartOrder, ...]
    seed: int
    is_even: bool = False
    drawn: tuple[int, ...] = ()
    """samples of each part before the first position; empty: none"""
    tells_draws: bool = False
    """whether later passes over a part give other numbers, so that each draw may be transformed with other random
    numbers, as by `Draws`: the sample + the passes before × the number of samples"""

    @property
    def samples_per_epoch(self) -> int:
        return sum(part.order.samples_per_epoch for part in self.parts)

    def at_stage(self, stage: MixtureStage) -> Mixed:
        """Return the order from the beginning of a stage on, with even turns; each part goes on where it was."""
        shares = exact_shares(stage.weights)
        parts = tuple(
            replace(part, share=share) for part, share in zip(self.parts, shares, strict=True)
        )
        return replace(self, parts=parts, is_even=True, drawn=stage.drawn)

    def counts(self, position: int) -> tuple[int, ...]:
        """Return how many samples of each part come before a position, those before the first one included."""
        shares = self._shares()
        period, offset = divmod(position, sum(shares))
        turns = self._turns(period, offset)
        return _counts(shares, turns, self.drawn or (0,) * len(shares), position)

    def indices(self, epoch: int, start: int, stop: int) -> Int64Array:
        check_positions(self, epoch, start, stop)
        count, position = stop - start, epoch * self.samples_per_epoch + start
        period, offset = divmod(position, sum(self._shares()))
        turns = self._turns(period, offset + count)[offset:]
        earlier = self.counts(position)
        samples = np.empty(count, dtype=np.int64)
        for number, part in enumerate(self.parts):
            rows = np.flatnonzero(turns == number)
            samples[rows] = part.first + _draws(part.order, earlier[number], rows.size)
            if self.tells_draws:
                draws = earlier[number] + np.arange(rows.size)
                samples[rows] += draws // part.order.samples_per_epoch * self.samples_per_epoch
        return samples

    def _shares(self) -> list[int]:
        return [part.share for part in self.parts]

    def _turns(self, period: int, count: int) -> NDArray[np.intp]:
        """Return the part numbers at the `count` positions from the start of a period on."""
        shares = self._shares()
        turns: NDArray[np.intp]
        if self.is_even:
            turns = np.resize(even_turns(tuple(shares)), count)
            return turns
        pattern = np.repeat(np.arange(len(shares)), shares)
        periods, offsets = np.divmod(np.arange(count, dtype=np.uint64), np.uint64(pattern.size))
        key = np.frombuffer(key_bytes("turns", self.seed, 0, 8), dtype="<u8")[0]
        places = permuted_apart(offsets, pattern.size, periods + np.uint64(period), key)
        turns = pattern[places]
        return turns


def _counts(
    shares: Sequence[int], turns: NDArray[np.intp], drawn: Sequence[int], position: int
) -> tuple[int, ...]:
    """Return the samples of each part before a position.

    Args:
        turns: of the period that the position is in.
        drawn: before the first position.
    """
    periods, offset = divmod(position, sum(shares))
    within = np.bincount(turns[:offset], minlength=len(shares)).tolist()
    return tuple(
        before + periods * share + count
        for before, share, count in zip(drawn, shares, within, strict=True)
    )


def exact_shares(weights: Sequence[float]) -> list[int]:
    """Return each part's positions in the shortest period in which the shares are exact, of at most `LONGEST_PERIOD`
    positions, to which other weights are rounded by the largest remainder method; 0 for a weight of 0.

    Raises:
        ValueError: a weight is negative, or none is above 0.
    """
    if not weights or min(weights) < 0 or not max(weights) > 0:
        raise ValueError(f"needs weights of at least 0, one of them above it, got {[*weights]}")
    fractions = [Fraction(repr(float(weight))) for weight in weights]
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    wholes = [int(fraction * scale) for fraction in fractions]
    divisor = math.gcd(*wholes)
    shares = [whole // divisor for whole in wholes]
    if sum(shares) <= LONGEST_PERIOD:
        return shares
    total = sum(fractions)
    quotas = [fraction / total * LONGEST_PERIOD for fraction in fractions]
    counts = [max(int(quota), 1) if quota else 0 for quota in quotas]
    while sum(counts) != LONGEST_PERIOD:
        step = 1 if sum(counts) < LONGEST_PERIOD else -1
        gaps = [
            step * (quota - count) if count > (step < 0) else -LONGEST_PERIOD
            for quota, count in zip(quotas, counts, strict=True)
        ]
        counts[gaps.index(max(gaps))] += step
    return counts


@lru_cache(maxsize=8)
def even_turns(shares: tuple[int, ...]) -> NDArray[np.intp]:
    """Return the turns of a period: after t of them, each of k parts has had t times its share of them, within
    1 - 1 / (2 k - 2) (Tijdeman, "The chairman assignment problem", 1980)."""
    total, used = sum(shares), [number for number, share in enumerate(shares) if share]
    turns = np.full(total, used[0], dtype=np.intp)
    if len(used) == 1:
        return turns
    slack = 2 * len(used) - 2
    counts = dict.fromkeys(used, 0)
    for turn in range(total):
        # lags in units of 1 / total; whoever lags by 1 / slack may have the turn, and who must have it soonest does
        lags = {number: (turn + 1) * shares[number] - counts[number] * total for number in used}
        number = min(
            (number for number in used if slack * lags[number] >= total),
            key=lambda number: ((slack - 1) * total - slack * lags[number]) / shares[number],
        )
        counts[number] += 1
        turns[turn] = number
    return turns


def mixture_order(
    make: Callable[[int, int], Order],
    sizes: Sequence[int],
    weights: Sequence[float] | None,
    seed: int,
) -> Order:
    """Return an order over `Concatenated` sources.

    Args:
        make: returns an order of n samples for (n, seed).
        sizes: the number of samples of each source.
        weights: the relative sampling shares of the parts; None: one order over all samples, so
            that each occurs once per epoch.
    """
    if weights is None:
        return make(sum(sizes), seed)
    firsts = np.cumsum([0, *sizes]).tolist()
    shares = mixture_shares(weights)
    keys = (key_bytes("part", seed, number, 8) for number in range(len(sizes)))
    seeds = [int.from_bytes(key, "little") for key in keys]
    parts = zip(map(make, sizes, seeds), firsts[:-1], shares, strict=True)
    return Mixed(tuple(PartOrder(*part) for part in parts), seed)


def mixture_shares(weights: Sequence[float]) -> list[int]:
    """Return each part's positions in a period, at least one, by the largest remainder method.

    Raises ValueError if a weight is not above 0, or there are more parts than positions.
    """
    if not weights or len(weights) > PERIOD or min(weights) <= 0:
        raise ValueError(f"needs 1 to {PERIOD} weights above 0, got {list(weights)}")
    quotas = np.array(weights, dtype=np.float64) / sum(weights) * PERIOD
    counts = np.maximum(np.floor(quotas), 1)
    while counts.sum() < PERIOD:
        counts[np.argmax(quotas - counts)] += 1
    while counts.sum() > PERIOD:
        counts[np.argmax(np.where(counts > 1, counts - quotas, -np.inf))] -= 1
    return [int(count) for count in counts]


def _draws(order: Order, position: int, count: int) -> Int64Array:
    """Return the next `count` samples of an order that is repeated, after `position` samples."""
    chunks = [np.empty(0, dtype=np.int64)]
    while count:
        epoch, start = divmod(position, order.samples_per_epoch)
        stop = min(start + count, order.samples_per_epoch)
        chunks.append(order.indices(epoch, start, stop))
        position, count = position + stop - start, count - (stop - start)
    return np.concatenate(chunks)
