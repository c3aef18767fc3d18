"""What a safetensors file says of its tensors, read without torch.

The file begins with eight bytes, little-endian: the length of the JSON that follows. It gives each
tensor's type, shape, and first and last byte behind it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import msgspec

from instar.checkpoint.manifest import CheckpointError

_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class TensorEntry:
    """A tensor as the header describes it; `dtype` in the format's words: F32, BF16, I64, …"""

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Every tensor of a safetensors file by name, as the file has them in order.

    Raises:
        CheckpointError: the file cannot be read, or is no safetensors file, or ends too early.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
                raise CheckpointError(f"{path}: not a safetensors file")
            content = json.loads(file.read(length))
        if not isinstance(content, dict):
            raise CheckpointError(f"{path}: not a safetensors file")
        content.pop("__metadata__", None)
        entries = msgspec.convert(content, dict[str, _Entry])
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise CheckpointError(f"{path}: not a safetensors file: {error}") from error
    data_bytes = size - 8 - length
    for name, entry in entries.items():
        begin, end = entry.data_offsets
        if not 0 <= begin <= end <= data_bytes:
            raise CheckpointError(f"{path}: {name} lies outside the file, which ends too early")
    by_place = sorted(entries.items(), key=lambda item: item[1].data_offsets)
    return {
        name: TensorEntry(entry.dtype, entry.shape, entry.data_offsets[1] - entry.data_offsets[0])
        for name, entry in by_place
    }
