"""The model's shape, and the one table of its parameters with named axes.

Growing an architecture is changing a field of `Architecture` (`models/shape.py` says what axes are).
Head h reads key and value head
``h // (n_head / n_kv_head)``.

An adapter's factors (see `lora`) are of the kind of their weight, with an axis of their own
between them, ``<weight>.rank``: of a linear map, ``lora_a`` writes what ``lora_b`` reads; of the
token table, ``lora_b`` has a row for each token and ``lora_a`` writes the stream.

The residual stream is ``embed``: embeddings, ``attn.output`` and ``mlp.down`` (with their
biases) write it; queries, keys, values, ``mlp.up``, ``mlp.gate`` and the head read it, each
through a norm. A tied head is the token table read once more: it has no entry of its own.
The layer is part of the name, ``blocks.<layer>.…``; see `layer_of`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, Self, get_args

from instar.config.language import ModelConfig
from instar.models import lora as adapters
from instar.models import mask as masks
from instar.models.lora import Lora
from instar.models.mask import Mask
from instar.models.shape import (
    ArchitectureError,
    Kind,
    Mistake,
    Parameter,
    axis_size,
    count_parameters,
)

Norm = Literal["layernorm", "rmsnorm"]
Activation = Literal["gelu", "gelu_tanh", "relu2", "swiglu"]
Positions = Literal["learned", "rope"]

AXES = {
    "embed": "n_embd",
    "mlp": "n_mlp",
    "heads": "n_head",
    "kv_heads": "n_kv_head",
    "head_dim": "head_dim",
    "vocab": "vocab_size",
    "context": "context",
    "layers": "n_layer",
}
"""Field of `Architecture` that holds the size of each simple axis."""


@dataclass(frozen=True)
class Architecture:
    """The shape in force. Raises ArchitectureError when no model can have it.

    `head_dim` and `n_embd` are free of each other: growth may change either. Pair i of RoPE turns
    by ``rope_base ** (-2 i / head_dim)`` per position, so a head_dim grown by a factor k keeps its
    old frequencies with ``rope_base ** k``. `qk_norm_eps` is apart from `norm_eps` because widening
    the stream scales the one and must leave the other.
    """

    n_layer: int
    n_head: int
    n_kv_head: int
    head_dim: int
    n_embd: int
    n_mlp: int
    context: int
    vocab_size: int
    norm: Norm
    activation: Activation
    positions: Positions
    bias: bool
    tied: bool
    qk_norm: bool
    rope_base: float
    norm_eps: float
    qk_norm_eps: float
    dropout: float
    lora: tuple[Lora, ...] = ()
    """adapters; a weight is matched by one entry at most"""
    mask: Mask | None = None
    """what of it is still entering"""

    def __post_init__(self) -> None:
        mistakes = [
            Mistake(f"model.{field}", f"must be a whole number above 0, not {size!r}")
            for field, size in ((field, getattr(self, field)) for field in AXES.values())
            if type(size) is not int or size < 1
        ]
        choices = {"norm": Norm, "activation": Activation, "positions": Positions}
        for field, choice in choices.items():
            if getattr(self, field) not in get_args(choice):
                wanted = ", ".join(get_args(choice))
                mistakes.append(
                    Mistake(
                        f"model.{field}", f"must be one of {wanted}, not {getattr(self, field)!r}"
                    )
                )
        if not mistakes and self.n_head % self.n_kv_head:
            mistakes.append(
                Mistake(
                    "model.n_kv_head",
                    f"{self.n_head} query heads cannot share {self.n_kv_head} key and value heads evenly",
                    f"choose one of {_divisors(self.n_head)}",
                )
            )
        if not mistakes and self.positions == "rope" and self.head_dim % 2:
            mistakes.append(
                Mistake(
                    "model.n_head",
                    f"RoPE turns pairs of channels, and a head of {self.head_dim} channels is odd",
                    "make n_embd / n_head even, or use positions: learned",
                )
            )
        if self.lora and not mistakes:
            weights = replace(self, lora=()).adaptable()
            mistakes = [
                Mistake(f"model.lora[{number}]", message, hint)
                for number, message, hint in adapters.problems(self.lora, weights)
            ]
        if self.mask and not mistakes:
            mistakes = [
                Mistake("model.mask", message, hint)
                for message, hint in masks.problems(self.mask, self.sizes())
            ]
        if mistakes:
            raise ArchitectureError(*mistakes)

    def sizes(self) -> dict[str, int]:
        """Size of each simple axis."""
        return {axis: getattr(self, field) for axis, field in AXES.items()}

    @property
    def streams(self) -> tuple[str, ...]:
        """The axes that blocks add to."""
        return ("embed",)

    def resized(self, **sizes: int) -> Self:
        """With other sizes of simple axes, all else as it was. Raises ArchitectureError when no
        model can have them, KeyError for an axis that is none."""
        changes: dict[str, Any] = {AXES[axis]: size for axis, size in sizes.items()}
        return replace(self, **changes)

    def parameters(self) -> dict[str, Parameter]:
        """Every parameter by name, in the order of the forward pass."""
        return _table(self)

    def adaptable(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights that may have an adapter, by name without ``.weight``."""
        return {
            name.removesuffix(".weight"): entry.shape
            for name, entry in self.parameters().items()
            if name.endswith(".weight") and (entry.reads or name.startswith("token_"))
        }

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values. No adapters and no mask are left out: files of before say so."""
        values = asdict(self)
        values["lora"] = list(values["lora"])
        if self.mask is not None:
            values["mask"]["new"] = [list(part) for part in self.mask.new]
        return {name: value for name, value in values.items() if value not in ([], None)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`. Raises ArchitectureError for missing or unknown fields."""
        names = {field.name for field in fields(cls)}
        missing = names - values.keys() - {"lora", "mask"}
        mistakes = [Mistake(f"model.{name}", "is missing") for name in sorted(missing)]
        mistakes += [
            Mistake(f"model.{name}", "is unknown") for name in sorted(values.keys() - names)
        ]
        read = dict(values)
        for name, from_json in (("lora", adapters.from_json), ("mask", masks.from_json)):
            try:
                if read.get(name) is not None:
                    read[name] = from_json(read[name])
            except (TypeError, ValueError, KeyError) as error:
                mistakes.append(Mistake(f"model.{name}", f"cannot be read: {error}"))
        if mistakes:
            raise ArchitectureError(*mistakes)
        return cls(**read)


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)


def resolve(model: ModelConfig, vocab_size: int) -> Architecture:
    """The shape that a config asks for, with everything left out derived.

    `vocab_size` is the tokenizer's; the config may ask for more rows, never for fewer.
    Raises ArchitectureError with every mistake found.
    """
    mistakes = []
    if model.vocab_size is not None and model.vocab_size < vocab_size:
        mistakes.append(
            Mistake(
                "model.vocab_size",
                f"{model.vocab_size} rows are too few for a tokenizer of {vocab_size} tokens",
                "leave it out to take the tokenizer's size",
            )
        )
    if model.n_embd % model.n_head:
        mistakes.append(
            Mistake(
                "model.n_embd",
                f"a width of {model.n_embd} cannot be divided into {model.n_head} heads",
                f"choose a multiple of {model.n_head}, such as "
                f"{math.ceil(model.n_embd / model.n_head) * model.n_head}",
            )
        )
    n_mlp = model.n_mlp
    if n_mlp is None and model.activation == "swiglu":
        n_mlp = math.ceil(8 * model.n_embd / (3 * 32)) * 32
    values = model.model_dump() | {
        "n_kv_head": model.n_kv_head or model.n_head,
        "head_dim": max(1, model.n_embd // model.n_head),
        "n_mlp": n_mlp or 4 * model.n_embd,
        "vocab_size": model.vocab_size or vocab_size,
        "qk_norm_eps": model.norm_eps,
    }
    try:
        architecture = Architecture.from_dict(values)
    except ArchitectureError as error:
        raise ArchitectureError(*mistakes, *error.mistakes) from None
    if mistakes:
        raise ArchitectureError(*mistakes)
    return architecture


def _table(arch: Architecture) -> dict[str, Parameter]:
    """First values are GPT-2's: a standard deviation of 0.02, and that over √(2 n_layer) for the
    matrices that write the residual stream. At width 128 too, short AdamW runs learned faster from
    it than from variances that follow the fan-in. Adapters start as LoRA's authors' own: B at zero,
    A with a variance of 1 / (3 · inputs) (loralib's Kaiming initialisation with a = √5)."""
    table: dict[str, Parameter] = {}
    sizes = arch.sizes()
    into_stream = 0.02 / math.sqrt(2 * arch.n_layer)

    def add(name: str, kind: Kind, *axes: str, std: float = 0.0) -> None:
        table[name] = Parameter(axes, tuple(axis_size(sizes, axis) for axis in axes), kind, std)

    def add_weight(name: str, kind: Kind, output: str, source: str, *, biased: bool) -> None:
        writes_stream = kind == "matrix" and output == "embed"
        add(f"{name}.weight", kind, output, source, std=into_stream if writes_stream else 0.02)
        if biased:
            add(f"{name}.bias", "bias", output)
        if adapter := adapters.adapter_of(arch.lora, name):
            rank = f"{name}.rank"
            sizes[rank] = adapter.rank
            add(
                f"{name}.lora_a",
                kind,
                rank,
                source,
                std=1 / math.sqrt(3 * axis_size(sizes, source)),
            )
            add(f"{name}.lora_b", kind, output, rank)

    def add_linear(name: str, output: str, source: str) -> None:
        add_weight(name, "matrix", output, source, biased=arch.bias)

    def add_norm(name: str) -> None:
        add(f"{name}.weight", "norm", "embed")
        if arch.bias and arch.norm == "layernorm":
            add(f"{name}.bias", "norm", "embed")

    add_weight("token_embedding", "embedding", "vocab", "embed", biased=False)
    if arch.positions == "learned":
        add("position_embedding.weight", "embedding", "context", "embed", std=0.02)
    for layer in range(arch.n_layer):
        block = f"blocks.{layer}"
        add_norm(f"{block}.attn_norm")
        add_linear(f"{block}.attn.query", "heads*head_dim", "embed")
        add_linear(f"{block}.attn.key", "kv_heads*head_dim", "embed")
        add_linear(f"{block}.attn.value", "kv_heads*head_dim", "embed")
        if arch.qk_norm:
            add(f"{block}.attn.q_norm.weight", "norm", "head_dim")
            add(f"{block}.attn.k_norm.weight", "norm", "head_dim")
        add_linear(f"{block}.attn.output", "embed", "heads*head_dim")
        add_norm(f"{block}.mlp_norm")
        if arch.activation == "swiglu":
            add_linear(f"{block}.mlp.gate", "mlp", "embed")
        add_linear(f"{block}.mlp.up", "mlp", "embed")
        add_linear(f"{block}.mlp.down", "embed", "mlp")
    add_norm("final_norm")
    if not arch.tied:
        add_weight("head", "head", "vocab", "embed", biased=False)
    return table


def flops_per_token(arch: Architecture, context: int | None = None) -> int:
    """Floating-point operations of one token's forward and backward pass.

    6 N_matmul + 12 n_layer · context · (n_head · head_dim) (PaLM, arXiv 2204.02311, appendix B),
    in samples of `context` tokens (default: all of it). Attention is counted in full, not halved
    for causality, and nothing is added for what gradient checkpointing computes twice.
    """
    length = arch.context if context is None else context
    attention = 12 * arch.n_layer * length * arch.n_head * arch.head_dim
    return 6 * count_parameters(arch).matmul + attention
