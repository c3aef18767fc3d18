"""Tensors of torch as bits, and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from instar.checkpoint.inspect import TensorEntry
from instar.checkpoint.manifest import CheckpointError
from instar.checkpoint.tensor_file import DTYPES
from instar.extensions.delta.format.state import Bits, word_type

_WORDS = {dtype: word for word, dtype in DTYPES.items()}


def to_bits(tensor: Tensor) -> Bits:
    """Return a view of a contiguous CPU tensor's bits; of another one, of a copy.

    Raises:
        ValueError: safetensors has no such dtype.
    """
    if tensor.dtype not in _WORDS:
        raise ValueError(f"tensors of {tensor.dtype} cannot be saved")
    flat = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg().reshape(-1)
    size_bytes = flat.numel() * flat.itemsize
    entry = TensorEntry(_WORDS[tensor.dtype], tuple(tensor.shape), size_bytes)
    return Bits(entry, flat.view(torch.uint8).numpy().view(word_type(entry)))


def empty(entry: TensorEntry) -> Tensor:
    """Return a tensor with unset values.

    Raises:
        CheckpointError: torch has no such dtype.
    """
    if entry.dtype not in DTYPES:
        raise CheckpointError(f"tensors of the dtype {entry.dtype} cannot be loaded into torch")
    return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])


def without_aliases(
    tensors: Mapping[str, Tensor], aliases: Mapping[str, str]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return each tensor once, and its other names.

    Tied tensors, which are the same view of the same memory, keep the first of their names; so do
    checkpoints of transformers.

    Raises:
        ValueError: an alias refers to a missing tensor.
    """
    for alias, name in aliases.items():
        if name not in tensors or name in aliases:
            raise ValueError(f"{alias!r} is an alias of {name!r}, which is not saved")
    unique_tensors: dict[str, Tensor] = {}
    all_aliases = dict(aliases)
    first: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        if name in aliases:
            continue
        view = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        if tensor.numel() and first.setdefault(view, name) != name:
            all_aliases[name] = first[view]
        else:
            unique_tensors[name] = tensor
    return unique_tensors, all_aliases
