"""The tensors of transformers' GPT-2 and Llama: names and layouts.

`to_tensors` and `from_tensors` are pure functions over named tensors.

* GPT-2 stores its matrices as (input, output), and queries, keys and values as one matrix.
* Both Llama and `instar.models.gpt.rotate` pair channel i of a head with channel i + C/2, so rows
  keep their order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from instar.checkpoint.manifest import CheckpointError
from instar.models.architecture import Architecture
from instar.models.hf.config import TITLES, Style, style_of
from instar.models.hf.pretrained import LoraShape
from instar.models.lora import adapter_of
from instar.models.shape import Parameter

_PREFIX: dict[Style, str] = {"gpt2": "transformer.", "llama": "model."}
_BLOCKS: dict[Style, str] = {"gpt2": "transformer.h", "llama": "model.layers"}
_NAMES: dict[Style, dict[str, str]] = {
    "gpt2": {
        "token_embedding": "transformer.wte",
        "position_embedding": "transformer.wpe",
        "attn_norm": "ln_1",
        "attn.query": "attn.c_attn",
        "attn.key": "attn.c_attn",
        "attn.value": "attn.c_attn",
        "attn.output": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
    },
    "llama": {
        "token_embedding": "model.embed_tokens",
        "attn_norm": "input_layernorm",
        "attn.query": "self_attn.q_proj",
        "attn.key": "self_attn.k_proj",
        "attn.value": "self_attn.v_proj",
        "attn.output": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
        "final_norm": "model.norm",
        "head": "lm_head",
    },
}
BUFFERS = re.compile(r"h\.\d+\.attn\.(masked_)?bias|.*rotary_emb\.inv_freq")
"""Buffers that older versions of transformers saved; they follow from the config."""


def to_tensors(arch: Architecture, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's tensors under the names and in the layouts of transformers.

    A tied head is not repeated, and adapters are merged into their weights. GPT-2 always has
    biases: they are 0 if `arch` has none.

    Raises:
        CheckpointError: a tensor is missing; also see `style_of`.
    """
    return {name: make() for name, make in conversions(arch, tensors).items()}


def conversions(
    arch: Architecture, tensors: Mapping[str, Tensor]
) -> dict[str, Callable[[], Tensor]]:
    """Return a function for each tensor of `to_tensors` that makes it of those of `tensors` that it
    needs."""
    style = style_of(arch)
    missing = [f"{name}: missing" for name in arch.parameters() if name not in tensors]
    refuse_tensors("the tensors are not those of the architecture:", missing)
    table = replace(arch, lora=()).parameters()
    export_arch = replace(arch, lora=(), bias=style == "gpt2" or arch.bias)
    shapes = export_arch.parameters()

    def convert(sources: Sequence[str]) -> Tensor:
        parts = [
            merged_weight(arch, tensors, name) if name in table else torch.zeros(shapes[name].shape)
            for name in sources
        ]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        return (tensor.T if _is_transposed(shapes[sources[0]], style) else tensor).contiguous()

    return {name: partial(convert, sources) for name, sources in _names(export_arch, style).items()}


def from_tensors(
    arch: Architecture, tensors: Mapping[str, Tensor], *, shaped_by: str = "config.json"
) -> dict[str, Tensor]:
    """Inverse of `to_tensors`, in float32; also for tensors that transformers saved.

    Args:
        shaped_by: what the architecture was read from, for messages.

    Raises:
        CheckpointError: lists every tensor that is missing, unknown, of another shape, not floating
            point, or not finite.
    """
    style = style_of(arch)
    table = arch.parameters()
    sources_of = parts_of_tensors(arch)
    by_full_name = _under_full_names(tensors, sources_of, _PREFIX[style])
    problems = _problems_of_head(arch, sources_of, by_full_name)
    parameters = {}
    for name, sources in sources_of.items():
        if name not in by_full_name:
            problems.append(f"{name}: missing")
            continue
        tensor = by_full_name.pop(name)
        lengths = [table[part].shape[0] for part in sources]
        shape: tuple[int, ...] = (sum(lengths), *table[sources[0]].shape[1:])
        is_transposed = _is_transposed(table[sources[0]], style)
        expected = shape[::-1] if is_transposed else shape
        if tuple(tensor.shape) != expected:
            problems.append(f"{name}: shape {tuple(tensor.shape)}, but {shaped_by} says {expected}")
        elif not tensor.is_floating_point():
            problems.append(f"{name}: {tensor.dtype}; import takes weights in floating point")
        elif not tensor.isfinite().all():
            problems.append(f"{name}: holds values that are not finite (NaN or infinite)")
        else:
            matrix = (tensor.T if is_transposed else tensor).to(torch.float32)
            for part, piece in zip(sources, torch.split(matrix, lengths), strict=True):
                parameters[part] = piece.clone(memory_format=torch.contiguous_format)
    problems += [f"{name}: unknown" for name in by_full_name]
    refuse_tensors(f"the tensors are not those of the {TITLES[style]} of {shaped_by}:", problems)
    return {name: parameters[name] for name in table}


def merge_adapters(arch: Architecture, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of a model without adapters, which are merged into their weights."""
    return {
        name: merged_weight(arch, tensors, name) for name in replace(arch, lora=()).parameters()
    }


def merged_weight(
    arch: Architecture | LoraShape, tensors: Mapping[str, Tensor], name: str
) -> Tensor:
    """Return a parameter, with its adapter added if it has one."""
    layer = name.removesuffix(".weight")
    if layer not in arch.adaptable() or (adapter := adapter_of(arch.lora, layer)) is None:
        return tensors[name]
    a, b = tensors[f"{layer}.lora_a"], tensors[f"{layer}.lora_b"]
    return tensors[name] + b @ (adapter.scale * a)


def refuse_tensors(title: str, problems: Sequence[str]) -> None:
    """Raise CheckpointError with the first dozen problems, if there are any."""
    if problems:
        more = [f"and {len(problems) - 12} more"] if len(problems) > 12 else []
        raise CheckpointError("\n  ".join([title, *problems[:12], *more]))


def parts_of_tensors(arch: Architecture) -> dict[str, list[str]]:
    """Return the names of the parameters that each tensor of transformers concatenates, by its name."""
    return _names(arch, style_of(arch))


def _names(arch: Architecture, style: Style) -> dict[str, list[str]]:
    """Return each tensor name of transformers with the names of ours that it concatenates."""
    sources_of: dict[str, list[str]] = {}
    for name in arch.parameters():
        part, _, last = name.rpartition(".")
        block = re.match(r"blocks\.(\d+)\.(.*)", part)
        full_name = (
            f"{_BLOCKS[style]}.{block[1]}.{_NAMES[style][block[2]]}"
            if block
            else _NAMES[style][part]
        )
        sources_of.setdefault(f"{full_name}.{last}", []).append(name)
    return sources_of


def _is_transposed(entry: Parameter, style: Style) -> bool:
    return style == "gpt2" and entry.kind == "matrix"


def _under_full_names(
    tensors: Mapping[str, Tensor], names: Mapping[str, object], prefix: str
) -> dict[str, Tensor]:
    """Drop buffers, and add the prefix that a model saved without its head lacks."""
    by_full_name = {}
    for name, tensor in tensors.items():
        if not BUFFERS.fullmatch(name.removeprefix(prefix)):
            by_full_name[prefix + name if prefix + name in names else name] = tensor
    return by_full_name


def _problems_of_head(
    arch: Architecture, sources_of: Mapping[str, list[str]], tensors: dict[str, Tensor]
) -> list[str]:
    """Remove a repeated tied head from `tensors`; return a problem if it differs from the table."""
    if not arch.tied or "lm_head.weight" not in tensors:
        return []
    head = tensors.pop("lm_head.weight")
    (table,) = (
        name for name, sources in sources_of.items() if sources == ["token_embedding.weight"]
    )
    if table in tensors and not torch.equal(head, tensors[table]):
        return [f"lm_head.weight: differs from {table}, but config.json has tie_word_embeddings"]
    return []
