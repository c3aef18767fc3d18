"""An architecture as the `config.json` of transformers' GPT-2 or Llama, and back.

Pure functions over dicts; transformers itself is not needed. Keys and defaults are those of
`GPT2Config` and `LlamaConfig` (transformers 4 and 5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from instar.checkpoint.manifest import CheckpointError
from instar.models.architecture import Activation, Architecture
from instar.models.shape import ArchitectureError

Style = Literal["gpt2", "llama"]

TITLES: dict[Style, str] = {"gpt2": "GPT-2", "llama": "Llama"}
CLASSES: dict[Style, str] = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}

_ACTIVATIONS: dict[Activation, str] = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu2": "relu2"}
_ALIASES: dict[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh"}


def style_of(arch: Architecture) -> Style:
    """Which of the two computes the same as `arch`.

    Adapters do not count: `hf_tensors.to_tensors` merges them.

    Raises:
        CheckpointError: neither does; names every switch that stands in the way.
    """
    if arch.mask is not None:
        raise CheckpointError(
            f"new {arch.mask.axis} of this model are still entering, which neither GPT-2 nor Llama "
            f"can say: export a checkpoint from step {arch.mask.end:,} on"
        )
    like_llama = [arch.norm == "rmsnorm", arch.activation == "swiglu", arch.positions == "rope"]
    style: Style = "llama" if sum(like_llama) >= 2 else "gpt2"
    title = TITLES[style]
    found = []

    def must(holds: bool, field: str, why: str) -> None:
        if not holds:
            found.append(f"  model.{field}: {_in_yaml(getattr(arch, field))}, but {title} {why}")

    must(not arch.qk_norm, "qk_norm", "does not normalise queries and keys")
    if style == "llama":
        must(arch.norm == "rmsnorm", "norm", "has rmsnorm")
        must(arch.activation == "swiglu", "activation", "has swiglu")
        must(arch.positions == "rope", "positions", "has rope")
        must(arch.n_embd % arch.n_head == 0, "n_head", f"must divide n_embd, {arch.n_embd}")
    else:
        must(arch.norm == "layernorm", "norm", "has layernorm")
        must(arch.activation in _ACTIVATIONS, "activation", f"has {', '.join(_ACTIVATIONS)}")
        must(arch.positions == "learned", "positions", "has learned ones")
        must(arch.n_kv_head == arch.n_head, "n_kv_head", f"has as many as n_head, {arch.n_head}")
        wide = arch.n_embd // arch.n_head
        must(arch.head_dim * arch.n_head == arch.n_embd, "head_dim", f"has n_embd / n_head, {wide}")
    if found:
        raise CheckpointError(
            "export writes GPT-2 and Llama, and this model is neither; "
            f"the nearest is {title}:\n" + "\n".join(found) + "\n"
            f"A run with `preset: {style}` can be exported; this one's model.safetensors can be "
            "read as it is, by safetensors"
        )
    return style


def to_config(arch: Architecture, *, end_id: int | None = None) -> dict[str, Any]:
    """The `config.json` of `arch`; `end_id` is the token that ends a document.

    Raises:
        CheckpointError: see `style_of`.
    """
    style = style_of(arch)
    around: dict[str, Any] = {
        "architectures": [CLASSES[style]],
        "model_type": style,
        "dtype": "float32",
        "vocab_size": arch.vocab_size,
        "tie_word_embeddings": arch.tied,
        "bos_token_id": end_id,
        "eos_token_id": end_id,
    }
    if style == "gpt2":
        return around | {
            "n_layer": arch.n_layer,
            "n_head": arch.n_head,
            "n_embd": arch.n_embd,
            "n_inner": arch.n_mlp,
            "n_positions": arch.context,
            "activation_function": _ACTIVATIONS[arch.activation],
            "layer_norm_epsilon": arch.norm_eps,
            **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), arch.dropout),
        }
    return around | {
        "num_hidden_layers": arch.n_layer,
        "num_attention_heads": arch.n_head,
        "num_key_value_heads": arch.n_kv_head,
        "head_dim": arch.head_dim,
        "hidden_size": arch.n_embd,
        "intermediate_size": arch.n_mlp,
        "max_position_embeddings": arch.context,
        "hidden_act": "silu",
        "rms_norm_eps": arch.norm_eps,
        "attention_bias": arch.bias,
        "mlp_bias": arch.bias,
        "attention_dropout": arch.dropout,
        "rope_parameters": {"rope_type": "default", "rope_theta": arch.rope_base},
        "rope_theta": arch.rope_base,  # where transformers 4 and other readers look
    }


def from_config(config: Mapping[str, Any]) -> Architecture:
    """The architecture that a `config.json` describes; what it leaves out is as in transformers.

    Raises:
        CheckpointError: names every entry that has no counterpart here.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in TITLES:
        raise CheckpointError(f"config.json: model_type {kind!r}; import reads gpt2 and llama")
    problems: list[str] = []

    def take(key: str, default: Any) -> Any:
        """The value of a key, if it is of the default's type."""
        value = config.get(key)
        wanted = {float, int} if type(default) is float else {type(default)}
        if value is None or type(value) in wanted:
            return default if value is None else value
        problems.append(f"{key}: {value!r} is no {type(default).__name__}")
        return default

    def must(key: str, default: Any, *accepted: Any) -> None:
        if (value := take(key, default)) not in accepted:
            known = " or ".join(map(repr, accepted))
            problems.append(f"{key}: {value!r}; only {known} has a counterpart here")

    if config.get("quantization_config"):
        problems.append("quantization_config: import takes weights in floating point")
    read = _from_gpt2 if kind == "gpt2" else _from_llama
    fields = read(take, must, problems)
    fields |= {"qk_norm": False, "qk_norm_eps": fields["norm_eps"]}
    try:
        arch = Architecture.from_dict(fields)
    except ArchitectureError as error:
        problems += str(error).splitlines()
    if problems:
        told = ["config.json is of no model that is known here:", *dict.fromkeys(problems)]
        raise CheckpointError("\n  ".join(told))
    return arch


Take = Callable[[str, Any], Any]


def _from_gpt2(take: Take, must: Callable[..., None], problems: list[str]) -> dict[str, Any]:
    known = {name: ours for ours, name in _ACTIVATIONS.items()} | _ALIASES
    must("activation_function", "gelu_new", *known)
    must("scale_attn_weights", True, True)
    must("scale_attn_by_inverse_layer_idx", False, False)
    must("add_cross_attention", False, False)
    rates = [float(take(key, 0.1)) for key in ("embd_pdrop", "attn_pdrop", "resid_pdrop")]
    if len(set(rates)) > 1:
        problems.append(f"embd_pdrop, attn_pdrop, resid_pdrop: {rates}; here they are one")
    width, heads = take("n_embd", 768), take("n_head", 12)
    return {
        "n_layer": take("n_layer", 12),
        "n_head": heads,
        "n_kv_head": heads,
        "head_dim": _shared_out(width, heads, "n_embd", "n_head", problems),
        "n_embd": width,
        "n_mlp": take("n_inner", 4 * width),
        "context": take("n_positions", 1024),
        "vocab_size": take("vocab_size", 50257),
        "norm": "layernorm",
        "activation": known.get(take("activation_function", "gelu_new"), "gelu"),
        "positions": "learned",
        "bias": True,
        "tied": take("tie_word_embeddings", True),
        "rope_base": 10000.0,
        "norm_eps": float(take("layer_norm_epsilon", 1e-5)),
        "dropout": rates[0],
    }


def _from_llama(take: Take, must: Callable[..., None], problems: list[str]) -> dict[str, Any]:
    must("hidden_act", "silu", "silu", "swish")
    if take("attention_bias", False) != take("mlp_bias", False):
        problems.append("attention_bias, mlp_bias: one without the other has no counterpart here")
    rope = take("rope_parameters", {}) or take("rope_scaling", {})
    theta = rope.get("rope_theta", take("rope_theta", 10000.0))
    rope_kind = rope.get("rope_type", rope.get("type", "default"))
    if rope_kind != "default":
        problems.append(f"rope_parameters: type {rope_kind!r}; only 'default' has a counterpart")
    if not isinstance(theta, int | float):
        problems.append(f"rope_theta: {theta!r} is no float")
        theta = 10000.0
    if rope.get("partial_rotary_factor", take("partial_rotary_factor", 1.0)) != 1.0:
        problems.append("partial_rotary_factor: here RoPE turns the whole head")
    width, heads = take("hidden_size", 4096), take("num_attention_heads", 32)
    head_dim = take("head_dim", 0)
    return {
        "n_layer": take("num_hidden_layers", 32),
        "n_head": heads,
        "n_kv_head": take("num_key_value_heads", heads),
        "head_dim": head_dim
        or _shared_out(width, heads, "hidden_size", "num_attention_heads", problems),
        "n_embd": width,
        "n_mlp": take("intermediate_size", 11008),
        "context": take("max_position_embeddings", 2048),
        "vocab_size": take("vocab_size", 32000),
        "norm": "rmsnorm",
        "activation": "swiglu",
        "positions": "rope",
        "bias": take("attention_bias", False),
        "tied": take("tie_word_embeddings", False),
        "rope_base": float(theta),
        "norm_eps": float(take("rms_norm_eps", 1e-6)),
        "dropout": float(take("attention_dropout", 0.0)),
    }


def _shared_out(width: int, heads: int, wide: str, many: str, problems: list[str]) -> int:
    if heads < 1 or width % heads:
        problems.append(f"{wide}: {width} cannot be divided into {many} = {heads} heads")
        return 2
    return width // heads


def _in_yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
