"""Safetensors files read and written one tensor at a time.

The format's own writer wants every tensor in memory. A file begins with a header that says where
each of them lies, so whoever writes one by one must know types and shapes beforehand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from instar.checkpoint import disk
from instar.checkpoint.header import read_header
from instar.checkpoint.manifest import CheckpointError

Read = Callable[[str], Tensor]
"""A tensor by its name."""

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
}
"""The format's words for the types that runs save, in the order by which it sorts tensors."""

_WORDS = {dtype: word for word, dtype in DTYPES.items()}
_ALIGNMENT = 8


@dataclass(frozen=True)
class Outline:
    """What the header says of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@contextmanager
def reading(path: Path) -> Iterator[Read]:
    """Reads single tensors of a file.

    Raises:
        CheckpointError: it is not a safetensors file, or has no such tensor.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            yield lambda name: file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def outlines(path: Path) -> dict[str, Outline]:
    """Every tensor of a file by name, in the file's order.

    Raises:
        CheckpointError: it is not a safetensors file, or holds a type that runs do not save.
    """
    entries = read_header(path)
    for name, entry in entries.items():
        if entry.dtype not in DTYPES:
            raise CheckpointError(
                f"{path}: {name} is of the type {entry.dtype}, which no run saves"
            )
    return {name: Outline(DTYPES[entry.dtype], entry.shape) for name, entry in entries.items()}


def write_tensors(path: Path, outlines: Mapping[str, Outline], read: Read) -> None:
    """Write and sync a file of the tensors that `read` gives, asking for each once.

    The bytes are those that `safetensors.torch.save_file` would write of all of them.

    Raises:
        ValueError: a tensor is not as its outline says.
    """
    order = sorted(outlines, key=lambda name: (-_rank(outlines[name].dtype), name))
    with path.open("wb") as file:
        file.write(_header({name: outlines[name] for name in order}))
        for name in order:
            tensor = read(name)
            if (found := Outline(tensor.dtype, tuple(tensor.shape))) != outlines[name]:
                raise ValueError(f"{name}: {found}, not {outlines[name]}")
            file.write(_content(tensor))
    disk.sync_file(path)


def _rank(dtype: torch.dtype) -> int:
    return list(DTYPES.values()).index(dtype)


def _header(outlines: Mapping[str, Outline]) -> bytes:
    entries = {}
    begin = 0
    for name, outline in outlines.items():
        end = begin + outline.size_bytes
        entries[name] = {
            "dtype": _WORDS[outline.dtype],
            "shape": outline.shape,
            "data_offsets": (begin, end),
        }
        begin = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _content(tensor: Tensor) -> memoryview:
    """The tensor's own bytes, not a copy of them."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
