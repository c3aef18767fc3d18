"""What can only be read from its beginning: lanes of documents, and the samples cut from them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from instar.config.errors import ConfigError
from instar.data.columns import Columns, Ragged
from instar.data.shards import token_dtype
from instar.data.source import IGNORED
from instar.data.tokenizer import Tokenizer, in_pieces, separator_of

_BATCH_CHARACTERS = 1 << 18

Tokens: TypeAlias = NDArray[Any]
"""uint16 or uint32, as token shards hold them."""


class Stream(Protocol):
    """Samples in lanes. Each lane is read from its beginning, and gives the same samples each time.

    A sample is kept as `open` gives it; `columns` makes of several what a step takes.
    """

    @property
    def lanes(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...

    def open(self, lane: int) -> Iterator[Any]:
        """A lane's samples from the first on."""
        ...

    def weight_of(self, sample: Any) -> float:
        """A sample's loss weight."""
        ...

    def columns(self, samples: Sequence[Any]) -> Columns: ...


class Items(Protocol):
    """What a stream is made of: texts, or token ids."""

    @property
    def lanes(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...

    def open(self, lane: int) -> Iterator[list[str] | Ragged]:
        """A lane's items from the first on, some at a time: texts, or integers of any type.

        Raises ConfigError at an item that is neither, after those before it.
        """
        ...

    def place(self, lane: int, item: int) -> str:
        """How a person finds an item."""
        ...


class TokenLanes:
    """Lanes of documents as tokens: ids as they are, texts through the tokenizer.

    `separator` stands between two documents that were texts, as in prepared token shards; between
    documents of ids there is none.
    """

    def __init__(self, items: Items, tokenizer: Tokenizer, *, ids: bool) -> None:
        self._items, self._tokenizer = items, tokenizer
        self.dtype = token_dtype(tokenizer.vocab_size)
        separator = separator_of(tokenizer)
        self.separator: Tokens = (separator[:0] if ids else separator).astype(self.dtype)
        self.lanes = items.lanes
        self.fingerprint = f"{items.fingerprint}/{tokenizer.fingerprint}"

    def open(self, lane: int) -> Iterator[list[Tokens]]:
        """A lane's documents from the first on, some at a time; the empty ones are left out.

        Raises ConfigError at an id that is not in the vocabulary, after the documents before it.
        """
        first = 0
        for batch in self._items.open(lane):
            if isinstance(batch, Ragged):
                yield from self._of_ids(lane, first, batch)
            else:
                yield from map(self._of_texts, _some_at_a_time(batch))
            first += len(batch)

    def _of_texts(self, texts: list[str]) -> list[Tokens]:
        pieces = [list(in_pieces([text])) for text in texts if text]
        encoded = iter(self._tokenizer.encode_batch(list(itertools.chain(*pieces))))
        return [
            np.concatenate([next(encoded) for _ in document]).astype(self.dtype)
            for document in pieces
        ]

    def _of_ids(self, lane: int, first: int, batch: Ragged) -> Iterator[list[Tokens]]:
        ids, offsets = batch.flat, batch.offsets - batch.offsets[0]
        size, whole = self._tokenizer.vocab_size, len(batch)
        strange = np.flatnonzero((ids < 0) | (ids >= size)) if ids.size else ids
        if strange.size:
            whole = int(np.searchsorted(offsets, strange[0], side="right")) - 1
        tokens = ids[: offsets[whole]].astype(self.dtype)
        edges = itertools.pairwise(offsets[: whole + 1].tolist())
        yield [tokens[begin:end] for begin, end in edges if begin < end]
        if strange.size:
            raise ConfigError.one(
                f"token {ids[strange[0]]} is not in the vocabulary of {size:,}",
                where=self._items.place(lane, first + whole),
                hint="name the tokenizer that made the ids in data.tokenizer",
                key="data.tokenizer",
            )


class PackedStream:
    """A lane's documents end to end, cut into windows as `TokenWindows` cuts a split.

    Every token of a lane but its first is a target once; a lane's last window may be ragged.
    """

    def __init__(self, tokens: TokenLanes, context: int) -> None:
        self._tokens, self._context = tokens, context
        self.lanes = tokens.lanes
        self.fingerprint = f"{tokens.fingerprint}/packed/{context}"

    def open(self, lane: int) -> Iterator[Tokens]:
        held: list[Tokens] = []
        size = 0
        between: tuple[Tokens, ...] = ()
        for documents in self._tokens.open(lane):
            for document in documents:
                held += (*between, document)
                size += document.size + sum(part.size for part in between)
                between = (self._tokens.separator,)
            if size > self._context:
                tokens = np.concatenate(held)
                end = (size - 1) // self._context * self._context
                for begin in range(0, end, self._context):
                    yield tokens[begin : begin + self._context + 1]
                held = [tokens[end:].copy()]
                size -= end
        if size > 1:
            yield np.concatenate(held)

    def weight_of(self, sample: Tokens) -> float:
        """How many targets it has."""
        return float(sample.size - 1)

    def columns(self, samples: Sequence[Tokens]) -> dict[str, NDArray[np.int64]]:
        """`inputs` and `targets`, int64 [samples, context]."""
        return _windows(samples, self._context)


class DocumentStream:
    """One document with the separator after it is one sample, cut off after context + 1 tokens.

    A document too short to have a target is none.
    """

    def __init__(self, tokens: TokenLanes, context: int) -> None:
        self._tokens, self._context = tokens, context
        self.lanes = tokens.lanes
        self.fingerprint = f"{tokens.fingerprint}/documents/{context}"

    def open(self, lane: int) -> Iterator[Tokens]:
        for documents in self._tokens.open(lane):
            for document in documents:
                sample = np.concatenate([document[: self._context + 1], self._tokens.separator])
                if sample.size > 1:
                    yield sample[: self._context + 1]

    def weight_of(self, sample: Tokens) -> float:
        """How many targets it has."""
        return float(sample.size - 1)

    def columns(self, samples: Sequence[Tokens]) -> dict[str, NDArray[np.int64]]:
        """`inputs` and `targets`, int64 [samples, context]."""
        return _windows(samples, self._context)


def _some_at_a_time(texts: list[str]) -> Iterator[list[str]]:
    """Few enough that the first samples need not wait for them long."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _windows(samples: Sequence[Tokens], context: int) -> dict[str, NDArray[np.int64]]:
    """What a sample lacks is input 0 and target IGNORED."""
    inputs = np.empty((len(samples), context), dtype=np.int64)
    targets = np.empty_like(inputs)
    for row, sample in enumerate(samples):
        size = sample.size - 1
        inputs[row, :size], targets[row, :size] = sample[:-1], sample[1:]
        inputs[row, size:], targets[row, size:] = 0, IGNORED
    return {"inputs": inputs, "targets": targets}
