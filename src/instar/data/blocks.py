"""A shuffled order whose reads stay local: blocks change places, then samples within windows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from instar.config.schema import FeedConfig
from instar.data.order import (
    Int64Array,
    Order,
    UInt32Array,
    UInt64Array,
    check,
    key_bytes,
    make_order,
    mix64,
    permute,
    rounds_for,
)

_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class BlockShuffled:
    """Every sample once per epoch; what stands within one window lies in few blocks.

    Blocks of `block` neighbouring samples are permuted, and stand end to end. Then samples are
    permuted among each other within windows of `window` successive positions, rounded up to whole
    blocks. If n is no multiple of `block`, one block is short; it takes its turn like the others.

    Raises ValueError where n, block or window is below 1.
    """

    n: int
    seed: int
    block: int
    window: int

    def __post_init__(self) -> None:
        if min(self.n, self.block, self.window) < 1:
            raise ValueError(
                f"n, block and window are at least 1, got {self.n}, {self.block}, {self.window}"
            )

    @property
    def samples_per_epoch(self) -> int:
        return self.n

    def indices(self, epoch: int, start: int, stop: int) -> Int64Array:
        check(self, epoch, start, stop)
        layout = _Layout.of(self, epoch)
        samples = np.empty(stop - start, dtype=np.int64)
        for begin in range(start, stop, _AT_ONCE):
            end = min(begin + _AT_ONCE, stop)
            positions = np.arange(begin, end, dtype=np.int64)
            samples[begin - start : end - start] = layout.samples(layout.shuffled(positions))
        return samples


@dataclass(frozen=True)
class _Layout:
    """Where the blocks of one epoch stand.

    There are as many places for blocks as blocks. The short block stands in place `short` and
    fills it up to position `end`; `lacking` samples are missing there, by which all that follows
    stands further to the front. Without a short block, `end` is the end of the epoch.
    """

    n: int
    block: int
    whole_blocks: int
    short: int
    end: int
    lacking: int
    window: int
    block_key: np.uint64
    window_key: np.uint64

    @classmethod
    def of(cls, order: BlockShuffled, epoch: int) -> _Layout:
        block_key, window_key, turn = np.frombuffer(
            key_bytes("blocks", order.seed, epoch, 24), dtype="<u8"
        )
        whole_blocks, rest = divmod(order.n, order.block)
        short = int(turn) % (whole_blocks + 1) if rest else whole_blocks
        return cls(
            n=order.n,
            block=order.block,
            whole_blocks=whole_blocks,
            short=short,
            end=short * order.block + rest,
            lacking=order.block - rest if rest else 0,
            window=-(-order.window // order.block) * order.block,
            block_key=block_key,
            window_key=window_key,
        )

    def shuffled(self, positions: Int64Array) -> Int64Array:
        """Positions, permuted among those of their windows."""
        windows = (positions + self.lacking * (positions >= self.end)) // self.window
        begins = self._begin(windows)
        sizes = np.minimum(self._begin(windows + 1), self.n) - begins
        for size in np.unique(sizes):  # most are alike
            of_size = np.flatnonzero(sizes == size)
            offsets = (positions - begins)[of_size].astype(np.uint64)
            numbers = windows[of_size].astype(np.uint64)
            begins[of_size] += permuted_apart(offsets, int(size), numbers, self.window_key).astype(
                np.int64
            )
        return begins

    def samples(self, positions: Int64Array) -> Int64Array:
        """What stands there while blocks are still in one piece."""
        places, within = np.divmod(positions + self.lacking * (positions >= self.end), self.block)
        blocks = np.full_like(places, self.whole_blocks)
        whole = np.flatnonzero(places != self.short)
        numbers = (places - (places > self.short))[whole].astype(np.uint64)
        keys = _keys(np.zeros(1, dtype=np.uint64), self.whole_blocks, self.block_key)
        blocks[whole] = permute(numbers, self.whole_blocks, keys)
        return blocks * self.block + within

    def _begin(self, windows: Int64Array) -> Int64Array:
        begins = windows * self.window
        begins -= self.lacking * (begins > self.short * self.block)
        return begins


def permuted_apart(
    offsets: UInt64Array, size: int, domains: UInt64Array, key: np.uint64
) -> UInt64Array:
    """Offsets permuted within [0, size), in each domain by a permutation of its own.

    Args:
        domains: a number for each offset; cheapest where equal ones are neighbours.
    """
    first = np.ones(domains.size, dtype=bool)
    np.not_equal(domains[1:], domains[:-1], out=first[1:])
    runs = np.flatnonzero(first)
    keys = _keys(domains[runs], size, key)
    return permute(offsets, size, np.repeat(keys, np.diff(runs, append=domains.size), axis=1))


def _keys(domains: UInt64Array, size: int, key: np.uint64) -> UInt32Array:
    """Round keys for permutations of [0, size), [rounds, len(domains)]."""
    rounds = rounds_for(size)
    turns = np.arange(rounds, dtype=np.uint64)[:, None]
    return (mix64(domains * np.uint64(rounds) + turns, key) >> np.uint64(32)).astype(np.uint32)


def order_of(data: FeedConfig, n: int, seed: int) -> Order:
    """The order that a config names over n samples that can be read at any place."""
    if data.order == "blocks":
        return BlockShuffled(n, seed, data.block_samples, data.shuffle_window)
    return make_order(data.order, n, seed)
