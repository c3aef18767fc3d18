"""Documents by number, as tokens: rows of text that is tokenised on the way, or of token ids."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from instar.config.errors import ConfigError
from instar.data.corpus import Part, clip
from instar.data.order import Int64Array
from instar.data.shards import TokenArray, token_dtype
from instar.data.tokenizer import TokenIds, Tokenizer, in_pieces, separator_of

if TYPE_CHECKING:
    import pyarrow as pa

_CACHED_TOKENS = 1 << 24
_BATCH_CHARACTERS = 4 << 20


class Stretches(NamedTuple):
    """Tokens begins … begins+sizes-1 of sources, which go to `places` of a flat array; each [n]."""

    sources: Int64Array
    begins: Int64Array
    sizes: Int64Array
    places: Int64Array


class Documents(Protocol):
    """Documents by number. A document's tokens end with the separator to the next one."""

    @property
    def fingerprint(self) -> str: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def separator(self) -> NDArray[Any]:
        """What stands between documents; it may be empty."""
        ...

    def __len__(self) -> int: ...

    def counts(self, documents: Int64Array) -> Int64Array:
        """Tokens of each, [len(documents)]."""
        ...

    def locate(self, documents: Int64Array) -> tuple[Int64Array, Int64Array]:
        """In which source each document's tokens lie, and where they begin there."""
        ...

    def copy(self, stretches: Stretches, out: NDArray[Any]) -> None:
        """Write stretches of sources to a flat array of `dtype`."""
        ...


class TokenDocuments:
    """A column of lists of token ids in Arrow, read where it lies, memory-mapped.

    The sources are Arrow's chunks, in which neighbouring documents lie end to end. The documents
    are as the user made them: nothing is put between them. Eight bytes of memory for each tell
    where it begins.
    """

    def __init__(self, column: pa.ChunkedArray, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        chunks = [chunk for chunk in column.chunks if len(chunk)]
        width = _ids(chunks[0]).dtype.itemsize if chunks else 2
        self.dtype = np.dtype(f"<u{width}")
        self.separator: NDArray[Any] = np.empty(0, dtype=self.dtype)
        self._values: list[NDArray[Any]] = [_ids(chunk).view(self.dtype) for chunk in chunks]
        self._first_rows = np.cumsum([0, *map(len, chunks)])
        self._offsets: Int64Array = np.zeros(len(column) + 1, dtype=np.int64)
        if chunks:
            np.cumsum(np.concatenate([*map(_sizes, chunks)]), out=self._offsets[1:])

    def __len__(self) -> int:
        return self._offsets.size - 1

    def counts(self, documents: Int64Array) -> Int64Array:
        counts: Int64Array = self._offsets[documents + 1] - self._offsets[documents]
        return counts

    def tokens(self, document: int) -> NDArray[Any]:
        """A document's tokens where they lie."""
        (chunk,), (begin,) = self.locate(np.array([document]))
        size = self._offsets[document + 1] - self._offsets[document]
        tokens: NDArray[Any] = self._values[chunk][begin : begin + size]
        return tokens

    def locate(self, documents: Int64Array) -> tuple[Int64Array, Int64Array]:
        chunks = self._first_rows.searchsorted(documents, side="right") - 1
        return chunks, self._offsets[documents] - self._offsets[self._first_rows[chunks]]

    def copy(self, stretches: Stretches, out: NDArray[Any]) -> None:
        values = self._values
        for chunk, begin, size, place in zip(*(each.tolist() for each in stretches), strict=True):
            out[place : place + size] = values[chunk][begin : begin + size]


class TextDocuments:
    """A column of text in Arrow, tokenised when it is read; a null is an empty document.

    Each document is a source. The documents read last stay tokenised, about 2^24 tokens of them, and
    at least one: windows of a long document do not tokenise it again and again.
    """

    def __init__(self, column: pa.ChunkedArray, tokenizer: Tokenizer, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self.dtype = token_dtype(tokenizer.vocab_size)
        separator: NDArray[Any] = separator_of(tokenizer).astype(self.dtype)
        self.separator: TokenArray = separator
        self._column, self._tokenizer = column, tokenizer
        self._known: OrderedDict[int, TokenArray] = OrderedDict()
        self._known_tokens = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._column)

    def text(self, document: int) -> str:
        return self._column[document].as_py() or ""

    def counts(self, documents: Int64Array) -> Int64Array:
        """Tokens of each, [len(documents)]; all but bytes and characters are tokenised for it."""
        separators = self.separator.size
        if self._tokenizer.kind != "bpe":
            import pyarrow.compute as pc

            count = {"byte": pc.binary_length, "char": pc.utf8_length}[self._tokenizer.kind]
            counted = count(self._column).fill_null(0).to_numpy()
            counts: Int64Array = counted[documents].astype(np.int64) + separators
            return counts
        return count_tokens(self._tokenizer, map(self.text, documents.tolist())) + separators

    def locate(self, documents: Int64Array) -> tuple[Int64Array, Int64Array]:
        return documents, np.zeros_like(documents)

    def copy(self, stretches: Stretches, out: NDArray[Any]) -> None:
        tokens = self._tokens({*stretches.sources.tolist()})
        for document, begin, size, place in zip(
            *(each.tolist() for each in stretches), strict=True
        ):
            out[place : place + size] = tokens[document][begin : begin + size]

    def _tokens(self, documents: set[int]) -> dict[int, TokenArray]:
        with self._lock:
            found = {number: self._known[number] for number in documents if number in self._known}
            for number in found:
                self._known.move_to_end(number)
        missing = sorted(documents - found.keys())
        encoded = encode_documents(self._tokenizer, map(self.text, missing))
        for number, ids in zip(missing, encoded, strict=True):
            tokens: TokenArray = np.concatenate([ids.astype(self.dtype), self.separator])
            found[number] = tokens
            with self._lock:
                if number not in self._known:
                    self._known[number] = tokens
                    self._known_tokens += tokens.size
                while self._known_tokens > _CACHED_TOKENS and len(self._known) > 1:
                    self._known_tokens -= self._known.popitem(last=False)[1].size
        return found


def encode_documents(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[TokenIds]:
    """The tokens of each text, without separators; several texts are tokenised at once."""
    batch: list[list[str]] = []
    characters = 0

    def tokens() -> Iterator[TokenIds]:
        encoded = iter(tokenizer.encode_batch([piece for pieces in batch for piece in pieces]))
        for pieces in batch:
            parts = [next(encoded) for _ in pieces]
            yield np.concatenate(parts) if parts else np.empty(0, dtype=np.uint32)

    for text in texts:
        batch.append(list(in_pieces([text])))
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield from tokens()
            batch, characters = [], 0
    yield from tokens()


def count_tokens(tokenizer: Tokenizer, texts: Iterable[str]) -> Int64Array:
    """The tokens of each text, without separators."""
    return np.fromiter((ids.size for ids in encode_documents(tokenizer, texts)), dtype=np.int64)


class ColumnText:
    """A column of text as one file of a corpus, so that it is prepared as any other text."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._column = column

    def sizes(self) -> Iterator[int]:
        yield from text_bytes(self._column).tolist()

    def texts(self, parts: list[Part]) -> Iterator[Iterator[str]]:
        for part in parts:
            yield iter([clip(self._column[part[0]].as_py() or "", part)])


def text_bytes(column: pa.ChunkedArray) -> Int64Array:
    """Bytes of UTF-8 of each text, [rows]; none where it is null."""
    import pyarrow.compute as pc

    sizes: Int64Array = pc.binary_length(column).fill_null(0).to_numpy().astype(np.int64)
    return sizes


def check_ids(column: pa.ChunkedArray, vocab_size: int, name: str, source: str) -> None:
    """Read every id once. Raises ConfigError, naming the row, for one that is no token."""
    first_row = 0
    for chunk in column.chunks:
        if (problem := _bad_row(chunk, vocab_size)) is not None:
            row, what = problem
            raise ConfigError.one(
                f"row {first_row + row:,} of {source}: {what} in the column {name!r}",
                where="data.tokens_field",
                hint=f"the vocabulary of data.tokenizer has {vocab_size:,} tokens, from 0 on",
                key="data.tokens_field",
            )
        first_row += len(chunk)


def content_fingerprint(column: pa.ChunkedArray) -> str:
    """The xxh3-128 of a column's rows, however they are cut into chunks. Reads all of them."""
    import pyarrow as pa

    values, sizes = xxhash.xxh3_128(), xxhash.xxh3_128()
    for chunk in column.chunks:
        if len(chunk):
            is_list = pa.types.is_nested(chunk.type)
            values.update((_ids(chunk) if is_list else _utf8(chunk)).data)
            sizes.update(_sizes(chunk).data)
    return xxhash.xxh3_128_hexdigest(values.digest() + sizes.digest())


def _ids(chunk: Any) -> NDArray[Any]:
    """The values of a chunk of lists, end to end, not copied; it has no nulls."""
    ids: NDArray[Any] = chunk.flatten().to_numpy(zero_copy_only=True)
    return ids


def _utf8(chunk: Any) -> NDArray[np.uint8]:
    """The texts of a chunk, end to end, not copied."""
    offsets, content = _text_offsets(chunk), chunk.buffers()[2]
    whole = np.frombuffer(content, dtype=np.uint8) if content else np.empty(0, dtype=np.uint8)
    return whole[offsets[0] : offsets[-1]]


def _sizes(chunk: Any) -> Int64Array:
    """How many ids or bytes each row of a chunk has."""
    import pyarrow as pa

    if pa.types.is_fixed_size_list(chunk.type):
        return np.full(len(chunk), chunk.type.list_size, dtype=np.int64)
    is_list = pa.types.is_nested(chunk.type)
    offsets = chunk.offsets.to_numpy() if is_list else _text_offsets(chunk)
    return np.diff(offsets).astype(np.int64)


def _text_offsets(chunk: Any) -> NDArray[Any]:
    import pyarrow as pa

    dtype = np.int64 if pa.types.is_large_string(chunk.type) else np.int32
    offsets = np.frombuffer(chunk.buffers()[1], dtype=dtype)
    return offsets[chunk.offset : chunk.offset + len(chunk) + 1]


def _bad_row(chunk: Any, vocab_size: int) -> tuple[int, str] | None:
    """The first row that holds something else than tokens, and what that is."""
    if chunk.null_count:
        return int(np.flatnonzero(chunk.is_null().to_numpy(zero_copy_only=False))[0]), "a null"
    lists = chunk.flatten()
    if lists.null_count:
        at = int(np.flatnonzero(lists.is_null().to_numpy(zero_copy_only=False))[0])
        return _row_of(chunk, at), "a null"
    values = lists.to_numpy(zero_copy_only=True)
    if not values.size or (values.min() >= 0 and values.max() < vocab_size):
        return None
    at = int(np.flatnonzero((values < 0) | (values >= vocab_size))[0])
    return _row_of(chunk, at), f"the token {values[at]}"


def _row_of(chunk: Any, at: int) -> int:
    """The row of a chunk without null rows that holds its value `at`."""
    return int(np.cumsum(_sizes(chunk)).searchsorted(at, side="right"))
