"""Architectures as transformers' configs; `transformers` itself says what a config means."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import gpt2, llama
from transformers import GPT2Config, LlamaConfig

from instar.checkpoint.manifest import CheckpointError
from instar.models.architecture import Architecture
from instar.models.hf.config import from_config, style_of, to_config
from instar.models.lora import Lora
from instar.models.shape import Mask

GPT2 = gpt2(norm_eps=1e-3)
LLAMA = llama(rope_base=500.0, norm_eps=1e-4)


@st.composite
def exportable(draw: st.DrawFn) -> Architecture:
    """Every shape that transformers has too, and that keeps its biases on the way."""
    heads, kv_heads, head_dim = (draw(st.integers(1, 3)) for _ in range(3))
    eps = draw(st.sampled_from([1e-6, 1e-5, 1e-3]))
    sizes: dict[str, Any] = {
        "n_layer": draw(st.integers(1, 3)),
        "n_mlp": draw(st.integers(1, 40)),
        "context": draw(st.integers(2, 12)),
        "vocab_size": draw(st.integers(2, 60)),
        "tied": draw(st.booleans()),
        "dropout": draw(st.sampled_from([0.0, 0.1])),
        "norm_eps": eps,
        "qk_norm_eps": eps,
    }
    if draw(st.booleans()):
        sizes |= {"n_head": heads, "n_kv_head": heads, "head_dim": head_dim}
        activation = draw(st.sampled_from(["gelu", "gelu_tanh", "relu2"]))
        return replace(GPT2, **sizes, n_embd=heads * head_dim, activation=activation)
    sizes |= {"n_head": heads * kv_heads, "n_kv_head": kv_heads, "head_dim": 2 * head_dim}
    sizes |= {"n_embd": heads * kv_heads * draw(st.integers(1, 8)), "bias": draw(st.booleans())}
    return replace(LLAMA, **sizes, rope_base=draw(st.sampled_from([10.0, 10000.0, 5e5])))


@given(exportable())
def test_a_config_says_all_of_an_architecture(arch: Architecture) -> None:
    assert from_config(to_config(arch)) == arch


@given(exportable())
@settings(deadline=None, max_examples=40)
def test_transformers_reads_the_config_as_it_is_meant(arch: Architecture) -> None:
    config = to_config(arch, end_id=1)
    read = {"gpt2": GPT2Config, "llama": LlamaConfig}[style_of(arch)](**config)
    assert from_config(read.to_dict()) == arch
    assert (read.bos_token_id, read.eos_token_id) == (1, 1)


def test_a_gpt2_has_the_key_of_its_context_that_older_readers_take() -> None:
    assert to_config(GPT2)["n_ctx"] == GPT2.context


@pytest.mark.parametrize("kind", [GPT2Config, LlamaConfig])
def test_what_a_config_leaves_out_is_as_in_transformers(kind: type[Any]) -> None:
    assert from_config({"model_type": kind.model_type}) == from_config(kind().to_dict())


def test_older_configs_have_their_theta_beside_the_rest() -> None:
    assert from_config({"model_type": "llama", "rope_theta": 5e5}).rope_base == 5e5
    old = {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": None}
    assert from_config(old).rope_base == 5e5


def test_biases_that_gpt2_has_anyway_do_not_stand_in_the_way() -> None:
    assert style_of(replace(GPT2, bias=False)) == "gpt2"
    assert from_config(to_config(replace(GPT2, bias=False))) == GPT2


@pytest.mark.parametrize(
    ("arch", "messages"),
    [
        (replace(LLAMA, qk_norm=True), ["model.qk_norm: true, but Llama does not"]),
        (replace(GPT2, qk_norm=True), ["model.qk_norm: true, but GPT-2 does not"]),
        (replace(LLAMA, activation="relu2"), ["model.activation: relu2, but Llama has swiglu"]),
        (replace(GPT2, positions="rope"), ["model.positions: rope, but GPT-2 has learned"]),
        (replace(LLAMA, norm="layernorm"), ["model.norm: layernorm, but Llama has rmsnorm"]),
        (replace(GPT2, norm="rmsnorm"), ["model.norm: rmsnorm, but GPT-2 has layernorm"]),
        (replace(GPT2, n_kv_head=2), ["model.n_kv_head: 2, but GPT-2 has as many as n_head"]),
        (replace(LLAMA, conv_size=4), ["model.conv_size: 4, but Llama has no convolutions"]),
        (
            replace(GPT2, embedding_multiplier=8.0),
            ["model.embedding_multiplier: 8.0, but GPT-2 does not scale embeddings"],
        ),
        (replace(GPT2, head_dim=16), ["model.head_dim: 16, but GPT-2 has n_embd / n_head, 8"]),
        (replace(LLAMA, n_embd=30), ["model.n_head: 4, but Llama must divide n_embd, 30"]),
        (
            replace(GPT2, positions="rope", qk_norm=True, n_kv_head=1),
            ["model.qk_norm", "model.positions", "model.n_kv_head"],
        ),
    ],
)
def test_an_architecture_without_counterpart_is_refused_by_name(
    arch: Architecture, messages: list[str]
) -> None:
    with pytest.raises(CheckpointError) as error:
        to_config(arch)
    for words in messages:
        assert words in str(error.value)
    assert "preset: " in str(error.value)
    assert str(error.value).count("  model.") == len(messages)


def test_an_open_mask_is_refused_until_it_is_open() -> None:
    entering = replace(LLAMA, mask=Mask("mlp", ((0, 3),), 200, 1000))
    with pytest.raises(CheckpointError, match=r"new mlp .* export a checkpoint from step 1,200 on"):
        to_config(entering)


def test_adapters_do_not_stand_in_the_way() -> None:
    assert to_config(replace(LLAMA, lora=(Lora("all", 2, 4.0),))) == to_config(LLAMA)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"model_type": "mistral"}, "model_type 'mistral'; import reads gpt2 and llama"),
        ({"model_type": "gpt2", "activation_function": "tanh"}, "activation_function: 'tanh'"),
        (
            {"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True},
            "inverse_layer_idx: True",
        ),
        ({"model_type": "gpt2", "attn_pdrop": 0.2}, "embd_pdrop, attn_pdrop, resid_pdrop"),
        ({"model_type": "gpt2", "n_embd": "wide"}, "n_embd: 'wide' is not of type int"),
        (
            {"model_type": "gpt2", "n_embd": 10**400},
            f"n_embd: 1{59 * chr(48)} is out of all bounds",
        ),
        ({"model_type": "gpt2", "embd_pdrop": 10**400}, f"embd_pdrop: 1{59 * chr(48)} is out of"),
        ({"model_type": "llama", "rms_norm_eps": 10**400}, f"rms_norm_eps: 1{59 * chr(48)} is"),
        ({"model_type": "llama", "rms_norm_eps": math.inf}, "rms_norm_eps: inf is out of all"),
        ({"model_type": "gpt2", "n_layer": True}, "n_layer: True is not of type int"),
        ({"model_type": "gpt2", "n_head": 7}, "n_embd: 768 cannot be divided into n_head = 7"),
        ({"model_type": "gpt2", "n_layer": -1}, "model.n_layer: must be a whole number from 0"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias, mlp_bias"),
        ({"model_type": "llama", "num_key_value_heads": 5}, "model.n_kv_head: 32 query heads"),
        (
            {"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "type 'llama3'",
        ),
        ({"model_type": "llama", "quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_an_entry_without_counterpart_is_refused_by_name(
    entries: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError) as error:
        from_config(entries)
    assert message in str(error.value)


def test_everything_wrong_is_said_at_once() -> None:
    config = {"model_type": "gpt2", "activation_function": "tanh", "n_layer": "x", "n_head": 7}
    with pytest.raises(CheckpointError) as error:
        from_config(config)
    assert len(str(error.value).splitlines()) == 4
