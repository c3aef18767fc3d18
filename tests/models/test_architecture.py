import json
import math
from dataclasses import replace
from typing import Any

import pytest

from instar.config.language import ModelConfig
from instar.models.architecture import MOST, Architecture, resolve_architecture, section_of
from instar.models.cost import flops_per_token
from instar.models.shape import ArchitectureError, axis_size, count_parameters, layer_of

LLAMA = ModelConfig(
    norm="rmsnorm", activation="swiglu", positions="rope", bias=False, tied=False, n_kv_head=2
)

CONVOLVED = ModelConfig(conv_size=4, embedding_multiplier=8.0)


def keys_of(error: ArchitectureError) -> list[str]:
    return [problem.keys[0] for problem in error.problems]


def test_what_a_config_leaves_out_is_derived() -> None:
    arch = resolve_architecture(ModelConfig(n_embd=128, n_head=4), vocab_size=100)
    assert (arch.n_kv_head, arch.head_dim, arch.n_mlp, arch.vocab_size) == (4, 32, 512, 100)


def test_swiglu_has_two_thirds_of_the_width_to_a_multiple_of_32() -> None:
    assert resolve_architecture(ModelConfig(n_embd=384, activation="swiglu"), 100).n_mlp == 1024
    assert resolve_architecture(ModelConfig(n_embd=128, activation="swiglu"), 100).n_mlp == 352


@pytest.mark.parametrize(
    "model", [LLAMA, ModelConfig(n_embd=96, n_head=6, qk_norm=True), CONVOLVED]
)
def test_a_grown_shape_is_described_by_a_section(model: ModelConfig) -> None:
    arch = resolve_architecture(model, vocab_size=100)
    larger = replace(arch, n_embd=160, n_head=10, n_kv_head=5, norm_eps=0.25, head_dim=48)
    for shape in (arch, larger):
        expected = shape if shape.qk_norm else replace(shape, qk_norm_eps=shape.norm_eps)
        assert resolve_architecture(section_of(shape), 7) == expected
    with pytest.raises(ArchitectureError, match=r"norm_eps: must be .*, got 2\.0"):
        section_of(replace(arch, norm_eps=2.0))


def test_what_a_config_says_stands() -> None:
    arch = resolve_architecture(ModelConfig(n_mlp=96, n_kv_head=2, vocab_size=128), vocab_size=100)
    assert (arch.n_mlp, arch.n_kv_head, arch.vocab_size) == (96, 2, 128)


@pytest.mark.parametrize(
    ("model", "key"),
    [
        (ModelConfig(vocab_size=99), "model.vocab_size"),
        (ModelConfig(n_embd=130), "model.n_embd"),
        (ModelConfig(n_kv_head=3), "model.n_kv_head"),
        (ModelConfig(n_embd=12, n_head=4, positions="rope"), "model.n_head"),
    ],
)
def test_impossible_shapes_name_the_key(model: ModelConfig, key: str) -> None:
    with pytest.raises(ArchitectureError) as error:
        resolve_architecture(model, vocab_size=100)
    assert keys_of(error.value) == [key]


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ArchitectureError) as error:
        resolve_architecture(ModelConfig(vocab_size=99, n_embd=130, n_kv_head=3), vocab_size=100)
    assert keys_of(error.value) == ["model.vocab_size", "model.n_embd", "model.n_kv_head"]


def test_a_shape_survives_json() -> None:
    arch = resolve_architecture(LLAMA, 100)
    assert Architecture.from_dict(json.loads(json.dumps(arch.to_dict()))) == arch


def test_a_shape_from_json_is_checked() -> None:
    values = resolve_architecture(LLAMA, 100).to_dict()
    del values["n_head"]
    with pytest.raises(ArchitectureError) as error:
        Architecture.from_dict(values | {"n_heads": 4})
    assert keys_of(error.value) == ["model.n_head", "model.n_heads"]
    with pytest.raises(ArchitectureError) as error:
        Architecture.from_dict(
            resolve_architecture(LLAMA, 100).to_dict() | {"n_layer": -1, "norm": "batchnorm"}
        )
    assert keys_of(error.value) == ["model.n_layer", "model.norm"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"conv_size": 1},
        {"conv_size": 2**40},
        {"conv_size": "4"},
        {"conv_size": True},
        {"embedding_multiplier": 0.0},
        {"embedding_multiplier": math.inf},
        {"embedding_multiplier": [1.0]},
        {"embedding_multiplier": 10**400},
    ],
    ids=str,
)
def test_no_untrusted_value_becomes_a_size_or_a_factor(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArchitectureError) as error:
        Architecture.from_dict(resolve_architecture(LLAMA, 100).to_dict() | wrong)
    assert keys_of(error.value) == [f"model.{name}" for name in wrong]


def test_a_shape_of_before_there_were_convolutions_has_none() -> None:
    old = resolve_architecture(LLAMA, 100).to_dict()
    del old["embedding_multiplier"]
    assert "conv_size" not in old
    assert Architecture.from_dict(old) == resolve_architecture(LLAMA, 100)


def test_shapes_follow_from_axes() -> None:
    arch = resolve_architecture(LLAMA, 100)
    for entry in arch.parameters().values():
        assert entry.shape == tuple(axis_size(arch.sizes(), axis) for axis in entry.axes)


def test_writers_and_readers_of_the_stream() -> None:
    table = resolve_architecture(LLAMA, 100).parameters()
    writers = {name for name, entry in table.items() if entry.writes == "embed"}
    readers = {name for name, entry in table.items() if entry.reads == "embed"}
    per_block = [name for name in table if layer_of(name) == 0]
    assert {name for name in per_block if name in writers} == {
        "blocks.0.attn.output.weight",
        "blocks.0.mlp.down.weight",
    }
    assert {name.split(".")[-2] for name in per_block if name in readers} == {
        "query",
        "key",
        "value",
        "gate",
        "up",
    }
    assert "token_embedding.weight" in writers
    assert "head.weight" in readers
    assert not any("norm" in name for name in writers | readers)


def test_the_layer_is_in_the_name() -> None:
    assert layer_of("blocks.12.mlp.up.weight") == 12
    assert layer_of("final_norm.weight") is None


def test_gpt2_small_has_124_million_parameters() -> None:
    gpt2 = ModelConfig(n_layer=12, n_head=12, n_embd=768, context=1024)
    count = count_parameters(resolve_architecture(gpt2, 50257))
    assert count.total == 124_439_808
    assert count.non_embedding == 124_439_808 - 50257 * 768 - 1024 * 768


def test_the_head_counts_once_in_products_whether_tied_or_not() -> None:
    tied = count_parameters(resolve_architecture(ModelConfig(tied=True), 100))
    untied = count_parameters(resolve_architecture(ModelConfig(tied=False), 100))
    assert tied.matmul == untied.matmul
    assert untied.total - tied.total == 100 * 128
    assert untied.non_embedding == tied.non_embedding


def test_flops_grow_with_the_context_only_through_attention() -> None:
    arch = resolve_architecture(LLAMA, 100)
    matmul = 6 * count_parameters(arch).matmul
    assert flops_per_token(arch, 1000) - matmul == 12 * arch.n_layer * 1000 * arch.n_embd
    assert flops_per_token(arch) == flops_per_token(arch, arch.context)
    assert math.isclose(flops_per_token(arch, 0), matmul)


@pytest.mark.parametrize("field", MOST)
def test_sizes_beyond_any_model_are_refused_at_once(field: str) -> None:
    values = resolve_architecture(LLAMA, 100).to_dict()
    with pytest.raises(ArchitectureError) as error:
        Architecture.from_dict(values | {field: MOST[field] + 1})
    assert f"model.{field}" in keys_of(error.value)
    assert f"at most {MOST[field]:,}" in str(error.value)
