"""The file of one link: how a state differs from its base.

```
INSTAR-Δ                    the format and its version, 8 bytes
planes                      of each difference, in the order of the footer
footer                      JSON compressed by zstd, see `Footer`
lengths                     of the footer as JSON and as stored, 8 bytes each, little-endian
xxh3-128                    of footer and lengths, 16 bytes
xxh3-128                    of all bytes before, 16 bytes
```

The footer comes last so that a file is written in one pass, while tensors are read one at a time.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, Literal, TypeVar

import msgspec
import xxhash

from instar.checkpoint.manifest import CheckpointError
from instar.config.files import open_regular
from instar.extensions.delta.format.encoding import (
    BlockDelta,
    Coding,
    EncodingError,
    Words,
    apply_block,
    compress,
    decompress,
)
from instar.extensions.delta.format.state import FLOATS, Outline
from instar.record.events import Count

MAGIC = b"INSTAR\xce\x94"
FORMAT = 1
_DIGEST_BYTES = 16
_TAIL_BYTES = 8 + 8 + 2 * _DIGEST_BYTES
_MAX_FOOTER_BYTES = 1 << 27
_CHUNK_BYTES = 1 << 20

Values = Literal["steps", "absolute"]
H = TypeVar("H", bound="Head")


class Span(msgspec.Struct, frozen=True, array_like=True):
    """The difference of one block; see `encoding.BlockDelta`."""

    block: Count
    changed: Count
    gaps: tuple[Count, ...] | None
    """compressed length in bytes of each plane; None: dense"""
    values: tuple[Count, ...]

    @property
    def size_bytes(self) -> int:
        return sum(self.gaps or ()) + sum(self.values)


class Changes(msgspec.Struct, frozen=True, array_like=True):
    """The changed blocks of a tensor."""

    dtype: str
    shape: tuple[Count, ...]
    spans: tuple[Span, ...]

    @property
    def n_changed(self) -> int:
        return sum(span.changed for span in self.spans)


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What a link or an anchor says of itself."""

    format: int = FORMAT
    number: Count = 0
    first: Count = 0
    """number of the first link that it holds the changes of; `number` unless links were squashed"""
    step: Count = 0
    base: str = ""
    """hash of the state before; empty: there is none"""
    result: str
    """hash of the state"""
    aliases: dict[str, str] = {}
    """other names of tensors, such as those of tied weights"""
    elements: Count
    """of all tensors"""
    full_bytes: Count
    """of all tensors"""
    missing: tuple[Count, Count] | None = None
    """first and last of the steps before it whose states were due and are not in the chain"""


class Footer(Head, frozen=True, kw_only=True):
    """The footer of a link: its head, and where the changes of each tensor are."""

    values: Values
    tensors: dict[str, Changes]

    @property
    def n_changed(self) -> int:
        return sum(changes.n_changed for changes in self.tensors.values())


def coding(dtype: str, values: Values) -> Coding:
    return Coding(dtype in FLOATS, values == "absolute")


class LinkWriter:
    """Writes a link, difference by difference."""

    def __init__(self, file: BinaryIO, outline: Outline, values: Values) -> None:
        self._file, self._outline, self._values = file, outline, values
        self._digest = xxhash.xxh3_128()
        self._spans: dict[str, list[Span]] = {}
        self._write(MAGIC)

    def add(self, name: str, block: int, difference: BlockDelta) -> None:
        """Add the difference of a block of a tensor; blocks are numbered from 0."""
        for plane in (*(difference.gaps or ()), *difference.values):
            self._write(plane)
        gaps = None if difference.gaps is None else tuple(map(len, difference.gaps))
        span = Span(block, difference.n_changed, gaps, tuple(map(len, difference.values)))
        self._spans.setdefault(name, []).append(span)

    def finish(self, head: Head) -> Footer:
        """Write the footer and sync the file."""
        tensors = {
            name: Changes(self._outline[name].dtype, self._outline[name].shape, tuple(spans))
            for name, spans in self._spans.items()
        }
        fields = {name: getattr(head, name) for name in Head.__struct_fields__}
        footer = Footer(**fields, values=self._values, tensors=tensors)
        raw = msgspec.json.encode(footer)
        payload = compress(raw)
        end = payload + struct.pack("<QQ", len(raw), len(payload))
        self._write(end + xxhash.xxh3_128_digest(end))
        self._file.write(self._digest.digest())
        self._file.flush()
        os.fsync(self._file.fileno())
        return footer

    def _write(self, content: bytes) -> None:
        self._file.write(content)
        self._digest.update(content)


@dataclass(frozen=True)
class LinkFile:
    """A link on disk; differences are read on request."""

    path: Path
    footer: Footer
    size_bytes: int

    @cached_property
    def _places(self) -> dict[tuple[str, int], tuple[int, Span]]:
        places = {}
        at = len(MAGIC)
        for name, changes in self.footer.tensors.items():
            for span in changes.spans:
                places[name, span.block] = (at, span)
                at += span.size_bytes
        return places

    def difference(self, name: str, block: int) -> BlockDelta | None:
        """Return the difference of a block of a tensor; None: it is unchanged."""
        if (name, block) not in self._places:
            return None
        at, span = self._places[name, block]
        try:
            with open_regular(self.path) as file:
                file.seek(at)
                planes = [file.read(size) for size in (*(span.gaps or ()), *span.values)]
        except OSError as error:
            raise CheckpointError(f"{self.path}: {error.strerror}") from error
        count = len(span.gaps or ())
        gaps = None if span.gaps is None else tuple(planes[:count])
        return BlockDelta(span.changed, gaps, tuple(planes[count:]))

    def apply(self, name: str, difference: BlockDelta, words: Words) -> None:
        """Apply the difference of a block of a tensor in place.

        Raises:
            CheckpointError: the difference does not fit the block.
        """
        footer = self.footer
        try:
            apply_block(difference, words, coding(footer.tensors[name].dtype, footer.values))
        except EncodingError as error:
            raise CheckpointError(f"{self.path}: invalid: {name}: {error}") from error

    def check_fits(self, base: Outline) -> None:
        """Check that the differences are of tensors of a base.

        Raises:
            CheckpointError: a tensor is missing there, or has another dtype or shape.
        """
        for name, changes in self.footer.tensors.items():
            if (entry := base.get(name)) is None:
                raise CheckpointError(f"{self.path}: changes {name}, which its base does not have")
            if (entry.dtype, entry.shape) != (changes.dtype, changes.shape):
                raise CheckpointError(
                    f"{self.path}: {name} is {changes.dtype} {list(changes.shape)}, but "
                    f"{entry.dtype} {list(entry.shape)} in its base"
                )


def read_link(path: Path, *, check: bool = True) -> LinkFile:
    """Return a link; by default reads all of it to verify its checksum.

    Raises:
        CheckpointError: it is missing, damaged, not a link, or has a newer format.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size < len(MAGIC) + _TAIL_BYTES or file.read(len(MAGIC)) != MAGIC:
                raise CheckpointError(f"{path}: not a delta link, or it ends too early")
            if check and _digest(file, size - _DIGEST_BYTES) != file.read(_DIGEST_BYTES):
                raise _damage_error(path)
            file.seek(size - _TAIL_BYTES)
            lengths = file.read(16)
            raw_bytes, stored_bytes = struct.unpack("<QQ", lengths)
            begin = size - _TAIL_BYTES - stored_bytes
            if begin < len(MAGIC) or raw_bytes > _MAX_FOOTER_BYTES:
                raise _damage_error(path)
            digest = file.read(_DIGEST_BYTES)
            file.seek(begin)
            footer_bytes = file.read(stored_bytes)
        if xxhash.xxh3_128_digest(footer_bytes + lengths) != digest:
            raise _damage_error(path)
        raw = decompress(footer_bytes, raw_bytes)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing") from error
    except (OSError, EncodingError) as error:
        raise CheckpointError(f"{path}: invalid: {error}") from error
    footer = decode_head(raw, Footer, path)
    payload = sum(span.size_bytes for changes in footer.tensors.values() for span in changes.spans)
    if payload != begin - len(MAGIC):
        raise CheckpointError(f"{path}: invalid: its footer does not fit the file")
    return LinkFile(path, footer, size)


def decode_head(raw: bytes | str, kind: type[H], path: Path) -> H:
    """Decode the JSON of a head or footer.

    Raises:
        CheckpointError: it is invalid, or has a newer format.
    """
    try:
        if msgspec.json.decode(raw, type=_Format).format > FORMAT:
            raise CheckpointError(f"{path}: a newer format; this Instar reads up to {FORMAT}")
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: invalid: {error}") from error


def _damage_error(path: Path) -> CheckpointError:
    return CheckpointError(f"{path}: content has changed: its checksum does not match")


class _Format(msgspec.Struct):
    format: int


def _digest(file: BinaryIO, size: int) -> bytes:
    """Return the hash of the first `size` bytes, and leave the file after them."""
    digest = xxhash.xxh3_128()
    file.seek(0)
    while size and (chunk := file.read(min(size, _CHUNK_BYTES))):
        digest.update(chunk)
        size -= len(chunk)
    return digest.digest()
