"""Reads and writes safetensors files one tensor at a time.

The library's writer needs all tensors in memory. The header at the beginning of a file has the
position of each tensor, so all dtypes and shapes must be known before the first tensor is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from instar.checkpoint.inspect import TensorEntry, encode_header, read_header
from instar.checkpoint.manifest import CheckpointError
from instar.config.files import check_regular
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


@contextmanager
def reading(path: Path) -> Iterator[Read]:
    """Opens a file to read single tensors.

    Raises:
        CheckpointError: it is not a safetensors file, or has no such tensor.
    """
    from safetensors import SafetensorError, safe_open

    try:
        check_regular(path)
        with safe_open(path, "pt") as file:
            yield lambda name: file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def outlines(path: Path) -> dict[str, Outline]:
    """Returns dtype and shape of every tensor of a file, in the order of their data.

    Raises:
        CheckpointError: it is not a safetensors file, or has an unsupported dtype.
    """
    entries = read_header(path)
    for name, entry in entries.items():
        if entry.dtype not in DTYPES:
            raise CheckpointError(f"{path}: {name} has dtype {entry.dtype}, which is not supported")
    return {name: Outline(DTYPES[entry.dtype], entry.shape) for name, entry in entries.items()}


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
