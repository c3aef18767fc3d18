"""Sources, which read samples by index: token windows, documents, mixtures; weights and costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import numpy as np
import xxhash
from numpy.typing import NDArray

from instar.config.errors import ConfigError
from instar.data.columns import Columns, difference, join_columns, pick
from instar.data.order import Int64Array, Order, check_positions, key_bytes, permuted_apart
from instar.processes.pool import Workers

TokenArray = NDArray[np.uint16] | NDArray[np.uint32]

IGNORED = -1
"""The target of a position that has none."""
PERIOD = 1024
"""The number of positions over which the shares of a mixture are exact."""


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

    def check(self, sample: Mapping[str, Any]) -> None:
        """Raise ValueError if a transformed sample cannot be trained on."""
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


@dataclass(frozen=True, eq=False)
class _AnnotatedSource:
    """A source with one known int64 value per sample."""

    source: Source
    values: Int64Array
    """The value of each sample, int64 [samples]."""

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


class WeightedSource(_AnnotatedSource):
    """A source with a loss weight per sample."""

    def weights(self, indices: Int64Array) -> float:
        return float(self.values[indices].sum())


class CostedSource(_AnnotatedSource):
    """A source with a cost per sample: the work that it takes, in any unit."""

    def costs(self, indices: Int64Array) -> Int64Array:
        return self.values[indices]


class WorkerSource:
    """A source read by worker processes, each of which reads a part of the samples.

    It is also opened in this process, to answer queries that need no reading.
    """

    def __init__(self, open_source: Callable[[], Source], number: int) -> None:
        """
        Args:
            open_source: opens the same source in every process, see `Workers`.
        """
        self._source = open_source()
        self.workers = Workers(open_source, number)
        self.fingerprint = self._source.fingerprint

    def __len__(self) -> int:
        return len(self._source)

    @property
    def measure(self) -> Measure | None:
        return measure_of(self._source)

    def weights(self, indices: Int64Array) -> float:
        return self._source.weights(indices)

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
        return sum(
            self.sources[number].weights(part_indices)
            for number, _, part_indices in self._by_part(indices)
        )

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
class Mixed:
    """Interleaves the parts of a mixture; each part has its own order and its own epochs.

    The interleaving repeats in periods, each shuffled differently, in which every part has exactly its share. An
    epoch is as long as those of all parts together, and the next one continues where it ends: a part whose share
    exceeds its size starts its second epoch before others end their first.
    """

    parts: tuple[PartOrder, ...]
    seed: int

    @property
    def samples_per_epoch(self) -> int:
        return sum(part.order.samples_per_epoch for part in self.parts)

    def indices(self, epoch: int, start: int, stop: int) -> Int64Array:
        check_positions(self, epoch, start, stop)
        count = stop - start
        shares = [part.share for part in self.parts]
        period, offset = divmod(epoch * self.samples_per_epoch + start, sum(shares))
        turns = self._turns(period, offset + count)
        earlier = np.bincount(turns[:offset], minlength=len(shares)).tolist()
        turns = turns[offset:]
        samples = np.empty(count, dtype=np.int64)
        for number, part in enumerate(self.parts):
            rows = np.flatnonzero(turns == number)
            start_draw = period * part.share + earlier[number]
            samples[rows] = part.first + _draws(part.order, start_draw, rows.size)
        return samples

    def _turns(self, period: int, count: int) -> NDArray[np.intp]:
        """Return the part numbers at the `count` positions from the start of a period on."""
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
    seeds = [
        int.from_bytes(key_bytes("part", seed, number, 8), "little") for number in range(len(sizes))
    ]
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
