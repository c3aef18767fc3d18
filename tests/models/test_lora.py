"""Adapters: which weights they are of, what they compute, what they cost."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import gpt2, llama
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from instar.models.architecture import Architecture
from instar.models.cost import flops_per_token
from instar.models.gpt import GPT, named_generator
from instar.models.lora import TARGETS, Lora, adapter_of, cover_weights
from instar.models.shape import ArchitectureError, count_parameters

GPT2 = gpt2(vocab_size=40)
LLAMA = llama(vocab_size=40)
EVERYWHERE = (
    Lora("attn", 4, 8.0),
    Lora("mlp", 3, 3.0, rank_stabilized=True),
    Lora("embedding", 2, 1.0),
)
ADAPTED = [
    replace(GPT2, lora=EVERYWHERE),
    replace(LLAMA, lora=(*EVERYWHERE, Lora("head", 5, 2.5))),
    replace(
        LLAMA,
        tied=True,
        qk_norm=True,
        conv_size=3,
        embedding_multiplier=3.0,
        lora=(Lora("all", 2, 2.0),),
    ),
]
STYLES = pytest.mark.parametrize("arch", ADAPTED, ids=["gpt2", "llama", "tied"])


def random_values(arch: Architecture, seed: int = 0) -> dict[str, Tensor]:
    """Values that all matter, B's too."""
    return {
        name: torch.empty(entry.shape, dtype=torch.float64).normal_(
            1.0 if entry.kind == "norm" else 0.0,
            0.2,
            generator=named_generator(seed, name),
        )
        for name, entry in arch.parameters().items()
    }


def with_values(arch: Architecture, values: dict[str, Tensor]) -> GPT:
    model = GPT(arch).double()
    model.load_state_dict(values)
    return model


def merge_adapters(arch: Architecture, values: dict[str, Tensor]) -> GPT:
    """The model without adapters whose weights are W + scale · B A."""
    plain = replace(arch, lora=())
    weights = {name: values[name] for name in plain.parameters()}
    for name in arch.adaptable():
        if adapter := adapter_of(arch.lora, name):
            change = values[f"{name}.lora_b"] @ values[f"{name}.lora_a"]
            weights[f"{name}.weight"] = weights[f"{name}.weight"] + adapter.scale * change
    return with_values(plain, weights)


def tokens(arch: Architecture) -> Tensor:
    return torch.randint(arch.vocab_size, (3, arch.context), generator=named_generator("tokens"))


@STYLES
def test_an_adapted_weight_acts_as_the_sum(arch: Architecture) -> None:
    values = random_values(arch)
    inputs = tokens(arch)
    lora_model, plain = with_values(arch, values), merge_adapters(arch, values)
    torch.testing.assert_close(lora_model(inputs), plain(inputs), rtol=1e-11, atol=1e-11)
    targets = inputs.roll(-1, 1)
    torch.testing.assert_close(lora_model(inputs, targets), plain(inputs, targets))


@STYLES
def test_every_factor_matters(arch: Architecture) -> None:
    values = random_values(arch)
    inputs = tokens(arch)
    before = with_values(arch, values)(inputs)
    for name in arch.parameters():
        if name.endswith((".lora_a", ".lora_b")):
            without = values | {name: torch.zeros_like(values[name])}
            assert (with_values(arch, without)(inputs) - before).abs().max() > 1e-6, name


@STYLES
def test_a_new_adapter_does_nothing_and_learns(arch: Architecture) -> None:
    model, plain = GPT(arch), GPT(replace(arch, lora=()))
    model.init_weights(3)
    plain.init_weights(3)
    inputs = tokens(arch)
    torch.testing.assert_close(model(inputs), plain(inputs), rtol=0.0, atol=1e-6)
    model(inputs, inputs).backward()
    for name, parameter in model.named_parameters():
        if name.endswith(".lora_b"):
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() > 0, name


def test_first_values_are_those_of_loralib() -> None:
    arch = replace(gpt2(n_embd=256), lora=(Lora("attn", 32, 64.0),))
    model = GPT(arch)
    model.init_weights(0)
    a = model.get_parameter("blocks.0.attn.query.lora_a")
    assert a.std().item() == pytest.approx(1 / math.sqrt(3 * 256), rel=0.05)
    assert not model.get_parameter("blocks.0.attn.query.lora_b").any()


@STYLES
def test_the_module_has_the_parameters_of_the_table(arch: Architecture) -> None:
    with torch.device("meta"):
        model = GPT(arch)
    module = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert module == {name: entry.shape for name, entry in arch.parameters().items()}
    assert list(module) == list(arch.parameters())


def test_factors_write_and_read_as_their_weights_do() -> None:
    table = replace(LLAMA, lora=(Lora("all", 2, 2.0),)).parameters()
    for name in ("blocks.0.mlp.down", "head"):
        a, b, weight = (table[f"{name}.{part}"] for part in ("lora_a", "lora_b", "weight"))
        assert (a.reads, b.writes) == (weight.reads, weight.writes)
        assert a.writes == b.reads == f"{name}.rank"
    a, b = table["token_embedding.lora_a"], table["token_embedding.lora_b"]
    assert (a.writes, a.reads) == ("embed", None)
    assert (b.writes, b.reads, b.axes[0]) == ("token_embedding.rank", None, "vocab")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_leaves_the_loss_what_it_is(dtype: torch.dtype) -> None:
    for arch in ADAPTED:
        model = with_values(arch, random_values(arch)).float()
        inputs = tokens(arch)
        exact = model(inputs, inputs)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = model(inputs, inputs)
        loss.backward()
        assert loss.dtype == torch.float32
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
        torch.testing.assert_close(loss, exact, rtol=0.03, atol=0.0)


@STYLES
def test_gradient_checkpointing_changes_no_gradient(arch: Architecture) -> None:
    inputs = tokens(arch)
    values = random_values(arch)
    plain = with_values(arch, values)
    frugal = GPT(arch, gradient_checkpointing=True).double()
    frugal.load_state_dict(values)
    plain(inputs, inputs).backward()
    frugal(inputs, inputs).backward()
    for (name, a), b in zip(plain.named_parameters(), frugal.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad), name


def test_rank_stabilized_divides_by_the_root() -> None:
    assert Lora("attn", 16, 8.0).scale == 0.5
    assert Lora("attn", 16, 8.0, rank_stabilized=True).scale == 2.0


@given(st.integers(1, 64), st.integers(1, 64), st.booleans())
def test_another_rank_may_have_the_same_scale(rank: int, other: int, rank_stabilized: bool) -> None:
    adapter = Lora("attn", rank, 3.0, rank_stabilized)
    assert adapter.with_rank(other).scale == pytest.approx(adapter.scale)


def test_adapters_count_as_their_weights_do() -> None:
    plain, lora_count = count_parameters(GPT2), count_parameters(replace(GPT2, lora=EVERYWHERE))
    attention, mlp = 4 * (32 + 32) * 4, 2 * (32 + 128) * 3
    assert lora_count.non_embedding - plain.non_embedding == 2 * (attention + mlp)
    assert lora_count.total - plain.total == 2 * (attention + mlp) + (40 + 32) * 2
    assert lora_count.matmul - plain.matmul == lora_count.total - plain.total
    more = flops_per_token(replace(GPT2, lora=EVERYWHERE)) - flops_per_token(GPT2)
    assert more == 6 * (lora_count.total - plain.total)


@STYLES
def test_counted_flops_are_those_of_forward_and_backward(arch: Architecture) -> None:
    inputs = tokens(arch)

    def measure_flops(shape: Architecture) -> float:
        model = with_values(shape, random_values(shape))
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model(inputs, inputs).backward()
        return counter.get_total_flops() / inputs.numel()

    assert measure_flops(arch) == pytest.approx(flops_per_token(arch), rel=0.02)
    # without a head's adapter, whose product is made once for all tokens
    inside = replace(arch, lora=(Lora("blocks.*", 3, 3.0),))
    plain = replace(arch, lora=())
    more = flops_per_token(inside) - flops_per_token(plain)
    assert measure_flops(inside) - measure_flops(plain) == pytest.approx(more, rel=0.02)


def test_an_untied_table_is_looked_up_and_not_multiplied() -> None:
    plain = count_parameters(LLAMA)
    table = count_parameters(replace(LLAMA, lora=(Lora("embedding", 2, 1.0),)))
    head = count_parameters(replace(LLAMA, lora=(Lora("head", 2, 1.0),)))
    assert table.total == head.total == plain.total + 2 * (40 + 32)
    assert (table.matmul, head.matmul) == (plain.matmul, head.total - plain.total + plain.matmul)


@STYLES
def test_a_shape_survives_json(arch: Architecture) -> None:
    fields = json.loads(json.dumps(arch.to_dict()))
    assert fields == arch.to_dict()
    assert Architecture.from_dict(fields) == arch


def test_files_from_before_adapters_are_read() -> None:
    fields = GPT2.to_dict()
    assert not fields.keys() & {"lora", "mask"}
    assert Architecture.from_dict(fields) == GPT2


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ((Lora("atn", 2, 1.0),), r"'atn' names no weight of this model \(all, attn, mlp"),
        ((Lora("head", 2, 1.0),), "the head is tied, so it is the embedding"),
        ((Lora("attn", 0, 1.0),), "rank must be a whole number above 0, not 0"),
        ((Lora("attn", 2, 0.0),), "alpha must be a number above 0, not 0.0"),
        ((Lora("attn", 2, math.nan),), "alpha must be a number above 0, not nan"),
        ((Lora("attn", 33, 1.0),), r"query of shape \(32, 32\) can have \(at most 32\)"),
        ((Lora("attn", 2, 1.0), Lora("*.query", 2, 1.0)), "query is adapted by 'attn' already"),
    ],
)
def test_impossible_adapters_name_what_is_possible(lora: tuple[Lora, ...], message: str) -> None:
    with pytest.raises(ArchitectureError, match=message):
        replace(GPT2, lora=lora)


def test_adapters_from_json_are_checked() -> None:
    entry = {"target": "attn", "rank": 2, "alpha": 1.0}
    for wrong in ({"size": 3}, {"rank": "2"}, {"target": None}, {"rank_stabilized": 1}):
        with pytest.raises(ArchitectureError, match=r"model\.lora"):
            Architecture.from_dict(GPT2.to_dict() | {"lora": [entry | wrong]})


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_entries_cover_what_is_wanted_and_nothing_twice(data: st.DataObject) -> None:
    weights = list(LLAMA.adaptable())
    kinds = [None, Lora("", 1, 1.0), Lora("", 2, 1.0)]
    adapters = dict.fromkeys(weights, kinds[0])
    for target in data.draw(st.lists(st.sampled_from([*TARGETS, "blocks.1.*", "*.up", *weights]))):
        kind = data.draw(st.sampled_from(kinds))
        lora = Lora(target, 1, 1.0)
        adapters |= {name: kind for name in weights if lora.matches(name)}
    entries = cover_weights(adapters, ["blocks.1.*"])
    for name in weights:
        actual = [replace(entry, target="") for entry in entries if entry.matches(name)]
        assert actual == ([adapters[name]] if adapters[name] else [])


def test_entries_are_as_short_as_their_names_allow() -> None:
    def targets(lora: tuple[Lora, ...], *preferences: str) -> list[str]:
        adapters = {name: adapter_of(lora, name) for name in LLAMA.adaptable()}
        return [entry.target for entry in cover_weights(adapters, preferences)]

    whole_blocks = Lora("blocks.*", 2, 1.0)
    assert targets((whole_blocks,)) == ["attn", "mlp"]
    assert targets((whole_blocks,), "blocks.*") == ["blocks.*"]
    assert targets((Lora("all", 2, 1.0),)) == ["all"]
    assert targets((Lora("*.up", 2, 1.0),)) == ["blocks.*.mlp.up"]
    assert targets((Lora("blocks.1.mlp.*", 2, 1.0),)) == [
        "blocks.1.mlp.down",
        "blocks.1.mlp.gate",
        "blocks.1.mlp.up",
    ]
