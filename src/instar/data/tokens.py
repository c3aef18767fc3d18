"""A prepared data set: a folder of token shards, and each split as one sequence of tokens.

dataset.json      splits with their shards, tokenizer, vocabulary, source, fingerprint
tokenizer.json    see instar.data.tokenizer
train-00000.safetensors …  val-00000.safetensors …  test-00000.safetensors …
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import msgspec
import numpy as np
import xxhash

from instar.config.errors import ConfigError
from instar.config.explain import near_path
from instar.data.order import Int64Array
from instar.data.shards import (
    Shard,
    ShardFile,
    TokenArray,
    open_shard,
    read_rows,
    write_synced,
)

DATASET_FORMAT = "instar-dataset/1"
DATASET_FILE = "dataset.json"


class TokenizerRecord(msgspec.Struct, frozen=True):
    """Which tokenizer made the tokens: kind (byte, char, bpe) and fingerprint."""

    kind: str
    fingerprint: str


class DatasetRecord(msgspec.Struct, frozen=True, kw_only=True):
    """dataset.json."""

    format: str
    tokenizer: TokenizerRecord
    vocab_size: int
    splits: dict[str, tuple[Shard, ...]]
    source: dict[str, Any]
    fingerprint: str


@dataclass(frozen=True, eq=False)
class TokenSplit:
    """The shards of one split as one flat sequence of tokens.

    `arrays` are the shards, in files or in memory; shard k holds tokens offsets[k] …
    offsets[k+1]-1.
    """

    name: str
    arrays: tuple[ShardFile, ...] | tuple[TokenArray, ...]
    offsets: Int64Array
    fingerprint: str

    def __len__(self) -> int:
        return int(self.offsets[-1])

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.arrays[0].dtype

    def read(self, start: int, stop: int) -> TokenArray:
        """Tokens start … stop-1, copied. Raises IndexError outside the split."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start}..{stop} of {self.name}, which has {len(self)}")
        tokens: TokenArray = np.empty(stop - start, dtype=self.dtype)
        shard = int(np.searchsorted(self.offsets, start, side="right")) - 1
        at = start
        while at < stop:
            first, end = int(self.offsets[shard]), min(stop, int(self.offsets[shard + 1]))
            _read(self.arrays[shard], at - first, tokens[at - start : end - start])
            at, shard = end, shard + 1
        return tokens

    def windows(self, starts: Int64Array, length: int) -> TokenArray:
        """Tokens start … start+length-1 for each start, [len(starts), length].

        Raises IndexError where a window leaves the split.
        """
        if not starts.size:
            return np.empty((0, length), dtype=self.dtype)
        if starts.min() < 0 or starts.max() + length > len(self):
            raise IndexError(f"a window of {length} tokens leaves {self.name} ({len(self)} tokens)")
        tokens: TokenArray = np.empty((starts.size, length), dtype=self.dtype)
        shards = np.searchsorted(self.offsets, starts, side="right") - 1
        inside = np.all(starts + length <= self.offsets[shards + 1])
        if inside and _in_files(self.arrays):
            begins = starts - self.offsets[shards]
            read_rows(self.arrays, shards.tolist(), begins.tolist(), tokens)
        else:
            for row, start in zip(tokens, starts.tolist(), strict=True):
                row[...] = self.read(start, start + length)
        return tokens


@dataclass(frozen=True, eq=False)
class TokenDataset:
    """An opened data set: every shard present, of the right size, and what dataset.json says.

    `tokenizer` is the kind; `source` holds the parameters it was made from.
    """

    path: Path
    splits: Mapping[str, TokenSplit]
    vocab_size: int
    tokenizer: str
    tokenizer_fingerprint: str
    source: Mapping[str, Any]
    fingerprint: str
    shards: Mapping[str, tuple[Shard, ...]]

    def split(self, name: str) -> TokenSplit:
        """Raises ConfigError where the data set has no such split."""
        if name not in self.splits:
            raise ConfigError.one(
                f"the data set has no {name} split, it has: {', '.join(self.splits)}",
                where=str(self.path),
            )
        return self.splits[name]


@contextmanager
def publishing(path: Path) -> Iterator[Path]:
    """A folder to write a data set in, which becomes `path` at the end, whole or not at all.

    Where another process has published there meanwhile, its folder stays and ours is dropped.
    Raises ConfigError where the place cannot be written to.
    """
    aside = path.with_name(f".tmp-{path.name}-{uuid.uuid4().hex[:12]}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.mkdir()
        yield aside
        _sync_folder(aside)
        try:
            aside.rename(path)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        _sync_folder(path.parent)
    except OSError as error:
        raise ConfigError.one(
            f"cannot write the data set {path}: {error.strerror}",
            where="data.path",
            key="data.path",
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_record(
    folder: Path,
    *,
    tokenizer: TokenizerRecord,
    vocab_size: int,
    splits: dict[str, tuple[Shard, ...]],
    source: dict[str, Any],
) -> None:
    """Write dataset.json, the last file of a data set."""
    record = DatasetRecord(
        format=DATASET_FORMAT,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        splits=splits,
        source=source,
        fingerprint=_whole_fingerprint(tokenizer, vocab_size, splits),
    )
    content = msgspec.json.format(msgspec.json.encode(record), indent=2)
    write_synced(folder / DATASET_FILE, content + b"\n")


def open_dataset(path: str | Path) -> TokenDataset:
    """Open a prepared data set and check that every shard is whole, without reading tokens.

    Raises ConfigError, naming the file, where anything is missing, truncated, foreign, or not
    what dataset.json says it is.
    """
    folder = Path(path)
    record = _read_record(folder)
    problems: list[ConfigError] = []
    arrays: dict[str, list[ShardFile]] = {name: [] for name in record.splits}
    for name, shards in record.splits.items():
        for shard in shards:
            try:
                arrays[name].append(
                    open_shard(
                        folder / shard.file,
                        shard,
                        tokenizer=record.tokenizer.fingerprint,
                        vocab_size=record.vocab_size,
                    )
                )
            except ConfigError as error:
                problems.append(error)
    if problems:
        raise ConfigError(*(problem for error in problems for problem in error.problems))
    splits = {
        name: TokenSplit(
            name=name,
            arrays=tuple(arrays[name]),
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


def verify_tokens(dataset: TokenDataset) -> None:
    """Read every token: raises ConfigError for each shard that is not what was written."""
    problems: list[ConfigError] = []
    for name, split in dataset.splits.items():
        for shard, begin, end in zip(
            dataset.shards[name], split.offsets[:-1], split.offsets[1:], strict=True
        ):
            tokens = split.read(int(begin), int(end))
            file = str(dataset.path / shard.file)
            found = xxhash.xxh3_128_hexdigest(tokens.data)
            if found != shard.fingerprint:
                problems.append(
                    ConfigError.one(
                        f"the tokens are not those that were written: fingerprint {found}, "
                        f"recorded {shard.fingerprint}",
                        where=file,
                        hint="prepare the data set again",
                    )
                )
            elif int(tokens.max()) >= dataset.vocab_size:
                problems.append(
                    ConfigError.one(
                        f"token {int(tokens.max())} is not in the vocabulary of "
                        f"{dataset.vocab_size}",
                        where=file,
                    )
                )
    if problems:
        raise ConfigError(*(problem for error in problems for problem in error.problems))


def _in_files(
    arrays: tuple[ShardFile, ...] | tuple[TokenArray, ...],
) -> TypeGuard[tuple[ShardFile, ...]]:
    return isinstance(arrays[0], ShardFile)


def _read(shard: ShardFile | TokenArray, start: int, tokens: TokenArray) -> None:
    if isinstance(shard, ShardFile):
        shard.read_bytes(start, tokens.data.cast("B"))
    else:
        tokens[...] = shard[start : start + tokens.size]


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _whole_fingerprint(
    tokenizer: TokenizerRecord, vocab_size: int, splits: Mapping[str, tuple[Shard, ...]]
) -> str:
    identity = [tokenizer.kind, tokenizer.fingerprint, vocab_size, dict(splits)]
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(identity, order="sorted"))


def _read_record(folder: Path) -> DatasetRecord:
    file = folder / DATASET_FILE
    if not file.is_file():
        what = "has no dataset.json" if folder.is_dir() else "is not there"
        raise ConfigError.one(
            f"the data set {folder} {what}",
            where="data.path",
            hint=near_path(str(folder)) or "make one with `instar data prepare`",
        )
    try:
        record = msgspec.json.decode(file.read_bytes(), type=DatasetRecord)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError.one(f"not a data set's record: {error}", where=str(file)) from None
    if record.format != DATASET_FORMAT:
        raise ConfigError.one(
            f"format {record.format!r} is not {DATASET_FORMAT!r}", where=str(file)
        )
    empty = [name for name, shards in record.splits.items() if not shards]
    if empty or not record.splits:
        raise ConfigError.one(f"no shards for {', '.join(empty) or 'any split'}", where=str(file))
    if any(Path(s.file).name != s.file for shards in record.splits.values() for s in shards):
        raise ConfigError.one("a shard's file is not a name within the folder", where=str(file))
    if record.fingerprint != _whole_fingerprint(record.tokenizer, record.vocab_size, record.splits):
        raise ConfigError.one(
            "the fingerprint is not that of what the file lists",
            where=str(file),
            hint="it was edited or damaged: prepare the data set again",
        )
    return record
