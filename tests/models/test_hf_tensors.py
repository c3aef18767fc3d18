"""Tensors under transformers' names; its own models say what the names and shapes are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import gpt2, llama
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from instar.checkpoint.manifest import CheckpointError
from instar.models.architecture import Architecture
from instar.models.hf.config import to_config
from instar.models.hf.tensors import from_tensors, to_tensors

GPT2 = gpt2(n_head=3, n_embd=12, n_mlp=20, context=8)
LLAMA = llama(n_embd=16, context=8)
STYLES = [GPT2, replace(GPT2, tied=False), LLAMA, replace(LLAMA, tied=True, bias=True)]


def random_tensors(arch: Architecture, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(entry.shape, generator=generator)
        for name, entry in arch.parameters().items()
    }


@given(st.sampled_from(STYLES), st.integers(0, 99))
@settings(deadline=None, max_examples=20)
def test_there_and_back_nothing_changes(arch: Architecture, seed: int) -> None:
    tensors = random_tensors(arch, seed)
    back = from_tensors(arch, to_tensors(arch, tensors))
    assert list(back) == list(tensors)
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)
    starts = {tensor.untyped_storage().data_ptr() for tensor in back.values()}
    assert len(starts) == len(back)


@pytest.mark.parametrize("arch", STYLES)
def test_names_and_shapes_are_those_of_transformers(arch: Architecture) -> None:
    config = to_config(arch)
    with torch.device("meta"):
        if config["model_type"] == "gpt2":
            model: torch.nn.Module = GPT2LMHeadModel(GPT2Config(**config))
        else:
            model = LlamaForCausalLM(LlamaConfig(**config))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    actual = {name: tuple(t.shape) for name, t in to_tensors(arch, random_tensors(arch)).items()}
    if arch.tied:
        del expected["lm_head.weight"]
    assert actual == expected


def test_where_there_are_no_biases_gpt2_gets_zeros() -> None:
    bare = replace(GPT2, bias=False)
    tensors = to_tensors(bare, random_tensors(bare))
    assert tensors.keys() == to_tensors(GPT2, random_tensors(GPT2)).keys()
    assert all(not tensor.any() for name, tensor in tensors.items() if name.endswith(".bias"))


def test_what_older_versions_saved_besides_is_passed_over() -> None:
    tensors = to_tensors(GPT2, random_tensors(GPT2))
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    old |= {"h.0.attn.bias": torch.ones(1, 1, 8, 8), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    old |= {"lm_head.weight": old["wte.weight"].clone()}
    assert from_tensors(GPT2, old).keys() == random_tensors(GPT2).keys()
    llama = to_tensors(LLAMA, random_tensors(LLAMA))
    llama["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    assert from_tensors(LLAMA, llama).keys() == random_tensors(LLAMA).keys()


def test_half_precision_becomes_float32() -> None:
    half = {name: t.bfloat16() for name, t in to_tensors(LLAMA, random_tensors(LLAMA)).items()}
    back = from_tensors(LLAMA, half)
    assert {tensor.dtype for tensor in back.values()} == {torch.float32}
    assert torch.equal(back["head.weight"], half["lm_head.weight"].float())


def test_everything_that_does_not_fit_is_named_at_once() -> None:
    tensors = to_tensors(GPT2, random_tensors(GPT2))
    del tensors["transformer.wpe.weight"]
    tensors["transformer.h.0.attn.c_attn.weight"] = torch.zeros(36, 12)
    tensors["transformer.h.0.crossattention.bias"] = torch.zeros(1)
    tensors["transformer.ln_f.weight"] = torch.zeros(12, dtype=torch.int8)
    tensors["lm_head.weight"] = torch.zeros(50, 12)
    with pytest.raises(CheckpointError) as error:
        from_tensors(GPT2, tensors)
    for message in [
        "transformer.wpe.weight: missing",
        "transformer.h.0.attn.c_attn.weight: shape (36, 12), but config.json says (12, 36)",
        "transformer.h.0.crossattention.bias: unknown",
        "transformer.ln_f.weight: torch.int8",
        "lm_head.weight: differs from transformer.wte.weight",
    ]:
        assert message in str(error.value)


def test_many_that_do_not_fit_are_counted() -> None:
    with pytest.raises(CheckpointError, match=r"and \d+ more"):
        from_tensors(LLAMA, {})


def test_a_checkpoint_of_other_tensors_than_its_architecture_has_is_refused() -> None:
    tensors = random_tensors(GPT2)
    del tensors["blocks.1.attn.key.bias"]
    with pytest.raises(CheckpointError, match=r"blocks\.1\.attn\.key\.bias: missing"):
        to_tensors(GPT2, tensors)
