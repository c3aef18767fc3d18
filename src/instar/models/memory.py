"""How much memory a rank's training step needs, counted from the tensors it keeps; torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from instar.models.architecture import Architecture
from instar.models.lora import is_adapter
from instar.models.shape import Parameter, count_parameters

_WIDE = 4
"""Bytes of a float32: weights, gradients, moments, the residual stream, normalised logits."""

MATERIALISED_UP_TO = 512
"""Context up to which attention in bfloat16 on a CPU holds all its scores: torch's fused kernel has
a slow backward pass there (1.1 against 8.0 ms at 12 × 4 heads × 64 tokens, 80 against 94 ms at 512)."""

_CHUNKED_FROM_LOGITS = {"cpu": 2**20, "cuda": 2**28}
_CHUNK_LOGITS = {"cpu": 2**21, "cuda": 2**27}
_CHUNK_ROWS = {"cpu": (128, 512), "cuda": (1024, 8192)}


@dataclass(frozen=True)
class Still:
    """Parameters, by name, that do not train."""

    now: frozenset[str] = frozenset()
    """they have no gradient"""
    ever: frozenset[str] = frozenset()
    """of these the ones that never trained: the optimizer remembers nothing of them"""


ALL_TRAIN = Still()


def chunk_rows(tokens: int, vocab_size: int, device: str = "cpu") -> int | None:
    """Tokens whose logits are held at once in the loss; None: all of them, in plain steps.

    On a CPU chunks are also the faster road, as soon as the logits leave the cache; on a GPU they
    only save memory, so there they wait for logits of a GiB.
    """
    device = device if device == "cpu" else "cuda"
    if tokens * vocab_size < _CHUNKED_FROM_LOGITS[device]:
        return None
    least, most = _CHUNK_ROWS[device]
    return max(least, min(most, _CHUNK_LOGITS[device] // vocab_size))


def materialised(context: int, low_precision: bool, device: str) -> bool:
    """Whether attention holds a context × context matrix of each head."""
    return low_precision and device == "cpu" and context <= MATERIALISED_UP_TO


def state_bytes(
    parameters: Mapping[str, Parameter],
    still: Still = ALL_TRAIN,
    *,
    optimizer: Literal["adamw", "muon"] = "adamw",
    ema: bool = False,
) -> dict[str, int]:
    """Bytes by part of what a rank keeps for each parameter."""
    sizes = {name: _WIDE * math.prod(entry.shape) for name, entry in parameters.items()}
    one_moment = {
        name
        for name, entry in parameters.items()
        if optimizer == "muon" and entry.kind == "matrix" and not is_adapter(name)
    }
    total = sum(sizes.values())
    return {
        "weights": total,
        "gradients": sum(size for name, size in sizes.items() if name not in still.now),
        "optimizer": sum(
            size * (1 if name in one_moment else 2)
            for name, size in sizes.items()
            if name not in still.ever
        ),
        "ema": total if ema else 0,
    }


def memory_estimate(
    arch: Architecture,
    still: Still = ALL_TRAIN,
    *,
    batch_size: int,
    context: int | None = None,
    precision: Literal["fp32", "bf16", "fp16"] = "fp32",
    optimizer: Literal["adamw", "muon"] = "adamw",
    ema: bool = False,
    gradient_checkpointing: bool = False,
    device: str = "cpu",
) -> dict[str, int]:
    """Bytes by part at the top of a step, on one rank, for a micro-batch of `batch_size` samples.

    Their sum is the peak of the tensors alive, up to what allocators, kernels' workspaces and
    Python itself take. Dropout inside attention is left out, which on a CPU holds a matrix of
    context × context for each head, and so is what an open mask holds; activations are those of a
    model all of which trains.
    """
    context = arch.context if context is None else context
    tokens = batch_size * context
    count = count_parameters(arch)
    low = _WIDE if precision == "fp32" else 2
    return {
        **state_bytes(arch.parameters(), still, optimizer=optimizer, ema=ema),
        "activations": _activations(
            arch,
            tokens,
            low,
            gradient_checkpointing,
            context if materialised(context, low < _WIDE, device) else 0,
        )
        + _adapters(arch, tokens, low, gradient_checkpointing)
        + (low * count.matmul if low < _WIDE else 0),
        "logits": _logits(arch, tokens, low, device),
    }


def _activations(
    arch: Architecture, tokens: int, low: int, checkpointing: bool, scores: int
) -> int:
    """Bytes saved for the backward pass, without the logits.

    `scores` are those that attention holds for each token and head.
    """
    stream = _WIDE * arch.n_embd
    norm = stream + low * arch.n_embd
    queries, keys = arch.n_head * arch.head_dim, arch.n_kv_head * arch.head_dim
    attention = low * (2 * queries + 2 * (queries if scores else keys))
    attention += arch.n_head * (low * scores if scores else _WIDE)
    if arch.qk_norm:
        attention += _WIDE * (queries + keys)
    mlp = low * arch.n_mlp * (4 if arch.activation == "swiglu" else 2)
    masks = 2 * low * arch.n_embd if arch.dropout else 0
    block = 2 * norm + attention + mlp + masks
    blocks = arch.n_layer * stream + block if checkpointing else arch.n_layer * block
    targets_and_inputs = 2 * 8
    return tokens * (blocks + norm + targets_and_inputs)


def _adapters(arch: Architecture, tokens: int, low: int, checkpointing: bool) -> int:
    """Bytes saved for the backward pass by adapters: x Aᵀ of each, and a head's effective table."""
    table = arch.parameters()
    ranks = sum(entry.shape[0] for name, entry in table.items() if name.endswith(".lora_a"))
    head = "token_embedding" if arch.tied else "head"
    effective = _WIDE * arch.vocab_size * arch.n_embd if f"{head}.lora_a" in table else 0
    return tokens * low * (ranks // arch.n_layer if checkpointing else ranks) + effective


def _logits(arch: Architecture, tokens: int, low: int, device: str) -> int:
    """Bytes of the loss at its peak: logits, their softmax and its gradient, and the gradients
    that the chunked road makes beforehand."""
    rows = chunk_rows(tokens, arch.vocab_size, device)
    held = min(tokens, rows or tokens) * arch.vocab_size * (3 * _WIDE + (low if low < _WIDE else 0))
    if rows is None:
        return held
    return held + _WIDE * arch.n_embd * (2 * tokens + arch.vocab_size)
