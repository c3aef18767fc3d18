"""Array stores: samples in folders of zarr, held in memory or read by chunks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from instar.config.errors import ConfigError, near_path
from instar.config.files import of_bounded_depth, read_regular
from instar.data.columns import NUMBERS, Columns, Ragged
from instar.data.order import Int64Array
from instar.record.atomic import atomic_dir, sync_file, sync_folder

Stored: TypeAlias = Any
"""An array of `zarr`, which is imported where it is used."""


ARRAYS_FORMAT = "instar-arrays/1"
RECORD_FILE = "zarr.json"
IN_MEMORY_BYTES = 1 << 30
"""Arrays of at most this total size, in bytes, are kept in memory."""

_ATTRIBUTE = "instar"
_OFFSETS = ".offsets"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CHUNK_BYTES = 1 << 16
_CHUNKS_PER_FILE = 256


class ArrayRecord(msgspec.Struct, frozen=True):
    """Metadata of one array: numpy dtype name, shape, and xxh3-128 of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    fingerprint: str


class ArraysRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The attribute `instar` of an array store; `files` are sizes in bytes, its own left out."""

    format: str
    arrays: dict[str, ArrayRecord]
    files: dict[str, int]
    fingerprint: str
    about: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Arrays:
    """A `Source` over an array store, held in memory or read by chunks.

    The `fingerprint` covers the samples only, independently of how they were written; `about`
    describes what they were made from. Both mappings of arrays have column names as keys: `values`
    in memory or on disk, `offsets` of ragged columns in memory.
    """

    path: Path
    fingerprint: str
    about: Mapping[str, Any]
    samples: int
    values: Mapping[str, NDArray[Any] | Stored]
    offsets: Mapping[str, Int64Array]

    def __len__(self) -> int:
        return self.samples

    def read(self, indices: Int64Array, epoch: int = 0) -> Columns:  # noqa: ARG002
        """Return copies of the samples.

        Raises:
            IndexError: an index is outside 0 … len-1.
            ConfigError: the store is damaged.
        """
        if indices.size and not 0 <= indices.min() <= indices.max() < self.samples:
            raise IndexError(
                f"samples {indices.min()}..{indices.max()} of {self.path}, which has {self.samples}"
            )
        columns: dict[str, NDArray[Any] | Ragged] = {}
        for name in self.values:
            if name in self.offsets:
                rows, offsets = _spread(self.offsets[name], indices)
                columns[name] = Ragged(self._rows(name, rows), offsets)
            else:
                columns[name] = self._rows(name, indices)
        return columns

    def weights(self, indices: Int64Array) -> float:
        """Return the number of samples: each has weight 1."""
        return float(indices.size)

    def column(self, name: str) -> NDArray[Any]:
        """Return a dense column, [samples, ...]. Raises ConfigError if there is no such column."""
        if name not in self.values or name in self.offsets:
            raise self._lacks(
                "dense", name, [key for key in self.values if key not in self.offsets]
            )
        return self._rows(name, np.arange(self.samples))

    def sizes(self, name: str) -> Int64Array:
        """Return the lengths of a ragged column's arrays, int64 [samples].

        Raises ConfigError if there is no such column.
        """
        if name not in self.offsets:
            raise self._lacks("ragged", name, list(self.offsets))
        sizes: Int64Array = np.diff(self.offsets[name])
        return sizes

    def _rows(self, name: str, rows: Int64Array) -> NDArray[Any]:
        values = self.values[name]
        if isinstance(values, np.ndarray):
            return values[rows]
        if not rows.size or 0 in values.shape[1:]:
            return np.empty((rows.size, *values.shape[1:]), dtype=values.dtype)
        with _reading(self.path, name):
            return np.asarray(values.oindex[(rows, *(slice(None),) * (values.ndim - 1))])

    def _lacks(self, kind: str, name: str, names: list[str]) -> ConfigError:
        message = f"there is no {kind} column {name!r}, there are: {', '.join(names) or 'none'}"
        return ConfigError.of(message, str(self.path))


def write_arrays(folder: str | Path, blocks: Iterable[Columns], about: Mapping[str, Any]) -> None:
    """Write samples, given in blocks of any size, as an array store. The write is atomic.

    Column names consist of letters, digits and `_`; columns are not nested. The first block
    determines which columns are ragged, the dtypes, and the shapes of the elements.

    Args:
        about: JSON that describes what the samples are made from.

    Raises:
        ConfigError: the folder is not empty, or cannot be written to.
        ValueError: there are no blocks; or a block, given by its number, has columns that cannot be
            stored or that differ from those of the first.
    """
    library, path = _library(), Path(folder)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ConfigError.of(
            f"{path} already exists", where="data.path", hint="give another folder"
        )
    with atomic_dir(path, key="data.path", first_wins=True) as temporary:
        group = library.create_group(temporary, zarr_format=3)
        writers: dict[str, _ArrayWriter] = {}
        for number, block in enumerate(blocks):
            rows = _arrays_of(block, number, {name: w.count for name, w in writers.items()})
            if not writers:
                writers = {name: _ArrayWriter(group, name, array) for name, array in rows.items()}
            if rows.keys() != writers.keys():
                block_names, first = ", ".join(rows), ", ".join(writers)
                raise ValueError(
                    f"block {number} has {block_names or 'nothing'}, the first one {first}"
                )
            for name, array in rows.items():
                writers[name].append(array, number)
        if not writers:
            raise ValueError("there are no samples to write")
        arrays = {name: writer.close() for name, writer in writers.items()}
        record = ArraysRecord(
            format=ARRAYS_FORMAT,
            arrays=arrays,
            files=_file_sizes(temporary),
            fingerprint=_whole_fingerprint(arrays),
            about=dict(about),
        )
        group.update_attributes({_ATTRIBUTE: msgspec.to_builtins(record)})
        _sync(temporary)


def holds_arrays(folder: str | Path) -> bool:
    """Return whether the folder holds an array store, whole or damaged."""
    return (Path(folder) / RECORD_FILE).exists()


def open_arrays(
    folder: str | Path, in_memory_bytes: int = IN_MEMORY_BYTES, *, key: str = "data.path"
) -> Arrays:
    """Open an array store; check the size of every file and the metadata of every array.

    Data read into memory is compared with its fingerprint, a chunk read later with its checksum.

    Args:
        in_memory_bytes: the largest total size in bytes that is read into memory at once.

    Raises:
        ConfigError: the store, or a part of it given by name, is missing or damaged.
    """
    library, path = _library(), Path(folder)
    record = _read_record(path, key)
    _check_files(path, record.files)
    with _reading(path):
        group = library.open_group(path, mode="r", zarr_format=3)
    in_memory = sum(map(_nbytes, record.arrays.values())) <= in_memory_bytes
    values: dict[str, NDArray[Any] | Stored] = {}
    offsets: dict[str, Int64Array] = {}
    for name, entry in record.arrays.items():
        with _reading(path, name):
            array = group[name]
        if getattr(array, "dtype", None) != entry.dtype or array.shape != entry.shape:
            raise _damage_error(path, name, "the array is not the one that was written")
        of, is_offsets = name.removesuffix(_OFFSETS), name.endswith(_OFFSETS)
        if is_offsets:
            offsets[of] = _load_array(path, name, array, entry)
        else:
            values[of] = _load_array(path, name, array, entry) if in_memory else array
    first = next(iter(values))
    samples = len(offsets[first]) - 1 if first in offsets else record.arrays[first].shape[0]
    return Arrays(path, record.fingerprint, record.about, samples, values, offsets)


class _ArrayWriter:
    """Writes one array, in whole files of chunks."""

    def __init__(self, group: Any, name: str, first: NDArray[Any]) -> None:
        self.name = name
        self.tail = first.shape[1:]
        self.dtype = first.dtype
        inner = tuple(max(1, size) for size in self.tail)
        row_bytes = self.dtype.itemsize * int(np.prod(inner))
        chunk = max(1, _CHUNK_BYTES // row_bytes)
        self.rows_per_file = chunk * _CHUNKS_PER_FILE
        self.array = group.create_array(
            name,
            shape=(0, *self.tail),
            dtype=self.dtype,
            chunks=(chunk, *inner),
            shards=(self.rows_per_file, *inner),
            compressors=_library().codecs.ZstdCodec(checksum=True),
            config={"write_empty_chunks": True},
        )
        self.hash = xxhash.xxh3_128()
        self.count = 0
        self.rows_written = 0
        self.pending: list[NDArray[Any]] = []

    def append(self, rows: NDArray[Any], block: int) -> None:
        if (rows.dtype, rows.shape[1:]) != (self.dtype, self.tail):
            raise ValueError(
                f"block {block} has {self.name} as {rows.dtype}{list(rows.shape[1:])}, "
                f"the first one as {self.dtype}{list(self.tail)}"
            )
        self.hash.update(rows.tobytes())
        self.pending.append(rows)
        self.count += len(rows)
        if self.count - self.rows_written >= self.rows_per_file:
            self._write(self.count // self.rows_per_file * self.rows_per_file)

    def close(self) -> ArrayRecord:
        self._write(self.count)
        return ArrayRecord(self.dtype.str, (self.count, *self.tail), self.hash.hexdigest())

    def _write(self, end: int) -> None:
        if end == self.rows_written:
            return
        rows = np.concatenate(self.pending)
        row_count = end - self.rows_written
        self.array.resize((end, *self.tail))
        if rows.size:
            self.array[self.rows_written : end] = rows[:row_count]
        self.pending, self.rows_written = [rows[row_count:]], end


def _arrays_of(
    block: Columns, number: int, row_counts: Mapping[str, int]
) -> dict[str, NDArray[Any]]:
    """Return a block's arrays by their names in the store; offsets start at the rows in `row_counts`."""
    arrays: dict[str, NDArray[Any]] = {}
    for name, column in block.items():
        if isinstance(column, Mapping) or not _NAME.fullmatch(name):
            raise ValueError(
                f"block {number} has {name!r}: a stored column is not nested, and its name is of "
                "letters, digits and _"
            )
        values = column.flat if isinstance(column, Ragged) else column
        if values.dtype.kind not in NUMBERS or values.dtype.itemsize > 16 or values.ndim < 1:
            raise ValueError(f"block {number} has {name} as {values.dtype}, which is not stored")
        arrays[name] = np.ascontiguousarray(values, values.dtype.newbyteorder("="))
        if isinstance(column, Ragged):
            ends = np.cumsum(column.sizes, dtype=np.int64) + row_counts.get(name, 0)
            first = [] if name in row_counts else [0]
            arrays[name + _OFFSETS] = np.concatenate([np.array(first, dtype=np.int64), ends])
    counts = {name: len(column) for name, column in block.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(f"block {number} has columns of different lengths: {counts}")
    return arrays


def _spread(offsets: Int64Array, samples: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the concatenated rows of ragged samples, and the offsets of each sample among them."""
    sizes = offsets[samples + 1] - offsets[samples]
    ends = np.cumsum(np.concatenate([[0], sizes]), dtype=np.int64)
    rows = np.arange(ends[-1]) + np.repeat(offsets[samples] - ends[:-1], sizes)
    return rows, ends


def _load_array(path: Path, name: str, array: Stored, entry: ArrayRecord) -> NDArray[Any]:
    with _reading(path, name):
        values = np.asarray(array[:])
    if xxhash.xxh3_128_hexdigest(values.tobytes()) != entry.fingerprint:
        raise _damage_error(path, name, "the values are not those that were written")
    return values


def _nbytes(array: ArrayRecord) -> int:
    return np.dtype(array.dtype).itemsize * int(np.prod(array.shape))


def _whole_fingerprint(arrays: Mapping[str, ArrayRecord]) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(dict(arrays)))


def _file_sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of all files under the folder but the record's, by relative name."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    sizes = {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}
    sizes.pop(RECORD_FILE)
    return sizes


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        sync_folder(path) if path.is_dir() else sync_file(path)


def _check_files(folder: Path, sizes: Mapping[str, int]) -> None:
    problems = []
    for name, size in sizes.items():
        file = folder / name
        if not file.is_file():
            problems.append(_damage_error(folder, name, "the file is missing"))
        elif file.stat().st_size != size:
            size_bytes = file.stat().st_size
            problems.append(
                _damage_error(folder, name, f"{size_bytes:,} bytes, {size:,} were written")
            )
    if problems:
        raise ConfigError(*(problem for error in problems for problem in error.problems))


def _read_record(folder: Path, key: str) -> ArraysRecord:
    file = folder / RECORD_FILE
    if not file.is_file():
        what = f"has no {RECORD_FILE}" if folder.is_dir() else "is not there"
        raise ConfigError.at(key, f"the array store {folder} {what}", near_path(str(folder)))
    try:
        attributes = msgspec.json.decode(of_bounded_depth(read_regular(file, follow=True)))[
            "attributes"
        ]
        record = msgspec.convert(attributes[_ATTRIBUTE], ArraysRecord)
        for array in record.arrays.values():
            np.dtype(array.dtype)
    except (msgspec.DecodeError, ValueError, KeyError, TypeError) as error:
        message = f"not the record of an array store: {error}"
        hint = f"make it again, or name another {key}"
        raise ConfigError.of(message, str(file), hint) from None
    if record.format != ARRAYS_FORMAT:
        raise ConfigError.of(f"format {record.format!r} is not {ARRAYS_FORMAT!r}", where=str(file))
    if record.fingerprint != _whole_fingerprint(record.arrays):
        raise _damage_error(
            folder, RECORD_FILE, "the fingerprint is not that of the arrays it lists"
        )
    return record


def _damage_error(folder: Path, name: str, what: str) -> ConfigError:
    return ConfigError.of(
        what, where=str(folder / name), hint="the store is damaged: make it again"
    )


@contextmanager
def _reading(folder: Path, name: str = RECORD_FILE) -> Iterator[None]:
    """Turn exceptions of zarr and its codecs into a ConfigError with the array's name."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise _damage_error(folder, name, f"cannot be read: {error}") from error


def _library() -> Any:
    try:
        import zarr
    except ImportError:
        message = "array stores need the library `zarr`, which is not installed"
        hint = "install the extra: pip install 'instar[graph]'"
        raise ConfigError.at("data.path", message, hint) from None
    return zarr
