"""The tensors of files of known families: which part of which parameter each holds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from instar.models.hf.families import SingleExperts
from instar.models.hf.pretrained import PretrainedShape
from instar.models.shape import Parameter

_OF_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True)
class FilePart:
    """The part of a parameter that a tensor of a file holds."""

    parameter: str
    """its name in the shape"""
    shape: tuple[int, ...]
    index: tuple[int | slice, ...] = ()


def has_single_experts(names: Iterable[str]) -> bool:
    """Whether these tensors of files are those of experts, one by one."""
    return any(map(_OF_ONE_EXPERT.search, names))


def file_parts(shape: PretrainedShape, *, single_experts: bool) -> dict[str, FilePart]:
    """Returns every tensor of the files of a model, by its name there, in the model's order.

    Args:
        single_experts: each expert has tensors of its own; else, they are joined as in memory.
    """
    split = shape.family.single_experts if single_experts else None
    found: dict[str, FilePart] = {}
    for name, entry in shape.parameters().items():
        file_name = shape.module_name(name)
        if split and ".mlp." in file_name:
            file_name = file_name.replace(".mlp.", f".{split.block}.")
        if split and entry.kind == "experts" and len(entry.shape) == 3:
            found |= _of_experts(name, entry, file_name, split)
        else:
            found[file_name] = FilePart(name, entry.shape)
    return found


def _of_experts(
    name: str, entry: Parameter, file_name: str, split: SingleExperts
) -> Iterator[tuple[str, FilePart]]:
    stem, _, part = file_name.rpartition(".")
    experts, rows, columns = entry.shape
    half = rows // 2
    parts: Mapping[str, slice] = (
        {split.gate: slice(0, half), split.up: slice(half, rows)}
        if part == "gate_up_proj"
        else {split.down: slice(0, rows)}
    )
    for expert in range(experts):
        for title, along in parts.items():
            shape = (along.stop - along.start, columns)
            yield f"{stem}.{expert}.{title}.weight", FilePart(name, shape, (expert, along))
