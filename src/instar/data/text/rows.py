"""Rows of a Hugging Face data set as documents, and the index of the training rows.

Rows become token shards like other text. Next to the shards, `index-train.safetensors` holds the
rows of the training split (`chosen`) and the tokens of each, with its separator (`counts`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import safetensors
import safetensors.numpy
import xxhash
from numpy.typing import NDArray

from instar.config.errors import ConfigError
from instar.data.order import Int64Array
from instar.data.split import Parts
from instar.data.text.corpus import Corpus, Part, clip
from instar.data.text.shards import TokenDataset, open_dataset, splits_fingerprint, write_once
from instar.record.progress import track_items

if TYPE_CHECKING:
    import pyarrow as pa


INDEX_FORMAT = "instar-rows/1"
INDEX_FILE = "index-train.safetensors"


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
        raise ConfigError.of(
            f"this is not the index that was written ({INDEX_FORMAT}) for this tokenizer",
            where=str(file),
            hint=hint,
        )
    return index


def open_rows(folder: str | Path) -> TokenDataset:
    """Open prepared rows without accessing their source.

    The fingerprint covers the content: the column, the rows of each split, and the tokenizer.
    Raises ConfigError if anything is missing or damaged.
    """
    dataset = open_dataset(folder)
    index = read_row_index(dataset.path, dataset.tokenizer_fingerprint)
    held_out = {name: shards for name, shards in dataset.shards.items() if name != "train"}
    identity = index.fingerprint(dataset.tokenizer_fingerprint) + splits_fingerprint(
        dataset, held_out
    )
    return replace(
        dataset,
        fingerprint=xxhash.xxh3_128_hexdigest(identity.encode()),
        document_sizes=index.counts,
    )


def text_corpus(column: pa.ChunkedArray) -> Corpus:
    """Return a text column as a corpus; a null is an empty document."""
    import pyarrow.compute as pc

    sizes: Int64Array = pc.binary_length(column).fill_null(0).to_numpy().astype(np.int64)
    return Corpus((_ColumnText(column),), np.array([0, len(column)], dtype=np.int64), sizes)


@dataclass(frozen=True, eq=False)
class _ColumnText:
    """A text column as one file of a corpus."""

    column: pa.ChunkedArray

    def sizes(self) -> Iterator[int]:
        yield from text_corpus(self.column).sizes.tolist()

    def texts(self, parts: list[Part]) -> Iterator[Iterator[str]]:
        for part in parts:
            yield iter([clip(self.column[part[0]].as_py() or "", part)])


def id_bytes(column: pa.ChunkedArray) -> Int64Array:
    """Return the bytes of each row of token ids in Arrow's memory, [rows]."""
    sizes = [_sizes(chunk) * _ids(chunk).dtype.itemsize for chunk in column.chunks]
    return np.concatenate([np.empty(0, dtype=np.int64), *sizes])


def id_pieces(column: pa.ChunkedArray, parts: Parts) -> Iterator[tuple[int, NDArray[Any]]]:
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


def check_ids(column: pa.ChunkedArray, vocab_size: int, name: str, source: str) -> None:
    """Read every id once. Raises ConfigError, naming the row, for an id outside the vocabulary."""
    first_row = 0
    for chunk in track_items(column.chunks, f"reading {source}", "chunks", len(column.chunks)):
        if (problem := _bad_row(chunk, vocab_size)) is not None:
            row, what = problem
            raise ConfigError.of(
                f"row {first_row + row:,} of {source}: {what} in the column {name!r}",
                where="data.tokens_field",
                hint=f"the vocabulary of data.tokenizer has {vocab_size:,} tokens, from 0 on",
                key="data.tokens_field",
            )
        first_row += len(chunk)


def content_fingerprint(column: pa.ChunkedArray) -> str:
    """Return the xxh3-128 of a column's rows, independent of its chunks. Reads all of them."""
    import pyarrow as pa

    values, sizes = xxhash.xxh3_128(), xxhash.xxh3_128()
    for chunk in track_items(column.chunks, "reading rows", "chunks", len(column.chunks)):
        if len(chunk):
            is_list = pa.types.is_nested(chunk.type)
            values.update((_ids(chunk) if is_list else _utf8(chunk)).data)
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
