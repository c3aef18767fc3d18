"""Samples that lie in memory; and what is known of samples without reading them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import xxhash

from instar.data.columns import Columns, Ragged, leaves, pick
from instar.data.order import Int64Array
from instar.data.source import Source, close


class Samples:
    """A `Source` of columns in memory; each sample weighs 1.

    Raises ValueError where there is no column, or columns differ in length.
    """

    def __init__(self, columns: Columns) -> None:
        lengths = {name: len(column) for name, column in leaves(columns)}
        if len(set(lengths.values())) != 1:
            told = ", ".join(f"{name} {length}" for name, length in lengths.items()) or "no columns"
            raise ValueError(f"columns must have the same number of samples, got {told}")
        self.columns = columns
        self._length = next(iter(lengths.values()))

    @cached_property
    def fingerprint(self) -> str:
        digest = xxhash.xxh3_128()
        for name, column in leaves(self.columns):
            arrays = (column.flat, column.sizes) if isinstance(column, Ragged) else (column,)
            for array in arrays:
                digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
                digest.update(array.tobytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        return self._length

    def read(self, indices: Int64Array, epoch: int = 0) -> Columns:  # noqa: ARG002
        """Copies. Raises IndexError outside 0 … len-1."""
        if indices.size and (indices.min() < 0 or indices.max() >= self._length):
            raise IndexError(f"samples {indices.min()}..{indices.max()} of {self._length}")
        return pick(self.columns, indices)

    def weights(self, indices: Int64Array) -> float:
        return float(indices.size)


@dataclass(frozen=True, eq=False)
class _Known:
    """The samples of a source, of each of which something is known without reading it."""

    source: Source
    each: Int64Array
    """int64 [samples]"""

    @property
    def fingerprint(self) -> str:
        return self.source.fingerprint

    def __len__(self) -> int:
        return len(self.source)

    def read(self, indices: Int64Array, epoch: int = 0) -> Columns:
        """See `Source`."""
        return self.source.read(indices, epoch)

    def weights(self, indices: Int64Array) -> float:
        return self.source.weights(indices)

    def close(self) -> None:
        close(self.source)


class Weighed(_Known):
    """Samples with a weight each."""

    def weights(self, indices: Int64Array) -> float:
        return float(self.each[indices].sum())


class Costed(_Known):
    """Samples of which each is so much work, in any unit."""

    def costs(self, indices: Int64Array) -> Int64Array:
        return self.each[indices]
