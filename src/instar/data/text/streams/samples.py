"""Samples of a stream, lane by lane: items become documents of tokens, documents become samples."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from instar.config.errors import ConfigError
from instar.data.columns import Columns, Ragged
from instar.data.order import Int64Array
from instar.data.source import IGNORED
from instar.data.text.shards import token_dtype
from instar.data.text.streams.items import ItemStream
from instar.data.text.streams.seek_points import START, SeekPoint, digest_of
from instar.data.text.tokenizer import Tokenizer, in_pieces, separator_of
from instar.distributed.failure import RunFailed

_BATCH_CHARACTERS = 1 << 18

Tokens: TypeAlias = NDArray[Any]
"""uint16 or uint32, as in token shards."""

Documents: TypeAlias = "tuple[int, int, list[Tokens]]"
"""Successive documents of a lane, at least one, with the part and row of the first one's item."""

Note: TypeAlias = "Callable[[SeekPoint], None]"


class StreamChanged(RunFailed):
    """A stream gave other samples than when it was read before."""


class SampleStream(ABC):
    """Samples in lanes. Each lane always has the same samples.

    The *count* of a lane, and an *offset* in it, is a number of its samples or, where documents are packed, of its
    tokens, separators included.
    """

    lanes: int
    fingerprint: str
    unit: str
    """what a count counts, in the plural, such as tokens"""

    @abstractmethod
    def open(self, lane: int, seek: SeekPoint, note: Note) -> Generator[Any, None, int]:
        """Yield a lane's samples from `first_after(seek.offset)` on, and return the lane's count.

        `note` is called with points at which reading can begin.

        Raises StreamChanged if the document at `seek` is another one.
        """

    def first_after(self, offset: int) -> int:
        """Return the first sample that begins at or after an offset."""
        return offset

    def offset_of(self, sample: int) -> int:
        """Return the offset at which a sample begins."""
        return sample

    def samples(self, count: int) -> int:
        """Return the number of samples of a lane."""
        return count

    @abstractmethod
    def weight_of(self, sample: Any) -> float:
        """Return a sample's loss weight."""

    @abstractmethod
    def columns(self, samples: Sequence[Any]) -> Columns:
        """Collate several samples for a step."""

    @abstractmethod
    def measure(self, lane: int, note: Note) -> int | NDArray[np.uint32]:
        """Read a lane to its end and return its count; where documents are not packed, the tokens of each that is a
        sample."""


class TokenLanes:
    """Lanes of tokenized documents: token ids are used as they are, texts are encoded.

    Texts begin and end with what the tokenizer adds to a text, and `separator` is inserted between two of them,
    as in prepared token shards. Documents of ids are what they are.
    """

    def __init__(self, items: ItemStream, tokenizer: Tokenizer, *, ids: bool) -> None:
        self._items, self._tokenizer = items, tokenizer
        self.dtype = token_dtype(tokenizer.vocab_size)
        separator = np.empty(0, np.uint32) if ids else separator_of(tokenizer)
        self.separator: Tokens = separator.astype(self.dtype)
        self.lanes = items.lanes
        self.place = items.place
        self.fingerprint = f"{items.fingerprint}/{tokenizer.fingerprint}"

    def open(self, lane: int, part: int = 0, row: int = 0) -> Iterator[Documents]:
        """Yield batches of a lane's documents from a row of a part on, without empty ones.

        Raises ConfigError at an id outside the vocabulary, after the documents before it.
        """
        for at, first, batch in self._items.open(lane, part, row):
            if isinstance(batch, Ragged):
                yield from self._of_ids(lane, at, first, batch)
            else:
                yield from self._of_texts(at, first, batch)

    def _of_texts(self, part: int, first: int, batch: list[str]) -> Iterator[Documents]:
        before, after = self._tokenizer.before, self._tokenizer.after
        for begin, texts in _some_at_a_time(batch):
            pieces = [list(in_pieces([text])) for text in texts if text]
            encodings = iter(self._tokenizer.encode_batch(list(itertools.chain(*pieces))))
            documents: list[Tokens] = [
                np.concatenate([before, *(next(encodings) for _ in document), after]).astype(
                    self.dtype
                )
                for document in pieces
            ]
            if documents:
                row = first + begin + next(at for at, text in enumerate(texts) if text)
                yield part, row, documents

    def _of_ids(self, lane: int, part: int, first: int, batch: Ragged) -> Iterator[Documents]:
        ids, offsets = batch.flat, batch.offsets - batch.offsets[0]
        size, count = self._tokenizer.vocab_size, len(batch)
        strange = np.flatnonzero((ids < 0) | (ids >= size)) if ids.size else ids
        if strange.size:
            count = int(np.searchsorted(offsets, strange[0], side="right")) - 1
        tokens = ids[: offsets[count]].astype(self.dtype)
        edges = itertools.pairwise(offsets[: count + 1].tolist())
        documents = [tokens[begin:end] for begin, end in edges if begin < end]
        if documents:
            yield part, first + int(np.flatnonzero(np.diff(offsets))[0]), documents
        if strange.size:
            raise ConfigError.of(
                f"token {ids[strange[0]]} is not in the vocabulary of {size:,}",
                where=self._items.place(lane, part, first + count),
                hint="name the tokenizer that made the ids in data.tokenizer",
                key="data.tokenizer",
            )


class _TokenSamples(SampleStream):
    """Samples of at most context + 1 successive tokens of a lane."""

    kind: str

    def __init__(self, tokens: TokenLanes, context: int) -> None:
        self._tokens, self.context = tokens, context
        self.lanes, self.separator = tokens.lanes, tokens.separator
        self.cut = f"{tokens.fingerprint}/{self.kind}"
        """Fingerprint of the lanes with any context."""
        self.fingerprint = f"{self.cut}/{context}"

    def documents(self, lane: int, seek: SeekPoint, note: Note) -> Iterator[list[Tokens]]:
        """Yield batches of a lane's documents from a point on; `note` where each batch begins.

        Raises StreamChanged if the document at the point is another one.
        """
        offset, expected = seek.offset, seek if seek != START else None
        for part, row, documents in self._tokens.open(lane, seek.part, seek.row):
            point = SeekPoint(offset, part, row, digest_of(documents[0]))
            if expected not in (None, point):
                break
            expected = None
            note(point)
            offset += self.count_of(documents)
            yield documents
        if expected is not None:
            raise StreamChanged(
                f"{self._tokens.place(lane, seek.part, seek.row)} is not what it was when it was "
                "read before; a stream must give the same items in the same order every time, "
                "unshuffled: data.order shuffles samples"
            )

    @abstractmethod
    def count_of(self, documents: list[Tokens]) -> int:
        """Return the count of some documents, a separator after the last included."""

    def weight_of(self, sample: Tokens) -> float:
        """Return the number of targets."""
        return float(sample.size - 1)

    def columns(self, samples: Sequence[Tokens]) -> dict[str, NDArray[np.int64]]:
        """Return `inputs` and `targets`, int64 [samples, context]; a short sample is padded with
        input 0 and target IGNORED."""
        inputs = np.empty((len(samples), self.context), dtype=np.int64)
        targets = np.empty_like(inputs)
        for row, sample in enumerate(samples):
            size = sample.size - 1
            inputs[row, :size], targets[row, :size] = sample[:-1], sample[1:]
            inputs[row, size:], targets[row, size:] = 0, IGNORED
        return {"inputs": inputs, "targets": targets}


class PackedStream(_TokenSamples):
    """Packed samples: a lane's documents are concatenated and cut into windows, as in `TokenWindows`.

    Every token of a lane but the first is a target once; a lane's last window may be shorter.
    """

    kind, unit = "packed", "tokens"
    spacing = 1 << 16

    def open(
        self, lane: int, seek: SeekPoint = START, note: Note = lambda _: None
    ) -> Generator[Tokens, None, int]:
        begin, context = seek.offset, self.context
        offset = -begin % context
        """tokens before the first sample"""
        pending: list[Tokens] = []
        size = 0
        between: tuple[Tokens, ...] = ()
        for documents in self.documents(lane, seek, note):
            for document in documents:
                pending += (*between, document)
                size += document.size + sum(part.size for part in between)
                between = (self.separator,)
            if size - offset > context:
                tokens = np.concatenate(pending)
                end = offset + (size - offset - 1) // context * context
                for first in range(offset, end, context):
                    yield tokens[first : first + context + 1]
                pending = [tokens[end:].copy()]
                begin, size, offset = begin + end, size - end, 0
        if size - offset > 1:
            yield np.concatenate(pending)[offset:]
        return begin + size

    def count_of(self, documents: list[Tokens]) -> int:
        return sum(document.size + self.separator.size for document in documents)

    def measure(self, lane: int, note: Note) -> int:
        total = sum(map(self.count_of, self.documents(lane, START, note)))
        return max(0, total - self.separator.size)

    def first_after(self, offset: int) -> int:
        return -(-offset // self.context)

    def offset_of(self, sample: int) -> int:
        return sample * self.context

    def samples(self, count: int) -> int:
        return PackedLane(count, self.context).samples


class DocumentStream(_TokenSamples):
    """Unpacked samples: one document with its separator each, truncated to context + 1 tokens.

    Documents too short to have a target are skipped.
    """

    kind, unit = "documents", "documents"
    spacing = 1 << 8

    def open(
        self, lane: int, seek: SeekPoint = START, note: Note = lambda _: None
    ) -> Generator[Tokens, None, int]:
        number = seek.offset
        for documents in self.documents(lane, seek, note):
            for document in documents:
                sample = np.concatenate([document[: self.context + 1], self.separator])
                if sample.size > 1:
                    number += 1
                    yield sample[: self.context + 1]
        return number

    def count_of(self, documents: list[Tokens]) -> int:
        return sum(document.size + self.separator.size > 1 for document in documents)

    def measure(self, lane: int, note: Note) -> NDArray[np.uint32]:
        sizes = [np.empty(0, dtype=np.uint32)]
        for documents in self.documents(lane, START, note):
            of_each = (document.size + self.separator.size for document in documents)
            sizes.append(np.fromiter(of_each, dtype=np.uint32))
        all_sizes = np.concatenate(sizes)
        return all_sizes[all_sizes > 1]


@dataclass(frozen=True)
class PackedLane:
    """The samples of a packed lane with `tokens` tokens."""

    tokens: int
    context: int

    @property
    def samples(self) -> int:
        return max(0, -(-(self.tokens - 1) // self.context))

    def total(self, numbers: Int64Array) -> float:
        """Return the number of targets in the given samples."""
        missing = self.samples * self.context - (self.tokens - 1)
        last = np.count_nonzero(numbers == self.samples - 1)
        return float(numbers.size * self.context - missing * last)


@dataclass(frozen=True, eq=False)
class DocumentLane:
    """The samples of an unpacked lane: documents of these sizes in tokens, [samples]."""

    sizes: NDArray[np.uint32]
    context: int

    @property
    def samples(self) -> int:
        return len(self.sizes)

    def total(self, numbers: Int64Array) -> float:
        """Return the number of targets in the given samples."""
        targets = np.minimum(self.sizes[numbers].astype(np.int64) - 1, self.context)
        return float(targets.sum())


LaneWeights: TypeAlias = PackedLane | DocumentLane
"""The loss weights of a lane's samples, known without reading them."""


def _some_at_a_time(texts: list[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield batches of texts with the number of the first, small enough that the first samples are
    available soon."""
    begin = size = 0
    for end, text in enumerate(texts, 1):
        size += len(text)
        if size >= _BATCH_CHARACTERS or end == len(texts):
            yield begin, texts[begin:end]
            begin, size = end, 0
