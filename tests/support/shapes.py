"""Small architectures in the two styles that most tests of models want."""

from __future__ import annotations

from typing import Any

from instar.config.language import ModelConfig
from instar.models.architecture import Architecture, resolve_architecture


def gpt2(vocab_size: int = 50, **changes: Any) -> Architecture:
    """Two layers of GPT-2's block: LayerNorm, GELU, learned positions, biases, a tied head."""
    shape = {"n_layer": 2, "n_head": 4, "n_embd": 32, "context": 16} | changes
    return resolve_architecture(ModelConfig(**shape), vocab_size)


def llama(vocab_size: int = 50, **changes: Any) -> Architecture:
    """Two layers of Llama's block: RMSNorm, SwiGLU, RoPE, grouped queries, an untied head."""
    style = {
        "n_kv_head": 2,
        "norm": "rmsnorm",
        "activation": "swiglu",
        "positions": "rope",
        "bias": False,
        "tied": False,
    }
    return gpt2(vocab_size, **style, **changes)
