"""The bits of named tensors, from safetensors files or from memory; their hash; files of them.

Everything here works without torch, on any dtype that safetensors knows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open

from instar.checkpoint.layout import TensorEntry, encode_header, read_header
from instar.checkpoint.manifest import SUFFIX, CheckpointError
from instar.config.files import check_regular, of_bounded_depth, read_regular
from instar.extensions.delta.format.encoding import BLOCK_BYTES, Words

FLOATS = {"F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2"}
"""Dtypes whose bits are sign and magnitude."""


@dataclass(frozen=True)
class Bits:
    """A tensor as words: its bytes as unsigned integers of the size of its elements, flat."""

    entry: TensorEntry
    words: Words

    def blocks(self) -> Iterator[Words]:
        """Yield views of consecutive words, of `BLOCK_BYTES` each but the last."""
        step = block_words(self.entry)
        for begin in range(0, self.words.size, step):
            yield self.words[begin : begin + step]


State = Mapping[str, Bits]
Outline = Mapping[str, TensorEntry]


def word_type(entry: TensorEntry) -> np.dtype[np.unsignedinteger]:
    """Return the unsigned integer of the size of an element; bytes if there is none."""
    size = entry.size_bytes // entry.elements if entry.elements else 1
    is_word = size in (1, 2, 4, 8) and size * entry.elements == entry.size_bytes
    return np.dtype(f"<u{size}") if is_word else np.dtype("u1")


def word_count(entry: TensorEntry) -> int:
    return entry.size_bytes // word_type(entry).itemsize


def block_words(entry: TensorEntry) -> int:
    """Return the number of words in each block of a tensor but the last."""
    return BLOCK_BYTES // word_type(entry).itemsize


def outline(state: State) -> dict[str, TensorEntry]:
    return {name: bits.entry for name, bits in state.items()}


def open_state(path: Path) -> dict[str, Bits]:
    """Map a safetensors file, or the files of a folder in the layout of transformers, into memory.

    Raises:
        CheckpointError: a file is missing or is not a safetensors file.
    """
    if not path.is_dir():
        return _open_file(path)
    index = path / f"model{SUFFIX}.index.json"
    if not index.exists():
        return _open_file(path / f"model{SUFFIX}")
    try:
        names = msgspec.json.decode(of_bounded_depth(read_regular(index)), type=_Index).weight_map
    except (OSError, msgspec.DecodeError, ValueError) as error:
        raise CheckpointError(f"{index}: {error}") from error
    tensors: dict[str, Bits] = {}
    for name in sorted(set(names.values())):
        if Path(name).name != name:
            raise CheckpointError(f"{index}: {name!r} is not the name of a file")
        tensors |= _open_file(path / name)
    return tensors


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _open_file(path: Path) -> dict[str, Bits]:
    try:
        check_regular(path)
        with safe_open(path, "np"):  # checks that tensors neither overlap nor leave gaps
            entries = read_header(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing") from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: not a safetensors file: {error}") from error
    begin = path.stat().st_size - sum(entry.size_bytes for entry in entries.values())
    content = np.memmap(path, np.uint8, "r")
    tensors = {}
    for name, entry in entries.items():
        raw = content[begin : begin + entry.size_bytes]
        tensors[name] = Bits(entry, raw.view(np.ndarray).view(word_type(entry)))
        begin += entry.size_bytes
    return tensors


class StateHash:
    """The xxh3-128 of a state: over names, dtypes, shapes and the hash of the bytes of each tensor,
    in the order of the names. Blocks of different tensors may come in any order."""

    def __init__(self, outline: Outline) -> None:
        self._outline = outline
        self._tensors = {name: xxhash.xxh3_128() for name in outline}

    def update(self, name: str, words: Words) -> None:
        self._tensors[name].update(words.view("u1").data)

    def hexdigest(self) -> str:
        digest = xxhash.xxh3_128()
        for name, entry in sorted(self._outline.items()):
            fields = (name, entry.dtype, entry.shape, self._tensors[name].hexdigest())
            digest.update(json.dumps(fields).encode() + b"\n")
        return digest.hexdigest()


def state_hash(state: State) -> str:
    """Return the hash of a state."""
    digest = StateHash(outline(state))
    for name, bits in state.items():
        digest.update(name, bits.words)
    return digest.hexdigest()


def file_header(outline: Outline, metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the header of a safetensors file of these tensors, the largest elements first.

    The metadata is by default that without which transformers refuses a file.
    """
    return encode_header(
        {name: outline[name] for name in _order(outline)}, metadata or {"format": "pt"}
    )


def write_state(
    path: Path, outline: Outline, header: bytes, blocks: Callable[[str], Iterable[Words]]
) -> None:
    """Write and sync a safetensors file of the tensors whose blocks `blocks` yields.

    Raises:
        OSError: it cannot be written.
    """
    with path.open("wb") as file:
        file.write(header)
        for name in _order(outline):
            for words in blocks(name):
                file.write(words.view("u1").data)
        file.flush()
        os.fsync(file.fileno())


def _order(outline: Outline) -> list[str]:
    return sorted(outline, key=lambda name: (-word_type(outline[name]).itemsize, name))
