"""The difference between two states of a block of words: pure functions on bits.

A *word* is the bit pattern of one element as an unsigned integer, so that +0 and -0 differ and NaN
payloads are kept. A difference is a list of values, stored as byte planes (all lowest bytes, then
all second bytes, …), each compressed on its own; planes above the highest non-zero byte are omitted:

- `gaps`: unchanged words before each changed one. None if the difference is *dense*: it then has a
  value for every word.
- `values`: steps from old to new, zigzag-coded, or the new words. A step counts in units in the
  last place: words of floats are mapped to integers in the order of the floats, so that small
  updates are small numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from instar.config.errors import ConfigError

Words: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]

BLOCK_BYTES = 1 << 25
"""Size of the blocks that tensors are compared in; part of the file format."""
LEVEL = 1
"""Compression level of zstd; higher ones are slower and gain nothing on what is nearly random."""

_MOST_SPARSE, _LEAST_SPARSE = 0.75, 0.25
"""Shares of changed words above which nothing but dense, and below which nothing but sparse, is tried."""


class EncodingError(ValueError):
    """Encoded bytes do not fit the block that they are applied to."""


@dataclass(frozen=True)
class Coding:
    """What values mean: whether words are floats, and whether values are new words or steps."""

    floating: bool
    absolute: bool = False


@dataclass(frozen=True)
class BlockDelta:
    """The encoded difference of a block."""

    n_changed: int
    """number of words that differ"""
    gaps: tuple[bytes, ...] | None
    """planes; None: dense"""
    values: tuple[bytes, ...]

    @property
    def size_bytes(self) -> int:
        return sum(map(len, (*(self.gaps or ()), *self.values)))


def encode_block(old: Words, new: Words, coding: Coding) -> BlockDelta | None:
    """Return the smallest encoding of the difference; None if there is none."""
    differs = old != new
    n_changed = int(np.count_nonzero(differs))
    if not n_changed:
        return None
    deltas = []
    share = n_changed / differs.size
    if share < _MOST_SPARSE or coding.absolute:
        places = np.flatnonzero(differs)
        gaps = np.diff(places, prepend=-1) - 1
        values = _values(old[places], new[places], coding)
        deltas.append(BlockDelta(n_changed, _planes(gaps.astype(np.uint32)), _planes(values)))
    if share > _LEAST_SPARSE:
        deltas.append(BlockDelta(n_changed, None, _planes(_values(old, new, coding))))
    return min(deltas, key=lambda delta: delta.size_bytes)


def apply_block(difference: BlockDelta, words: Words, coding: Coding) -> None:
    """Change a block of old words in place to the new ones.

    Raises:
        EncodingError: the difference is not one of a block of this size; the block is unchanged.
    """
    if difference.gaps is None:
        new = _from_planes(difference.values, words.size, words.dtype)
        words[...] = new if coding.absolute else _apply_steps(words, new, coding)
        return
    places = _places(difference.gaps, difference.n_changed, words.size)
    values = _from_planes(difference.values, places.size, words.dtype)
    words[places] = values if coding.absolute else _apply_steps(words[places], values, coding)


def changed_mask(difference: BlockDelta, size: int) -> npt.NDArray[np.bool_]:
    """Return whether each word of a block of `size` words is changed.

    Those of a dense difference of new words are unknown.

    Raises:
        EncodingError: the difference is not one of a block of this size.
    """
    mask = np.zeros(size, np.bool_)
    if difference.gaps is not None:
        mask[_places(difference.gaps, difference.n_changed, size)] = True
    for plane in difference.values if difference.gaps is None else ():
        mask |= np.frombuffer(decompress(plane, size), np.uint8) != 0
    return mask


def _places(gaps: Sequence[bytes], n_changed: int, size: int) -> npt.NDArray[np.int64]:
    """Return the indices of the changed words of a block of `size` words, in ascending order."""
    if n_changed > size:
        raise EncodingError(f"{n_changed:,} changes in a block of {size:,}")
    places = np.cumsum(_from_planes(gaps, n_changed, np.dtype(np.uint32)), dtype=np.int64)
    places += np.arange(places.size)
    if places.size and places[-1] >= size:
        raise EncodingError(f"a change at {places[-1]:,} in a block of {size:,}")
    return places


def compress(raw: bytes | memoryview) -> bytes:
    """Compress bytes; return them unchanged if that is not shorter."""
    payload: bytes = _zstandard().ZstdCompressor(LEVEL).compress(raw)
    return payload if len(payload) < len(raw) else bytes(raw)


def decompress(payload: bytes, size: int) -> bytes:
    """Inverse of `compress` for bytes that are known to be `size` long.

    Raises:
        EncodingError: they are not.
    """
    if len(payload) == size:
        return payload
    zstandard = _zstandard()
    try:
        # the library allocates what the frame's own header says
        if (content_size := zstandard.frame_content_size(payload)) != size:
            raise EncodingError(f"compressed bytes of length {content_size:,}, not {size:,}")
        raw: bytes = zstandard.ZstdDecompressor().decompress(payload)
    except zstandard.ZstdError as error:
        raise EncodingError(f"compressed bytes are damaged: {error}") from error
    return raw


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError.of(
            "delta checkpoints need zstandard, which is not installed",
            hint="install the extra: pip install 'instar[delta]'",
        ) from error
    return zstandard


def _values(old: Words, new: Words, coding: Coding) -> Words:
    if coding.absolute:
        return new
    steps = _to_ordered(new, coding) - _to_ordered(old, coding)
    top = 8 * steps.itemsize - 1
    zigzag: Words = (steps << 1) ^ np.negative(steps >> top)
    return zigzag


def _apply_steps(old: Words, zigzag: Words, coding: Coding) -> Words:
    steps: Words = np.bitwise_xor(zigzag >> 1, np.negative(zigzag & 1))
    key = _to_ordered(old, coding) + steps
    if not coding.floating:
        return key
    top = 8 * key.itemsize - 1
    ordered_words: Words = np.bitwise_xor(key, ((key >> top) - 1) | (1 << top))
    return ordered_words


def _to_ordered(words: Words, coding: Coding) -> Words:
    """Map words of floats to integers in the order of the floats; others are in order already."""
    if not coding.floating:
        return words
    top = 8 * words.itemsize - 1
    ordered_words: Words = words ^ (np.negative(words >> top) | (1 << top))
    return ordered_words


def _planes(values: Words) -> tuple[bytes, ...]:
    raw = values.view(np.uint8).reshape(-1, values.itemsize)
    used = -(-int(values.max()).bit_length() // 8)
    return tuple(compress(np.ascontiguousarray(raw[:, plane]).data) for plane in range(used))


def _from_planes(planes: Sequence[bytes], size: int, dtype: np.dtype[Any]) -> Words:
    if len(planes) > dtype.itemsize:
        raise EncodingError(f"{len(planes)} planes of words of {dtype.itemsize} bytes")
    raw = np.zeros((size, dtype.itemsize), np.uint8)
    for number, plane in enumerate(planes):
        raw[:, number] = np.frombuffer(decompress(plane, size), np.uint8)
    words: Words = raw.reshape(-1).view(dtype)
    return words
