"""The `config.json` of transformers' GPT-2 and Llama, and the shape that it describes; torch-free.

`to_config` and `from_config` are pure functions over its dict. Keys and defaults are those of
`GPT2Config` and `LlamaConfig` (transformers 4 and 5). Code that a folder brings is never run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from instar.checkpoint.manifest import CheckpointError, read_json
from instar.models.architecture import Activation, Architecture
from instar.models.hf import CONFIG
from instar.models.shape import ArchitectureError

Style = Literal["gpt2", "llama"]

TITLES: dict[Style, str] = {"gpt2": "GPT-2", "llama": "Llama"}
CLASSES: dict[Style, str] = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}

_ACTIVATIONS: dict[Activation, str] = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu2": "relu2"}
_ALIASES: dict[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh"}

_KEYS: dict[Style, dict[str, tuple[str, Any]]] = {
    "gpt2": {
        "n_layer": ("n_layer", 12),
        "n_head": ("n_head", 12),
        "n_embd": ("n_embd", 768),
        "context": ("n_positions", 1024),
        "vocab_size": ("vocab_size", 50257),
        "tied": ("tie_word_embeddings", True),
        "norm_eps": ("layer_norm_epsilon", 1e-5),
    },
    "llama": {
        "n_layer": ("num_hidden_layers", 32),
        "n_head": ("num_attention_heads", 32),
        "n_embd": ("hidden_size", 4096),
        "n_mlp": ("intermediate_size", 11008),
        "context": ("max_position_embeddings", 2048),
        "vocab_size": ("vocab_size", 32000),
        "bias": ("attention_bias", False),
        "tied": ("tie_word_embeddings", False),
        "norm_eps": ("rms_norm_eps", 1e-6),
        "dropout": ("attention_dropout", 0.0),
    },
}
"""The key in `config.json` of each field with the same meaning, and the default in transformers."""


def style_of(arch: Architecture) -> Style:
    """Return the model family that computes the same function as `arch`.

    Adapters are ignored: `to_tensors` merges them.

    Raises:
        CheckpointError: neither does; lists every setting that differs.
    """
    if arch.mask is not None:
        raise CheckpointError(
            f"new {arch.mask.axis} of this model are still masked, which neither GPT-2 nor Llama "
            f"supports: export a checkpoint from step {arch.mask.end:,} on"
        )
    like_llama = [arch.norm == "rmsnorm", arch.activation == "swiglu", arch.positions == "rope"]
    style: Style = "llama" if sum(like_llama) >= 2 else "gpt2"
    title = TITLES[style]
    problems = []

    def must(holds: bool, field: str, why: str) -> None:
        if not holds:
            problems.append(f"  model.{field}: {_in_yaml(getattr(arch, field))}, but {title} {why}")

    must(arch.n_layer > 0, "n_layer", "has at least one block")
    must(arch.num_experts is None, "num_experts", "has one MLP in each block")
    must(not arch.qk_norm, "qk_norm", "does not normalise queries and keys")
    must(arch.embedding_multiplier == 1, "embedding_multiplier", "does not scale embeddings")
    must(arch.conv_size is None, "conv_size", "has no convolutions")
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
        head_dim = arch.n_embd // arch.n_head
        must(
            arch.head_dim * arch.n_head == arch.n_embd,
            "head_dim",
            f"has n_embd / n_head, {head_dim}",
        )
    if problems:
        raise CheckpointError(
            "export writes GPT-2 and Llama, and this model is neither; "
            f"the nearest is {title}:\n" + "\n".join(problems) + "\n"
            f"A run with `preset: {style}` can be exported; this one's model.safetensors can be "
            "read as it is, by safetensors"
        )
    return style


def to_config(arch: Architecture, *, end_id: int | None = None) -> dict[str, Any]:
    """Return the `config.json` of `arch`; `end_id` is the token that ends a document.

    Raises:
        CheckpointError: see `style_of`.
    """
    style = style_of(arch)
    config: dict[str, Any] = {
        "architectures": [CLASSES[style]],
        "model_type": style,
        "dtype": "float32",
        "bos_token_id": end_id,
        "eos_token_id": end_id,
        **{key: getattr(arch, field) for field, (key, _) in _KEYS[style].items()},
    }
    if style == "gpt2":
        return config | {
            "n_inner": arch.n_mlp,
            "n_ctx": arch.context,  # what llama.cpp reads
            "activation_function": _ACTIVATIONS[arch.activation],
            **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), arch.dropout),
        }
    return config | {
        "num_key_value_heads": arch.n_kv_head,
        "head_dim": arch.head_dim,
        "hidden_act": "silu",
        "mlp_bias": arch.bias,
        "rope_parameters": {"rope_type": "default", "rope_theta": arch.rope_base},
        "rope_theta": arch.rope_base,  # for transformers 4 and other readers
    }


def is_bounded(value: object) -> bool:
    """Return whether all numbers in a JSON value fit 64 bits and are finite."""
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            stack += value.values()
        elif isinstance(value, list):
            stack += value
        elif isinstance(value, int | float) and not (
            math.isfinite(value) if isinstance(value, float) else -(2**63) <= value < 2**63
        ):
            return False
    return True


def from_config(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture that a `config.json` describes; defaults are those of transformers.

    Raises:
        CheckpointError: lists every entry without a counterpart here.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in TITLES:
        raise CheckpointError(f"config.json: model_type {kind!r}; import reads gpt2 and llama")
    problems: list[str] = []

    def take(key: str, default: Any) -> Any:
        """Return the value of a key if it has the type of the default."""
        value = config.get(key)
        if not is_bounded(value):
            problems.append(f"{key}: {value!r:.60} is out of all bounds")
            return default
        types = {float, int} if type(default) is float else {type(default)}
        if value is None or type(value) in types:
            return default if value is None else value
        problems.append(f"{key}: {value!r} is not of type {type(default).__name__}")
        return default

    def must(key: str, default: Any, *accepted: Any) -> None:
        if (value := take(key, default)) not in accepted:
            choices = " or ".join(map(repr, accepted))
            problems.append(f"{key}: {value!r}; only {choices} has a counterpart here")

    if config.get("auto_map"):
        problems.append("auto_map: the folder brings code of its own, which is not run")
    if config.get("quantization_config"):
        problems.append("quantization_config: import takes weights in floating point")
    fields = {
        field: type(default)(take(key, default))
        for field, (key, default) in _KEYS["gpt2" if kind == "gpt2" else "llama"].items()
    }
    read = _from_gpt2 if kind == "gpt2" else _from_llama
    fields |= read(fields, take, must, problems)
    fields |= {"qk_norm": False, "qk_norm_eps": fields["norm_eps"]}
    try:
        arch = Architecture.from_dict(fields)
    except ArchitectureError as error:
        problems += str(error).splitlines()
    if problems:
        lines = ["config.json describes no supported model:", *dict.fromkeys(problems)]
        raise CheckpointError("\n  ".join(lines))
    return arch


Take = Callable[[str, Any], Any]


def _from_gpt2(
    fields: Mapping[str, Any], take: Take, must: Callable[..., None], problems: list[str]
) -> dict[str, Any]:
    activations = {name: sources for sources, name in _ACTIVATIONS.items()} | _ALIASES
    must("activation_function", "gelu_new", *activations)
    must("scale_attn_weights", True, True)
    must("scale_attn_by_inverse_layer_idx", False, False)
    must("add_cross_attention", False, False)
    rates = [float(take(key, 0.1)) for key in ("embd_pdrop", "attn_pdrop", "resid_pdrop")]
    if len(set(rates)) > 1:
        problems.append(f"embd_pdrop, attn_pdrop, resid_pdrop: {rates}; here they are one")
    width, heads = fields["n_embd"], fields["n_head"]
    return {
        "n_kv_head": heads,
        "head_dim": _head_dim(width, heads, "n_embd", "n_head", problems),
        "n_mlp": take("n_inner", 4 * width),
        "norm": "layernorm",
        "activation": activations.get(take("activation_function", "gelu_new"), "gelu"),
        "positions": "learned",
        "bias": True,
        "rope_base": 10000.0,
        "dropout": rates[0],
    }


def _from_llama(
    fields: Mapping[str, Any], take: Take, must: Callable[..., None], problems: list[str]
) -> dict[str, Any]:
    must("hidden_act", "silu", "silu", "swish")
    if fields["bias"] != take("mlp_bias", False):
        problems.append("attention_bias, mlp_bias: one without the other has no counterpart here")
    rope = take("rope_parameters", {}) or take("rope_scaling", {})
    theta = rope.get("rope_theta", take("rope_theta", 10000.0))
    rope_kind = rope.get("rope_type", rope.get("type", "default"))
    if rope_kind != "default":
        problems.append(f"rope_parameters: type {rope_kind!r}; only 'default' has a counterpart")
    if not isinstance(theta, int | float):
        problems.append(f"rope_theta: {theta!r} is not a float")
        theta = 10000.0
    if rope.get("partial_rotary_factor", take("partial_rotary_factor", 1.0)) != 1.0:
        problems.append("partial_rotary_factor: here RoPE turns the whole head")
    width, heads = fields["n_embd"], fields["n_head"]
    return {
        "n_kv_head": take("num_key_value_heads", heads),
        "head_dim": take("head_dim", 0)
        or _head_dim(width, heads, "hidden_size", "num_attention_heads", problems),
        "norm": "rmsnorm",
        "activation": "swiglu",
        "positions": "rope",
        "rope_base": float(theta),
    }


def _head_dim(width: int, heads: int, width_key: str, heads_key: str, problems: list[str]) -> int:
    if heads < 1 or width % heads:
        problems.append(f"{width_key}: {width} cannot be divided into {heads_key} = {heads} heads")
        return 2
    return width // heads


def _in_yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def read_config(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG).is_file():
        raise CheckpointError(
            f"{folder}: no {CONFIG}; import takes the folder that save_pretrained of a "
            "transformers model wrote"
        )
    return read_json(folder / CONFIG, follow=True)
