"""Layers with windows: a token attends to itself and the window − 1 tokens before it, and its cost is counted so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import parametrize_first
from growing import batch, random_gpt, values
from shapes import gpt2, llama
from torch import Tensor

import instar.models.gpt as own
from instar.growth.analysis import attention_entropy
from instar.models.architecture import Architecture, section_of
from instar.models.cost import flops_per_token
from instar.models.gpt import GPT, KVCache, causal_attention
from instar.models.hf.config import to_config
from instar.models.hf.tensors import to_tensors
from instar.models.sampling import SamplingOptions, generate
from instar.models.shape import ArchitectureError

SIZES = {"vocab_size": 11, "n_layer": 3, "n_embd": 16, "n_mlp": 12, "context": 160}
WINDOWS = (5, None, 70)
GPT2 = replace(gpt2(**SIZES), windows=WINDOWS)
LLAMA = replace(llama(**SIZES), windows=WINDOWS)
NORMED = replace(LLAMA, qk_norm=True, conv_size=3, tied=True)
STYLES = {"gpt2": GPT2, "llama": LLAMA, "normed": NORMED}
EACH_STYLE = pytest.mark.parametrize("arch", STYLES.values(), ids=list(STYLES))


def dense(
    q: Tensor, k: Tensor, v: Tensor, _dropout: float, window: int | None, *_documents: None
) -> Tensor:
    """By the definition, pair by pair; without dropout."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    hidden = ~torch.tensor(pairs(q.shape[2], window))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


def pairs(length: int, window: int | None) -> list[list[bool]]:
    return [[sees(t, s, window) for s in range(length)] for t in range(length)]


def sees(t: int, s: int, window: int | None) -> bool:
    return s <= t and (window is None or t - s < window)


def heads(length: int, kv_heads: int, dtype: torch.dtype = torch.float64) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(length)
    for number in (4, kv_heads, kv_heads):
        tensor = torch.randn(2, number, length, 8, generator=generator, dtype=torch.float64)
        yield tensor.to(dtype).requires_grad_()


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    ("length", "window"),
    [(7, 1), (7, 3), (7, 6), (7, 7), (7, 9), (64, 5), (65, 5), (128, 64), (150, 1), (150, 66)],
)
def test_attention_is_that_of_a_dense_mask(length: int, window: int, kv_heads: int) -> None:
    """Values and gradients, by the kernels and by the scores that bfloat16 on a CPU materializes."""
    exact = [*heads(length, kv_heads)]
    expected = dense(*exact, 0.0, window)
    slopes = torch.randn(expected.shape, dtype=torch.float64)
    expected_grads = torch.autograd.grad(expected, exact, slopes)
    result = causal_attention(*exact, 0.0, window)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    for grad, expected_grad in zip(
        torch.autograd.grad(result, exact, slopes), expected_grads, strict=True
    ):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-10, atol=1e-12)
    low = [*heads(length, kv_heads, torch.bfloat16)]
    result = causal_attention(*low, 0.0, window)
    torch.testing.assert_close(result.double(), expected, rtol=3e-2, atol=3e-2)
    for grad, expected_grad in zip(
        torch.autograd.grad(result, low, slopes.bfloat16()), expected_grads, strict=True
    ):
        torch.testing.assert_close(grad.double(), expected_grad, rtol=5e-2, atol=8e-2)


def test_no_window_is_torchs_causal_kernel_bit_for_bit() -> None:
    q, k, v = heads(40, 4, torch.float32)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert all(torch.equal(causal_attention(q, k, v, 0.0, w), expected) for w in (None, 40, 99))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_leaves_the_mean_and_nothing_from_outside(dtype: torch.dtype) -> None:
    q, k = (torch.zeros(1, 1, 100, 8, dtype=dtype) for _ in range(2))
    v = torch.arange(100.0).to(dtype)[:, None].expand(1, 1, 100, 8)
    torch.manual_seed(0)
    output = torch.stack([causal_attention(q, k, v, 0.5, 4) for _ in range(200)]).double().mean(0)
    expected = torch.arange(100.0).double() - 1.5
    torch.testing.assert_close(
        output.mean((0, 1, 3))[3:], expected[3:], rtol=0.2, atol=1.0, check_dtype=False
    )


def oracle(model: GPT, tokens: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(own, "causal_attention", dense)
        logits: Tensor = model(tokens)
    return logits


@parametrize_first("arch", STYLES.values(), first=1, ids=list(STYLES))
def test_a_model_is_that_of_dense_masks(
    arch: Architecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In training mode, in evaluation, in short samples, under gradient checkpointing, and as torch traces it."""
    model = random_gpt(arch)
    for tokens in (batch(arch)[0], batch(arch)[0][:, :6]):
        expected = oracle(model, tokens, monkeypatch)
        for variant in (model.train(), model.eval(), torch.compile(model, backend="eager")):
            torch.testing.assert_close(variant(tokens), expected, rtol=1e-10, atol=1e-10)
        without = fill_weights(GPT(replace(arch, windows=())), model)
        assert not torch.allclose(without(tokens), expected, atol=1e-3)
    frugal = fill_weights(GPT(arch, gradient_checkpointing=True), model)
    losses = [network(*batch(arch)) for network in (model, frugal)]
    grads = [
        torch.autograd.grad(loss, [*network.parameters()])
        for loss, network in zip(losses, (model, frugal), strict=True)
    ]
    for grad, other in zip(*grads, strict=True):
        torch.testing.assert_close(grad, other)


def fill_weights(model: GPT, source: GPT) -> GPT:
    model.double().load_state_dict(values(source))
    model.reset_buffers()
    return model


@EACH_STYLE
@pytest.mark.parametrize("prompt", [1, 3, 100])
def test_a_cache_changes_no_logits_and_holds_the_window(arch: Architecture, prompt: int) -> None:
    model = random_gpt(arch).eval()
    tokens, cache = batch(arch)[0], KVCache()
    parts = [tokens[:, :prompt], *tokens[:, prompt:].split(1, 1)]
    with torch.no_grad():
        logits = torch.cat([model(part, cache=cache) for part in parts], 1)
        torch.testing.assert_close(logits, model(tokens), rtol=1e-10, atol=1e-10)
    lengths = [cache._layers[layer][0].shape[2] for layer in range(3)]
    assert lengths == [4, arch.context, 69]


def test_tokens_are_those_without_a_cache_also_when_the_context_slides() -> None:
    arch = replace(LLAMA, context=8, windows=(1, 3, None))
    model = random_gpt(arch)
    tokens = generate(model, torch.tensor([[1, 2, 3]]), 30, SamplingOptions(temperature=0))
    for end in range(3, 33):
        logits = model(tokens[:, max(0, end - 8) : end])[:, -1]
        assert torch.equal(tokens[:, end], logits.argmax(-1))


@pytest.mark.parametrize("windows", [(5, 5, 5), (5, None, 5)])
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_computes_the_same_from_the_same_weights(
    windows: tuple[int | None, ...], tied: bool
) -> None:
    """All layers of a Mistral have its window; a Ministral names those that do."""
    transformers = pytest.importorskip("transformers")
    arch = replace(LLAMA, windows=windows, tied=tied)
    model = random_gpt(arch).eval()
    config = transformers.AutoConfig.for_model(**to_config(arch))
    hf_model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    assert type(hf_model).__name__ == to_config(arch)["architectures"][0]
    tensors = dict(to_tensors(arch, values(model)))
    expected = {*hf_model.state_dict()} - ({"lm_head.weight"} if tied else set())
    assert {*tensors} == expected
    hf_model.load_state_dict(tensors, strict=False)
    tokens, _ = batch(arch)
    torch.testing.assert_close(hf_model(tokens).logits, model(tokens), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("windows", [(), (1, 4, None), (63, 2, 8)])
@pytest.mark.parametrize("length", [1, 3, 40, 64])
def test_flops_count_the_pairs_that_layers_attend_to(
    windows: tuple[int | None, ...], length: int
) -> None:
    """Twice those below the diagonal, as published for attention without windows, which is length² then."""
    arch = replace(LLAMA, context=64, windows=windows)
    total = 0
    for window in windows or (None,) * 3:
        total += 2 * sum(map(sum, pairs(length, window))) - length
    assert windows or total == 3 * length**2
    base_flops = flops_per_token(arch, 0)
    expected = 12 * total * arch.n_head * arch.head_dim / length
    assert flops_per_token(arch, length) == base_flops + int(expected)


def test_entropies_are_of_what_is_seen() -> None:
    arch = replace(LLAMA, context=32, windows=(4, None, 1))
    model = random_gpt(arch)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".query." in name:
                parameter.zero_()
    tokens, _ = batch(arch)
    by_layer = {head.layer: head for head in attention_entropy(model, tokens)}
    visible = torch.arange(2, 33).double()
    assert by_layer[0].entropy_nats == pytest.approx(
        visible.clamp(max=4).log().mean().item(), rel=1e-5
    )
    assert by_layer[1].entropy_nats == pytest.approx(visible.log().mean().item(), rel=1e-5)
    assert [by_layer[layer].share for layer in range(3)] == pytest.approx([1, 1, 0])


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        ((4, 4), "has 2 entries for 3 layers"),
        ((None, None, None), "names no window"),
        ((4, 160, None), "that of layer 1 must be a whole number from 1 to less than the context"),
        ((0, 4, 4), "layer 0 must be a whole number"),
        ((True, 4, 4), "layer 0 must be a whole number"),
        ((4.0, 4, 4), "layer 0 must be a whole number"),
        ("abc", "layer 0 must be a whole number"),
        (4, "cannot be read"),
    ],
)
def test_impossible_windows_are_refused(windows: Any, message: str) -> None:
    with pytest.raises(ArchitectureError, match=message):
        Architecture.from_dict(LLAMA.to_dict() | {"windows": windows})


def test_json_has_windows_only_where_there_are_some() -> None:
    assert LLAMA.to_dict()["windows"] == [5, None, 70]
    assert Architecture.from_dict(LLAMA.to_dict()) == LLAMA
    plain = replace(LLAMA, windows=())
    assert "windows" not in plain.to_dict()
    assert Architecture.from_dict(plain.to_dict()) == plain
    with pytest.raises(ArchitectureError, match="a run cannot begin with windows"):
        section_of(LLAMA)
