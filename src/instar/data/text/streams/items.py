"""The items of a stream: the texts or token ids of a Hugging Face data set or of a Python iterable."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from instar.config.errors import ConfigError
from instar.config.language import DataConfig
from instar.config.user_code.named import load_named
from instar.data.columns import Ragged
from instar.data.text.formats import ArrowColumn, is_ids, is_text, library, other_columns
from instar.data.text.hf import Stream, load_stream

_ROWS = 256
_VALUES = 1 << 18
_LONGEST_S = 0.1
_PARTS = 1024

Items: TypeAlias = "list[str] | Ragged"
"""A batch of texts, or of arrays of integers."""


class ItemStream(Protocol):
    """The items of a stream in lanes, and of a lane in parts: files, mostly."""

    @property
    def lanes(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...

    def open(self, lane: int, part: int = 0, row: int = 0) -> Iterator[tuple[int, int, Items]]:
        """Yield batches of a lane's items, each with the part and row of its first item, from a row of a part on.

        Raises ConfigError at an item that is neither text nor ids, after those before it.
        """
        ...

    def place(self, lane: int, part: int, row: int) -> str:
        """Return the location of an item, for error messages."""
        ...


def open_items(data: DataConfig) -> ItemStream:
    """Open the items of `data.source` (kind stream or python).

    Raises ConfigError if it cannot be opened, lacks the field, or is shuffled already.
    """
    ids = data.tokens_field is not None
    field = data.tokens_field or data.text_field
    if data.kind == "python":
        function = load_named(data.source, key="data.source")
        return FunctionLane(function, data.source, field, ids=ids)
    name = "/".join(filter(None, (data.source, data.subset, data.source_split)))
    return RowLanes(load_stream(data), name, field, ids=ids, lanes=data.lanes)


def version_of(data: DataConfig) -> str:
    """Return a hash of what tells that items whose origin is the same have changed: the file of the function, or the
    state that `save_to_disk` writes; "" where there is none."""
    files = [Path(data.source, *part, "state.json") for part in ((), (data.source_split,))]
    if data.kind == "python":
        function = load_named(data.source, key="data.source")
        try:
            files = [Path(inspect.getsourcefile(function) or "")]
        except TypeError:  # no function, but an object that can be called
            return ""
    contents = [file.read_bytes() for file in files if file.is_file()]
    return xxhash.xxh3_128_hexdigest(b"\n".join(contents)) if contents else ""


class RowLanes:
    """The rows of a Hugging Face stream; a lane consists of some of its shards, in sequence.

    `IterableDataset.shard` gives lane k neighbouring shards; if they cannot be divided evenly, the
    first lanes have one more. The concatenated lanes are the stream. Lanes are divided into parts
    likewise, one for each shard unless there are very many.
    """

    def __init__(self, rows: Stream, name: str, field: str, *, ids: bool, lanes: int) -> None:
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

    def open(self, lane: int, part: int = 0, row: int = 0) -> Iterator[tuple[int, int, Items]]:
        parts = self._parts(lane)
        while (rows := parts(part)) is not None:
            place = partial(self.place, lane, part)
            if rows._ex_iterable.iter_arrow is not None:
                batches = self._of_tables(rows, place, row)
            else:
                values = _values(islice(rows, row, None), self._field, place, row, ids=self._ids)
                batches = collect_items(values, ids=self._ids)
            for batch in batches:
                yield part, row, batch
                row += len(batch)
            part, row = part + 1, 0

    def place(self, lane: int, part: int, row: int) -> str:
        rows = self._parts(lane)(part)
        files = [] if rows is None else [Path(file).name for file in _files(rows)]
        within = f" ({files[0]})" if len(files) == 1 else ""
        within = f" ({files[0]} … {files[-1]})" if len(files) > 1 else within
        return f"{self._name}, lane {lane}{within}, item {row}"

    def _parts(self, lane: int) -> Callable[[int], Stream | None]:
        """Return a function that opens a part of a lane by its number, None after the last."""
        rows = self._rows.shard(num_shards=self.lanes, index=lane)
        number = min(rows.num_shards, _PARTS)
        return lambda part: rows.shard(num_shards=number, index=part) if part < number else None

    def _of_tables(self, rows: Stream, place: Callable[[int], str], row: int) -> Iterator[Items]:
        """Yield a part's items from a row on; the rows before it are skipped as tables."""
        first_row = 0
        try:
            for table in rows.with_format("arrow").iter(batch_size=_ROWS):
                if self._field not in table.column_names:
                    raise _no_field(place(first_row), self._field, table.column_names)
                for column in table.column(self._field).chunks:
                    offset = min(max(row - first_row, 0), len(column))
                    first_row += offset
                    yield from self._of_column(place, first_row, column.slice(offset))
                    first_row += len(column) - offset
        except ConfigError as error:
            (problem,) = error.problems
            if problem.place:
                raise
            raise ConfigError(replace(problem, place=place(first_row))) from None
        except Exception as error:
            if differs := other_columns(error, place(first_row)):
                raise differs from None
            error.add_note(f"while reading {place(first_row)} and what follows")
            raise

    def _of_column(
        self, place: Callable[[int], str], first: int, column: ArrowColumn
    ) -> Iterator[Items]:
        """Yield a column's values; a null text is an empty one."""
        if not self._ids and str(column.type) == "null":  # of rows of nulls alone
            column = column.cast("string")
        if not self._ids and is_text(column.type):
            column = column.cast("large_string").fill_null("")
        count = _before_null(column)
        if count:
            if not (is_ids if self._ids else is_text)(column.type):
                raise _strange(place(first), self._field, str(column.type), self._ids)
            values = column.slice(0, count)
            if not self._ids:
                yield values.to_pylist()
            else:
                ids = _ragged_ids(values)
                count = len(ids)
                yield ids
        if count < len(column):
            content = "nothing" if column[count].as_py() is None else "a list with nothing in it"
            raise _strange(place(first + count), self._field, content, self._ids)


class FunctionLane:
    """The items of a function's return value, one lane of one part: an iterable of texts, of arrays
    of token ids, or of mappings with such a field. The function is called for each pass.
    """

    lanes = 1

    def __init__(
        self, function: Callable[[], Iterable[Any]], name: str, field: str, *, ids: bool
    ) -> None:
        self._function, self._name, self._field, self._ids = function, name, field, ids
        self._last: object = None
        self.fingerprint = _fingerprint("python", name, [], field, ids, 1)

    def open(self, lane: int, part: int = 0, row: int = 0) -> Iterator[tuple[int, int, Items]]:
        iterable = self._function()
        try:
            iterator = iter(iterable)
        except TypeError:
            raise self._unfit(
                f"returned an object of type {type(iterable).__name__}, which is not iterable"
            ) from None
        if iterator is iterable and iterable is self._last:
            raise self._unfit("returned the same iterator again, which is used up")
        self._last = iterable
        place = partial(self.place, lane, part)
        values = _values(islice(iterator, row, None), self._field, place, row, ids=self._ids)
        try:
            for batch in collect_items(values, ids=self._ids):
                yield part, row, batch
                row += len(batch)
        finally:
            if iterator is iterable and hasattr(iterable, "close"):
                iterable.close()

    def place(self, lane: int, part: int, row: int) -> str:  # noqa: ARG002
        return f"{self._name}, item {row}"

    def _unfit(self, what: str) -> ConfigError:
        hint = "return a new iterable each time: it is called for every pass through the data"
        return ConfigError.at("data.source", f"{self._name} {what}", hint)


def _values(
    items: Iterator[Any], field: str, place: Callable[[int], str], row: int, *, ids: bool
) -> Iterator[str | NDArray[np.int64]]:
    """Yield the values of items, the first of which is in the given row."""
    try:
        for item in items:
            yield item_value(item, field, partial(place, row), ids=ids)
            row += 1
    except ConfigError:
        raise
    except Exception as error:
        error.add_note(f"while reading {place(row)}")
        raise


def item_value(
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


def collect_items(values: Iterator[str | NDArray[np.int64]], *, ids: bool) -> Iterator[Items]:
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
            ends = np.cumsum([0, *(len(item) for item in batch)], dtype=np.int64)
            yield Ragged(np.concatenate(batch), ends)
        elif batch:
            yield batch
    if failure is not None:
        raise failure


def _ragged_ids(lists: ArrowColumn) -> Ragged:
    """Convert lists without a copy, up to the first that contains a null."""
    flat = lists.flatten()
    if hasattr(lists.type, "list_size"):
        offsets = np.arange(len(lists) + 1, dtype=np.int64) * lists.type.list_size
    else:
        offsets = lists.offsets.to_numpy().astype(np.int64)
        offsets -= offsets[0]
    rows = len(lists)
    if flat.null_count:
        rows = int(np.searchsorted(offsets, _before_null(flat), side="right")) - 1
    count = int(offsets[rows])
    return Ragged(flat.slice(0, count).to_numpy(zero_copy_only=True), offsets[: rows + 1])


def _before_null(column: ArrowColumn) -> int:
    """Return the number of values before the first null."""
    if not column.null_count:
        return len(column)
    return int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))


def _check_unshuffled(rows: Stream, name: str) -> None:
    shuffled = library().iterable_dataset.BufferShuffledExamplesIterable
    is_shuffled = any(isinstance(stage, shuffled) for stage in _within(rows))
    if is_shuffled or rows.epoch or rows._distributed is not None:
        what = "shuffled" if is_shuffled or rows.epoch else "shared out among nodes"
        raise ConfigError.at(
            "data.source",
            f"{name} is already {what}; a resumed run would lose rows and repeat others",
            "give it as it is: data.order shuffles it, and ranks share its lanes",
        )


def _within(rows: Stream) -> Iterator[Any]:
    """Yield a stream's stages and its underlying data sets."""
    stages = [rows._ex_iterable]
    while stages:
        stage = stages.pop()
        yield stage
        stages += getattr(stage, "ex_iterables", None) or []
        stages += [stage.ex_iterable] if hasattr(stage, "ex_iterable") else []


def _files(rows: Stream) -> list[str]:
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


def _no_field(where: str, field: str, names: Iterable[Any]) -> ConfigError:
    fields = ", ".join(map(str, names)) or "none"
    return ConfigError.of(
        f"there is no field {field!r} (fields: {fields})",
        where=where,
        hint="name that of the text in data.text_field, or that of token ids in data.tokens_field",
        key="data.text_field",
    )


def _strange(where: str, field: str, kind: str, ids: bool) -> ConfigError:
    expected = "a list of token ids" if ids else "text"
    key = "data.tokens_field" if ids else "data.text_field"
    return ConfigError.of(
        f"{field!r} is {kind}, not {expected}",
        where=where,
        hint=f"{key} names the field of {'token ids' if ids else 'the text'}",
        key=key,
    )
