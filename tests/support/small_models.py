"""Small models of every known family of transformers, and what each is grown by."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from instar.config.sections import Operation

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
"head_dim is not hidden_size / num_attention_heads, except where the config has none"
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 8},
    "qwen2": {"tie_word_embeddings": True},
    "gemma2": {"query_pre_attn_scalar": 16, "sliding_window": 8},
    "gemma3_text": {"query_pre_attn_scalar": 16, "sliding_window": 8},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
EXACT = {
    "insert_layers": Operation("insert_layers", 2, {"where": "even"}),
    "insert_drawn": Operation("insert_layers", 1, {"from": "normal", "where": "start"}),
    "widen_mlp": Operation("widen_mlp", "x1.5", {}),
    "widen_mlp_split": Operation("widen_mlp", "x2", {"how": "split"}),
    "widen_hidden": Operation("widen_hidden", "x1.5", {}),
    "widen_hidden_copied": Operation("widen_hidden", "x2", {"how": "duplicate"}),
    "add_groups": Operation("add_heads", 2, {"where": "groups"}),
    "add_inside": Operation("add_heads", 2, {"where": "inside"}),
    "split_kv_heads": Operation("split_kv_heads", 2, {}),
    "grow_head_dim": Operation("grow_head_dim", 12, {}),
    "extend_context": Operation("extend_context", 48, {}),
}
OTHER = {
    "stack_layers": Operation("stack_layers", 2, {}),
    "overlap": Operation("stack_layers", [0, 1, 1, 2], {}),
    "insert_means": Operation("insert_layers", 2, {"from": "average", "where": [1, 3]}),
    "resize_vocab": Operation("resize_vocab", 80, {}),
}
_WIDTH = ("widen_hidden", "widen_hidden_copied")
_HEADS = ("add_groups", "add_inside")
REFUSED = {
    "gpt2": (*_WIDTH, *_HEADS, "grow_head_dim", "split_kv_heads"),
    "qwen3": ("grow_head_dim", "widen_hidden"),
    "gemma2": _WIDTH,
    "gemma3_text": (*_WIDTH, "grow_head_dim"),
    "olmo2": (*_WIDTH, *_HEADS, "grow_head_dim"),
    "qwen3_moe": ("grow_head_dim", "widen_hidden"),
}
"Keys of `EXACT`"


@cache
def model_of(kind: str) -> PreTrainedModel:
    """A small model whose norms and biases are not what they begin with."""
    config = AutoConfig.for_model(
        kind, **({} if kind == "gpt2" else SIZES), **CHANGES.get(kind, {})
    )
    if kind == "gpt2":
        config.vocab_size = 64
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.2 if parameter.ndim == 1 else 0.05
            parameter.add_(spread * torch.randn_like(parameter))
    return model
