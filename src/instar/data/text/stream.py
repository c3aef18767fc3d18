"""Streams, read from their beginning only: lanes of documents, and samples cut from them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from instar.config.errors import ConfigError
from instar.config.language import DataConfig
from instar.config.user_code import load_named
from instar.data.columns import Columns, Ragged
from instar.data.source import IGNORED
from instar.data.text.hf import is_ids, is_text, load_stream
from instar.data.text.shards import token_dtype
from instar.data.text.tokenizer import Tokenizer, in_pieces, separator_of

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa


_BATCH_CHARACTERS = 1 << 18

Tokens: TypeAlias = NDArray[Any]
"""uint16 or uint32, as in token shards."""


class SampleStream(Protocol):
    """Samples in lanes. Each lane is read from its beginning and always gives the same samples.

    `open` yields single samples; `columns` collates several of them for a step.
    """

    @property
    def lanes(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...

    def open(self, lane: int) -> Iterator[Any]:
        """Yield a lane's samples from the first on."""
        ...

    def weight_of(self, sample: Any) -> float:
        """Return a sample's loss weight."""
        ...

    def columns(self, samples: Sequence[Any]) -> Columns: ...


class ItemStream(Protocol):
    """The items of a stream in lanes: texts, or token ids."""

    @property
    def lanes(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...

    def open(self, lane: int) -> Iterator[list[str] | Ragged]:
        """Yield batches of a lane's items from the first on: texts, or integers of any type.

        Raises ConfigError at an item that is neither, after those before it.
        """
        ...

    def place(self, lane: int, item: int) -> str:
        """Return the location of an item, for error messages."""
        ...


class TokenLanes:
    """Lanes of tokenized documents: token ids are used as they are, texts are encoded.

    `separator` is inserted between two text documents, as in prepared token shards, and not between
    documents of ids.
    """

    def __init__(self, items: ItemStream, tokenizer: Tokenizer, *, ids: bool) -> None:
        self._items, self._tokenizer = items, tokenizer
        self.dtype = token_dtype(tokenizer.vocab_size)
        separator = separator_of(tokenizer)
        self.separator: Tokens = (separator[:0] if ids else separator).astype(self.dtype)
        self.lanes = items.lanes
        self.fingerprint = f"{items.fingerprint}/{tokenizer.fingerprint}"

    def open(self, lane: int) -> Iterator[list[Tokens]]:
        """Yield batches of a lane's documents from the first on, without empty ones.

        Raises ConfigError at an id outside the vocabulary, after the documents before it.
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


class _TokenSamples:
    """Samples of at most context + 1 successive tokens of a lane."""

    def __init__(self, tokens: TokenLanes, context: int, kind: str) -> None:
        self._tokens, self._context = tokens, context
        self.lanes = tokens.lanes
        self.fingerprint = f"{tokens.fingerprint}/{kind}/{context}"

    def weight_of(self, sample: Tokens) -> float:
        """Return the number of targets."""
        return float(sample.size - 1)

    def columns(self, samples: Sequence[Tokens]) -> dict[str, NDArray[np.int64]]:
        """Return `inputs` and `targets`, int64 [samples, context]; a short sample is padded with
        input 0 and target IGNORED."""
        inputs = np.empty((len(samples), self._context), dtype=np.int64)
        targets = np.empty_like(inputs)
        for row, sample in enumerate(samples):
            size = sample.size - 1
            inputs[row, :size], targets[row, :size] = sample[:-1], sample[1:]
            inputs[row, size:], targets[row, size:] = 0, IGNORED
        return {"inputs": inputs, "targets": targets}


class PackedStream(_TokenSamples):
    """Packed samples: a lane's documents are concatenated and cut into windows, as in
    `TokenWindows`.

    Every token of a lane but the first is a target once; a lane's last window may be shorter.
    """

    def __init__(self, tokens: TokenLanes, context: int) -> None:
        super().__init__(tokens, context, "packed")

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


class DocumentStream(_TokenSamples):
    """Unpacked samples: one document with its separator each, truncated to context + 1 tokens.

    Documents too short to have a target are skipped.
    """

    def __init__(self, tokens: TokenLanes, context: int) -> None:
        super().__init__(tokens, context, "documents")

    def open(self, lane: int) -> Iterator[Tokens]:
        for documents in self._tokens.open(lane):
            for document in documents:
                sample = np.concatenate([document[: self._context + 1], self._tokens.separator])
                if sample.size > 1:
                    yield sample[: self._context + 1]


def _some_at_a_time(texts: list[str]) -> Iterator[list[str]]:
    """Yield batches of texts, small enough that the first samples are available soon."""
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


_ROWS = 256
_VALUES = 1 << 18
_LONGEST_S = 0.1


def open_lanes(data: DataConfig, tokenizer: Tokenizer) -> TokenLanes:
    """Open the lanes of `data.source` (kind stream or python) as tokens.

    Raises ConfigError if it cannot be opened, lacks the field, or is shuffled already.
    """
    ids = data.tokens_field is not None
    field = data.tokens_field or data.text_field
    items: RowLanes | FunctionLane
    if data.kind == "python":
        function = load_named(data.source, key="data.source")
        items = FunctionLane(function, data.source, field, ids=ids)
    else:
        name = "/".join(filter(None, (data.source, data.subset, data.source_split)))
        items = RowLanes(load_stream(data), name, field, ids=ids, lanes=data.lanes)
    return TokenLanes(items, tokenizer, ids=ids)


class RowLanes:
    """The rows of a Hugging Face stream; a lane consists of some of its shards, in sequence.

    `IterableDataset.shard` gives lane k neighbouring shards; if they cannot be divided evenly, the
    first lanes have one more. The concatenated lanes are the stream.
    """

    def __init__(
        self, rows: datasets.IterableDataset, name: str, field: str, *, ids: bool, lanes: int
    ) -> None:
        """
        Args:
            lanes: the maximal number of lanes; there are never more than the source has shards.
        """
        if rows.column_names is not None and field not in rows.column_names:
            raise _no_field(name, field, rows.column_names)
        _check_unshuffled(rows, name)
        self._rows, self._name, self._field, self._ids = rows, name, field, ids
        self.lanes = min(lanes, rows.num_shards)
        files = [[Path(file).name, _size(file)] for file in _files(rows)]
        self.fingerprint = _fingerprint("rows", name, files, field, ids, self.lanes)

    def open(self, lane: int) -> Iterator[list[str] | Ragged]:
        rows = self._rows.shard(num_shards=self.lanes, index=lane)
        if rows._ex_iterable.iter_arrow is not None:
            return self._of_tables(lane, rows.with_format("arrow").iter(batch_size=_ROWS))
        return collected(self._values(lane, rows), ids=self._ids)

    def place(self, lane: int, item: int) -> str:
        rows = self._rows.shard(num_shards=self.lanes, index=lane)
        files = [Path(file).name for file in _files(rows)]
        within = f" ({files[0]})" if len(files) == 1 else ""
        within = f" ({files[0]} … {files[-1]})" if len(files) > 1 else within
        return f"{self._name}, lane {lane}{within}, item {item}"

    def _values(self, lane: int, rows: Iterable[Any]) -> Iterator[str | NDArray[np.int64]]:
        for item, row in enumerate(rows):
            yield value_of(row, self._field, partial(self.place, lane, item), ids=self._ids)

    def _of_tables(self, lane: int, tables: Iterator[pa.Table]) -> Iterator[list[str] | Ragged]:
        item = 0
        try:
            for table in tables:
                if self._field not in table.column_names:
                    raise _no_field(self.place(lane, item), self._field, table.column_names)
                for column in table.column(self._field).chunks:
                    yield from self._of_column(lane, item, column)
                    item += len(column)
        except ConfigError:
            raise
        except Exception as error:
            error.add_note(f"while reading {self.place(lane, item)} and what follows")
            raise

    def _of_column(self, lane: int, first: int, column: pa.Array) -> Iterator[list[str] | Ragged]:
        whole = _before_null(column)
        if whole:
            if not (is_ids if self._ids else is_text)(column.type):
                raise _strange(self.place(lane, first), self._field, str(column.type), self._ids)
            values = column.slice(0, whole)
            if not self._ids:
                yield values.to_pylist()
            else:
                ids = _ragged(values)
                whole = len(ids)
                yield ids
        if whole < len(column):
            found = "nothing" if column[whole].as_py() is None else "a list with nothing in it"
            raise _strange(self.place(lane, first + whole), self._field, found, self._ids)


class FunctionLane:
    """The items of a function's return value, one lane: an iterable of texts, of arrays of token
    ids, or of mappings with such a field. The function is called for each pass.
    """

    lanes = 1

    def __init__(
        self, function: Callable[[], Iterable[Any]], name: str, field: str, *, ids: bool
    ) -> None:
        self._function, self._name, self._field, self._ids = function, name, field, ids
        self._last: object = None
        self.fingerprint = _fingerprint("python", name, [], field, ids, 1)

    def open(self, lane: int) -> Iterator[list[str] | Ragged]:
        made = self._function()
        try:
            iterator = iter(made)
        except TypeError:
            raise self._unfit(
                f"returned an object of type {type(made).__name__}, which is not iterable"
            ) from None
        if iterator is made and made is self._last:
            raise self._unfit("returned the same iterator again, which is used up")
        self._last = made
        try:
            yield from collected(self._values(lane, iterator), ids=self._ids)
        finally:
            if iterator is made and hasattr(made, "close"):
                made.close()

    def place(self, lane: int, item: int) -> str:  # noqa: ARG002
        return f"{self._name}, item {item}"

    def _values(self, lane: int, items: Iterator[Any]) -> Iterator[str | NDArray[np.int64]]:
        item = 0
        try:
            for found in items:
                yield value_of(found, self._field, partial(self.place, lane, item), ids=self._ids)
                item += 1
        except ConfigError:
            raise
        except Exception as error:
            error.add_note(f"while reading {self.place(lane, item)}")
            raise

    def _unfit(self, what: str) -> ConfigError:
        return ConfigError.one(
            f"{self._name} {what}",
            where="data.source",
            hint="return a new iterable each time: it is called for every pass through the data",
            key="data.source",
        )


def value_of(
    item: Any, field: str, place: Callable[[], str], *, ids: bool
) -> str | NDArray[np.int64]:
    """Return an item's text or token ids. Raises ConfigError, naming the place, if it has none."""
    if isinstance(item, Mapping):
        if field not in item:
            raise _no_field(place(), field, item)
        item = item[field]
    if not ids:
        if isinstance(item, str):
            return item
    elif item is not None and not isinstance(item, str):
        try:
            values = np.asarray(item)
        except ValueError:  # lists of different lengths
            values = np.array(item, dtype=object)
        if values.ndim == 1 and (values.dtype.kind in "iu" or not values.size):
            return values.astype(np.int64)
    raise _strange(place(), field, "nothing" if item is None else type(item).__name__, ids)


def collected(
    values: Iterator[str | NDArray[np.int64]], *, ids: bool
) -> Iterator[list[str] | Ragged]:
    """Yield batches of values; small ones if values arrive slowly. An exception of `values` is
    raised after the values before it."""
    failure: Exception | None = None
    going_on = True
    while going_on:
        batch: list[Any] = []
        size = 0
        began = time.monotonic()
        while size < _VALUES and time.monotonic() - began < _LONGEST_S:
            try:
                batch.append(next(values))
            except StopIteration:
                going_on = False
                break
            except Exception as error:
                failure, going_on = error, False
                break
            size += len(batch[-1])
        if batch and ids:
            ends = np.cumsum([0, *(len(one) for one in batch)], dtype=np.int64)
            yield Ragged(np.concatenate(batch), ends)
        elif batch:
            yield batch
    if failure is not None:
        raise failure


def _ragged(lists: pa.Array) -> Ragged:
    """Convert lists without a copy, up to the first that contains a null."""
    import pyarrow as pa

    flat = lists.flatten()
    if pa.types.is_fixed_size_list(lists.type):
        offsets = np.arange(len(lists) + 1, dtype=np.int64) * lists.type.list_size
    else:
        offsets = lists.offsets.to_numpy().astype(np.int64)
        offsets -= offsets[0]
    whole = len(lists)
    if flat.null_count:
        whole = int(np.searchsorted(offsets, _before_null(flat), side="right")) - 1
    count = int(offsets[whole])
    return Ragged(flat.slice(0, count).to_numpy(zero_copy_only=True), offsets[: whole + 1])


def _before_null(column: pa.Array) -> int:
    """Return the number of values before the first null."""
    if not column.null_count:
        return len(column)
    return int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))


def _check_unshuffled(rows: datasets.IterableDataset, name: str) -> None:
    from datasets.iterable_dataset import BufferShuffledExamplesIterable

    shuffled = any(isinstance(each, BufferShuffledExamplesIterable) for each in _within(rows))
    if shuffled or rows.epoch or rows._distributed is not None:
        what = "shuffled" if shuffled or rows.epoch else "shared out among nodes"
        raise ConfigError.one(
            f"{name} is already {what}; a resumed run would lose rows and repeat others",
            where="data.source",
            hint="give it as it is: data.order shuffles it, and ranks share its lanes",
            key="data.source",
        )


def _within(rows: datasets.IterableDataset) -> Iterator[Any]:
    """Yield a stream's stages and its underlying data sets."""
    stages = [rows._ex_iterable]
    while stages:
        stage = stages.pop()
        yield stage
        stages += getattr(stage, "ex_iterables", None) or []
        stages += [stage.ex_iterable] if hasattr(stage, "ex_iterable") else []


def _files(rows: datasets.IterableDataset) -> list[str]:
    """Return the files that a stream is read from, if they can be determined."""
    for stage in _within(rows):
        sources = getattr(stage, "kwargs", {})
        for name in ("base_files", "original_files", "files"):
            files = [str(file) for file in sources.get(name) or () if isinstance(file, (str, Path))]
            if files:
                return files
    return []


def _size(file: str) -> int | None:
    path = Path(file)
    return path.stat().st_size if path.is_file() else None


def _fingerprint(*identity: Any) -> str:
    """Return a hash of the origin of items and how they are read: their content is unknown."""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(identity))


def _no_field(where: str, field: str, found: Iterable[Any]) -> ConfigError:
    fields = ", ".join(map(str, found)) or "none"
    return ConfigError.one(
        f"there is no field {field!r} (fields: {fields})",
        where=where,
        hint="name that of the text in data.text_field, or that of token ids in data.tokens_field",
        key="data.text_field",
    )


def _strange(where: str, field: str, found: str, ids: bool) -> ConfigError:
    wanted = "a list of token ids" if ids else "text"
    key = "data.tokens_field" if ids else "data.text_field"
    return ConfigError.one(
        f"{field!r} is {found}, not {wanted}",
        where=where,
        hint=f"{key} names the field of {'token ids' if ids else 'the text'}",
        key=key,
    )
