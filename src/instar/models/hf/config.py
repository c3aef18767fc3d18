"""What a `config.json` of transformers says of a model; torch-free. Code that a folder brings is never run.

`to_config` and `from_config` are pure functions between an architecture and the dict of a GPT-2 or Llama, with keys and
defaults of `GPT2Config` and `LlamaConfig` (transformers 4 and 5).

`complete_config` takes that of any known family: completed by the defaults of its class, or refused. What transformers
would read and Instar does not know, a model would silently be another by: such a key is refused by name. The names are
those of transformers' own code, so that they are never older than the library.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from instar.checkpoint.manifest import CheckpointError, read_json
from instar.models.architecture import Activation, Architecture
from instar.models.hf import CONFIG
from instar.models.hf.families import FAMILIES
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

LEGACY: Mapping[str, str] = dict.fromkeys(
    ("rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor"),
    "rope_parameters",
) | {"sliding_window_pattern": "layer_types"}
"""Keys of older configs, and the key that transformers makes of each."""
_COMMON = ("tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")
_INERT = frozenset(
    {
        "architectures",
        "classifier_dropout",
        "dtype",
        "gradient_checkpointing",
        "id2label",
        "init_std",
        "initializer_factor",
        "label2id",
        "model_type",
        "name_or_path",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "return_dict",
        "tags",
        "torch_dtype",
        "transformers_version",
        "use_return_dict",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_name_or_path",
    }
)
"""Keys that do not change what a causal language model in float32 computes."""
_MUST: Mapping[str, tuple[object, ...]] = {
    "chunk_size_feed_forward": (0, None),
    "is_encoder_decoder": (False, None),
    "attn_implementation": (None, "eager", "sdpa"),
    "_attn_implementation": (None, "eager", "sdpa"),
    "_attn_implementation_internal": (None, "eager", "sdpa"),
    "per_layer_config": (None, {}),
}
_READS = re.compile(
    r"config\.([A-Za-z_]\w*)"
    r"|attr\([^()]*config[^()]*,\s*[\"'](\w+)[\"']"
    r"|kwargs(?:\.(?:get|pop|setdefault))?[\(\[]\s*[\"'](\w+)[\"']"
)
"""How transformers' code reads a key."""
_SHARED = (
    "cache_utils",
    "configuration_utils",
    "masking_utils",
    "modeling_rope_utils",
    "modeling_utils",
)


def style_of(arch: Architecture) -> Style:
    """Return the model family that computes the same function as `arch`.

    Adapters are ignored: `to_tensors` merges them. A Llama with windows has another name, and the same tensors.

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
    must(arch.loop is None, "loop", "runs each layer once: unloop makes layers of the passes")
    if style == "llama":
        must(arch.norm == "rmsnorm", "norm", "has rmsnorm")
        must(arch.activation == "swiglu", "activation", "has swiglu")
        must(arch.positions == "rope", "positions", "has rope")
        must(arch.n_embd % arch.n_head == 0, "n_head", f"must divide n_embd, {arch.n_embd}")
        sizes = {window for window in arch.windows if window is not None}
        must(len(sizes) <= 1, "windows", "has none, and Mistral and Ministral have one size")
        must(not (arch.windows and arch.bias), "bias", "with windows (Mistral, Ministral) has none")
    else:
        must(arch.norm == "layernorm", "norm", "has layernorm")
        must(arch.activation in _ACTIVATIONS, "activation", f"has {', '.join(_ACTIVATIONS)}")
        must(arch.positions == "learned", "positions", "has learned ones")
        must(arch.n_kv_head == arch.n_head, "n_kv_head", f"has as many as n_head, {arch.n_head}")
        must(not arch.windows, "windows", "has none: set_window: null takes them away")
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
    config |= {
        "num_key_value_heads": arch.n_kv_head,
        "head_dim": arch.head_dim,
        "hidden_act": "silu",
        "mlp_bias": arch.bias,
        "rope_parameters": {"rope_type": "default", "rope_theta": arch.rope_base},
        "rope_theta": arch.rope_base,  # for transformers 4 and other readers
    }
    if arch.windows:
        del config["attention_bias"], config["mlp_bias"]
        config |= _windows_config(arch.windows)
    return config


def _windows_config(windows: Sequence[int | None]) -> dict[str, Any]:
    """Return what says that a Llama has windows: a Mistral if all layers do, else a Ministral, which names them."""
    family = "ministral" if None in windows else "mistral"
    config: dict[str, Any] = {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
        "sliding_window": max(window for window in windows if window is not None),
    }
    if None in windows:
        kinds = ["full_attention" if w is None else "sliding_attention" for w in windows]
        config |= {"layer_types": kinds}
    return config


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


LABELS = ("id2label", "label2id")
"""Keys of classifiers, which every config of transformers has; their own keys are numbers, which JSON has not."""


def read_config(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG).is_file():
        raise CheckpointError(
            f"{folder}: no {CONFIG}; import takes the folder that save_pretrained of a "
            "transformers model wrote"
        )
    return read_json(folder / CONFIG, follow=True)


def complete_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config of a known family as transformers reads it, with its defaults.

    Raises:
        CheckpointError: transformers refuses it or is not installed, a number is out of all bounds, or it has
            keys that transformers reads and nothing here knows.
    """
    config_type = config_class(config)
    values = {key: copy.deepcopy(config[key]) for key in config if key in family_keys(config)}
    problems = [
        f"{key}: {value!r:.60} is out of all bounds"
        for key, value in values.items()
        if not is_bounded(value)
    ]
    problems += _not_understood(config, config_type)
    if problems:
        raise CheckpointError("\n  ".join([f"{CONFIG}:", *problems]))
    try:
        config_dict: dict[str, Any] = config_type(**values).to_dict()
    except Exception as error:  # a config of anyone's: whatever transformers makes of it
        raise CheckpointError(f"{CONFIG}: transformers refuses it: {error}") from error
    return config_dict


def family_keys(config: Mapping[str, Any]) -> frozenset[str]:
    """Return the keys that say what a model of this family computes."""
    config_type = config_class(config)

    from transformers import PreTrainedConfig

    common = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    field_names = {field.name for field in dataclasses.fields(config_type)} - common
    sizes = FAMILIES[config["model_type"]].axes.values()
    return frozenset({*field_names, *LEGACY, *_COMMON, *config_type.attribute_map, *sizes})


def explicit_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `config.json` must say for a model of a completed config: all values, so that none is derived anew
    from one that changed."""
    keys = family_keys(config) - LEGACY.keys()
    identity = {key: config[key] for key in ("model_type", "architectures") if config.get(key)}
    return {**identity, **{key: config[key] for key in sorted(keys) if key in config}}


def config_class(config: Mapping[str, Any]) -> Any:
    """Return the class of a config, of transformers itself."""
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError as error:
        raise CheckpointError(
            f"folders of transformers need transformers ({error}): pip install 'instar[loops]'"
        ) from error
    return CONFIG_MAPPING[config["model_type"]]


def _not_understood(config: Mapping[str, Any], config_type: Any) -> Iterator[str]:
    from transformers import GenerationConfig

    # transformers moves these to the settings of generation
    accepted_keys = family_keys(config) | _INERT | {*GenerationConfig().to_dict()}
    read = _names_read(config_type.__module__)
    for key, value in config.items():
        if key in _MUST:
            if value not in _MUST[key]:
                yield f"{key} is {value!r:.60}; only {_MUST[key][0]!r} is supported"
        elif key not in accepted_keys and (key in read or hasattr(config_type, key)):
            yield f"{key}: transformers reads it, and Instar does not know what it changes"


@cache
def _names_read(module: str) -> frozenset[str]:
    """Return the keys that the code of a family reads, beside those that its class declares."""
    modules = (
        module,
        module.replace(".configuration_", ".modeling_"),
        *(f"transformers.{name}" for name in _SHARED),
    )
    origins = [spec.origin for name in modules if (spec := importlib.util.find_spec(name))]
    texts = [Path(origin).read_text(encoding="utf-8") for origin in origins if origin]
    return frozenset(
        name for text in texts for names in _READS.findall(text) for name in names if name
    )
