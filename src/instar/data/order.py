"""The one global order of samples: a pure function of (seed, epoch, position).

An order knows nothing of ranks, workers or batch sizes, and holds nothing but a few integers:
any position of any epoch is reached at once.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]
UInt32Array = NDArray[np.uint32]
UInt64Array = NDArray[np.uint64]

OrderKind = Literal["shuffled", "sequential", "random"]

_BLOCK = 1 << 16  # positions worked on at once: the temporaries stay in the CPU's cache


class Order(Protocol):
    """Which sample stands at which position of which epoch."""

    @property
    def samples_per_epoch(self) -> int: ...

    def indices(self, epoch: int, start: int, stop: int) -> Int64Array:
        """The samples at positions start … stop-1 of an epoch, int64 [stop - start].

        Raises IndexError where the positions are not within the epoch.
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
        check(self, epoch, start, stop)
        return np.arange(start, stop, dtype=np.int64)


@dataclass(frozen=True)
class Shuffled:
    """Every sample once per epoch, each epoch in a permutation of its own.

    A keyed Feistel network permutes the smallest power of two that holds n; positions that land
    outside [0, n) are sent through again until they land inside (cycle walking: Black and
    Rogaway, "Ciphers with Arbitrary Finite Domains", 2002), which leaves a bijection of [0, n).
    """

    n: int
    seed: int

    @property
    def samples_per_epoch(self) -> int:
        return self.n

    def indices(self, epoch: int, start: int, stop: int) -> Int64Array:
        check(self, epoch, start, stop)
        drawn = key_bytes("shuffled", self.seed, epoch, 4 * rounds_for(self.n))
        keys = np.frombuffer(drawn, dtype="<u4")[:, None]
        samples = np.empty(stop - start, dtype=np.int64)
        for begin in range(start, stop, _BLOCK):
            end = min(begin + _BLOCK, stop)
            positions = np.arange(begin, end, dtype=np.uint64)
            samples[begin - start : end - start] = permute(positions, self.n, keys)
        return samples


@dataclass(frozen=True)
class RandomWindows:
    """Each position draws one of n starts, independently and with replacement.

    `samples_per_epoch` says how many draws are called an epoch.
    """

    n: int
    samples_per_epoch: int
    seed: int

    def indices(self, epoch: int, start: int, stop: int) -> Int64Array:
        check(self, epoch, start, stop)
        key = np.uint64(int.from_bytes(key_bytes("random", self.seed, epoch, 8), "little"))
        samples = np.empty(stop - start, dtype=np.int64)
        for begin in range(start, stop, _BLOCK):
            end = min(begin + _BLOCK, stop)
            drawn = mix64(np.arange(begin, end, dtype=np.uint64), key) % np.uint64(self.n)
            samples[begin - start : end - start] = drawn
        return samples


def make_order(
    kind: OrderKind, n: int, seed: int, *, samples_per_epoch: int | None = None
) -> Order:
    """The order named by `data.order` over a source of n samples.

    `samples_per_epoch` counts only for "random" (default n): how many draws make an epoch.
    Raises ValueError where n or samples_per_epoch is below 1.
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


def check(order: Order, epoch: int, start: int, stop: int) -> None:
    """Raises IndexError where positions start … stop-1 are not within the epoch."""
    if epoch < 0 or not 0 <= start <= stop <= order.samples_per_epoch:
        raise IndexError(
            f"positions {start}..{stop} of epoch {epoch} are not within an epoch of "
            f"{order.samples_per_epoch} samples"
        )


def key_bytes(purpose: str, seed: int, epoch: int, count: int) -> bytes:
    """Bytes that look drawn at random, the same on every machine."""
    return hashlib.shake_256(f"instar/{purpose}/{seed}/{epoch}".encode()).digest(count)


def rounds_for(n: int) -> int:
    """Few bits mix slowly: a small domain needs more rounds to reach every permutation alike."""
    return 8 if n > 1024 else 24


def permute(positions: UInt64Array, n: int, keys: UInt32Array) -> UInt64Array:
    """Where a keyed permutation of [0, n) sends each position.

    Args:
        keys: [rounds, 1], or [rounds, len(positions)] where each position has keys of its own.
    """
    bits = (n - 1).bit_length()
    samples = _feistel(positions, bits, keys)
    outside = np.flatnonzero(samples >= n)
    while outside.size:
        of_outside = keys if keys.shape[1] == 1 else keys[:, outside]
        walked = _feistel(samples[outside], bits, of_outside)
        samples[outside] = walked
        outside = outside[walked >= n]
    return samples


def _feistel(values: UInt64Array, bits: int, keys: UInt32Array) -> UInt64Array:
    """A keyed bijection of [0, 2**bits): the halves take turns at being masked by the other."""
    low_bits = (bits + 1) // 2
    masks = np.uint32((1 << (bits - low_bits)) - 1), np.uint32((1 << low_bits) - 1)
    halves = [
        (values >> np.uint64(low_bits)).astype(np.uint32),
        (values & np.uint64(masks[1])).astype(np.uint32),
    ]
    hashed = np.empty_like(halves[0])
    scratch = np.empty_like(halves[0])
    for turn, key in enumerate(keys):
        side = turn % 2
        np.add(halves[1 - side], key, out=hashed)
        _mix32(hashed, scratch)
        hashed &= masks[side]
        halves[side] ^= hashed
    samples = halves[0].astype(np.uint64)
    samples <<= np.uint64(low_bits)
    samples |= halves[1]
    return samples


def _mix32(x: UInt32Array, scratch: UInt32Array) -> None:
    """In place, the integer hash with the lowest bias of C. Wellons' hash prospector (2018)."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        np.right_shift(x, np.uint32(shift), out=scratch)
        x ^= scratch
        x *= np.uint32(factor)
    np.right_shift(x, np.uint32(16), out=scratch)
    x ^= scratch


def mix64(x: UInt64Array, key: np.uint64) -> UInt64Array:
    """SplitMix64 (Steele, Lea and Flood, 2014) with its counter starting at the key."""
    x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + key
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
