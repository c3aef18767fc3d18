"""Folders of transformers' models of known families, which are read but not trusted.

Nothing of a folder is run or unpickled, and its config says nothing that its tensors do not confirm: a folder is
opened only if every tensor of the model is there with its shape, and none besides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from instar.checkpoint.layout import ComponentReader, Layout, TensorEntry, open_reader
from instar.checkpoint.manifest import CheckpointError
from instar.checkpoint.tensor_file import DTYPES, Outline
from instar.models.hf import CONFIG
from instar.models.hf.config import complete_config, explicit_config, family_keys, read_config
from instar.models.hf.families import FAMILIES, Family, SingleExperts
from instar.models.hf.pretrained import PretrainedShape
from instar.models.hf.tensors import BUFFERS, refuse_tensors
from instar.models.hf.weights import weights_layout
from instar.models.shape import ArchitectureError, Parameter

_FLOATS = ("F16", "BF16", "F32", "F64")
_ADAPTER = "adapter_config.json"
_HEAD = "lm_head.weight"
_OF_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")
_ROWS_BYTES = 1 << 26
"""compared at once"""

Read = Callable[[str], Tensor]


@dataclass(frozen=True)
class PretrainedFolder:
    """A model of transformers on disk: its shape, and where each of its tensors is."""

    path: Path
    config: Mapping[str, Any]
    """`config.json` as it is"""
    shape: PretrainedShape
    """of the config, completed by the defaults of transformers"""
    layout: Layout
    stored: Mapping[str, str]
    """name in the files of each tensor of the model, by its full name"""

    @property
    def single_experts(self) -> bool:
        """Whether each expert has tensors of its own in the files."""
        return has_single_experts(self.stored)

    @cached_property
    def outlines(self) -> dict[str, Outline]:
        """Dtype and shape of each parameter by its name in the shape, in the model's order."""
        table = self.shape.parameters()
        return {
            name: Outline(DTYPES[self._entry(parts[0][0]).dtype], table[name].shape)
            for name, parts in self._parts.items()
        }

    def config_of(self, shape: PretrainedShape) -> dict[str, Any]:
        """Return the `config.json` of a model of another shape, with this one's other entries."""
        shape_keys = family_keys(self.shape.config) | family_keys(shape.config)
        other_entries = {key: value for key, value in self.config.items() if key not in shape_keys}
        return {**other_entries, **explicit_config(shape.config)}

    @contextmanager
    def reading(self) -> Iterator[Read]:
        """Context manager: a function that reads a parameter by its name in the shape."""
        with open_reader(self.layout) as read:
            yield lambda name: self._read(read, name)

    def _read(self, read: ComponentReader, name: str) -> Tensor:
        parts, outline = self._parts[name], self.outlines[name]
        if not parts[0][1].index:
            return read(self.stored[parts[0][0]])
        tensor = torch.empty(outline.shape, dtype=outline.dtype)
        for file_name, part in parts:
            tensor[part.index] = read(self.stored[file_name])
        return tensor

    @cached_property
    def _parts(self) -> dict[str, list[tuple[str, FilePart]]]:
        """The tensors of files that each parameter is made of."""
        parts: dict[str, list[tuple[str, FilePart]]] = {}
        for file_name, part in file_parts(self.shape, single_experts=self.single_experts).items():
            parts.setdefault(part.parameter, []).append((file_name, part))
        return parts

    def _entry(self, file_name: str) -> TensorEntry:
        return self.layout.entries[self.stored[file_name]]


def open_folder(path: Path | str) -> PretrainedFolder:
    """Open a folder that `save_pretrained` wrote. Reads the headers of its files, no tensor but a tied head.

    Raises:
        CheckpointError: no known family; weights that are quantised, only pickled, or not those of the config,
            which lists what does not fit; code of its own.
    """
    path = Path(path)
    config = read_config(path)
    where = path / CONFIG
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CheckpointError(
            f"{where}: model_type {kind!r} is not a known family; there are {', '.join(FAMILIES)}"
        )
    if config.get("auto_map") or config.get("trust_remote_code"):
        raise CheckpointError(
            f"{where}: auto_map: the folder brings code of its own, which is not run"
        )
    if (path / _ADAPTER).exists():
        raise CheckpointError(
            f"{path / _ADAPTER}: transformers adds the adapter to the weights as it loads them; merge it, and save the "
            "model alone"
        )
    if quantised_names := [
        key for key in ("quantization_config", "compression_config") if config.get(key)
    ]:
        raise CheckpointError(
            f"{where}: {quantised_names[0]}: quantised weights do not grow; load the model in floating point and "
            "save it again with save_pretrained"
        )
    layout = weights_layout(path)
    _check_counts(where, config, FAMILIES[kind], len(layout.entries))
    shape = _shape(where, config)
    stored_names = _names_in_files(path, shape, layout)
    return PretrainedFolder(path, config, shape, layout, stored_names)


def _check_counts(where: Path, config: Mapping[str, Any], family: Family, tensors: int) -> None:
    """Check counts before anything is made as often as they say: each layer has tensors of its own."""
    layers = config.get(family.axes["layers"], 0)
    if type(layers) is not int or layers > tensors:
        raise CheckpointError(
            f"{where}: {family.axes['layers']} is {layers!r}, and the files have {tensors:,} tensors"
        )


def _shape(where: Path, config: Mapping[str, Any]) -> PretrainedShape:
    try:
        return PretrainedShape(complete_config(config))
    except ArchitectureError as error:
        lines = [problem.message for problem in error.problems]
        raise CheckpointError("\n  ".join([f"{where}: no model of this shape:", *lines])) from error


def _names_in_files(path: Path, shape: PretrainedShape, layout: Layout) -> dict[str, str]:
    """Return the names in the files by full names; raises CheckpointError unless they are the model's."""
    sizes = shape.sizes()
    single = has_single_experts(layout.entries)
    count = sizes["layers"] * (sizes.get("experts", 1) if single else 1)
    if count > len(layout.entries):
        raise CheckpointError(
            f"{path / CONFIG}: {sizes['layers']} layers of {sizes.get('experts', 1)} experts, and the files have "
            f"{len(layout.entries)} tensors"
        )
    parts = file_parts(shape, single_experts=single)
    prefix = shape.family.blocks.partition(".")[0] + "."
    stored_names, problems = dict[str, str](), list[str]()
    for name in layout.entries:
        if BUFFERS.fullmatch(name.removeprefix(prefix)):
            continue
        full = name if name in parts or prefix + name not in parts else prefix + name
        if full in stored_names:
            problems.append(f"{full}: saved twice, also as {name}")
        stored_names[full] = name
    if shape.tied and _HEAD in stored_names:
        problems += _problems_of_head(shape, layout, stored_names)
    entries = {full: layout.entries[name] for full, name in stored_names.items()}
    problems += _mismatches(parts, entries)
    refuse_tensors(
        f"{path}: the tensors are not those of the {shape.family.name} of {CONFIG}:", problems
    )
    return {full: stored_names[full] for full in parts}


def _mismatches(parts: Mapping[str, FilePart], entries: Mapping[str, TensorEntry]) -> Iterable[str]:
    dtypes: dict[str, str] = {}
    for name, part in parts.items():
        entry = entries.get(name)
        if entry is None:
            yield f"{name}: missing"
        elif entry.dtype not in _FLOATS:
            yield f"{name}: {entry.dtype}; weights must be in floating point ({', '.join(_FLOATS)})"
        elif entry.shape != part.shape:
            yield f"{name}: shape {entry.shape}, but {CONFIG} says {part.shape}"
        elif (first := dtypes.setdefault(part.parameter, entry.dtype)) != entry.dtype:
            yield f"{name}: {entry.dtype}, beside experts of {first}"
    yield from (f"{name}: unknown" for name in entries if name not in parts)


def _problems_of_head(
    shape: PretrainedShape, layout: Layout, stored_names: dict[str, str]
) -> Iterable[str]:
    """Remove a repeated tied head; return a problem if it differs from the table of tokens."""
    head = stored_names.pop(_HEAD)
    table = next(n for n, entry in shape.parameters().items() if entry.kind == "embedding")
    tokens = stored_names.get(table)
    if tokens is None:
        return []
    head_entry, tokens_entry = layout.entries[head], layout.entries[tokens]
    is_alike = (head_entry.dtype, head_entry.shape) == (tokens_entry.dtype, tokens_entry.shape)
    if is_alike and head_entry.dtype in _FLOATS:
        rows = head_entry.shape[0] if head_entry.shape else 1
        step = max(1, _ROWS_BYTES * rows // max(1, head_entry.size_bytes))
        with open_reader(layout) as read:
            if all(
                _same_bits(read.rows(head, at, at + step), read.rows(tokens, at, at + step))
                for at in range(0, rows, step)
            ):
                return []
    return [f"{_HEAD}: differs from {table}, but {CONFIG} has tie_word_embeddings"]


def _same_bits(first: Tensor, second: Tensor) -> bool:
    return torch.equal(*(tensor.contiguous().view(torch.uint8) for tensor in (first, second)))


@dataclass(frozen=True)
class FilePart:
    """The part of a parameter that a tensor of a file holds."""

    parameter: str
    """its name in the shape"""
    shape: tuple[int, ...]
    index: tuple[int | slice, ...] = ()


def has_single_experts(names: Iterable[str]) -> bool:
    """Return whether these tensors of files are those of experts, one by one."""
    return any(map(_OF_ONE_EXPERT.search, names))


def file_parts(shape: PretrainedShape, *, single_experts: bool) -> dict[str, FilePart]:
    """Return every tensor of the files of a model, by its name there, in the model's order.

    Args:
        single_experts: each expert has tensors of its own; else, they are joined as in memory.
    """
    split = shape.family.single_experts if single_experts else None
    parts: dict[str, FilePart] = {}
    for name, entry in shape.parameters().items():
        file_name = shape.module_name(name)
        if split and ".mlp." in file_name:
            file_name = file_name.replace(".mlp.", f".{split.block}.")
        if split and entry.kind == "experts" and len(entry.shape) == 3:
            parts |= _of_experts(name, entry, file_name, split)
        else:
            parts[file_name] = FilePart(name, entry.shape)
    return parts


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
        for title, expert_rows in parts.items():
            shape = (expert_rows.stop - expert_rows.start, columns)
            yield f"{stem}.{expert}.{title}.weight", FilePart(name, shape, (expert, expert_rows))
