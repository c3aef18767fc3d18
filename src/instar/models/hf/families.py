"""Families of transformers' decoder-only models: every parameter with its named axes, as data.

A `Family` lists the parameters of one block and those outside the blocks, and the keys of `config.json` that
hold the sizes of the axes; `pretrained.py` makes a shape of it and a config. A family of your own is one more
entry::

    FAMILIES["starcoder2"] = replace(FAMILIES["llama"], name="StarCoder 2", block=(...))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from instar.models.shape import Kind

Biased = bool | str
"""Whether a linear map has a bias; or the key of the config that says so."""


@dataclass(frozen=True)
class TableEntry:
    """A module with a weight of these axes, and perhaps a bias of its output; or, with `bare`, a
    parameter."""

    name: str
    kind: Kind
    axes: tuple[str, ...]
    bias: Biased = False
    parts: tuple[str, ...] = ()
    bare: bool = False


def linear(
    name: str, output: str, source: str, *, bias: Biased = False, parts: tuple[str, ...] = ()
) -> TableEntry:
    """Return an `nn.Linear`. `parts`: ``query``, ``key`` and ``value`` where it makes these."""
    return TableEntry(name, "matrix", (output, source), bias, parts)


def conv1d(name: str, output: str, source: str, *, parts: tuple[str, ...] = ()) -> TableEntry:
    """GPT-2's linear map, whose weight is (input, output)."""
    return TableEntry(name, "transposed", (source, output), bias=True, parts=parts)


def norm(name: str, axis: str = "embed", *, bias: bool = False) -> TableEntry:
    return TableEntry(name, "norm", (axis,), bias)


def attention(
    bias: Biased = False, output_bias: Biased = False, output: str = "embed"
) -> tuple[TableEntry, ...]:
    """Separate projections of queries, keys, values and of the output."""
    keys = "kv_heads*head_dim"
    return (
        linear("self_attn.q_proj", "heads*head_dim", "embed", bias=bias, parts=("query",)),
        linear("self_attn.k_proj", keys, "embed", bias=bias, parts=("key",)),
        linear("self_attn.v_proj", keys, "embed", bias=bias, parts=("value",)),
        linear("self_attn.o_proj", output, "heads*head_dim", bias=output_bias),
    )


def qk_norms(query: str = "head_dim", key: str = "head_dim") -> tuple[TableEntry, ...]:
    return norm("self_attn.q_norm", query), norm("self_attn.k_norm", key)


def gated_mlp(bias: Biased = False, output: str = "embed") -> tuple[TableEntry, ...]:
    return (
        linear("mlp.gate_proj", "mlp", "embed", bias=bias),
        linear("mlp.up_proj", "mlp", "embed", bias=bias),
        linear("mlp.down_proj", output, "mlp", bias=bias),
    )


EXPERTS = (
    linear("mlp.gate", "experts", "embed"),
    TableEntry("mlp.experts.gate_up_proj", "experts", ("experts", "2*mlp", "embed"), bare=True),
    TableEntry("mlp.experts.down_proj", "experts", ("experts", "embed", "mlp"), bare=True),
)
"""A router and experts as transformers holds them in memory."""

PRE_NORMS = (norm("input_layernorm"), norm("post_attention_layernorm"))
POST_NORMS = tuple(
    TableEntry(f"post_{part}_layernorm", "post_norm", ("embed",))
    for part in ("attention", "feedforward")
)
"""Norms of what attention and MLP add to the residual stream."""

AXES: Mapping[str, str] = {
    "layers": "num_hidden_layers",
    "embed": "hidden_size",
    "mlp": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab": "vocab_size",
    "context": "max_position_embeddings",
}
"""Keys of most configs."""

_SANDWICH = {**AXES, "attn_output": "hidden_size", "mlp_output": "hidden_size"}
"""What a post-norm reads is no residual stream, although it is as wide."""


@dataclass(frozen=True)
class SingleExperts:
    """Names in files where each expert has tensors of its own, which transformers joins as it loads them:
    ``<block>.experts.<n>.<gate, up or down>.weight``."""

    block: str
    """what the MLP is called in files"""
    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class WithExperts:
    """The family whose blocks differ in that their MLPs are experts of `EXPERTS`."""

    model_type: str
    model_class: str
    config: Mapping[str, object]
    """keys that make the blocks alike"""


MIXTRAL = WithExperts("mixtral", "MixtralForCausalLM", {})
QWEN3_MOE = WithExperts(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
)
JOINED: Mapping[str, tuple[str, ...]] = {
    "mlp.experts.gate_up_proj": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.experts.down_proj": ("mlp.down_proj.weight",),
}
"""Parameters of `gated_mlp` that one of `EXPERTS` joins."""


@dataclass(frozen=True)
class Family:
    """The causal language models of one `model_type`."""

    name: str
    """as people write it"""
    block: tuple[TableEntry, ...]
    outside: tuple[TableEntry, ...] = (
        TableEntry("model.embed_tokens", "embedding", ("vocab", "embed")),
        norm("model.norm"),
    )
    axes: Mapping[str, str] = field(default_factory=lambda: AXES)
    """key of the config for each axis"""
    blocks: str = "model.layers."
    """prefix of the names of blocks' parameters"""
    final_norm: str = "model.norm"
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    eps: str = "rms_norm_eps"
    """key of the config"""
    gain_offset: float = 0.0
    """what norms add to their weight"""
    positions: Literal["learned", "rope"] = "rope"
    scales_by_head_dim: bool = True
    heads_divide_width: bool = False
    """whether transformers refuses a config whose width is not a multiple of the number of heads"""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """operations that this family does not support, with the reason"""
    rope_scalings: tuple[str, ...] = ("linear", "dynamic", "yarn")
    """kinds of scaled RoPE that transformers computes for it, of those that growth knows"""
    longrope_by_width: bool = False
    """whether transformers counts the factors of a config's longrope for heads of hidden_size / num_attention_heads"""
    must: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """values that keys of the config must have, if they are there"""
    single_experts: SingleExperts | None = None
    with_experts: WithExperts | None = None

    @property
    def qk_norm(self) -> bool:
        return any(entry.name.endswith("q_norm") for entry in self.block)


_BOUND = "GPT-2 has as many channels as its heads together: its config cannot say otherwise"
_POST_NORMED = (
    "norms between each sublayer and the residual stream take their statistics over all channels, "
    "so that new ones would change the old"
)
_JOINT = (
    "q_norm and k_norm take their statistics over all heads, so that new ones would change the old"
)
_GPT2 = Family(
    "GPT-2",
    block=(
        norm("ln_1", bias=True),
        conv1d(
            "attn.c_attn",
            "heads*head_dim+kv_heads*head_dim+kv_heads*head_dim",
            "embed",
            parts=("query", "key", "value"),
        ),
        conv1d("attn.c_proj", "embed", "heads*head_dim"),
        norm("ln_2", bias=True),
        conv1d("mlp.c_fc", "mlp", "embed"),
        conv1d("mlp.c_proj", "embed", "mlp"),
    ),
    outside=(
        TableEntry("transformer.wte", "embedding", ("vocab", "embed")),
        TableEntry("transformer.wpe", "embedding", ("context", "embed")),
        norm("transformer.ln_f", bias=True),
    ),
    axes={
        "layers": "n_layer",
        "embed": "n_embd",
        "mlp": "n_inner",
        "heads": "n_head",
        "vocab": "vocab_size",
        "context": "n_positions",
    },
    blocks="transformer.h.",
    final_norm="transformer.ln_f",
    norm="layernorm",
    eps="layer_norm_epsilon",
    positions="learned",
    refusals=dict.fromkeys(
        ("widen_hidden", "add_heads", "grow_head_dim", "split_kv_heads"), _BOUND
    ),
    must={"scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)},
)

_LLAMA = Family(
    "Llama",
    block=(*attention("attention_bias", "attention_bias"), *gated_mlp("mlp_bias"), *PRE_NORMS),
    heads_divide_width=True,
    with_experts=MIXTRAL,
)
_MISTRAL = Family("Mistral", block=(*attention(), *gated_mlp(), *PRE_NORMS), with_experts=MIXTRAL)
_QWEN3 = Family(
    "Qwen3",
    block=(*attention("attention_bias", "attention_bias"), *qk_norms(), *gated_mlp(), *PRE_NORMS),
    with_experts=QWEN3_MOE,
)
_GEMMA2 = Family(
    "Gemma 2",
    block=(
        *attention("attention_bias", "attention_bias", output="attn_output"),
        *gated_mlp(output="mlp_output"),
        norm("input_layernorm"),
        *POST_NORMS,
        norm("pre_feedforward_layernorm"),
    ),
    axes=_SANDWICH,
    gain_offset=1.0,
    scales_by_head_dim=False,
    heads_divide_width=True,
    refusals={"widen_hidden": _POST_NORMED},
    must={"use_bidirectional_attention": (False, None)},
)

FAMILIES: dict[str, Family] = {
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "qwen2": Family("Qwen2", block=(*attention(True), *gated_mlp(), *PRE_NORMS)),
    "qwen3": _QWEN3,
    "gemma2": _GEMMA2,
    "gemma3_text": replace(_GEMMA2, name="Gemma 3", block=(*_GEMMA2.block, *qk_norms())),
    "olmo2": Family(
        "OLMo 2",
        block=(
            *attention("attention_bias", "attention_bias", output="attn_output"),
            *qk_norms("heads*head_dim", "kv_heads*head_dim"),
            *gated_mlp(output="mlp_output"),
            *POST_NORMS,
        ),
        axes=_SANDWICH,
        refusals={"widen_hidden": _POST_NORMED, "add_heads": _JOINT},
    ),
    "phi3": Family(
        "Phi 3",
        block=(
            linear("self_attn.o_proj", "embed", "heads*head_dim"),
            linear(
                "self_attn.qkv_proj",
                "heads*head_dim+kv_heads*head_dim+kv_heads*head_dim",
                "embed",
                parts=("query", "key", "value"),
            ),
            linear("mlp.gate_up_proj", "2*mlp", "embed"),
            linear("mlp.down_proj", "embed", "mlp"),
            *PRE_NORMS,
        ),
        rope_scalings=(),
        longrope_by_width=True,
    ),
    "mixtral": Family(
        "Mixtral",
        block=(*attention(), *EXPERTS, *PRE_NORMS),
        axes={**AXES, "experts": "num_local_experts"},
        single_experts=SingleExperts("block_sparse_moe", "w1", "w3", "w2"),
    ),
    "qwen3_moe": Family(
        "Qwen3-MoE",
        block=(*attention("attention_bias", "attention_bias"), *qk_norms(), *EXPERTS, *PRE_NORMS),
        axes={**AXES, "mlp": "moe_intermediate_size", "experts": "num_local_experts"},
        must={"mlp_only_layers": ([],), "decoder_sparse_step": (1,)},
        single_experts=SingleExperts("mlp", "gate_proj", "up_proj", "down_proj"),
    ),
}
"""Families by the `model_type` of their config."""

BUILT_IN = frozenset(FAMILIES)
"""Families whose tables are tested here; the tables of others are tried before they are used."""
