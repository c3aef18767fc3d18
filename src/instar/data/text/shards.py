"""Token shards: safetensors files with one tensor, `tokens`, and the record of a data set.

The dtype is uint16 for vocabularies up to 65,536, else uint32; the metadata describes the tokens.
Shards are immutable; their sizes are checked on opening. They are read, not memory-mapped: randomly
accessed pages of a mapping, and their neighbours, count as the process's memory, and a file
truncated during reading would cause a SIGBUS instead of an exception.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import safetensors
import safetensors.numpy
import xxhash
from numpy.typing import NDArray

from instar.config.errors import ConfigError, ConfigProblem, near_path
from instar.config.files import of_bounded_depth, open_regular, read_regular
from instar.data.order import Int64Array
from instar.data.source import TokenArray
from instar.record.atomic import replace_file, write_synced

SHARD_FORMAT = "instar-tokens/1"
SHARD_TOKENS = 1 << 25
_LEAST_RUN = 8
"""consecutive windows, on average, from which on runs are read at once"""
_LARGEST_HEADER_BYTES = 1 << 20
_Record = TypeVar("_Record")


def token_dtype(vocab_size: int) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
    """Return the dtype that stores a vocabulary's tokens."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class Shard(msgspec.Struct, frozen=True):
    """A shard's entry in dataset.json; the fingerprint is xxh3-128 of the token bytes."""

    file: str
    count: int
    fingerprint: str


class ShardWriter:
    """Writes the tokens of one split as shards; buffers one shard at most."""

    def __init__(
        self,
        folder: Path,
        split: str,
        tokenizer: str,
        vocab_size: int,
        shard_tokens: int = SHARD_TOKENS,
    ) -> None:
        """
        Args:
            tokenizer: its fingerprint.
        """
        self._folder, self._split = folder, split
        self._metadata = {"tokenizer": tokenizer, "vocab_size": str(vocab_size)}
        self._buffer = np.empty(shard_tokens, dtype=token_dtype(vocab_size))
        self._filled = 0
        self._shards: list[Shard] = []

    def append(self, tokens: NDArray[Any]) -> None:
        while tokens.size:
            room = self._buffer.size - self._filled
            part, tokens = tokens[:room], tokens[room:]
            self._buffer[self._filled : self._filled + part.size] = part
            self._filled += part.size
            if self._filled == self._buffer.size:
                self._flush()

    def close(self) -> tuple[Shard, ...]:
        """Write the remaining tokens; return the split's shards in order."""
        if self._filled:
            self._flush()
        return tuple(self._shards)

    def _flush(self) -> None:
        tokens = self._buffer[: self._filled]
        shard = Shard(
            file=f"{self._split}-{len(self._shards):05d}.safetensors",
            count=tokens.size,
            fingerprint=xxhash.xxh3_128_hexdigest(tokens.data),
        )
        metadata = self._metadata | {
            "format": SHARD_FORMAT,
            "count": str(shard.count),
            "dtype": tokens.dtype.name,
            "fingerprint": shard.fingerprint,
        }
        content = safetensors.numpy.save({"tokens": tokens}, metadata=metadata)
        write_once(self._folder / shard.file, content)
        self._shards.append(shard)
        self._filled = 0


def write_once(path: Path, content: bytes) -> None:
    """Write an immutable file and fsync it."""
    write_synced(path, content)
    path.chmod(0o444)


class ShardFile:
    """The tokens of a shard, [count], in an open file. Thread-safe for reading."""

    def __init__(self, path: Path, dtype: np.dtype[Any], first_byte: int, count: int) -> None:
        self.path, self.dtype, self.size = path, dtype, count
        self.first_byte = first_byte
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)

    def read_bytes(self, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of the tokens from `start` on."""
        place = self.first_byte + start * self.dtype.itemsize
        got = os.preadv(self.descriptor, (buffer,), place)
        while got < len(buffer):
            buffer, place = buffer[got:], place + got
            got = os.preadv(self.descriptor, (buffer,), place)
            if not got:
                raise ConfigError.of(
                    "this shard was cut short after it was opened", where=str(self.path)
                )


def read_rows(
    files: Sequence[ShardFile], shards: Sequence[int], starts: Sequence[int], tokens: TokenArray
) -> None:
    """Fill each row of `tokens`, which is contiguous, from its shard, beginning at its start."""
    size, item, read = tokens.strides[0], tokens.itemsize, os.preadv
    buffer = tokens.data.cast("B")
    begin = 0
    for shard, start in zip(shards, starts, strict=True):
        file, row = files[shard], buffer[begin : begin + size]
        if read(file.descriptor, (row,), file.first_byte + start * item) != size:
            file.read_bytes(start, row)
        begin += size


def open_shard(path: Path, shard: Shard, *, tokenizer: str, vocab_size: int) -> ShardFile:
    """Open a shard's tokens, [count], without reading them.

    Raises ConfigError, naming the file, if it is missing, truncated or foreign, or its metadata
    does not match `shard`, the tokenizer's fingerprint and the vocabulary size.
    """
    if not path.is_file():
        raise ConfigError.of("this shard of the data set is missing", where=str(path))
    dtype = token_dtype(vocab_size)
    first_byte = _first_byte(path)
    try:
        with safetensors.safe_open(path, "numpy") as file:
            metadata, names = file.metadata() or {}, [*file.keys()]
            tensor = file.get_slice("tokens") if "tokens" in names else None
    except (OSError, safetensors.SafetensorError):
        _check_size(path, first_byte + shard.count * dtype.itemsize)
        raise _foreign(path) from None
    if tensor is None or metadata.get("format") != SHARD_FORMAT:
        raise ConfigError.of(
            f"this safetensors file is not a token shard ({SHARD_FORMAT})", where=str(path)
        )
    tensor_found = tensor.get_dtype(), tensor.get_shape()
    claims: dict[str, tuple[object, object]] = {
        "count": (metadata.get("count"), str(shard.count)),
        "dtype": (metadata.get("dtype"), dtype.name),
        "fingerprint": (metadata.get("fingerprint"), shard.fingerprint),
        "tokenizer": (metadata.get("tokenizer"), tokenizer),
        "vocab_size": (metadata.get("vocab_size"), str(vocab_size)),
        "tensor": (tensor_found, (f"U{8 * dtype.itemsize}", [shard.count])),
    }
    for key, (actual, expected) in claims.items():
        if actual != expected:
            raise ConfigError.of(
                f"this shard does not belong to the data set: {key} is {actual}, dataset.json asks for {expected}",
                where=str(path),
            )
    _check_size(path, first_byte + shard.count * dtype.itemsize)
    if shard.count == 0:
        raise ConfigError.of("this shard holds no tokens", where=str(path))
    return ShardFile(path, dtype, first_byte, shard.count)


def _first_byte(path: Path) -> int:
    """Return the offset of the data in a safetensors file: after the header's length, 8 bytes
    little endian, and the header, a JSON object."""
    with open_regular(path, follow=True) as file:
        length, start = int.from_bytes(file.read(8), "little"), file.read(1)
    if start != b"{" or length > _LARGEST_HEADER_BYTES:
        raise _foreign(path)
    if path.stat().st_size < 8 + length:
        _check_size(path, 8 + length)
    return 8 + length


def _foreign(path: Path) -> ConfigError:
    return ConfigError.of("not a safetensors file, so not a token shard", where=str(path))


def _check_size(path: Path, expected: int) -> None:
    size = path.stat().st_size
    if size != expected:
        what = "truncated" if size < expected else "longer than it should be"
        raise ConfigError.of(
            f"this shard is {what}: {size:,} bytes where {expected:,} are expected",
            where=str(path),
            hint="copy it again, or prepare the data set again",
        )


DATASET_FORMAT = "instar-dataset/1"
DATASET_FILE = "dataset.json"


class TokenizerRecord(msgspec.Struct, frozen=True):
    """The tokenizer of the tokens: kind (byte, char, bpe) and fingerprint."""

    kind: str
    fingerprint: str


class DatasetRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of dataset.json."""

    format: str
    tokenizer: TokenizerRecord
    vocab_size: int
    splits: dict[str, tuple[Shard, ...]]
    source: dict[str, Any]
    fingerprint: str


@dataclass(frozen=True, eq=False)
class TokenSplit:
    """The shards of one split as a flat sequence of tokens.

    Shard k holds tokens offsets[k] … offsets[k+1]-1.
    """

    name: str
    shards: tuple[ShardFile, ...]
    offsets: Int64Array
    fingerprint: str

    def __len__(self) -> int:
        return int(self.offsets[-1])

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.shards[0].dtype

    def read(self, start: int, stop: int) -> TokenArray:
        """Return a copy of tokens start … stop-1. Raises IndexError outside the split."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start}..{stop} of {self.name}, which has {len(self)}")
        tokens: TokenArray = np.empty(stop - start, dtype=self.dtype)
        shard = int(np.searchsorted(self.offsets, start, side="right")) - 1
        at = start
        while at < stop:
            first, end = int(self.offsets[shard]), min(stop, int(self.offsets[shard + 1]))
            buffer = tokens[at - start : end - start].data.cast("B")
            self.shards[shard].read_bytes(at - first, buffer)
            at, shard = end, shard + 1
        return tokens

    def windows(self, starts: Int64Array, length: int) -> TokenArray:
        """Return tokens start … start+length-1 for each start, [len(starts), length].

        Raises IndexError if a window exceeds the split.
        """
        if not starts.size:
            return np.empty((0, length), dtype=self.dtype)
        # as unsigned numbers, negative starts exceed every length
        if length > len(self) or starts.view(np.uint64).max() > len(self) - length:
            raise IndexError(f"a window of {length} tokens leaves {self.name} ({len(self)} tokens)")
        runs = np.flatnonzero(np.diff(starts) != length - 1) + 1
        if length > 1 and runs.size <= starts.size // _LEAST_RUN:
            return self._consecutive(starts, length, runs)
        tokens: TokenArray = np.empty((starts.size, length), dtype=self.dtype)
        shards = np.searchsorted(self.offsets, starts, side="right") - 1
        if np.all(starts + length <= self.offsets[shards + 1]):
            begins = starts - self.offsets[shards]
            read_rows(self.shards, shards.tolist(), begins.tolist(), tokens)
        else:
            for row, start in zip(tokens, starts.tolist(), strict=True):
                row[...] = self.read(start, start + length)
        return tokens

    def _consecutive(self, starts: Int64Array, length: int, breaks: Int64Array) -> TokenArray:
        """Return windows of which each begins with the last token of the one before, except at `breaks`;
        one read for each run of them."""
        firsts, lasts = starts[[0, *breaks]].tolist(), starts[[*(breaks - 1), -1]].tolist()
        parts: list[TokenArray] = []
        for first, last in zip(firsts, lasts, strict=True):
            read = self.read(first, last + length)
            shape = (last - first) // (length - 1) + 1, length
            # sliding_window_view takes as long as reading 16 windows
            strides = (length - 1) * read.itemsize, read.itemsize
            parts.append(np.ndarray(shape, read.dtype, read.data, strides=strides))
        return parts[0] if len(parts) == 1 else np.concatenate(parts, dtype=self.dtype)


@dataclass(frozen=True, eq=False)
class TokenDataset:
    """An opened data set whose shards are all present, of the right size, and as in dataset.json.

    `tokenizer` is the kind; `source` holds the parameters it was made from. `document_sizes` are
    the tokens of each training document, separator included, if documents are separate samples.
    """

    path: Path
    splits: Mapping[str, TokenSplit]
    vocab_size: int
    tokenizer: str
    tokenizer_fingerprint: str
    source: Mapping[str, Any]
    fingerprint: str
    shards: Mapping[str, tuple[Shard, ...]]
    document_sizes: Int64Array | None = None

    def split(self, name: str) -> TokenSplit:
        """Return a split. Raises ConfigError if there is no such split."""
        if name not in self.splits:
            raise ConfigError.of(
                f"the data set has no {name} split, it has: {', '.join(self.splits)}",
                where=str(self.path),
            )
        return self.splits[name]


def read_record(file: Path, kind: type[_Record], name: str, hint: str = "") -> _Record:
    """Return the record in a JSON file.

    Raises:
        FileNotFoundError: there is no file.
        ConfigError: it cannot be read, or is not what its name says.
    """
    try:
        return msgspec.json.decode(of_bounded_depth(read_regular(file, follow=True)), type=kind)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError.of(f"cannot be read: {error.strerror}", where=str(file)) from None
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError.of(f"not {name}: {error}", where=str(file), hint=hint) from None


def write_record(
    folder: Path,
    *,
    tokenizer: TokenizerRecord,
    vocab_size: int,
    splits: dict[str, tuple[Shard, ...]],
    source: dict[str, Any],
) -> None:
    """Write dataset.json, the last file of a data set; replace an existing one."""
    record = DatasetRecord(
        format=DATASET_FORMAT,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        splits=splits,
        source=source,
        fingerprint=_whole_fingerprint(tokenizer, vocab_size, splits),
    )
    content = msgspec.json.format(msgspec.json.encode(record), indent=2)
    replace_file(folder / DATASET_FILE, content + b"\n")


def open_dataset(path: str | Path) -> TokenDataset:
    """Open a prepared data set and check that every shard is complete, without reading tokens.

    Raises ConfigError, naming the file, if anything is missing, truncated, foreign, or does not match dataset.json.
    """
    folder = Path(path)
    record = _read_record(folder)
    problems: list[ConfigProblem] = []
    files: dict[str, list[ShardFile]] = {name: [] for name in record.splits}
    tokenizer, vocab_size = record.tokenizer.fingerprint, record.vocab_size
    for name, shards in record.splits.items():
        for shard in shards:
            path = folder / shard.file
            try:
                files[name].append(
                    open_shard(path, shard, tokenizer=tokenizer, vocab_size=vocab_size)
                )
            except ConfigError as error:
                problems += error.problems
    if problems:
        raise ConfigError(*problems)
    splits = {
        name: TokenSplit(
            name=name,
            shards=tuple(files[name]),
            offsets=np.cumsum([0, *(shard.count for shard in shards)], dtype=np.int64),
            fingerprint=xxhash.xxh3_128_hexdigest("".join(s.fingerprint for s in shards).encode()),
        )
        for name, shards in record.splits.items()
    }
    return TokenDataset(
        path=folder,
        splits=splits,
        vocab_size=record.vocab_size,
        tokenizer=record.tokenizer.kind,
        tokenizer_fingerprint=record.tokenizer.fingerprint,
        source=record.source,
        fingerprint=record.fingerprint,
        shards=record.splits,
    )


def splits_fingerprint(dataset: TokenDataset, splits: Mapping[str, tuple[Shard, ...]]) -> str:
    """Return the fingerprint of a data set that has only these splits."""
    tokenizer = TokenizerRecord(dataset.tokenizer, dataset.tokenizer_fingerprint)
    return _whole_fingerprint(tokenizer, dataset.vocab_size, splits)


def _whole_fingerprint(
    tokenizer: TokenizerRecord, vocab_size: int, splits: Mapping[str, tuple[Shard, ...]]
) -> str:
    identity = [tokenizer.kind, tokenizer.fingerprint, vocab_size, dict(splits)]
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(identity, order="sorted"))


def _read_record(folder: Path) -> DatasetRecord:
    file = folder / DATASET_FILE
    if not file.is_file():
        what = "has no dataset.json" if folder.is_dir() else "is not there"
        raise ConfigError.of(
            f"the data set {folder} {what}",
            where="data.path",
            hint=near_path(str(folder)) or "make one with `instar data prepare`",
        )
    record = read_record(file, DatasetRecord, "a data set's record")
    if record.format != DATASET_FORMAT:
        raise ConfigError.of(f"format {record.format!r} is not {DATASET_FORMAT!r}", where=str(file))
    empty = [name for name, shards in record.splits.items() if not shards]
    if empty or not record.splits:
        raise ConfigError.of(f"no shards for {', '.join(empty) or 'any split'}", where=str(file))
    if any(Path(s.file).name != s.file for shards in record.splits.values() for s in shards):
        raise ConfigError.of("a shard's file is not a name within the folder", where=str(file))
    if record.fingerprint != _whole_fingerprint(record.tokenizer, record.vocab_size, record.splits):
        raise ConfigError.of(
            "the fingerprint is not that of what the file lists",
            where=str(file),
            hint="it was edited or damaged: prepare the data set again",
        )
    return record
