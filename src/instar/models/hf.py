"""Export to and import from transformers' GPT-2 and Llama.

`to_config`, `to_tensors` and their inverses are pure functions over the dict of a `config.json` and
named tensors. `export_folder` and `import_folder` write and read the folder that `from_pretrained`
loads::

    config.json  model.safetensors              the model
    tokenizer.json  tokenizer_config.json       its tokenizer, if the run has one

Only safetensors and JSON are read and written; transformers is not needed. Keys and defaults are
those of `GPT2Config` and `LlamaConfig` (transformers 4 and 5).

* GPT-2 stores its matrices as (input, output), and queries, keys and values as one matrix.
* Both Llama and `instar.models.gpt.rotate` pair channel i of a head with channel i + C/2, so rows
  keep their order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Fast
from torch import Tensor

from instar.checkpoint.manifest import CheckpointError, Facts, read_json
from instar.checkpoint.store import Checkpoint, publish
from instar.config.files import check_regular
from instar.config.language import DataConfig, LanguageConfig, ModelConfig
from instar.config.origins import resolved
from instar.config.suggestions import wrong_value
from instar.data.text.tokenizer import (
    TOKENIZER_FILE,
    UNKNOWN,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    load_tokenizer,
)
from instar.models.architecture import Activation, Architecture, resolve
from instar.models.lora import adapter_of
from instar.models.shape import ArchitectureError, Parameter
from instar.record import atomic
from instar.record.atomic import atomic_dir, check_new
from instar.record.rundir import RunDir

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

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
    """Returns the model family that computes the same function as `arch`.

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
        head_dim = arch.n_embd // arch.n_head
        must(
            arch.head_dim * arch.n_head == arch.n_embd,
            "head_dim",
            f"has n_embd / n_head, {head_dim}",
        )
    if found:
        raise CheckpointError(
            "export writes GPT-2 and Llama, and this model is neither; "
            f"the nearest is {title}:\n" + "\n".join(found) + "\n"
            f"A run with `preset: {style}` can be exported; this one's model.safetensors can be "
            "read as it is, by safetensors"
        )
    return style


def to_config(arch: Architecture, *, end_id: int | None = None) -> dict[str, Any]:
    """Returns the `config.json` of `arch`; `end_id` is the token that ends a document.

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


def from_config(config: Mapping[str, Any]) -> Architecture:
    """Returns the architecture that a `config.json` describes; defaults are those of transformers.

    Raises:
        CheckpointError: lists every entry without a counterpart here.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in TITLES:
        raise CheckpointError(f"config.json: model_type {kind!r}; import reads gpt2 and llama")
    problems: list[str] = []

    def take(key: str, default: Any) -> Any:
        """Returns the value of a key if it has the type of the default."""
        value = config.get(key)
        wanted = {float, int} if type(default) is float else {type(default)}
        if value is None or type(value) in wanted:
            return default if value is None else value
        problems.append(f"{key}: {value!r} is not of type {type(default).__name__}")
        return default

    def must(key: str, default: Any, *accepted: Any) -> None:
        if (value := take(key, default)) not in accepted:
            known = " or ".join(map(repr, accepted))
            problems.append(f"{key}: {value!r}; only {known} has a counterpart here")

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
    known = {name: sources for sources, name in _ACTIVATIONS.items()} | _ALIASES
    must("activation_function", "gelu_new", *known)
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
        "activation": known.get(take("activation_function", "gelu_new"), "gelu"),
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


_PREFIX: dict[Style, str] = {"gpt2": "transformer.", "llama": "model."}
_BLOCKS: dict[Style, str] = {"gpt2": "transformer.h", "llama": "model.layers"}
_NAMES: dict[Style, dict[str, str]] = {
    "gpt2": {
        "token_embedding": "transformer.wte",
        "position_embedding": "transformer.wpe",
        "attn_norm": "ln_1",
        "attn.query": "attn.c_attn",
        "attn.key": "attn.c_attn",
        "attn.value": "attn.c_attn",
        "attn.output": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
    },
    "llama": {
        "token_embedding": "model.embed_tokens",
        "attn_norm": "input_layernorm",
        "attn.query": "self_attn.q_proj",
        "attn.key": "self_attn.k_proj",
        "attn.value": "self_attn.v_proj",
        "attn.output": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
        "final_norm": "model.norm",
        "head": "lm_head",
    },
}
_BUFFERS = re.compile(r"h\.\d+\.attn\.(masked_)?bias|.*rotary_emb\.inv_freq")
"""Buffers that older versions of transformers saved; they follow from the config."""


def to_tensors(arch: Architecture, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a model's tensors under the names and in the layouts of transformers.

    A tied head is not repeated, and adapters are merged into their weights. GPT-2 always has
    biases: they are 0 if `arch` has none.

    Raises:
        CheckpointError: a tensor is missing; also see `style_of`.
    """
    style = style_of(arch)
    _refuse(
        [f"{name}: missing" for name in arch.parameters() if name not in tensors],
        "the architecture",
    )
    arch, tensors = _merged(arch, tensors)
    table = arch.parameters()
    whole = replace(arch, bias=True) if style == "gpt2" else arch
    added = {
        name: torch.zeros(entry.shape)
        for name, entry in whole.parameters().items()
        if name not in table
    }
    made = {}
    for name, sources in _names(whole, style).items():
        parts = [added[part] if part in added else tensors[part] for part in sources]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        transposed = sources[0] in table and _is_transposed(table[sources[0]], style)
        made[name] = (joined.T if transposed else joined).contiguous()
    return made


def from_tensors(arch: Architecture, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Inverse of `to_tensors`, in float32; also for tensors that transformers saved.

    Raises:
        CheckpointError: lists every tensor that is missing, unknown, of another shape, not floating
            point, or not finite.
    """
    style = style_of(arch)
    table = arch.parameters()
    wanted = _names(arch, style)
    given = _under_full_names(tensors, wanted, _PREFIX[style])
    problems = _problems_of_head(arch, wanted, given)
    made = {}
    for name, sources in wanted.items():
        if name not in given:
            problems.append(f"{name}: missing")
            continue
        tensor = given.pop(name)
        lengths = [table[part].shape[0] for part in sources]
        shape: tuple[int, ...] = (sum(lengths), *table[sources[0]].shape[1:])
        transposed = _is_transposed(table[sources[0]], style)
        expected = shape[::-1] if transposed else shape
        if tuple(tensor.shape) != expected:
            problems.append(f"{name}: shape {tuple(tensor.shape)}, but config.json says {expected}")
        elif not tensor.is_floating_point():
            problems.append(f"{name}: {tensor.dtype}; import takes weights in floating point")
        elif not tensor.isfinite().all():
            problems.append(f"{name}: holds values that are not finite (NaN or infinite)")
        else:
            whole = (tensor.T if transposed else tensor).to(torch.float32)
            for part, piece in zip(sources, torch.split(whole, lengths), strict=True):
                made[part] = piece.clone(memory_format=torch.contiguous_format)
    problems += [f"{name}: unknown" for name in given]
    _refuse(problems, f"the {TITLES[style]} of config.json")
    return {name: made[name] for name in table}


def _merged(
    arch: Architecture, tensors: Mapping[str, Tensor]
) -> tuple[Architecture, Mapping[str, Tensor]]:
    """Returns the architecture and tensors with adapters merged into their weights."""
    plain = replace(arch, lora=())
    made = {name: tensors[name] for name in plain.parameters()}
    for name in arch.adaptable():
        if adapter := adapter_of(arch.lora, name):
            a, b = tensors[f"{name}.lora_a"], tensors[f"{name}.lora_b"]
            made[f"{name}.weight"] = made[f"{name}.weight"] + b @ (adapter.scale * a)
    return plain, made


def _refuse(problems: list[str], what: str) -> None:
    if problems:
        more = [f"and {len(problems) - 12} more"] if len(problems) > 12 else []
        lines = [f"the tensors are not those of {what}:", *problems[:12], *more]
        raise CheckpointError("\n  ".join(lines))


def _names(arch: Architecture, style: Style) -> dict[str, list[str]]:
    """Returns each tensor name of transformers with the names of ours that it concatenates."""
    made: dict[str, list[str]] = {}
    for name in arch.parameters():
        part, _, last = name.rpartition(".")
        block = re.match(r"blocks\.(\d+)\.(.*)", part)
        full_name = (
            f"{_BLOCKS[style]}.{block[1]}.{_NAMES[style][block[2]]}"
            if block
            else _NAMES[style][part]
        )
        made.setdefault(f"{full_name}.{last}", []).append(name)
    return made


def _is_transposed(entry: Parameter, style: Style) -> bool:
    return style == "gpt2" and entry.kind == "matrix"


def _under_full_names(
    tensors: Mapping[str, Tensor], wanted: Mapping[str, object], prefix: str
) -> dict[str, Tensor]:
    """Drops buffers, and adds the prefix that a model saved without its head lacks."""
    given = {}
    for name, tensor in tensors.items():
        if not _BUFFERS.fullmatch(name.removeprefix(prefix)):
            given[prefix + name if prefix + name in wanted else name] = tensor
    return given


def _problems_of_head(
    arch: Architecture, wanted: Mapping[str, list[str]], given: dict[str, Tensor]
) -> list[str]:
    """Removes a repeated tied head from `given`; returns a problem if it differs from the table."""
    if not arch.tied or "lm_head.weight" not in given:
        return []
    head = given.pop("lm_head.weight")
    (table,) = (name for name, sources in wanted.items() if sources == ["token_embedding.weight"])
    if table in given and not torch.equal(head, given[table]):
        return [f"lm_head.weight: differs from {table}, but config.json has tie_word_embeddings"]
    return []


def export_folder(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    averaged: bool = False,
    weights: Mapping[str, Tensor] | None = None,
) -> Architecture:
    """Writes the model of a checkpoint, or the moving average of its weights, as a folder that
    `from_pretrained` loads. The folder is published atomically.

    Args:
        weights: other weights of the same model, e.g. those of another step.

    Raises:
        CheckpointError: transformers has no such model, or there is no average.
        WriteError: the folder cannot be written or is not empty.
        ConfigError: the run's tokenizer cannot be read.
    """
    check_new(folder)
    component = "ema" if averaged else "model"
    path = checkpoint.path
    if component not in checkpoint.components:
        missing = "no moving average was kept (train.ema)" if averaged else "its model is missing"
        raise CheckpointError(f"{path}: {missing}; it has {', '.join(checkpoint.components)}")
    try:
        arch = Architecture.from_dict(checkpoint.manifest.architecture)
    except ArchitectureError as error:
        raise CheckpointError(f"{path}: not a GPT that is supported here:\n{error}") from error
    run = path.absolute().parent.parent
    tokenizer = load_tokenizer(run) if (run / TOKENIZER_FILE).is_file() else None
    config = to_config(arch, end_id=tokenizer.end_id if tokenizer else None)
    tensors = to_tensors(arch, checkpoint.tensors(component) if weights is None else weights)
    with atomic_dir(folder) as temporary:
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        atomic.adopt_file(temporary / WEIGHTS)
        if tokenizer:
            atomic.write_synced(temporary / TOKENIZER_FILE, to_fast(tokenizer).encode())
            about = _tokenizer_config(tokenizer, arch)
            atomic.write_synced(temporary / "tokenizer_config.json", _json(about))
        atomic.write_synced(temporary / CONFIG, _json(config))
    return arch


def import_folder(folder: Path, run_dir: Path) -> Path:
    """Creates a run with one checkpoint, at step 0, from a folder that transformers saved.

    Returns:
        the path of the checkpoint.

    Raises:
        CheckpointError: the folder holds no GPT-2 or Llama in safetensors.
        WriteError: `run_dir` cannot be written or is not empty.
        ConfigError: the tokenizer cannot be read.
    """
    check_new(run_dir)
    arch = from_config(_read_config(folder))
    model = _model_section(arch)
    tensors = from_tensors(arch, _read_weights(folder))
    tokenizer = _read_tokenizer(folder, arch)
    config = LanguageConfig(name=_name(run_dir), model=model, data=_data_section(tokenizer))
    origins = {f"model.{field}": f"{folder.name}/{CONFIG}" for field in ModelConfig.model_fields}
    with atomic_dir(run_dir) as temporary:
        run = RunDir(temporary)
        run.logs.mkdir()
        if tokenizer:
            atomic.write_synced(temporary / TOKENIZER_FILE, tokenizer.to_json().encode())
        atomic.write_synced(run.config, resolved(config, origins).encode())
        facts = Facts(
            tokenizer=tokenizer.fingerprint if tokenizer else "",
            reason=f"imported from {folder.name}",
            left_out=["optimizer", "rng"],
        )
        made = publish(
            temporary, 0, {"model": tensors}, {}, architecture=arch.to_dict(), facts=facts
        )
    return RunDir(run_dir).checkpoints / made.name


def to_fast(tokenizer: Tokenizer) -> str:
    """Returns the equivalent tokenizer in the JSON of the tokenizers library."""
    if isinstance(tokenizer, ByteTokenizer):
        fast = Fast(models.BPE({_letter(byte): byte for byte in range(256)}, []))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        fast.decoder = decoders.ByteLevel()
    elif isinstance(tokenizer, CharTokenizer):
        names = [*tokenizer.characters, UNKNOWN]
        ids = {name: number for number, name in enumerate(names)}
        fast = Fast(models.WordLevel(ids, unk_token=UNKNOWN))
        fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        fast.decoder = decoders.Fuse()
    else:
        return tokenizer.to_json()
    return str(fast.to_str())


def from_fast(tokenizer: Tokenizer) -> Tokenizer:
    """Inverse of `to_fast`; a tokenizer that `to_fast` did not write is returned as it is."""
    text = tokenizer.to_json()
    if not isinstance(tokenizer, BPETokenizer):
        return tokenizer
    if text == to_fast(ByteTokenizer()):
        return ByteTokenizer()
    if (vocabulary := json.loads(text)["model"]).get("type") == "WordLevel":
        names = sorted(vocabulary["vocab"], key=vocabulary["vocab"].__getitem__)
        chars = CharTokenizer("".join(names[:-1]))
        return chars if text == to_fast(chars) else tokenizer
    return tokenizer


def _letter(byte: int) -> str:
    """Returns the character of a byte in byte-level tokenizers, as in GPT-2: itself if it is
    printable, else one from code point 256 on."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [each for each in range(256) if each not in visible]
    return chr(byte if byte in visible else 256 + hidden.index(byte))


def _tokenizer_config(tokenizer: Tokenizer, arch: Architecture) -> dict[str, Any]:
    token = tokenizer.end_token
    end = {} if token is None else {"bos_token": token, "eos_token": token}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": arch.context,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # text never becomes a special token
        **end,
    }


def _read_config(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG).is_file():
        raise CheckpointError(
            f"{folder}: no {CONFIG}; import takes the folder that save_pretrained of a "
            "transformers model wrote"
        )
    return read_json(folder / CONFIG, follow=True)


def _read_weights(folder: Path) -> dict[str, Tensor]:
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX, follow=True).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
            raise CheckpointError(f"{folder / INDEX}: not an index of safetensors files")
        files = sorted(set(index.values()))
    elif (folder / WEIGHTS).is_file():
        files = [WEIGHTS]
    else:
        pickled = sorted(path.name for kind in _PICKLED for path in folder.glob(kind))
        if pickled:
            raise CheckpointError(
                f"{folder}: weights only as {', '.join(pickled)}, which may run any program when "
                "unpickled and is not opened; save the model again with save_pretrained, which "
                f"writes {WEIGHTS}"
            )
        raise CheckpointError(f"{folder}: no {WEIGHTS} and no {INDEX}")
    tensors: dict[str, Tensor] = {}
    for file in files:
        if Path(file).name != file:
            raise CheckpointError(f"{folder / INDEX}: {file!r} is not a file of this folder")
        try:
            check_regular(folder / file, follow=True)
            tensors |= load_file(folder / file)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder / file}: {error}") from error
    return tensors


def _read_tokenizer(folder: Path, arch: Architecture) -> Tokenizer | None:
    if not (folder / TOKENIZER_FILE).is_file():
        return None
    tokenizer = from_fast(load_tokenizer(folder))
    if tokenizer.vocab_size > arch.vocab_size:
        raise CheckpointError(
            f"{folder / TOKENIZER_FILE}: {tokenizer.vocab_size} tokens, but the model's table has "
            f"{arch.vocab_size} rows; without this file the model is imported alone"
        )
    return tokenizer


def _model_section(arch: Architecture) -> ModelConfig:
    """Returns the config section that resolves to `arch`."""
    fields = {
        field: value for field, value in arch.to_dict().items() if field in ModelConfig.model_fields
    }
    try:
        section = ModelConfig(**fields)
        resolved_shape = resolve(section, 1)
    except ArchitectureError as error:
        raise CheckpointError(f"{CONFIG}: no run could have this shape: {error}") from error
    except ValidationError as error:
        messages = [
            wrong_value(LanguageConfig, ("model", *each["loc"]), each["input"], each["type"], "")[0]
            for each in error.errors(include_url=False)
        ]
        raise CheckpointError(
            f"{CONFIG}: no run could have this shape: {'; '.join(messages)}"
        ) from None
    if differing := _differing(arch.to_dict(), resolved_shape.to_dict()):
        raise CheckpointError(f"{CONFIG}: no run could have this shape: {differing}")
    return section


def _differing(wanted: Mapping[str, Any], made: Mapping[str, Any]) -> str:
    return "; ".join(
        f"{field} is {wanted[field]}, a run's would be {made[field]}"
        for field in wanted
        if wanted[field] != made[field]
    )


def _data_section(tokenizer: Tokenizer | None) -> DataConfig:
    """Returns the data section with the nearest kind of tokenizer."""
    if tokenizer is None:
        return DataConfig()
    if tokenizer.kind != "bpe":
        return DataConfig.model_validate({"tokenizer": tokenizer.kind})
    return DataConfig(tokenizer="bpe", vocab_size=tokenizer.vocab_size)


def _name(run_dir: Path) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", run_dir.resolve().name).lstrip("-._")
    return name or "imported"


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"
