"""What a step of a GPT costs: its FLOPs, and the memory of a rank."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from instar.config.schema import OptimizerConfig, OptimizerName
from instar.config.torch_optim.optimizers import OPTIMIZERS, shaped_states
from instar.models import lora as adapters
from instar.models.architecture import Architecture
from instar.models.shape import (
    Parameter,
    TransformerShape,
    count_parameters,
    layer_of,
    passes_of,
)

_WIDE = 4
"""Bytes of a float32: weights, gradients, moments, the residual stream, log-softmax."""

MATERIALIZED_UP_TO = 512
"""Longest context for which bfloat16 attention on a CPU materializes its scores: the backward pass
of torch's fused kernel is slower there (8.0 against 1.1 ms at 12 × 4 heads × 64 tokens, 94 against
80 ms at 512)."""

_SMALLEST_BLOCK = 64
"""Fewest queries of a block of windowed attention: smaller ones leave kernels idle."""

_BF16_FROM = 2**23
"""Multiplications of the activations with a width × width matrix. Steps in both precisions took the same time at
3 to 4 million on a CPU with AMX, for widths of 32, 64 and 128 (docs/benchmarks.md)."""

_CHUNKED_FROM_LOGITS = {"cpu": 2**20, "cuda": 2**28, "compiled": 2**31}
_CHUNK_LOGITS = {"cpu": 2**21, "cuda": 2**27, "compiled": 2**29}
_CHUNK_ROWS = {"cpu": (128, 512), "cuda": (1024, 8192), "compiled": (1024, 16384)}


@dataclass(frozen=True)
class FrozenParameters:
    """Names of parameters that do not train."""

    now: frozenset[str] = frozenset()
    """have no gradient"""
    ever: frozenset[str] = frozenset()
    """have never trained, so they have no optimizer state either"""


NONE_FROZEN = FrozenParameters()


def chunk_rows(
    tokens: int, vocab_size: int, device: str = "cpu", *, compiled: bool = False
) -> int | None:
    """Return the number of tokens per chunk of the loss; None if the loss is not chunked.

    On a CPU chunks are faster as soon as the logits exceed the cache. On a GPU they only save memory:
    they are used for logits of 1 GiB in float32, and, as compiled kernels hold logits in low precision
    alone, for those of 4 GiB in bf16. There chunks of 2,668 tokens made steps of 16 × 1,024 tokens 6 % slower, to save
    half of 8.5 GiB (124 M on an H200).
    """
    kind = device if device == "cpu" else "compiled" if compiled else "cuda"
    if tokens * vocab_size < _CHUNKED_FROM_LOGITS[kind]:
        return None
    min_rows, max_rows = _CHUNK_ROWS[kind]
    return max(min_rows, min(max_rows, _CHUNK_LOGITS[kind] // vocab_size))


def materializes_scores(context: int, low_precision: bool, device: str) -> bool:
    """Return whether attention materializes a context × context matrix of scores per head."""
    return low_precision and device == "cpu" and context <= MATERIALIZED_UP_TO


def window_block(window: int, context: int) -> int:
    """Return the number of queries in a block of windowed attention."""
    return min(context, max(window, _SMALLEST_BLOCK))


def attended_pairs(window: int | None, context: int) -> int:
    """Return the pairs of tokens of a sample that attention is counted for, as if it were not causal: those at most
    `window` − 1 apart.

    Without a window they are context². Those really attended to are half of them, and half of the diagonal.
    """
    apart = max(0, context - (context if window is None else window))
    return context**2 - apart * (apart + 1)


def bf16_pays(width: int, tokens: int) -> bool:
    """Return whether a step of `tokens` tokens is large enough for bf16 to be faster than float32 on a CPU whose
    bf16 matrix products are: small ones take no longer than casting their operands."""
    return tokens * width**2 >= _BF16_FROM


def repeats_keys(low_precision: bool, device: str) -> bool:
    """Return whether attention repeats keys and values of grouped queries for each of them.

    On GPUs only the 16-bit flash kernel reads groups. In float32 torch would fall back to a kernel
    that materializes all scores.
    """
    return not low_precision and device != "cpu"


ADAMW = OptimizerConfig()


def state_bytes(
    parameters: Mapping[str, Parameter],
    frozen: FrozenParameters = NONE_FROZEN,
    *,
    optimizer: OptimizerConfig = ADAMW,
    ema: bool = False,
) -> dict[str, int]:
    """Return the bytes of weights, gradients, optimizer states and EMA of a rank."""
    sizes = {name: _WIDE * math.prod(entry.shape) for name, entry in parameters.items()}
    total = sum(sizes.values())
    updated_by = "adamw" if optimizer.name == "muon" else optimizer.name
    states = len(shaped_states(updated_by, optimizer.model_dump()))
    return {
        "weights": total,
        "gradients": sum(size for name, size in sizes.items() if name not in frozen.now),
        "optimizer": sum(
            _optimizer_bytes(name, entry, optimizer.name, states)
            for name, entry in parameters.items()
            if name not in frozen.ever
        ),
        "ema": total if ema else 0,
    }


def _optimizer_bytes(name: str, entry: Parameter, optimizer: OptimizerName, states: int) -> int:
    """Return the bytes of an optimizer's states of a parameter, without numbers such as the count of steps.

    Args:
        states: number of them that have its shape, unless Muon updates it.
    """
    size = _WIDE * math.prod(entry.shape)
    if OPTIMIZERS[optimizer].is_factored:
        matrix = entry.shape[-2:]
        return size if len(matrix) < 2 else size // matrix[0] + size // matrix[1]
    is_matrix = entry.kind in ("matrix", "experts") and entry.dimensions > 1
    is_muons = optimizer == "muon" and is_matrix and not adapters.is_adapter(name)
    return size * (1 if is_muons else states)


@dataclass(frozen=True)
class TrainingSetup:
    """How a model is trained, as far as the memory of a step depends on it."""

    batch_size: int
    """samples of a micro-batch"""
    context: int | None = None
    """None: the model's"""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    optimizer: OptimizerConfig = ADAMW
    ema: bool = False
    gradient_checkpointing: bool = False
    compiled: bool = False
    device: str = "cpu"
    document_masks: bool = False
    """whether samples have masks of context × context"""


def memory_estimate(
    arch: Architecture, setup: TrainingSetup, frozen: FrozenParameters = NONE_FROZEN
) -> dict[str, int]:
    """Return the bytes of each part at the peak of a step on one rank.

    Their sum is the peak of live tensors, without allocator overhead, kernel workspaces and Python
    itself. Not counted are attention dropout (on a CPU a context × context matrix per head) and
    masks; activations are those of a model that trains as a whole.
    """
    context = arch.context if setup.context is None else setup.context
    tokens, device = setup.batch_size * context, setup.device
    count = count_parameters(arch)
    low = _WIDE if setup.precision == "fp32" else 2
    return {
        **state_bytes(arch.parameters(), frozen, optimizer=setup.optimizer, ema=setup.ema),
        "activations": _activation_bytes(
            arch, setup.batch_size, context, low, device, checkpointing=setup.gradient_checkpointing
        )
        + _adapter_bytes(arch, tokens, low, setup.gradient_checkpointing)
        + (
            _document_bytes(arch, setup, context, low)
            if masks_documents(setup, has_kernel=arch.dropout == 0)
            else 0
        )
        + (low * count.matmul if low < _WIDE else 0),
        "logits": logit_bytes(
            arch.vocab_size, arch.n_embd, tokens, low, device, compiled=setup.compiled
        ),
    }


def masks_documents(setup: TrainingSetup, *, has_kernel: bool) -> bool:
    """Return whether masks of context × context keep documents apart, and not a GPU's kernel, see `models.documents`.

    Args:
        has_kernel: whether there is one for the model's attention.
    """
    on_gpu = setup.device != "cpu" and setup.precision != "fp32"
    return setup.document_masks and not (on_gpu and has_kernel)


def _document_bytes(arch: Architecture, setup: TrainingSetup, context: int, low: int) -> int:
    """Return the bytes of the masks of packed documents: one for all layers, and one for each with a window."""
    windowed = sum(window is not None for window in _windows_of_passes(arch))
    return setup.batch_size * context**2 * low * (1 + windowed)


def _activation_bytes(
    arch: Architecture, samples: int, context: int, low: int, device: str, *, checkpointing: bool
) -> int:
    """Return the bytes saved for the backward pass, without logits."""
    tokens = samples * context
    stream = _WIDE * arch.n_embd
    norm = stream + low * arch.n_embd
    conv_bytes = 0 if arch.conv_size is None else low * arch.n_embd
    mlp = low * arch.n_mlp * (4 if arch.activation == "swiglu" else 2)
    if arch.num_experts is not None and arch.num_experts_per_tok is not None:
        # rows are copied for each expert, and their outputs kept for the gates
        mlp = (
            arch.num_experts_per_tok * (mlp + 2 * low * arch.n_embd) + 4 * _WIDE * arch.num_experts
        )
    masks = 2 * low * arch.n_embd if arch.dropout else 0
    block = tokens * (2 * norm + conv_bytes + mlp + masks)
    attention = [
        _attention_bytes(arch, samples, context, low, device, window)
        for window in _windows_of_passes(arch)
    ]
    blocks = len(attention) * block + sum(attention)
    if checkpointing and attention:
        blocks = len(attention) * tokens * stream + block + max(attention)
    targets_and_inputs = 2 * 8
    return blocks + tokens * (norm + targets_and_inputs)


def _attention_bytes(
    arch: Architecture, samples: int, context: int, low: int, device: str, window: int | None
) -> int:
    """Return the bytes that the attention of a layer saves for the backward pass.

    Blocks of windowed attention are copies, of keys and values twice, and their outputs are joined.
    """
    is_windowed = window is not None and window < context
    length = window_block(window, context) if is_windowed and window is not None else context
    first, blocks = samples * length, samples * length * -(-(context - length) // length)
    materializes = materializes_scores(length, low < _WIDE, device)
    is_repeated = repeats_keys(low < _WIDE, device) or (is_windowed and device != "cpu")
    queries = arch.n_head * arch.head_dim
    keys = queries if materializes or is_repeated else arch.n_kv_head * arch.head_dim
    attention = low * (2 * queries + 2 * keys) * samples * context
    attention += blocks * low * (queries + 4 * keys)
    attention += low * queries * samples * context if blocks else 0
    scores = length * first + 2 * length * blocks
    attention += arch.n_head * (low * scores if materializes else _WIDE * (first + blocks))
    if is_windowed and not materializes:
        attention += low * length * (length + (2 * length if blocks else 0))
    if arch.qk_norm:
        attention += _WIDE * (queries + arch.n_kv_head * arch.head_dim) * samples * context
    return attention


def _adapter_bytes(arch: Architecture, tokens: int, low: int, checkpointing: bool) -> int:
    """Return the bytes that adapters save for the backward pass: x Aᵀ, and an adapted head."""
    table = arch.parameters()
    ranks = sum(entry.shape[0] for name, entry in table.items() if name.endswith(".lora_a"))
    head = "token_embedding" if arch.tied else "head"
    effective = _WIDE * arch.vocab_size * arch.n_embd if f"{head}.lora_a" in table else 0
    return tokens * low * (ranks // max(1, arch.n_layer) if checkpointing else ranks) + effective


def logit_bytes(
    vocab_size: int, width: int, tokens: int, low: int, device: str, *, compiled: bool
) -> int:
    """Return the peak bytes of the loss: logits, softmax and its gradient, and the gradients that
    the chunked loss computes in the forward pass. Compiled for a GPU: logits and their gradient."""
    rows = chunk_rows(tokens, vocab_size, device, compiled=compiled)
    bytes_per_logit = 3 * _WIDE + (low if low < _WIDE else 0)
    if compiled and device != "cpu":
        bytes_per_logit = 2 * low
    size = min(tokens, rows or tokens) * vocab_size * bytes_per_logit
    return size if rows is None else size + _WIDE * width * (2 * tokens + vocab_size)


def flops_per_token(arch: TransformerShape, context: int | None = None) -> int:
    """Return floating-point operations per token of a forward and backward pass.

    6 N_matmul + 12 layers · context · (heads · head_dim) (PaLM, arXiv 2204.02311, appendix B),
    for samples of `context` tokens (default: the architecture's). Of the experts, N_matmul counts those that a token
    uses, and of a loop the blocks of every pass. Attention is not halved for causality, also where layers have windows,
    see `attended_pairs`, and the recomputation of gradient checkpointing is not counted.
    """
    sizes, passes = arch.sizes(), passes_of(arch)
    length = sizes["context"] if context is None else context
    pairs = sum(attended_pairs(window, length) for window in _windows_of_passes(arch))
    attention = 12 * pairs * sizes["heads"] * sizes["head_dim"] // max(length, 1)
    experts, used = sizes.get("experts"), getattr(arch, "num_experts_per_tok", None)
    share = 1.0 if experts is None or used is None else used / experts
    in_use = count_parameters(arch).matmul
    for name, entry in arch.parameters().items():
        if entry.kind not in ("matrix", "transposed", "experts"):
            continue
        layer, size = layer_of(name), math.prod(entry.shape)
        repeats = 1 if layer is None else passes.count(layer)
        in_use += round(repeats * size * (share if entry.kind == "experts" else 1.0)) - size
    return 6 * in_use + attention


def _windows_of_passes(arch: TransformerShape) -> list[int | None]:
    """Return the window of each pass through the model, None: it has none."""
    windows = getattr(arch, "windows", ())
    return [windows[layer] if windows else None for layer in passes_of(arch)]
