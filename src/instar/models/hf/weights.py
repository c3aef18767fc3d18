"""Files of weights as transformers saves them: one of safetensors, or shards and their index."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

from torch import Tensor

from instar.checkpoint.layout import Layout, linked_layout, open_reader
from instar.checkpoint.manifest import CheckpointError, read_json
from instar.checkpoint.tensor_file import Outline, file_order, write_tensors
from instar.models.hf import encode_json_file
from instar.record import atomic

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 50 * 10**9
"""Largest file of weights, as `save_pretrained` writes them."""
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_SHARD = re.compile(r"[\w.-]+\.safetensors", re.ASCII)


def weights_layout(folder: Path) -> Layout:
    """Return where each tensor of a folder is, from the headers of its files and its index.

    Raises:
        CheckpointError: there are no safetensors, a shard is missing or cut off, or the index is not that of the
            shards.
    """
    if (folder / WEIGHTS).exists():
        return linked_layout(folder, [WEIGHTS])
    if not (folder / INDEX).exists():
        raise CheckpointError(_without_weights(folder))
    index = folder / INDEX
    file_of = read_json(index, follow=True).get("weight_map")
    if not isinstance(file_of, dict) or not all(isinstance(file, str) for file in file_of.values()):
        raise CheckpointError(f"{index}: not an index of safetensors files")
    files = sorted(set(file_of.values()))
    if odd := [file for file in files if not _SHARD.fullmatch(file)]:
        raise CheckpointError(f"{index}: {odd[0]!r} is not a safetensors file of this folder")
    layout = linked_layout(folder, files)
    stored_in = {name: pieces[0].file for name, pieces in layout.pieces.items()}
    for name in (*file_of, *stored_in):
        if file_of.get(name) != stored_in.get(name):
            raise CheckpointError(
                f"{index}: {name} is in {stored_in.get(name, 'no shard')}, and the index says "
                f"{file_of.get(name, 'nothing of it')}"
            )
    return layout


def _without_weights(folder: Path) -> str:
    names = sorted(path.name for kind in _PICKLED for path in folder.glob(kind))
    if names:
        return (
            f"{folder}: weights only as {', '.join(names)}, which may run any program when "
            "unpickled and is not opened; save the model again with save_pretrained, which "
            f"writes {WEIGHTS}"
        )
    return f"{folder}: no {WEIGHTS} and no {INDEX}"


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a folder; raises CheckpointError as `weights_layout`."""
    layout = weights_layout(folder)
    with open_reader(layout) as read:
        return {name: read(name) for name in layout.entries}


def write_weights(
    folder: Path,
    outlines: Mapping[str, Outline],
    make: Mapping[str, Callable[[], Tensor]],
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write tensors in as many files as needed, in the order of `outlines`, and their index.

    While one tensor is written, a thread makes the next.
    """
    groups, room = list[list[str]](), 0
    for name, outline in outlines.items():
        if outline.size_bytes > room or not groups:
            groups.append([])
            room = max_shard_bytes
        groups[-1].append(name)
        room -= outline.size_bytes
    stem, suffix = WEIGHTS.split(".")
    files = [
        WEIGHTS if len(groups) == 1 else f"{stem}-{number:05}-of-{len(groups):05}.{suffix}"
        for number in range(1, len(groups) + 1)
    ]
    shapes = [{name: outlines[name] for name in names} for names in groups]
    order = [name for shard in shapes for name in file_order(shard)]
    with ThreadPoolExecutor(1) as pool:
        later = deque(pool.submit(make[name]) for name in order[:1])
        following = iter(order[1:])

        def read(_: str) -> Tensor:
            tensor = later.popleft().result()
            later.extend(pool.submit(make[name]) for name in islice(following, 1))
            return tensor

        for file, group_outlines in zip(files, shapes, strict=True):
            write_tensors(folder / file, group_outlines, read, {"format": "pt"})
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(outline.size_bytes for outline in outlines.values())},
            "weight_map": {
                n: file for file, names in zip(files, groups, strict=True) for n in names
            },
        }
        atomic.write_synced(folder / INDEX, encode_json_file(index))
