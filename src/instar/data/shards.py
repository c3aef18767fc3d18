"""One token shard on disk: a safetensors file with one tensor, `tokens`.

The tokens are uint16 for vocabularies up to 65,536, else uint32; the metadata says what they are.
Shards are written once and never changed; their sizes are checked when they are opened. They are
read, not mapped: pages of a mapping that are touched at random count as memory of the process, with
their neighbours, and a file cut short under a reader would be a SIGBUS, not an exception.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import safetensors.numpy
import xxhash
from numpy.typing import NDArray

from instar.config.errors import ConfigError

TokenArray = NDArray[np.uint16] | NDArray[np.uint32]

SHARD_FORMAT = "instar-tokens/1"
SHARD_TOKENS = 1 << 25
_LARGEST_HEADER_BYTES = 1 << 20
_SAFETENSORS_NAMES = {"uint16": "U16", "uint32": "U32"}


def token_dtype(vocab_size: int) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
    """The dtype that a vocabulary's tokens are kept in."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class Shard(msgspec.Struct, frozen=True):
    """What dataset.json says about one shard; the fingerprint is xxh3-128 of the token bytes."""

    file: str
    count: int
    fingerprint: str


class ShardWriter:
    """Cuts the tokens of one split into shards; holds one shard in memory at most."""

    def __init__(
        self,
        folder: Path,
        split: str,
        *,
        tokenizer: str,
        vocab_size: int,
        shard_tokens: int = SHARD_TOKENS,
    ) -> None:
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
        """Writes what is left; the split's shards in order."""
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
        write_synced(self._folder / shard.file, content)
        self._shards.append(shard)
        self._filled = 0


def write_synced(path: Path, content: bytes) -> None:
    """Write a file that will not change again, and wait until it is on the disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    path.chmod(0o444)


class ShardFile:
    """The tokens of a shard, [count], in its open file. Threads may read at the same time."""

    def __init__(self, path: Path, dtype: np.dtype[Any], first_byte: int, count: int) -> None:
        self.path, self.dtype, self.size = path, dtype, count
        self.first_byte = first_byte
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)

    def read_bytes(self, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes of the tokens from one on."""
        place = self.first_byte + start * self.dtype.itemsize
        got = os.preadv(self.descriptor, (into,), place)
        while got < len(into):
            into, place = into[got:], place + got
            got = os.preadv(self.descriptor, (into,), place)
            if not got:
                raise ConfigError.one(
                    "this shard was cut short after it was opened", where=str(self.path)
                )


def read_rows(
    files: Sequence[ShardFile], shards: Sequence[int], starts: Sequence[int], tokens: TokenArray
) -> None:
    """Fill each row of `tokens`, contiguous, from its start in its shard on."""
    size, item, read = tokens.strides[0], tokens.itemsize, os.preadv
    into = tokens.data.cast("B")
    begin = 0
    for shard, start in zip(shards, starts, strict=True):
        file, row = files[shard], into[begin : begin + size]
        if read(file.descriptor, (row,), file.first_byte + start * item) != size:
            file.read_bytes(start, row)
        begin += size


def open_shard(path: Path, shard: Shard, *, tokenizer: str, vocab_size: int) -> ShardFile:
    """Open a shard's tokens, [count], without reading them.

    Raises ConfigError, naming the file, where it is missing, truncated, foreign, or its metadata
    is not what `shard`, the tokenizer's fingerprint and the vocabulary ask for.
    """
    if not path.is_file():
        raise ConfigError.one("this shard of the data set is missing", where=str(path))
    size = path.stat().st_size
    header, first_byte = _read_header(path, size)
    tensor, metadata = header.get("tokens"), header.get("__metadata__")
    if (
        not isinstance(tensor, dict)
        or not isinstance(metadata, dict)
        or metadata.get("format") != SHARD_FORMAT
    ):
        raise ConfigError.one(
            f"this safetensors file is not a token shard ({SHARD_FORMAT})", where=str(path)
        )
    dtype = token_dtype(vocab_size)
    data_bytes = shard.count * dtype.itemsize
    stated: dict[str, tuple[object, object]] = {
        "count": (metadata.get("count"), str(shard.count)),
        "dtype": (metadata.get("dtype"), dtype.name),
        "fingerprint": (metadata.get("fingerprint"), shard.fingerprint),
        "tokenizer": (metadata.get("tokenizer"), tokenizer),
        "vocab_size": (metadata.get("vocab_size"), str(vocab_size)),
        "tensor": (
            tensor,
            {
                "dtype": _SAFETENSORS_NAMES[dtype.name],
                "shape": [shard.count],
                "data_offsets": [0, data_bytes],
            },
        ),
    }
    for key, (found, expected) in stated.items():
        if found != expected:
            raise ConfigError.one(
                f"this shard does not belong to the data set: {key} is {found}, "
                f"dataset.json asks for {expected}",
                where=str(path),
            )
    _check_size(path, first_byte + data_bytes, size)
    if shard.count == 0:
        raise ConfigError.one("this shard holds no tokens", where=str(path))
    return ShardFile(path, dtype, first_byte, shard.count)


def _read_header(path: Path, size: int) -> tuple[dict[str, Any], int]:
    """The JSON header of a safetensors file and where its data begins.

    The format: 8 bytes, little endian, length of the header; the header; the data.
    """
    foreign = ConfigError.one("not a safetensors file, so not a token shard", where=str(path))
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= _LARGEST_HEADER_BYTES:
            raise foreign
        if size < 8 + length:
            _check_size(path, 8 + length, size)
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError):
            raise foreign from None
    if not isinstance(header, dict):
        raise foreign
    return header, 8 + length


def _check_size(path: Path, expected: int, size: int) -> None:
    if size != expected:
        what = "truncated" if size < expected else "longer than it should be"
        raise ConfigError.one(
            f"this shard is {what}: {size:,} bytes where {expected:,} are expected",
            where=str(path),
            hint="copy it again, or prepare the data set again",
        )
