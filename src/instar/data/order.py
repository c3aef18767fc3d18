"""The global order of samples, a pure function of (seed, epoch, position), and the part of it that is a step.

An order does not depend on ranks, workers or batch sizes. Its state is a few integers: any position
of any epoch is computed directly. `instar.data.mixture` orders mixtures of sources. How a step is divided
into slices and micro-batches follows from its plan; no data is read here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from instar.config.schema import FeedConfig

Int64Array = NDArray[np.int64]
UInt32Array = NDArray[np.uint32]
UInt64Array = NDArray[np.uint64]
Places = range | Int64Array
"""Indices of samples within a global batch, ascending."""

OrderKind = Literal["shuffled", "sequential", "random"]

UNKNOWN = 1 << 62
"""Length of an epoch whose end has not been reached yet."""

_BLOCK = 1 << 16  # positions per chunk, so that temporaries fit the CPU's cache


class Order(Protocol):
    """Maps each position of each epoch to a sample."""

    @property
    def samples_per_epoch(self) -> int: ...

    def indices(self, epoch: int, start: int, stop: int) -> Int64Array:
        """Return the samples at positions start … stop-1 of an epoch, int64 [stop - start].

        Raises IndexError if the positions are not within the epoch.
        """
        ...


@dataclass(frozen=True)
class Sequential:
    """Sample i at position i, in every epoch."""

    n: int

    @property
    def samples_per_epoch(self) -> int:
        return self.n

    def indices(self, epoch: int, start: int, stop: int) -> Int64Array:
        check_positions(self, epoch, start, stop)
        return np.arange(start, stop, dtype=np.int64)


@dataclass(frozen=True)
class Shuffled:
    """A random permutation of all samples in each epoch.

    A keyed Feistel network permutes the smallest power of two that holds n; positions that are
    mapped outside [0, n) are mapped again until they are inside (cycle walking: Black and Rogaway,
    "Ciphers with Arbitrary Finite Domains", 2002), which gives a bijection of [0, n).
    """

    n: int
    seed: int

    @property
    def samples_per_epoch(self) -> int:
        return self.n

    def indices(self, epoch: int, start: int, stop: int) -> Int64Array:
        check_positions(self, epoch, start, stop)
        key_material = key_bytes("shuffled", self.seed, epoch, 4 * rounds_for(self.n))
        keys = np.frombuffer(key_material, dtype="<u4")[:, None]
        return _in_blocks(start, stop, lambda positions: permute(positions, self.n, keys))


@dataclass(frozen=True)
class RandomWindows:
    """Draws one of n starts at each position, independently and with replacement.

    `samples_per_epoch` is the number of draws that form an epoch.
    """

    n: int
    samples_per_epoch: int
    seed: int

    def indices(self, epoch: int, start: int, stop: int) -> Int64Array:
        check_positions(self, epoch, start, stop)
        key = np.uint64(int.from_bytes(key_bytes("random", self.seed, epoch, 8), "little"))
        return _in_blocks(start, stop, lambda positions: mix64(positions, key) % np.uint64(self.n))


def make_order(
    kind: OrderKind, n: int, seed: int, *, samples_per_epoch: int | None = None
) -> Order:
    """Return the order named by `data.order` over a source of n samples.

    Args:
        samples_per_epoch: draws per epoch, used by "random" only; default: n.

    Raises:
        ValueError: n or samples_per_epoch is below 1.
    """
    draws = n if samples_per_epoch is None else samples_per_epoch
    if n < 1 or draws < 1:
        raise ValueError(f"an order needs at least one sample, got n={n}, {draws} per epoch")
    match kind:
        case "shuffled":
            return Shuffled(n, seed)
        case "sequential":
            return Sequential(n)
        case "random":
            return RandomWindows(n, draws, seed)


def order_of(data: FeedConfig, n: int, seed: int) -> Order:
    """Return the order that a config names, over n samples with random access."""
    if data.order == "blocks":
        return BlockShuffled(n, seed, data.block_samples, data.shuffle_window)
    return make_order(data.order, n, seed)


def check_positions(order: Order, epoch: int, start: int, stop: int) -> None:
    """Raise IndexError if positions start … stop-1 are not within the epoch."""
    if epoch < 0 or not 0 <= start <= stop <= order.samples_per_epoch:
        raise IndexError(
            f"positions {start}..{stop} of epoch {epoch} are not within an epoch of "
            f"{order.samples_per_epoch} samples"
        )


def _in_blocks(
    start: int, stop: int, samples_of: Callable[[UInt64Array], UInt64Array | Int64Array]
) -> Int64Array:
    """Return the samples at positions start … stop-1, which are computed a block at a time."""
    samples = np.empty(stop - start, dtype=np.int64)
    for begin in range(start, stop, _BLOCK):
        end = min(begin + _BLOCK, stop)
        samples[begin - start : end - start] = samples_of(np.arange(begin, end, dtype=np.uint64))
    return samples


def key_bytes(purpose: str, seed: int, epoch: int, count: int) -> bytes:
    """Return pseudo-random bytes, the same on every machine."""
    return hashlib.shake_256(f"instar/{purpose}/{seed}/{epoch}".encode()).digest(count)


def rounds_for(n: int) -> int:
    """Return the number of Feistel rounds: small domains mix slowly and need more of them."""
    return 8 if n > 1024 else 24


def permute(positions: UInt64Array, n: int, keys: UInt32Array) -> UInt64Array:
    """Map positions by a keyed permutation of [0, n).

    Args:
        keys: [rounds, 1], or [rounds, len(positions)] with separate keys for each position.
    """
    bits = (n - 1).bit_length()
    return permute_within(positions, np.full(1, n, dtype=np.uint64), bits, keys)


def permute_within(
    positions: UInt64Array, sizes: UInt64Array, bits: int, keys: UInt32Array
) -> UInt64Array:
    """Map positions by keyed permutations of [0, size), for sizes of which each is at most 2**bits.

    Args:
        sizes, keys: [1] and [rounds, 1], or one for each position: [len(positions)] and [rounds, len(positions)].
    """
    samples = _feistel(positions, bits, keys)
    outside = np.flatnonzero(samples >= sizes)
    while outside.size:
        keys_outside = keys if keys.shape[1] == 1 else keys[:, outside]
        new_places = _feistel(samples[outside], bits, keys_outside)
        samples[outside] = new_places
        outside = outside[new_places >= (sizes if sizes.size == 1 else sizes[outside])]
    return samples


def _feistel(values: UInt64Array, bits: int, keys: UInt32Array) -> UInt64Array:
    """Return a keyed bijection of [0, 2**bits); the two halves alternately mask each other."""
    low_bits = (bits + 1) // 2
    masks = np.uint32((1 << (bits - low_bits)) - 1), np.uint32((1 << low_bits) - 1)
    halves = [
        (values >> np.uint64(low_bits)).astype(np.uint32),
        (values & np.uint64(masks[1])).astype(np.uint32),
    ]
    mask_bits = np.empty_like(halves[0])
    scratch = np.empty_like(halves[0])
    for turn, key in enumerate(keys):
        side = turn % 2
        np.add(halves[1 - side], key, out=mask_bits)
        _mix32(mask_bits, scratch)
        mask_bits &= masks[side]
        halves[side] ^= mask_bits
    samples = halves[0].astype(np.uint64)
    samples <<= np.uint64(low_bits)
    samples |= halves[1]
    return samples


# Arrays: to convert a scalar at each call takes longer than the arithmetic on a few hundred numbers.
_MIX32_ROUNDS = tuple(
    (np.array(shift, np.uint32), np.array(factor, np.uint32))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B))
)
_MIX32_LAST_SHIFT = np.array(16, dtype=np.uint32)


def _mix32(x: UInt32Array, scratch: UInt32Array) -> None:
    """Mix in place with the integer hash of lowest bias of C. Wellons' hash prospector (2018)."""
    for shift, factor in _MIX32_ROUNDS:
        np.right_shift(x, shift, out=scratch)
        x ^= scratch
        x *= factor
    np.right_shift(x, _MIX32_LAST_SHIFT, out=scratch)
    x ^= scratch


def mix64(x: UInt64Array, key: np.uint64) -> UInt64Array:
    """SplitMix64 (Steele, Lea and Flood, 2014) with its counter starting at the key."""
    x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + key
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class BlockShuffled:
    """A permutation of all samples in each epoch in which a window's samples come from few blocks.

    Blocks of `block` neighbouring samples are permuted. Then samples are permuted within windows of
    `window` successive positions, rounded up to whole blocks. If n is not a multiple of `block`,
    one block is shorter; it is permuted like the others.

    Raises ValueError if n, block or window is below 1.
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
        check_positions(self, epoch, start, stop)
        layout = _Layout.of(self, epoch)
        return _in_blocks(
            start,
            stop,
            lambda positions: layout.samples(layout.shuffle(positions.astype(np.int64))),
        )


@dataclass(frozen=True)
class _Layout:
    """The positions of the blocks of one epoch.

    There are as many slots as blocks. The short block is in slot `short` and ends at position
    `end`; it lacks `lacking` samples, by which the positions of all later blocks are shifted
    forward. Without a short block, `end` is the end of the epoch.
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
        content = key_bytes("blocks", order.seed, epoch, 24)
        block_key, window_key, turn = np.frombuffer(content, dtype="<u8")
        whole_blocks, remainder = divmod(order.n, order.block)
        short = int(turn) % (whole_blocks + 1) if remainder else whole_blocks
        return cls(
            n=order.n,
            block=order.block,
            whole_blocks=whole_blocks,
            short=short,
            end=short * order.block + remainder,
            lacking=order.block - remainder if remainder else 0,
            window=-(-order.window // order.block) * order.block,
            block_key=block_key,
            window_key=window_key,
        )

    def shuffle(self, positions: Int64Array) -> Int64Array:
        """Permute positions within their windows."""
        windows = (positions + self.lacking * (positions >= self.end)) // self.window
        begins = self._begin(windows)
        sizes = np.minimum(self._begin(windows + 1), self.n) - begins
        for size in np.unique(sizes):  # most windows have the same size
            of_size = np.flatnonzero(sizes == size)
            offsets = (positions - begins)[of_size].astype(np.uint64)
            numbers = windows[of_size].astype(np.uint64)
            shuffled = permuted_apart(offsets, int(size), numbers, self.window_key)
            begins[of_size] += shuffled.astype(np.int64)
        return begins

    def samples(self, positions: Int64Array) -> Int64Array:
        """Return the samples at positions of the order in which only whole blocks are permuted."""
        places, within = np.divmod(positions + self.lacking * (positions >= self.end), self.block)
        blocks = np.full_like(places, self.whole_blocks)
        full_rows = np.flatnonzero(places != self.short)
        numbers = (places - (places > self.short))[full_rows].astype(np.uint64)
        keys = round_keys(np.zeros(1, dtype=np.uint64), self.whole_blocks, self.block_key)
        blocks[full_rows] = permute(numbers, self.whole_blocks, keys)
        return blocks * self.block + within

    def _begin(self, windows: Int64Array) -> Int64Array:
        begins = windows * self.window
        begins -= self.lacking * (begins > self.short * self.block)
        return begins


def permuted_apart(
    offsets: UInt64Array, size: int, domains: UInt64Array, key: np.uint64
) -> UInt64Array:
    """Permute offsets within [0, size), with a separate permutation for each domain.

    Args:
        domains: the domain of each offset; cheapest if equal domains are neighbours.
    """
    first = np.ones(domains.size, dtype=bool)
    np.not_equal(domains[1:], domains[:-1], out=first[1:])
    runs = np.flatnonzero(first)
    keys = round_keys(domains[runs], size, key)
    return permute(offsets, size, np.repeat(keys, np.diff(runs, append=domains.size), axis=1))


def round_keys(domains: UInt64Array, size: int, key: np.uint64) -> UInt32Array:
    """Return round keys for permutations of [0, size), another one for each domain, [rounds, len(domains)]."""
    rounds = rounds_for(size)
    turns = np.arange(rounds, dtype=np.uint64)[:, None]
    return (mix64(domains * np.uint64(rounds) + turns, key) >> np.uint64(32)).astype(np.uint32)


@dataclass(frozen=True)
class StepPlan:
    """The samples of one step over all ranks: positions start … start+count-1 of an epoch.

    `cursor` is the number of samples before it since the order began, `dropped` the number of those that
    `data.drop_last` leaves out, beside the step: before it, at the end of the epoch before, or after it, at
    the end of its own.
    """

    cursor: int
    epoch: int
    start: int
    count: int
    dropped: int = 0

    @property
    def after(self) -> int:
        """The cursor after the step, at which no sample is that the step left out."""
        return self.cursor + self.count + self.dropped


@runtime_checkable
class Laned(Protocol):
    """An order whose samples belong to lanes, each of which is read by one rank only."""

    @property
    def lanes(self) -> int: ...

    def lane_of(self, epoch: int, start: int, stop: int) -> Int64Array:
        """Return the lanes of the samples at positions start … stop-1, int64 [stop - start]."""
        ...


@runtime_checkable
class Costly(Protocol):
    """A source whose samples differ in cost."""

    def costs(self, indices: Int64Array) -> Int64Array:
        """Return the cost of each sample, in any unit, without reading it; int64 [len(indices)]."""
        ...


def plan_step(
    cursor: int, samples_per_epoch: int, global_batch: int, drop_last: bool = False
) -> StepPlan:
    """Plan the step at a cursor: global_batch samples, or the rest of the epoch if that is less.

    Args:
        drop_last: leave out the rest of an epoch that is less.

    Raises:
        ValueError: that leaves out all of every epoch.
    """
    epoch, start = divmod(cursor, samples_per_epoch)
    remaining = samples_per_epoch - start
    if not drop_last:
        return StepPlan(cursor, epoch, start, min(global_batch, remaining))
    if samples_per_epoch < global_batch:
        raise ValueError(
            f"data.drop_last leaves out every sample: an epoch has {samples_per_epoch:,}, fewer than a global batch "
            f"of {global_batch:,}; lower train.batch_size or gradient_accumulation_steps, or set data.drop_last: false"
        )
    dropped_samples = 0
    if remaining < global_batch:  # the batch has grown since
        epoch, start, remaining, dropped_samples = epoch + 1, 0, samples_per_epoch, remaining
    tail = remaining - global_batch
    dropped_samples += tail if tail < global_batch else 0
    return StepPlan(cursor, epoch, start, global_batch, dropped_samples)


def divide_step(plan: StepPlan, slices: int, lanes: Laned | None = None) -> Sequence[Places]:
    """Divide a step into slices; return the places of each slice's samples.

    Slices are contiguous and their sizes differ by at most one. If the order has at least as many
    lanes as slices, slices follow the lanes instead: lane k of L belongs to slice k · slices // L.
    """
    if lanes is not None and lanes.lanes >= slices:
        of_place = lanes.lane_of(plan.epoch, plan.start, plan.start + plan.count)
        owner = of_place * slices // lanes.lanes
        return [np.flatnonzero(owner == number) for number in range(slices)]
    ends = [plan.count * number // slices for number in range(slices + 1)]
    return [range(begin, end) for begin, end in pairwise(ends)]


def balance_costs(costs: Int64Array, slices: int) -> Sequence[Places]:
    """Divide samples of different costs into slices of similar cost; return each slice's places.

    Samples are dealt by descending cost, back and forth over the slices: their counts differ by at
    most one, their costs by little, so that no rank waits long for another.
    """
    turn, seat = np.divmod(np.arange(costs.size), slices)
    slice_of = np.empty(costs.size, dtype=np.int64)
    slice_of[np.argsort(-costs, kind="stable")] = np.where(turn % 2, slices - 1 - seat, seat)
    return [np.flatnonzero(slice_of == number) for number in range(slices)]


def samples_at(samples: Int64Array, places: Places) -> Int64Array:
    """Return the samples of a global batch at the given places."""
    if isinstance(places, range):
        return samples[places.start : places.stop]
    return samples[places]


def micro_slices(size: int, batch_size: int) -> list[tuple[int, int]]:
    """Cut into the fewest slices of at most batch_size samples; sizes differ by at most one."""
    parts = -(-size // batch_size)
    return [(size * i // parts, size * (i + 1) // parts) for i in range(parts)]
