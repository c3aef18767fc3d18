"""Writes safetensors files one tensor at a time.

The library's writer needs all tensors in memory. The header at the beginning of a file has the
position of each tensor, so all dtypes and shapes must be known before the first tensor is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from instar.checkpoint.inspect import TensorEntry, encode_header
from instar.checkpoint.layout import Layout
from instar.checkpoint.manifest import CheckpointError
from instar.record import atomic

Read = Callable[[str], Tensor]
"""Returns a tensor by its name."""

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
"""Safetensors dtypes that runs save, in the order in which the format sorts tensors."""

_WORDS = {dtype: word for word, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Outline:
    """Dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def outlines(layout: Layout) -> dict[str, Outline]:
    """Returns dtype and shape of every tensor of a layout.

    Raises:
        CheckpointError: one has an unsupported dtype.
    """
    for name, entry in layout.entries.items():
        if entry.dtype not in DTYPES:
            raise CheckpointError(
                f"{layout.folder}: {name} has dtype {entry.dtype}, which is not supported"
            )
    return {name: Outline(DTYPES[e.dtype], e.shape) for name, e in layout.entries.items()}


def write_tensors(path: Path, outlines: Mapping[str, Outline], read: Read) -> None:
    """Writes and syncs a file of the tensors that `read` returns; reads each tensor once.

    The file is the same as that of `safetensors.torch.save_file`.

    Raises:
        ValueError: a tensor does not match its outline.
    """
    order = sorted(outlines, key=lambda name: (-_rank(outlines[name].dtype), name))
    with path.open("wb") as file:
        file.write(encode_header({name: _entry(outlines[name]) for name in order}))
        for name in order:
            tensor = read(name)
            if (found := Outline(tensor.dtype, tuple(tensor.shape))) != outlines[name]:
                raise ValueError(f"{name}: {found}, not {outlines[name]}")
            file.write(_content(tensor))
    atomic.sync_file(path)


def _rank(dtype: torch.dtype) -> int:
    return list(DTYPES.values()).index(dtype)


def _entry(outline: Outline) -> TensorEntry:
    return TensorEntry(_WORDS[outline.dtype], outline.shape, outline.size_bytes)


def _content(tensor: Tensor) -> memoryview:
    """Returns the bytes of a tensor without copying."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
