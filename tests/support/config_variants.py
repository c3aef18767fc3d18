"""Every documented variant of the keys of each family's `config.json`, and each operation on a folder of it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from small_models import CHANGES, EXACT, OTHER, SIZES
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from instar.config.errors import InstarError
from instar.config.sections import Operation
from instar.growth.folders import grow_folder
from instar.models.hf.pretrained_folder import open_folder

Values = Mapping[str, Any]

GROWN: Mapping[str, Operation] = {
    **EXACT,
    **OTHER,
    "odd_head_dim": Operation("grow_head_dim", 11, {}),
    "linear": Operation("extend_context", 64, {"rope": "linear"}),
    "dynamic": Operation("extend_context", 64, {"rope": "dynamic"}),
    "yarn": Operation("extend_context", 64, {"rope": "yarn"}),
    "upcycle": Operation("upcycle", 4, {"num_experts_per_tok": 2}),
}
"""Operations by name"""


def _rope(kind: str, **values: Any) -> Values:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 100.0, **values}}


_FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0]}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 4.0}
_ROPES: Mapping[str, Values] = {
    "linear": _rope("linear", factor=2.0),
    "dynamic": _rope("dynamic", factor=2.0),
    "yarn": _rope("yarn", factor=4.0, original_max_position_embeddings=8),
    "yarn without original": _rope("yarn", factor=4.0),
    "yarn without factor": _rope("yarn", factor=None, original_max_position_embeddings=8),
    "yarn with mscale": _rope("yarn", factor=4.0, mscale=0.7, mscale_all_dim=1.1, beta_fast=16),
    "llama3": _rope("llama3", **_LLAMA3, original_max_position_embeddings=8),
    "llama3 without original": _rope("llama3", **_LLAMA3),
    "longrope": _rope("longrope", **_FACTORS, original_max_position_embeddings=16),
    "longrope with factor": _rope(
        "longrope", **_FACTORS, original_max_position_embeddings=16, factor=3.0
    ),
    "partial": _rope("default", partial_rotary_factor=0.5),
    "old scaling": {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 50.0},
    "old theta": {"rope_theta": 50.0},
}
_TIED: Mapping[str, Values] = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
}
_COMMON: Mapping[str, Values] = {
    **_TIED,
    **_ROPES,
    "one head of keys": {"num_key_value_heads": 1},
    "all heads of keys": {"num_key_value_heads": 4},
    "keys not said": {"num_key_value_heads": None},
    "relu": {"hidden_act": "relu"},
    "no padding": {"pad_token_id": None},
    "several ends": {"eos_token_id": [1, 2, 3]},
    "no cache": {"use_cache": False},
    "dropout": {"attention_dropout": 0.5},
    "float16": {"dtype": "float16"},
}
_NULL_HEAD: Mapping[str, Values] = {"head_dim null": {"head_dim": None}}
_BIAS: Mapping[str, Values] = {
    "bias": {"attention_bias": True},
    "no bias": {"attention_bias": False},
}
_SLIDING: Mapping[str, Values] = {
    "sliding": {"sliding_window": 6},
    "not sliding": {"sliding_window": None},
}
_QWEN_SLIDING: Mapping[str, Values] = {
    "not used sliding": {"use_sliding_window": False, "sliding_window": 6},
    "sliding upper layers": {
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
    },
    "layer types": {
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
}
_GEMMA: Mapping[str, Values] = {
    **_BIAS,
    **_SLIDING,
    "layer types": {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    "capped": {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0},
    "not capped": {"final_logit_softcapping": None, "attn_logit_softcapping": None},
    "scalar": {"query_pre_attn_scalar": 144},
    "bidirectional": {"use_bidirectional_attention": True},
}
_EXPERTS: Mapping[str, Values] = {
    "one expert": {"num_experts_per_tok": 1},
    "router logits": {"output_router_logits": True},
    "jitter": {"router_jitter_noise": 0.1},
}
_NOT_OF_GEMMA3 = {name: value for name, value in _ROPES.items() if "old" not in name}

VARIANTS: Mapping[str, Mapping[str, Values]] = {
    "gpt2": {
        **_TIED,
        "inner": {"n_inner": 40},
        "not scaled": {"scale_attn_weights": False},
        "scaled by layer": {"scale_attn_by_inverse_layer_idx": True},
        "upcast": {"reorder_and_upcast_attn": True},
        "cross": {"add_cross_attention": True},
        "relu": {"activation_function": "relu"},
        "dropout": {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5},
        "eps": {"layer_norm_epsilon": 0.1},
    },
    "llama": {
        **_COMMON,
        **_BIAS,
        **_NULL_HEAD,
        "bias of the MLP": {"mlp_bias": True, "attention_bias": False},
        "pretraining_tp": {"pretraining_tp": 2},
    },
    "mistral": {**_COMMON, **_SLIDING, **_NULL_HEAD},
    "qwen2": {**_COMMON, **_QWEN_SLIDING},
    "qwen3": {**_COMMON, **_QWEN_SLIDING, **_BIAS},
    "gemma2": {**_COMMON, **_GEMMA},
    "gemma3_text": {
        **{name: value for name, value in _COMMON.items() if name not in _NOT_OF_GEMMA3},
        **_GEMMA,
        "pattern": {"sliding_window_pattern": 2, "layer_types": None},
        "nested": {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
            }
        },
        "old local": {"rope_local_base_freq": 20.0, "rope_theta": 300.0},
    },
    "olmo2": {**_COMMON, **_BIAS},
    "phi3": {
        **_COMMON,
        **_SLIDING,
        "longrope of this family": {
            **_rope("longrope", **_FACTORS),
            "original_max_position_embeddings": 16,
            "hidden_size": 32,
        },
        "old longrope": {
            "rope_scaling": {"type": "longrope", **_FACTORS},
            "original_max_position_embeddings": 16,
            "hidden_size": 32,
        },
    },
    "mixtral": {**_COMMON, **_SLIDING, **_NULL_HEAD, **_EXPERTS},
    "qwen3_moe": {
        **_COMMON,
        **_BIAS,
        **_EXPERTS,
        "not normalised": {"norm_topk_prob": False},
        "normalised": {"norm_topk_prob": True},
        "sliding upper layers": _QWEN_SLIDING["sliding upper layers"],
        "some dense": {"mlp_only_layers": [1]},
    },
}


def write_variant(kind: str, name: str, folder: Path) -> PreTrainedModel | None:
    """Writes a model with the values as they stand in the config; None: transformers itself refuses them."""
    values = copy.deepcopy(dict(VARIANTS[kind][name]))
    sizes: dict[str, Any] = {} if kind == "gpt2" else dict(SIZES)
    sizes |= CHANGES.get(kind, {}) | ({"vocab_size": 64} if kind == "gpt2" else {}) | values
    if "head_dim" in values or (values.get("hidden_size") and kind == "phi3"):
        sizes.pop("head_dim")
    torch.manual_seed(0)
    try:
        config = AutoConfig.for_model(kind, **sizes)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        logits(model)
    except Exception:
        return None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_((0.2 if parameter.ndim == 1 else 0.05) * torch.randn_like(parameter))
    model.save_pretrained(folder)
    values = copy.deepcopy(dict(VARIANTS[kind][name]))
    file = folder / "config.json"
    fields = json.loads(file.read_text()) | values
    if "rope_scaling" in values or "rope_theta" in values:
        del fields["rope_parameters"]
    if fields.get("layer_types", "") is None:
        del fields["layer_types"]
    file.write_text(json.dumps(fields))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    ids = torch.randint(0, 64, (2, 30), generator=torch.Generator().manual_seed(1))
    logits_BTV: Tensor = model(ids).logits[..., :64].float()
    return logits_BTV


def outcomes(
    kind: str, variant: str, names: Iterator[str] | list[str], place: Path
) -> Iterator[tuple[str, str]]:
    """Yields operations and what became of each, published without a proof and loaded by transformers: ``refused``,
    ``equal``, ``other`` (as its label says), or what is wrong."""
    source = place / "source"
    model = write_variant(kind, variant, source)
    if model is None:
        return
    before = logits(model)
    try:
        folder = open_folder(source)
    except InstarError as error:
        for name in names:
            yield name, f"refused: {error}"
        return
    for number, name in enumerate(names):
        out = place / f"out-{number}"
        try:
            growth = grow_folder(folder, out, [GROWN[name]], check=False)
        except InstarError as error:
            yield name, f"refused: {error}"
            continue
        try:
            after = logits(AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval())
        except Exception as error:
            yield name, f"does not load: {type(error).__name__}: {error}"
            continue
        difference = float((after - before).abs().max() / before.abs().max())
        label = growth.stages[0].label
        if label != "lossy" and not difference <= 2e-5:
            yield name, f"labelled {label}, and moved by {difference:.2g}"
        else:
            yield name, "equal" if difference <= 2e-5 else "other"
