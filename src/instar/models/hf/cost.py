"""The memory of a step of a model of transformers on a rank.

What autograd keeps for the backward pass is linear in the widths of a layer. The bytes below were measured on its tensors for
transformers 5.23, and are whole numbers (`tests/models/test_memory.py` counts them again): of torch's own attention, but
for families whose scores are capped, which keep them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from instar.models.cost import (
    NONE_FROZEN,
    FrozenParameters,
    TrainingSetup,
    logit_bytes,
    masks_documents,
    state_bytes,
)
from instar.models.hf.pretrained import LoraShape
from instar.models.shape import count_parameters

_WIDE = 4
_CAPPED = 6
"""tensors of logits in float32 at the peak of a loss whose logits are capped"""


class _Kept(NamedTuple):
    """Bytes of a token in a layer for each element of a width."""

    embed: int
    mlp: int
    queries: int
    keys: int
    heads: int = 0
    scores: int = 0
    """for each head and token of the context"""
    expert_embed: int = 0
    """of each expert that a token uses; `mlp` is of each of them, too"""


_LLAMA = _Kept(24, 16, 8, 8, 4), _Kept(26, 8, 4, 4, 4)
_KEPT: Mapping[str, tuple[_Kept, _Kept]] = {
    "gemma2": (_Kept(40, 16, 16, 0, 0, 8), _Kept(42, 8, 8, 0, 0, 8)),
    "gemma3_text": (_Kept(40, 16, 16, 16, 8), _Kept(42, 8, 12, 12, 8)),
    "gpt2": (_Kept(20, 20, 20, 0), _Kept(15, 10, 15, 0)),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": (_Kept(24, 16, 8, 8, 4, 0, 8), _Kept(26, 16, 4, 4, 4, 0, 7)),
    "olmo2": (_Kept(24, 16, 16, 16, 4), _Kept(26, 8, 12, 12, 4)),
    "phi3": (_Kept(20, 16, 20, 12, 4), _Kept(14, 8, 14, 6, 4)),
    "qwen2": _LLAMA,
    "qwen3": (_Kept(24, 16, 16, 16, 8), _Kept(26, 8, 10, 10, 8)),
    "qwen3_moe": (_Kept(24, 16, 16, 16, 8, 0, 8), _Kept(26, 16, 10, 10, 8, 0, 7)),
}
"""In float32, and with 16 bits."""
_ROUTED, _CHOSEN = 4, 38
"""Bytes of a token for each expert that its router knows, and for each that it uses."""
_DROPPED_SCORES = 12
"""Bytes for each head and token of the context where attention has dropout, which is not fused on CPUs."""


def pretrained_memory(
    shape: LoraShape, setup: TrainingSetup, frozen: FrozenParameters = NONE_FROZEN
) -> dict[str, int]:
    """Return the bytes of each part at the peak of a step on one rank, as `cost.memory_estimate` does of a GPT.

    Without activations of a family that this file does not know.
    """
    context = shape.context if setup.context is None else setup.context
    tokens, sizes = setup.batch_size * context, shape.sizes()
    low = _WIDE if setup.precision == "fp32" else 2
    parts = state_bytes(shape.parameters(), frozen, optimizer=setup.optimizer, ema=setup.ema)
    layer = _layer_bytes(shape, context, low, setup.device)
    if layer is None:
        return parts
    embed, layers = sizes["embed"], sizes["layers"]
    blocks = layers * layer
    if setup.gradient_checkpointing:
        blocks = layers * _WIDE * embed + layer
    activations = tokens * (blocks + (2 * _WIDE + low) * embed + low * _adapter_ranks(shape, setup))
    capped = shape.config.get("attn_logit_softcapping") is not None
    has_kernel = not attention_dropout(shape) and not capped
    if masks_documents(setup, has_kernel=has_kernel):  # torch's attention makes them in every layer
        activations += layers * tokens * context * low
    activations += low * _cast_elements(shape) if low < _WIDE else 0
    logits = logit_bytes(sizes["vocab"], embed, tokens, low, setup.device, compiled=setup.compiled)
    if shape.config.get("final_logit_softcapping") is not None:
        logits = _CAPPED * _WIDE * tokens * sizes["vocab"]
    return {**parts, "activations": activations, "logits": logits}


def attention_dropout(shape: LoraShape) -> float:
    """Return the dropout of attention in training."""
    return max(shape.config.get(key) or 0.0 for key in ("attention_dropout", "attn_pdrop"))


def _layer_bytes(shape: LoraShape, context: int, low: int, device: str) -> int | None:
    """Return the bytes of a token in a layer; None of a family that is not known here."""
    pair = _KEPT.get(shape.config["model_type"])
    if pair is None:
        return None
    bytes_of, sizes = pair[low < _WIDE], shape.sizes()
    used = shape.num_experts_per_tok if "experts" in sizes else None
    scores = bytes_of.scores
    if shape.config.get("attn_pdrop") and device == "cpu":
        scores = _DROPPED_SCORES
    return (
        (bytes_of.embed + bytes_of.expert_embed * (used or 0)) * sizes["embed"]
        + bytes_of.mlp * (used or 1) * sizes["mlp"]
        + bytes_of.queries * sizes["heads"] * sizes["head_dim"]
        + bytes_of.keys * sizes["kv_heads"] * sizes["head_dim"]
        + (bytes_of.heads + scores * context) * sizes["heads"]
        + _ROUTED * sizes.get("experts", 0)
        + _CHOSEN * (used or 0)
    )


def _cast_elements(shape: LoraShape) -> int:
    """Return the elements of the weights that autocast keeps with 16 bits: those of experts it leaves as they are."""
    experts = (entry for entry in shape.parameters().values() if entry.kind == "experts")
    return count_parameters(shape).matmul - sum(math.prod(entry.shape) for entry in experts)


def _adapter_ranks(shape: LoraShape, setup: TrainingSetup) -> int:
    """Return the ranks of the adapters whose inner values are bytes_of."""
    table = shape.parameters()
    ranks = sum(entry.shape[0] for name, entry in table.items() if name.endswith(".lora_a"))
    return ranks // max(1, shape.sizes()["layers"]) if setup.gradient_checkpointing else ranks
