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
from instar.models.hf.lora_shape import LoraShape
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
    """Returns a model's tensors under the names and in the layouts of transformers.

    A tied head is not repeated, and adapters are merged into their weights. GPT-2 always has
    biases: they are 0 if `arch` has none.

    Raises:
        CheckpointError: a tensor is missing; also see `style_of`.
    """
    return {name: make() for name, make in conversions(arch, tensors).items()}


def conversions(
    arch: Architecture, tensors: Mapping[str, Tensor]
) -> dict[str, Callable[[], Tensor]]:
    """Returns a function for each tensor of `to_tensors` that makes it of those of `tensors` that it
    needs."""
    style = style_of(arch)
    _refuse(
        [f"{name}: missing" for name in arch.parameters() if name not in tensors],
        "the architecture",
    )
    table = replace(arch, lora=()).parameters()
    whole = replace(arch, lora=(), bias=style == "gpt2" or arch.bias)
    shapes = whole.parameters()

    def convert(sources: Sequence[str]) -> Tensor:
        parts = [
            merged_weight(arch, tensors, name) if name in table else torch.zeros(shapes[name].shape)
            for name in sources
        ]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return (joined.T if _is_transposed(shapes[sources[0]], style) else joined).contiguous()

    return {name: partial(convert, sources) for name, sources in _names(whole, style).items()}


def from_tensors(arch: Architecture, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Inverse of `to_tensors`, in float32; also for tensors that transformers saved.

    Raises:
        CheckpointError: lists every tensor that is missing, unknown, of another shape, not floating
            point, or not finite.
    """
    style = style_of(arch)
    table = arch.parameters()
    wanted = _names(arch, style)
    given = _under_full_names(tensors, wanted, _PREFIX[style])
    problems = _problems_of_head(arch, wanted, given)
    made = {}
    for name, sources in wanted.items():
        if name not in given:
            problems.append(f"{name}: missing")
            continue
        tensor = given.pop(name)
        lengths = [table[part].shape[0] for part in sources]
        shape: tuple[int, ...] = (sum(lengths), *table[sources[0]].shape[1:])
        transposed = _is_transposed(table[sources[0]], style)
        expected = shape[::-1] if transposed else shape
        if tuple(tensor.shape) != expected:
            problems.append(f"{name}: shape {tuple(tensor.shape)}, but config.json says {expected}")
        elif not tensor.is_floating_point():
            problems.append(f"{name}: {tensor.dtype}; import takes weights in floating point")
        elif not tensor.isfinite().all():
            problems.append(f"{name}: holds values that are not finite (NaN or infinite)")
        else:
            whole = (tensor.T if transposed else tensor).to(torch.float32)
            for part, piece in zip(sources, torch.split(whole, lengths), strict=True):
                made[part] = piece.clone(memory_format=torch.contiguous_format)
    problems += [f"{name}: unknown" for name in given]
    _refuse(problems, f"the {TITLES[style]} of config.json")
    return {name: made[name] for name in table}


def merged(arch: Architecture, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the parameters of a model without adapters, which are merged into their weights."""
    return {
        name: merged_weight(arch, tensors, name) for name in replace(arch, lora=()).parameters()
    }


def merged_weight(
    arch: Architecture | LoraShape, tensors: Mapping[str, Tensor], name: str
) -> Tensor:
    """Returns a parameter, with its adapter added if it has one."""
    layer = name.removesuffix(".weight")
    if layer not in arch.adaptable() or (adapter := adapter_of(arch.lora, layer)) is None:
        return tensors[name]
    a, b = tensors[f"{layer}.lora_a"], tensors[f"{layer}.lora_b"]
    return tensors[name] + b @ (adapter.scale * a)


def _refuse(problems: list[str], what: str) -> None:
    if problems:
        more = [f"and {len(problems) - 12} more"] if len(problems) > 12 else []
        lines = [f"the tensors are not those of {what}:", *problems[:12], *more]
        raise CheckpointError("\n  ".join(lines))


def _names(arch: Architecture, style: Style) -> dict[str, list[str]]:
    """Returns each tensor name of transformers with the names of ours that it concatenates."""
    made: dict[str, list[str]] = {}
    for name in arch.parameters():
        part, _, last = name.rpartition(".")
        block = re.match(r"blocks\.(\d+)\.(.*)", part)
        full_name = (
            f"{_BLOCKS[style]}.{block[1]}.{_NAMES[style][block[2]]}"
            if block
            else _NAMES[style][part]
        )
        made.setdefault(f"{full_name}.{last}", []).append(name)
    return made


def _is_transposed(entry: Parameter, style: Style) -> bool:
    return style == "gpt2" and entry.kind == "matrix"


def _under_full_names(
    tensors: Mapping[str, Tensor], wanted: Mapping[str, object], prefix: str
) -> dict[str, Tensor]:
    """Drops buffers, and adds the prefix that a model saved without its head lacks."""
    given = {}
    for name, tensor in tensors.items():
        if not BUFFERS.fullmatch(name.removeprefix(prefix)):
            given[prefix + name if prefix + name in wanted else name] = tensor
    return given


def _problems_of_head(
    arch: Architecture, wanted: Mapping[str, list[str]], given: dict[str, Tensor]
) -> list[str]:
    """Removes a repeated tied head from `given`; returns a problem if it differs from the table."""
    if not arch.tied or "lm_head.weight" not in given:
        return []
    head = given.pop("lm_head.weight")
    (table,) = (name for name, sources in wanted.items() if sources == ["token_embedding.weight"])
    if table in given and not torch.equal(head, given[table]):
        return [f"lm_head.weight: differs from {table}, but config.json has tie_word_embeddings"]
    return []
