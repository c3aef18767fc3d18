"""Inspects checkpoints without torch: headers of tensor files, checksums."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from instar.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    UnreadableError,
    file_errors,
    read_manifest,
)
from instar.config.files import open_regular
from instar.record.events import Count

_MAX_HEADER_BYTES = 100_000_000
_ALIGNMENT = 8


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in the header of a safetensors file; `dtype` is F32, BF16, I64, …"""

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 8),
}
"""Bytes of an element."""


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[Count, ...]
    data_offsets: tuple[int, int]


def read_header(path: Path, *, follow: bool = False) -> dict[str, TensorEntry]:
    """Return the tensors of a safetensors file by name, in the order of their data.

    Args:
        follow: the file may be a symbolic link.

    Raises:
        CheckpointError: the file cannot be read, is not a safetensors file, or is truncated.
    """
    raw, content, size = _header(path, follow)
    try:
        content.pop("__metadata__", None)
        entries = msgspec.convert(content, dict[str, _Entry])
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise CheckpointError(f"{path}: not a safetensors file: {error}") from error
    data_bytes = size - len(raw)
    for name, entry in entries.items():
        begin, end = entry.data_offsets
        if not 0 <= begin <= end <= data_bytes:
            raise CheckpointError(f"{path}: {name} lies outside the file, which ends too early")
        size_bytes = math.prod(entry.shape) * _BYTES.get(entry.dtype, 0)
        if entry.dtype in _BYTES and end - begin != size_bytes:
            raise CheckpointError(
                f"{path}: {name} has {end - begin:,} bytes, and {entry.shape} needs {size_bytes:,}"
            )
    by_place = sorted(entries.items(), key=lambda item: item[1].data_offsets)
    return {
        name: TensorEntry(entry.dtype, entry.shape, entry.data_offsets[1] - entry.data_offsets[0])
        for name, entry in by_place
    }


def read_metadata(path: Path) -> tuple[bytes, dict[str, str]]:
    """Return the whole header of a safetensors file, and its metadata.

    Raises:
        CheckpointError: the file cannot be read, or is not a safetensors file.
    """
    raw, content, _ = _header(path)
    try:
        return raw, msgspec.convert(content.get("__metadata__", {}), dict[str, str])
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path}: not a safetensors file: {error}") from error


def _header(path: Path, follow: bool = False) -> tuple[bytes, dict[str, Any], int]:
    """Return the header of a safetensors file with its length, its content, and the file's size."""
    try:
        with open_regular(path, follow=follow) as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
                raise CheckpointError(f"{path}: not a safetensors file")
            raw = file.read(length)
            content = json.loads(raw)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a safetensors file: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not a safetensors file")
    return prefix + raw, content, size


def encode_header(
    entries: Mapping[str, TensorEntry], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the header of a safetensors file whose tensors follow in the order of `entries`."""
    content: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for name, entry in entries.items():
        end = begin + entry.size_bytes
        content[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (begin, end)}
        begin = end
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def check_shapes(
    folder: Path, headers: Mapping[str, TensorEntry], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Check that a component has these tensors.

    Args:
        folder: of the checkpoint, for messages.
        headers: its tensors.

    Raises:
        CheckpointError: one is missing or has another shape.
    """
    for name, shape in shapes.items():
        if name not in headers or headers[name].shape != shape:
            shape_text = headers[name].shape if name in headers else "missing"
            raise CheckpointError(
                f"{folder}: the tensors do not fit the architecture: {name} must have the shape "
                f"{shape}, and is {shape_text}"
            )


@dataclass(frozen=True)
class Verification:
    """The result of verifying a checkpoint."""

    path: Path
    broken: tuple[str, ...]
    """errors of damaged files; only that of the manifest if it is damaged, since the other files
    cannot be checked without it"""
    extra_files: tuple[str, ...]
    """files that are not in the manifest"""
    size_bytes: int
    seconds: float
    unreadable: tuple[str, ...] = ()
    """files that this user may not read"""

    @property
    def bytes_per_s(self) -> float:
        return self.size_bytes / max(self.seconds, 1e-9)


def verify_checkpoint(path: Path) -> Verification:
    """Compare the files of the checkpoint in the folder `path` with its manifest."""
    start_time = time.perf_counter()
    try:
        manifest = read_manifest(path)
    except UnreadableError as error:
        return Verification(path, (), (), 0, time.perf_counter() - start_time, (str(error),))
    except CheckpointError as error:
        return Verification(path, (str(error),), (), 0, time.perf_counter() - start_time)

    errors = file_errors(path, manifest)
    on_disk = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    return Verification(
        path,
        tuple(str(error) for error in errors if not isinstance(error, UnreadableError)),
        tuple(sorted(on_disk - manifest.files.keys() - {MANIFEST})),
        sum(entry.size_bytes for entry in manifest.files.values()),
        time.perf_counter() - start_time,
        tuple(str(error) for error in errors if isinstance(error, UnreadableError)),
    )
