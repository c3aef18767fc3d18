"""The documents of a source: encoded in parts, and compared with each other; rows of a Hugging Face data set are.

Rows become token shards like other text. Next to the shards, `index-train.safetensors` holds the
rows of the training split (`chosen`) and the tokens of each, with its separator (`counts`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import safetensors
import safetensors.numpy
import xxhash
from numpy.typing import NDArray

from instar.config.errors import ConfigError
from instar.config.language import DataConfig
from instar.data.order import Int64Array
from instar.data.split import Parts, whole_documents
from instar.data.text.corpus import Corpus, Part, clip, open_corpus
from instar.data.text.foreign.token_files import TokenFiles, holds_ids, open_token_files
from instar.data.text.formats import ArrowColumn, is_text
from instar.data.text.hf import column_of, load_rows
from instar.data.text.shards import TokenDataset, open_dataset, splits_fingerprint, write_once
from instar.data.text.tokenizer import Tokenizer, in_pieces, separator_of
from instar.record.progress import Advance, progress, track_items

INDEX_FORMAT = "instar-rows/1"
INDEX_FILE = "index-train.safetensors"
_BATCH_CHARACTERS = min(16, max(4, os.cpu_count() or 1)) << 20
"""Characters encoded at once: `tokenizers` spreads pieces of 2^20 over all cores."""

Pieces = Iterator[tuple[int, NDArray[Any]]]
"""The tokens of a split in order, each with the number of its document in the split; a separator
belongs to the document before it."""


class RowsRecord(msgspec.Struct, frozen=True):
    """The rows that a data set was made from.

    `loaded` is the `datasets` fingerprint, which changes with the files and their times. `content`
    is the xxh3-128 of the column itself.
    """

    rows: int
    loaded: str
    content: str


@dataclass(frozen=True, eq=False)
class RowIndex:
    """Rows of the training split, ascending, and their tokens, separators included; both [n]."""

    record: RowsRecord
    rows: Int64Array
    counts: Int64Array

    def fingerprint(self, tokenizer: str) -> str:
        """Return a hash of the training data, independent of the rows' location and loading."""
        content_hash = xxhash.xxh3_128_hexdigest(f"{self.record.content}{tokenizer}".encode())
        digest = xxhash.xxh3_128(content_hash.encode())
        digest.update(self.rows.data)
        digest.update(self.counts.data)
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of a source: text to encode, a column of token ids, or files of them."""

    corpus: Corpus | None = None
    ids: Any = None
    rows: RowsRecord | None = None
    files: TokenFiles | None = None

    @property
    def sizes(self) -> Int64Array:
        """Return the bytes of each document."""
        texts = self.corpus or self.files
        return id_bytes(self.ids) if texts is None else texts.sizes

    def _ids_of(self, parts: Parts) -> Pieces:
        """Yield the ids of each part, which need not be encoded, with the part's number."""
        return id_pieces(self.ids, parts) if self.files is None else self.files.pieces(parts)

    def digests(self, numbers: Int64Array) -> list[bytes]:
        """Return the xxh3-128 of what each of some documents holds; read them."""
        sizes = self.sizes
        parts, digests = whole_documents(numbers, sizes), []
        with progress("comparing documents", int(sizes[numbers].sum())) as advance:
            if self.corpus is None:
                hashes = [xxhash.xxh3_128() for _ in range(len(numbers))]
                for number, ids in self._ids_of(parts):
                    hashes[number].update(ids.astype("<i8").tobytes())
                return [digest.digest() for digest in hashes]
            for texts in self.corpus.texts(parts):
                digest = xxhash.xxh3_128()
                for text in texts:
                    digest.update(content := text.encode())
                    advance(len(content))
                digests.append(digest.digest())
        return digests

    def tokens(self, parts: Parts, tokenizer: Tokenizer, advance: Advance) -> Pieces:
        """Yield the tokens of the parts; `advance` counts the bytes of their documents."""
        if self.corpus is not None:
            yield from _encode_parts(tokenizer, self.corpus, parts, advance)
            return
        for number, ids in self._ids_of(parts):
            yield number, ids
            advance(ids.nbytes)


def open_text(data: DataConfig, source: str, tokenizer: Tokenizer | None) -> Documents:
    """Open the text of a source, or its files of token ids."""
    if not holds_ids(source):
        return Documents(open_corpus(source, data.text_field))
    return Documents(files=open_token_files(source, _maker_of_ids(data, tokenizer).vocab_size))


def _maker_of_ids(data: DataConfig, tokenizer: Tokenizer | None) -> Tokenizer:
    """Return the tokenizer of token ids. Raises ConfigError if it is to be trained."""
    if tokenizer is None:
        raise ConfigError.at(
            "data.tokenizer",
            f"a {data.tokenizer} tokenizer cannot be trained on token ids",
            "name the tokenizer.json that made them",
        )
    return tokenizer


def open_rows_of(data: DataConfig, tokenizer: Tokenizer | None) -> Documents:
    """Open the rows of a Hugging Face data set. Raises ConfigError for ids that are not tokens."""
    rows = load_rows(data)
    column = column_of(rows, data.tokens_field or data.text_field)
    if data.tokens_field is None:
        column = _as_strings(column, data)
        record = RowsRecord(len(rows), rows._fingerprint, content_fingerprint(column))
        return Documents(text_corpus(column), rows=record)
    vocab_size = _maker_of_ids(data, tokenizer).vocab_size
    check_ids(column, vocab_size, data.tokens_field, data.source)
    record = RowsRecord(len(rows), rows._fingerprint, content_fingerprint(column))
    return Documents(ids=column, rows=record)


def open_held_out(data: DataConfig, source: str, tokenizer: Tokenizer | None) -> Documents:
    """Open the documents of `val_source`."""
    if data.tokens_field is None:
        return open_text(data, source, tokenizer)
    fields = {"source": source, "subset": None, "source_split": "train"}
    return open_rows_of(data.model_copy(update=fields), tokenizer)


def same_documents(
    documents: Documents, other: Documents, numbers: Int64Array, other_numbers: Int64Array
) -> Int64Array:
    """Return for each of some documents of `documents` the first of some of `other` that holds the same, or -1.

    Args:
        numbers, other_numbers: of documents, ascending, [n] and [m]; those compared with themselves may be the
            same.
    """
    matches = np.full(numbers.size, -1, dtype=np.int64)
    sizes, other_sizes = documents.sizes[numbers], other.sizes[other_numbers]
    candidates = np.flatnonzero(np.isin(sizes, other_sizes) & (sizes > 0))
    if documents is other and np.array_equal(numbers, other_numbers):
        values, counts = np.unique(sizes, return_counts=True)
        candidates = np.flatnonzero(np.isin(sizes, values[counts > 1]) & (sizes > 0))
        other_candidates = candidates
    else:
        other_candidates = np.flatnonzero(np.isin(other_sizes, sizes) & (other_sizes > 0))
    if not candidates.size or not other_candidates.size:
        return matches
    keys = documents.digests(numbers[candidates])
    number_of: dict[bytes, int] = {}
    for number, key in zip(
        other_numbers[other_candidates].tolist(),
        keys if other_candidates is candidates else other.digests(other_numbers[other_candidates]),
        strict=True,
    ):
        number_of.setdefault(key, number)
    matches[candidates] = [number_of.get(key, -1) for key in keys]
    return matches


def pieces_of(corpus: Corpus, parts: Parts) -> Iterator[tuple[int, str | None]]:
    """Yield the text of the parts in pieces, each with the part's number; None separates parts."""
    for number, texts in enumerate(corpus.texts(parts)):
        if number:
            yield number - 1, None
        for piece in in_pieces(texts):
            yield number, piece


def _encode_parts(tokenizer: Tokenizer, corpus: Corpus, parts: Parts, advance: Advance) -> Pieces:
    """Yield the tokens of the parts' text, each with what the tokenizer adds to a text, and a separator between
    documents."""
    begin, end, separator = tokenizer.before, tokenizer.after, separator_of(tokenizer)
    batch: list[tuple[int, str | NDArray[Any]]] = []

    def tokens() -> Pieces:
        texts = [text for _, text in batch if isinstance(text, str)]
        encodings = iter(tokenizer.encode_batch(texts))
        for number, piece in batch:
            if isinstance(piece, str):
                yield number, next(encodings)
                advance(len(piece.encode()))
            else:
                yield number, piece

    if not len(parts):  # of a source with a word or two
        return
    characters = 0
    batch.append((0, begin))
    for number, piece in pieces_of(corpus, parts):
        if piece is None:
            batch += [(number, end), (number, separator), (number + 1, begin)]
        else:
            batch.append((number, piece))
            characters += len(piece)
        if characters >= _BATCH_CHARACTERS:
            yield from tokens()
            batch, characters = [], 0
    batch.append((len(parts) - 1, end))
    yield from tokens()


def write_row_index(folder: Path, index: RowIndex, tokenizer: str) -> None:
    """Write the index; `tokenizer` is a fingerprint."""
    metadata = {
        "format": INDEX_FORMAT,
        "index": msgspec.json.encode(index.record).decode(),
        "fingerprint": index.fingerprint(tokenizer),
    }
    tensors = {"chosen": index.rows, "counts": index.counts}
    write_once(folder / INDEX_FILE, safetensors.numpy.save(tensors, metadata=metadata))


def read_row_index(folder: Path, tokenizer: str) -> RowIndex:
    """Read the index. Raises ConfigError if it is missing, damaged, or of another tokenizer."""
    file = folder / INDEX_FILE
    hint = "prepare the data again, in another folder"
    if not file.is_file():
        raise ConfigError.of("the index of the rows is missing", where=str(file), hint=hint)
    try:
        with safetensors.safe_open(file, "numpy") as reader:
            metadata = reader.metadata() or {}
            record = msgspec.json.decode(metadata.get("index", ""), type=RowsRecord)
            index = RowIndex(record, reader.get_tensor("chosen"), reader.get_tensor("counts"))
    except (OSError, safetensors.SafetensorError, msgspec.DecodeError) as error:
        raise ConfigError.of(f"not an index of rows: {error}", where=str(file)) from None
    identity = metadata.get("format"), metadata.get("fingerprint")
    if identity != (INDEX_FORMAT, index.fingerprint(tokenizer)):
        message = f"this is not the index that was written ({INDEX_FORMAT}) for this tokenizer"
        raise ConfigError.of(message, where=str(file), hint=hint)
    return index


def open_rows(folder: str | Path) -> TokenDataset:
    """Open prepared rows without accessing their source.

    The fingerprint covers the content: the column, the rows of each split, and the tokenizer.
    Raises ConfigError if anything is missing or damaged.
    """
    dataset = open_dataset(folder)
    index = read_row_index(dataset.path, dataset.tokenizer_fingerprint)
    held_out = {name: shards for name, shards in dataset.shards.items() if name != "train"}
    identity = index.fingerprint(dataset.tokenizer_fingerprint)
    identity += splits_fingerprint(dataset, held_out)
    fingerprint = xxhash.xxh3_128_hexdigest(identity.encode())
    return replace(dataset, fingerprint=fingerprint, document_sizes=index.counts)


def text_corpus(column: ArrowColumn) -> Corpus:
    """Return a text column as a corpus; a null is an empty document."""
    import pyarrow.compute as pc

    sizes: Int64Array = pc.binary_length(column).fill_null(0).to_numpy().astype(np.int64)
    return Corpus((_ColumnText(column),), np.array([0, len(column)], dtype=np.int64), sizes)


@dataclass(frozen=True, eq=False)
class _ColumnText:
    """A text column as one file of a corpus."""

    column: ArrowColumn

    def sizes(self) -> Iterator[int]:
        yield from text_corpus(self.column).sizes.tolist()

    def texts(self, parts: list[Part]) -> Iterator[Iterator[str]]:
        for part in parts:
            yield iter([clip(self.column[part[0]].as_py() or "", part)])


def _as_strings(column: ArrowColumn, data: DataConfig) -> ArrowColumn:
    """Return a text column that may hold it as bytes. Raises ConfigError for bytes that are not UTF-8."""
    if str(column.type) in ("string", "large_string"):
        return column
    try:
        return column.cast("large_string")
    except ValueError as error:
        message = f"the column {data.text_field!r} of {data.source} is not UTF-8 text: {error}"
        raise ConfigError.at("data.text_field", message) from None


def id_bytes(column: ArrowColumn) -> Int64Array:
    """Return the bytes of each row of token ids in Arrow's memory, [rows]."""
    sizes = [_sizes(chunk) * _ids(chunk).dtype.itemsize for chunk in column.chunks]
    return np.concatenate([np.empty(0, dtype=np.int64), *sizes])


def id_pieces(column: ArrowColumn, parts: Parts) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield the ids of each part (row, first byte, end byte), [n, 3], with the part's number.

    Documents are kept as the user made them: no separator is inserted.
    """
    first = 0
    for chunk in column.chunks:
        low, high = np.searchsorted(parts[:, 0], [first, first + len(chunk)]).tolist()
        ids = _ids(chunk)
        width, begins = ids.dtype.itemsize, np.cumsum(_sizes(chunk)) - _sizes(chunk)
        for number, (row, begin, end) in enumerate(parts[low:high].tolist(), low):
            at = int(begins[row - first])
            yield number, ids[at + begin // width : at + end // width]
        first += len(chunk)


def check_ids(column: ArrowColumn, vocab_size: int, name: str, source: str) -> None:
    """Read every id once. Raises ConfigError, naming the row, for an id outside the vocabulary."""
    first_row = 0
    for chunk in track_items(column.chunks, f"reading {source}", "chunks", len(column.chunks)):
        if (problem := _bad_row(chunk, vocab_size)) is not None:
            row, what = problem
            raise ConfigError.at(
                "data.tokens_field",
                f"row {first_row + row:,} of {source}: {what} in the column {name!r}",
                f"the vocabulary of data.tokenizer has {vocab_size:,} tokens, from 0 on",
            )
        first_row += len(chunk)


def content_fingerprint(column: ArrowColumn) -> str:
    """Return the xxh3-128 of a column's rows, independent of its chunks. Reads all of them."""
    values, sizes = xxhash.xxh3_128(), xxhash.xxh3_128()
    for chunk in track_items(column.chunks, "reading rows", "chunks", len(column.chunks)):
        if len(chunk):
            values.update((_utf8(chunk) if is_text(chunk.type) else _ids(chunk)).data)
            sizes.update(_sizes(chunk).data)
    return xxhash.xxh3_128_hexdigest(values.digest() + sizes.digest())


def _ids(chunk: Any) -> NDArray[Any]:
    """Return the concatenated values of a chunk of lists without nulls, not copied."""
    ids: NDArray[Any] = chunk.flatten().to_numpy(zero_copy_only=True)
    return ids


def _utf8(chunk: Any) -> NDArray[np.uint8]:
    """Return the concatenated UTF-8 of a chunk, not copied."""
    offsets, content = _text_offsets(chunk), chunk.buffers()[2]
    text_bytes = np.frombuffer(content, dtype=np.uint8) if content else np.empty(0, dtype=np.uint8)
    return text_bytes[offsets[0] : offsets[-1]]


def _sizes(chunk: Any) -> Int64Array:
    """Return the number of ids or bytes in each row of a chunk."""
    if hasattr(chunk.type, "list_size"):
        return np.full(len(chunk), chunk.type.list_size, dtype=np.int64)
    offsets = _text_offsets(chunk) if is_text(chunk.type) else chunk.offsets.to_numpy()
    return np.diff(offsets).astype(np.int64)


def _text_offsets(chunk: Any) -> NDArray[Any]:
    dtype = np.int64 if str(chunk.type).startswith("large_") else np.int32
    offsets = np.frombuffer(chunk.buffers()[1], dtype=dtype)
    return offsets[chunk.offset : chunk.offset + len(chunk) + 1]


def _bad_row(chunk: Any, vocab_size: int) -> tuple[int, str] | None:
    """Return the first row that contains other values than tokens, and a description of them."""
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
    """Return the row that holds the value `at`, in a chunk without null rows."""
    return int(np.cumsum(_sizes(chunk)).searchsorted(at, side="right"))
