"""Files of token ids that other trainers write: nanoGPT's `train.bin`, and those of llm.c.

nanoGPT's hold uint16, little endian, and nothing else. Those of llm.c, which modded-nanogpt reads too, begin with 256
int32: a number that says the kind of file, a version, and how many ids follow.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instar.config.errors import ConfigError
from instar.data.order import Int64Array
from instar.data.text.files import find_files, open_source, suffix_of

SUFFIX = ".bin"
_HEADER_BYTES = 256 * 4
_KINDS: dict[int, np.dtype[Any]] = {20240520: np.dtype("<u2"), 20240801: np.dtype("<u4")}
"""dtype of the ids of each kind of file with a header"""
_PLAIN = 20240520
"""The kind whose ids are those of files without a header."""
_PIECE_IDS = 1 << 22


@dataclass(frozen=True)
class TokenFile:
    """A file of ids, which is one document."""

    path: Path
    dtype: np.dtype[Any]
    first_byte: int
    size: int
    """bytes of the ids"""

    def read(self, begin: int, end: int) -> Iterator[NDArray[Any]]:
        """Yield the ids from a byte on to another, counted from the first id, in pieces."""
        width = self.dtype.itemsize
        with open_source(self.path) as file:
            for first in range(begin // width, end // width, _PIECE_IDS):
                count = min(_PIECE_IDS, end // width - first)
                file.seek(self.first_byte + first * width)
                content = file.read(count * width)
                if len(content) < count * width:
                    raise ConfigError.of("this file was cut short", where=str(self.path))
                yield np.frombuffer(content, dtype=self.dtype)


@dataclass(frozen=True)
class TokenFiles:
    """Files of ids of one vocabulary."""

    files: tuple[TokenFile, ...]
    vocab_size: int

    @property
    def sizes(self) -> Int64Array:
        """Return the bytes of each file's ids, [files]."""
        return np.array([file.size for file in self.files], dtype=np.int64)

    def pieces(self, parts: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield the ids of each part (file, first byte, end byte), [n, 3], in pieces with the part's number.

        Raises:
            ConfigError: an id is not in the vocabulary; names the file.
        """
        for number, (index, begin, end) in enumerate(parts.tolist()):
            file = self.files[index]
            for ids in file.read(begin, end):
                if ids.size and (largest := int(ids.max())) >= self.vocab_size:
                    raise ConfigError.at(
                        "data.source",
                        f"{file.path} holds the id {largest:,}, and the vocabulary of data.tokenizer has "
                        f"{self.vocab_size:,} tokens, from 0 on",
                        "name the tokenizer that made it",
                    )
                yield number, ids


def holds_ids(source: str) -> bool:
    """Return whether a source, a file or a glob, names files of token ids."""
    return Path(source).suffix.lower() == SUFFIX and not Path(source).is_dir()


def open_token_files(source: str, vocab_size: int) -> TokenFiles:
    """Open files of token ids.

    Raises:
        ConfigError: there are none, or one is not such a file.
    """
    files = find_files(source).files
    if foreign := [file for file in files if suffix_of(file) != SUFFIX]:
        raise ConfigError.at("data.source", f"{foreign[0]} is no file of token ids ({SUFFIX})")
    token_files = TokenFiles(tuple(map(_opened, files)), vocab_size)
    if not token_files.sizes.any():
        raise ConfigError.at("data.source", f"{source} is empty")
    return token_files


def _opened(path: Path) -> TokenFile:
    with open_source(path) as file:
        start = file.read(_HEADER_BYTES)
        size = file.seek(0, 2)
    kind, _, count = struct.unpack("<3i", start[:12].ljust(12, b"\0"))
    # read as ids, the first numbers of such a header would be a rare pair, and its rest is zeros
    has_header = kind in _KINDS and len(start) == _HEADER_BYTES and not any(start[12:])
    dtype, first_byte = _KINDS[kind if has_header else _PLAIN], _HEADER_BYTES if has_header else 0
    size -= first_byte
    if has_header and size != count * dtype.itemsize:
        raise ConfigError.of(
            f"its header says {count:,} ids, and {size / dtype.itemsize:,.1f} follow",
            where=str(path),
            hint="copy it again",
        )
    if size % dtype.itemsize:
        raise ConfigError.of(
            f"it has {size:,} bytes, and ids have {dtype.itemsize} each: not a file of token ids, or cut short",
            where=str(path),
        )
    return TokenFile(path, dtype, first_byte, size)
