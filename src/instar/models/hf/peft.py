"""Adapters in the files of peft: `adapter_config.json` and `adapter_model.safetensors`, for models of transformers.

peft is not needed. Its key of a factor is ``base_model.model.<module>.lora_A.weight``; its scale is `lora_alpha / r`, or
`lora_alpha / √r` with `use_rslora`, and ranks and scales of single modules are in `rank_pattern` and `alpha_pattern`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from instar.checkpoint.layout import Layout, linked_layout, open_reader
from instar.checkpoint.manifest import CheckpointError, read_json
from instar.checkpoint.tensor_file import Outline, write_tensors
from instar.models.hf import encode_json_file
from instar.models.hf.pretrained import LoraShape, PretrainedShape
from instar.models.hf.tensors import refuse_tensors
from instar.models.lora import Lora, adapter_of, cover_weights, is_adapter
from instar.record import atomic

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FACTORS = {"lora_A.weight": "lora_a", "lora_B.weight": "lora_b"}
_FLOATS = ("F16", "BF16", "F32", "F64")
_MOST_CONFIG = 1 << 20
_PLAIN_INITS = (None, True, False, "gaussian", "eva", "orthogonal")
"""values of `init_lora_weights` that leave the base model's weights as they are"""
_WITHOUT_EFFECT = frozenset({
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"),
    *("init_lora_weights", "eva_config", "loftq_config", "corda_config", "runtime_config", "qalora_group_size"),
    *("megatron_config", "megatron_core", "ensure_weight_tying"),
    # which modules have an adapter, and of which rank, is what the tensors say
    *("exclude_modules", "layers_pattern", "layers_to_transform", "rank_pattern", "target_modules"),
    *("alpha_pattern", "lora_alpha", "lora_dropout", "peft_type", "r", "use_rslora"),
})  # fmt: skip
"""keys that are read here, or do not change what an adapter computes"""
_OFF: tuple[object, ...] = (None, False, "none", 0, [], {})
"""values of any other key with which it does nothing"""


@dataclass(frozen=True)
class PeftFolder:
    """Adapters on disk, for a model of this shape."""

    path: Path
    lora: tuple[Lora, ...]
    stored: Mapping[str, str]
    """name in the file of each factor, by its name in the shape"""
    layout: Layout
    remark: str = ""
    """what the folder asks for and a run does not do; empty: nothing"""

    @contextmanager
    def reading(self) -> Iterator[Callable[[str], Tensor]]:
        """Context manager: a function that reads a factor by its name in the shape."""
        with open_reader(self.layout) as read:
            yield lambda name: read(self.stored[name])


def open_adapter(path: Path, base: PretrainedShape) -> PeftFolder:
    """Open a folder that peft's `save_pretrained` wrote. Reads the header of its file, no tensor.

    Raises:
        CheckpointError: it holds something else than adapters as here, or those of another model; names what.
    """
    file = path / ADAPTER_CONFIG
    if not file.is_file():
        raise CheckpointError(f"{path}: no {ADAPTER_CONFIG} of peft")
    if file.stat().st_size > _MOST_CONFIG:
        raise CheckpointError(f"{file}: more than {_MOST_CONFIG:,} bytes")
    config = read_json(file, follow=True)
    if problems := list(_config_problems(config)):
        raise CheckpointError("\n  ".join([f"{file}: no adapters that are known here:", *problems]))
    if not (path / ADAPTER_WEIGHTS).exists():
        raise CheckpointError(
            f"{path}: no {ADAPTER_WEIGHTS}; pickled weights are not opened: save the adapter again with peft's "
            "save_pretrained"
        )
    layout = linked_layout(path, [ADAPTER_WEIGHTS])
    modules, stored = _factors(path, base, layout)
    adapters = {
        module: _adapter(file, config, base, module, rank) for module, rank in modules.items()
    }
    of_weights = {name: adapters.get(name) for name in LoraShape(base.config).adaptable()}
    dropout = config.get("lora_dropout") or 0
    remark = f"lora_dropout {dropout:g} of {file} is not applied" if dropout else ""
    return PeftFolder(path, cover_weights(of_weights), stored, layout, remark)


def _config_problems(config: Mapping[str, Any]) -> Iterator[str]:
    kind = config.get("peft_type")
    if kind != "LORA":
        yield f"peft_type {kind!r}: adapters here are LORA"
        return
    for key in sorted(config.keys() - _WITHOUT_EFFECT):
        if config[key] not in _OFF:
            yield f"{key} {config[key]!r}: not known here; merge the adapter with peft, and start from the model"
    init = config.get("init_lora_weights")
    if init not in _PLAIN_INITS:
        yield (
            f"init_lora_weights {init!r}: the adapter belongs to a base model whose weights were changed; convert it with "
            "peft (path_initial_model_for_weight_conversion)"
        )
    for key in ("r", "lora_alpha"):
        if not _is_positive(config.get(key)):
            yield f"{key} must be a number above 0, not {config.get(key)!r}"
    pattern = config.get("alpha_pattern") or {}
    if not isinstance(pattern, dict) or not all(map(_is_positive, pattern.values())):
        yield f"alpha_pattern must give numbers above 0, not {pattern!r}"
    elif odd := [name for name in pattern if not re.fullmatch(r"\^?[\w.]+", name)]:
        yield f"alpha_pattern: {odd[0]!r} is an expression; name modules"


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e9


def _factors(
    path: Path, base: PretrainedShape, layout: Layout
) -> tuple[dict[str, int], dict[str, str]]:
    """Return the rank of each adapted weight, by its name in the shape, and the names of factors in the file.

    Raises:
        CheckpointError: lists what does not fit the model.
    """
    weights = LoraShape(base.config).adaptable()
    ranks: dict[str, dict[str, int]] = {}
    stored, problems = dict[str, str](), list[str]()
    for name, entry in layout.entries.items():
        part = next((end for end in _FACTORS if name.endswith(f".{end}")), None)
        module = base.name(f"{name.removeprefix(_PREFIX).removesuffix(f'.{part}')}.")[:-1]
        if part is None or not name.startswith(_PREFIX):
            problems.append(f"{name}: no factor of an adapter")
        elif module not in weights:
            problems.append(
                f"{name}: the {base.family.name} has no weight of this name that can have one"
            )
        elif entry.dtype not in _FLOATS or len(entry.shape) != 2:
            problems.append(f"{name}: {entry.dtype} {entry.shape}; factors are matrices of floats")
        else:
            outputs, inputs = weights[module]
            is_a = part == "lora_A.weight"
            rank, size = entry.shape if is_a else entry.shape[::-1]
            if size != (inputs if is_a else outputs):
                problems.append(f"{name}: shape {entry.shape} for a weight of {weights[module]}")
            ranks.setdefault(module, {})[part] = rank
            stored[f"{module}.{_FACTORS[part]}"] = name
    for module, of_parts in ranks.items():
        if len(of_parts) < 2 or len({*of_parts.values()}) > 1:
            problems.append(f"{module}: a factor is missing, or the two have different ranks")
    if not ranks and not problems:
        problems.append("no tensors")
    refuse_tensors(
        f"{path / ADAPTER_WEIGHTS}: the tensors are not those of adapters of the model:", problems
    )
    return {module: next(iter(of_parts.values())) for module, of_parts in ranks.items()}, stored


def _adapter(
    file: Path, config: Mapping[str, Any], base: PretrainedShape, module: str, rank: int
) -> Lora:
    name = base.module_name(f"{module}.")[:-1]
    pattern = config.get("alpha_pattern") or {}
    by_name = (value for key, value in pattern.items() if _names(key, name))
    alpha = float(next(by_name, config["lora_alpha"]))
    stabilized = config.get("use_rslora", False)
    if type(stabilized) is not bool:
        raise CheckpointError(f"{file}: use_rslora must be true or false, not {stabilized!r}")
    return Lora("", rank, alpha, stabilized)


def _names(key: str, module: str) -> bool:
    """Return whether a key of a pattern of peft names a module: itself, or its end; after ^ only itself."""
    if key.startswith("^"):
        return module == key[1:]
    return module == key or module.endswith(f".{key}")


def adapter_files(shape: LoraShape, base: str) -> dict[str, bytes]:
    """Return the files of peft beside the tensors, for the adapters of a model.

    Args:
        base: folder of the model that they are for.

    Raises:
        CheckpointError: peft cannot have such adapters.
    """
    by_module: dict[str, Lora] = {}
    for name in shape.adaptable():
        if (adapter := adapter_of(shape.lora, name)) is not None:
            by_module[shape.module_name(f"{name}.")[:-1]] = adapter
    kinds = {adapter.rank_stabilized for adapter in by_module.values()}
    if len(kinds) != 1:
        said = "both rank-stabilized adapters and others" if kinds else "no adapters"
        raise CheckpointError(f"the model has {said}, which peft has no file for")
    first = next(iter(by_module.values()))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": first.rank,
        "lora_alpha": first.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": first.rank_stabilized,
        "target_modules": sorted(by_module),
        # from the beginning of a name: peft takes a pattern for its end, too
        "rank_pattern": {f"^{n}": a.rank for n, a in by_module.items() if a.rank != first.rank},
        "alpha_pattern": {f"^{n}": a.alpha for n, a in by_module.items() if a.alpha != first.alpha},
    }
    return {ADAPTER_CONFIG: encode_json_file(config)}


def write_adapter(folder: Path, shape: LoraShape, tensors: Mapping[str, Tensor], base: str) -> None:
    """Write the adapters of a model into a folder; see `adapter_files`."""
    names = {ours: theirs for theirs, ours in _FACTORS.items()}
    stored: dict[str, str] = {}
    for name in filter(is_adapter, shape.parameters()):
        module, _, part = name.rpartition(".")
        stored[f"{_PREFIX}{shape.module_name(f'{module}.')[:-1]}.{names[part]}"] = name
    outlines = {
        name: Outline(tensors[ours].dtype, tuple(tensors[ours].shape))
        for name, ours in stored.items()
    }
    write_tensors(
        folder / ADAPTER_WEIGHTS,
        outlines,
        lambda name: tensors[stored[name]].contiguous(),
        {"format": "pt"},
    )
    for name, content in adapter_files(shape, base).items():
        atomic.write_synced(folder / name, content)
