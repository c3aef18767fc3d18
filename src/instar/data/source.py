"""Sources, which read samples by index: in memory, token windows, documents; weights and costs; in worker processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import numpy as np
import xxhash
from numpy.typing import NDArray

from instar.config.errors import ConfigError
from instar.data.columns import Columns, Ragged, join_columns, leaves, pick
from instar.data.order import Int64Array
from instar.processes.pool import Workers

TokenArray = NDArray[np.uint16] | NDArray[np.uint32]

IGNORED = -1
"""The target of a position that has none."""


class Source(Protocol):
    """Samples with random access by index; each index always gives the same sample."""

    @property
    def fingerprint(self) -> str:
        """Content hash: equal for two sources if and only if they hold the same samples."""
        ...

    def __len__(self) -> int: ...

    def read(self, indices: Int64Array, epoch: int = 0) -> Columns:
        """Return columns with the samples in the order of `indices`.

        Args:
            epoch: the number of passes through the data before this one; used only by sources that
                draw random numbers for every sample.
        """
        ...

    def weights(self, indices: Int64Array) -> float:
        """Return the sum of the samples' loss weights, without reading them."""
        ...


def check_indices(indices: Int64Array, length: int) -> None:
    """Raise IndexError if an index is outside 0 … length-1."""
    # as unsigned numbers, negative ones exceed every length: one pass instead of two
    if indices.size and indices.view(np.uint64).max() >= length:
        raise IndexError(f"samples {indices.min()}..{indices.max()} of {length}")


class Measure(Protocol):
    """The loss weights of samples as a transform leaves them."""

    def check(self, sample: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a transformed sample as it is trained on. Raises ValueError if it cannot be."""
        ...

    def weights(self, columns: Columns) -> NDArray[np.float64]:
        """Return the loss weight of each sample, [samples]."""
        ...


def measure_of(source: object) -> Measure | None:
    """Return what measures a source's samples once they are read; None: `Source.weights` knows."""
    measure: Measure | None = getattr(source, "measure", None)
    return measure


@runtime_checkable
class Closable(Protocol):
    """A source that owns processes or open files."""

    def close(self) -> None: ...


def close(source: Source) -> None:
    """Release the resources of a source."""
    if isinstance(source, Closable):
        source.close()


class InMemorySource:
    """A `Source` of in-memory columns; each sample has weight 1.

    Raises:
        ValueError: there are no columns, or their lengths differ.
    """

    def __init__(self, columns: Columns) -> None:
        lengths = {name: len(column) for name, column in leaves(columns)}
        if len(set(lengths.values())) != 1:
            length_text = (
                ", ".join(f"{name} {length}" for name, length in lengths.items()) or "no columns"
            )
            raise ValueError(f"columns must have the same number of samples, got {length_text}")
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
        """Return copies of the samples. Raises IndexError outside 0 … len-1."""
        check_indices(indices, self._length)
        return pick(self.columns, indices)

    def weights(self, indices: Int64Array) -> float:
        return float(indices.size)


@runtime_checkable
class Columnar(Protocol):
    """A source that gives a dense column of all samples without reading the others."""

    def column(self, name: str) -> NDArray[Any]: ...


class TokenSequence(Protocol):
    """One split as a flat sequence of tokens, independent of how they are stored."""

    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> TokenArray:
        """Return a copy of tokens start … stop-1. Raises IndexError outside the split."""
        ...

    def windows(self, starts: Int64Array, length: int) -> TokenArray:
        """Return tokens start … start+length-1 for each start, [len(starts), length].

        Raises IndexError if a window exceeds the split.
        """
        ...


def windows_of(tokens: int, context: int) -> int:
    """Return how many windows of `context` targets cover all tokens of a text but the first."""
    return max(1, -(-(tokens - 1) // context))


class TokenWindows:
    """Windows of `context` tokens; the targets are the same tokens shifted by one.

    Without a stride, windows are contiguous and the last may be shorter, so that every token but
    the first is a target exactly once; the last is padded with input 0 and target -1. With a
    stride, a window begins at every stride-th token, and only full windows count.

    Raises ConfigError if the split is too short: train splits and strided windows need context + 1
    tokens, held-out splits 2.
    """

    def __init__(self, split: TokenSequence, context: int, stride: int | None = None) -> None:
        min_tokens = context + 1 if split.name == "train" or stride is not None else 2
        if len(split) < min_tokens:
            raise ConfigError.at(
                "model.context",
                f"the {split.name} split has {len(split):,} tokens, fewer than the {min_tokens:,} "
                f"that a context of {context:,} needs",
                "a shorter context or more text",
            )
        self.split = split
        self.context = context
        self.stride = context if stride is None else stride
        self.fingerprint = f"{split.fingerprint}/{context}/{self.stride}"
        if stride is None:
            self._length = -(-(len(split) - 1) // context)
        else:
            self._length = (len(split) - context - 1) // stride + 1
        last_targets = min(context, len(split) - 1 - (self._length - 1) * self.stride)
        self._missing_in_last = context - last_targets

    def __len__(self) -> int:
        return self._length

    def weights(self, indices: Int64Array) -> float:
        """Return the number of targets in the windows."""
        missing = 0
        if self._missing_in_last:
            last = int(np.count_nonzero(indices == self._length - 1))
            missing = self._missing_in_last * last
        return float(indices.size * self.context - missing)

    def read(self, indices: Int64Array, epoch: int = 0) -> dict[str, NDArray[Any]]:  # noqa: ARG002
        """Return `inputs` and `targets`, int64 [len(indices), context], contiguous.

        Raises IndexError outside 0 … len-1.
        """
        check_indices(indices, self._length)
        inputs = np.empty((indices.size, self.context), dtype=np.int64)
        targets = np.empty_like(inputs)
        short_rows = np.flatnonzero(indices == self._length - 1) if self._missing_in_last else ()
        full_rows = np.flatnonzero(indices != self._length - 1) if len(short_rows) else slice(None)
        tokens = self.split.windows(indices[full_rows] * self.stride, self.context + 1)
        inputs[full_rows], targets[full_rows] = tokens[:, :-1], tokens[:, 1:]
        if len(short_rows):
            tail = self.split.read((self._length - 1) * self.stride, len(self.split))
            inputs[short_rows], targets[short_rows] = 0, IGNORED
            inputs[short_rows, : tail.size - 1] = tail[:-1]
            targets[short_rows, : tail.size - 1] = tail[1:]
        return {"inputs": inputs, "targets": targets}


class DocumentSamples:
    """A source with one sample per document, truncated to context + 1 tokens.

    Shorter documents are padded with input 0 and target -1. The separator after a document belongs
    to it. Documents of fewer than two tokens have no target and are not samples.
    """

    def __init__(
        self, split: TokenSequence, sizes: Int64Array, last_separator: NDArray[Any], context: int
    ) -> None:
        """
        Args:
            sizes: tokens of each document of the split, separator included, [documents].
            last_separator: the separator of the last document, which the split does not contain.
        """
        usable = sizes >= 2
        self.split, self.context, self._last = split, context, last_separator
        self._begins: Int64Array = (np.cumsum(sizes) - sizes)[usable]
        self._sizes: Int64Array = np.minimum(sizes[usable], context + 1)
        self.fingerprint = f"{split.fingerprint}/document/{context}"

    def __len__(self) -> int:
        return self._sizes.size

    def weights(self, indices: Int64Array) -> float:
        """Return the number of targets in the samples."""
        return float(self._sizes[indices].sum() - indices.size)

    def read(self, indices: Int64Array, epoch: int = 0) -> dict[str, NDArray[Any]]:  # noqa: ARG002
        """Return `inputs` and `targets`, int64 [len(indices), context], contiguous.

        Raises IndexError outside 0 … len-1.
        """
        check_indices(indices, len(self))
        inputs = np.zeros((indices.size, self.context), dtype=np.int64)
        targets = np.full_like(inputs, IGNORED)
        places = zip(self._begins[indices].tolist(), self._sizes[indices].tolist(), strict=True)
        for row, (begin, size) in enumerate(places):
            tokens: NDArray[Any] = self.split.read(begin, min(begin + size, len(self.split)))
            if tokens.size < size:
                tokens = np.concatenate([tokens, self._last[: size - tokens.size]])
            inputs[row, : size - 1], targets[row, : size - 1] = tokens[:-1], tokens[1:]
        return {"inputs": inputs, "targets": targets}


class WrappedSource:
    """A source over another one, which answers what a subclass does not."""

    source: Source

    @property
    def fingerprint(self) -> str:
        return self.source.fingerprint

    @property
    def measure(self) -> Measure | None:
        return measure_of(self.source)

    def __len__(self) -> int:
        return len(self.source)

    def read(self, indices: Int64Array, epoch: int = 0) -> Columns:
        """See `Source`."""
        return self.source.read(indices, epoch)

    def weights(self, indices: Int64Array) -> float:
        return self.source.weights(indices)

    def close(self) -> None:
        close(self.source)


@dataclass(frozen=True, eq=False)
class _AnnotatedSource(WrappedSource):
    """A source with one known int64 value per sample."""

    source: Source
    values: Int64Array
    """The value of each sample, int64 [samples]."""


class WeightedSource(_AnnotatedSource):
    """A source with a loss weight per sample."""

    def weights(self, indices: Int64Array) -> float:
        return float(self.values[indices].sum())


class CostedSource(_AnnotatedSource):
    """A source with a cost per sample: the work that it takes, in any unit."""

    def costs(self, indices: Int64Array) -> Int64Array:
        # indices may count draws of the samples, see `instar.data.sampling.Draws`
        return self.values[indices % self.values.size]


class WorkerSource(WrappedSource):
    """A source read by worker processes, each of which reads a part of the samples.

    It is also opened in this process, to answer queries that need no reading.
    """

    def __init__(self, open_source: Callable[[], Source], number: int) -> None:
        """
        Args:
            open_source: opens the same source in every process, see `Workers`.
        """
        self.source = open_source()
        self.workers = Workers(open_source, number)

    def read(self, indices: Int64Array, epoch: int = 0) -> Columns:
        """Return the source's samples; raises the source's exceptions, or `WorkerLost`."""
        size = indices.size
        number = max(1, min(len(self.workers), size))
        edges = [size * worker // number for worker in range(number + 1)]
        futures = [
            self.workers.call(worker, "read", indices[begin:end], epoch)
            for worker, (begin, end) in enumerate(pairwise(edges))
        ]
        parts: list[Columns] = [future.result() for future in futures]
        return join_columns(parts) if number > 1 else parts[0]

    def close(self) -> None:
        """Stop the workers. Idempotent."""
        self.workers.close()
