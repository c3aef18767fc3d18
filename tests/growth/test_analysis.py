"""What an analysis says of models of which the answer is known."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from shapes import gpt2, llama

from instar.growth.analysis import (
    MatrixRank,
    WeightAnalysis,
    analyze,
    attention_entropy,
    effective_ranks,
    product_spectrum,
    spectrum,
)
from instar.models.architecture import Architecture
from instar.models.gpt import GPT
from instar.models.lora import Lora

TOKENS = torch.arange(32).view(2, 16)


def born(arch: Architecture) -> GPT:
    model = GPT(arch)
    model.init_weights(1)
    return model.eval()


def analysis_of(
    model: GPT, tokens_BT: torch.Tensor | None = None, **options: Any
) -> WeightAnalysis:
    heads = () if tokens_BT is None else attention_entropy(model, tokens_BT)
    weights = dict(model.named_parameters())
    return analyze(weights, model.arch.parameters(), heads=heads, **options)


def rank_of(model: GPT, name: str, *, adapter: bool = False) -> MatrixRank:
    ranks = analysis_of(model).ranks
    return next(rank for rank in ranks if rank.name == name and rank.adapter == adapter)


def test_a_spectrum_is_the_squares_of_the_singular_values() -> None:
    for shape in ((5, 9), (9, 5)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(
            spectrum(matrix), torch.linalg.svdvals(matrix.double()) ** 2, rtol=1e-9, atol=1e-12
        )


def test_the_spectrum_of_a_product_is_that_of_its_matrix() -> None:
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(3, 20, generator=generator)
    b = torch.randn(30, 3, generator=generator)
    torch.testing.assert_close(
        product_spectrum(a, b), spectrum(b.double() @ a.double())[:3], rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize(
    ("squares", "ranks"),
    [
        ([1.0, 0.0, 0.0], (1, 1)),
        ([1.0] * 10, (9, 10)),
        ([0.9, 0.09, 0.01], (1, 2)),
        ([0.0, 0.0], (0, 0)),
    ],
)
def test_effective_ranks_count_what_makes_the_share(
    squares: list[float], ranks: tuple[int, int]
) -> None:
    assert effective_ranks(torch.tensor(squares, dtype=torch.float64), (0.9, 0.99)) == ranks


@torch.no_grad()
def test_a_matrix_of_known_rank_is_found_out() -> None:
    model = born(gpt2())
    up = model.get_parameter("blocks.1.mlp.up.weight")
    up.zero_()
    up[:3, :3] = torch.eye(3)

    rank = rank_of(model, "blocks.1.mlp.up")

    assert rank == MatrixRank("blocks.1.mlp.up", (128, 32), 32, (3, 3))


@torch.no_grad()
def test_adapters_are_said_to_be_unused_idle_or_used_up() -> None:
    arch = replace(gpt2(), lora=(Lora("blocks.0.attn.query", 8, 16.0), Lora("mlp", 2, 4.0)))
    model = born(arch)
    model.get_parameter("blocks.0.attn.query.lora_b")[0, 0] = 1.0
    for part in ("up", "down"):
        model.get_parameter(f"blocks.0.mlp.{part}.lora_b").normal_()

    suggestions = "\n".join(analysis_of(model).suggestions)

    assert rank_of(model, "blocks.0.attn.query", adapter=True).effective == (1, 1)
    assert (
        "blocks.0.attn.query: its adapter of rank 8 uses only 1; a rank of 1 suffices"
        in suggestions
    )
    assert "blocks.0.mlp.up: its adapter of rank 2 is used fully" in suggestions
    assert "blocks.1.mlp.up: its adapter is still zero" in suggestions


@torch.no_grad()
def test_a_full_mlp_is_told_of_and_a_poor_one_is_not() -> None:
    model = born(gpt2())
    model.get_parameter("blocks.0.mlp.down.weight")[:, 1:] = 0.0

    (suggestion,) = analysis_of(model).suggestions

    assert suggestion.startswith("the MLPs of layers 1 have full")


@pytest.mark.parametrize("arch", [gpt2(), llama()], ids=["gpt2", "llama"])
def test_a_head_without_queries_attends_to_all_alike(arch: Architecture) -> None:
    model = born(arch)
    with torch.no_grad():
        for layer in range(arch.n_layer):
            model.get_parameter(f"blocks.{layer}.attn.query.weight").zero_()

    heads = attention_entropy(model, TOKENS)

    assert [(head.layer, head.head) for head in heads] == [
        (layer, head) for layer in range(2) for head in range(4)
    ]
    even = sum(math.log(count) for count in range(2, 17)) / 15
    for head in heads:
        assert head.share == pytest.approx(1.0, abs=1e-6)
        assert head.entropy_nats == pytest.approx(even, abs=1e-6)


@torch.no_grad()
def test_a_head_that_looks_at_one_token_has_collapsed() -> None:
    model = born(gpt2())
    # positions are unit vectors far longer than tokens, and every head finds its own
    model.position_embedding.weight.copy_(1e3 * torch.eye(16, 32))
    for part in ("query", "key"):
        model.get_parameter(f"blocks.0.attn.{part}.weight").copy_(
            torch.cat([30.0 * torch.randn(8, 32, generator=torch.Generator().manual_seed(2))] * 4)
        )

    analysis = analysis_of(model, tokens_BT=TOKENS)

    assert all(head.share < 0.05 for head in analysis.heads if head.layer == 0)
    assert sum("attends to one token only" in text for text in analysis.suggestions) == 4


@torch.no_grad()
def test_change_is_relative_and_by_the_step() -> None:
    model = born(gpt2())
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    model.get_parameter("blocks.0.attn.query.weight").mul_(1.5)
    model.token_embedding.weight[10:].mul_(-1.0)

    analysis = analysis_of(model, before=before, steps=5)

    changes = {change.name: change for change in analysis.changes}
    query = changes["blocks.0.attn.query.weight"]
    assert (query.relative, query.relative_per_step) == pytest.approx((0.5, 0.1))
    assert changes["blocks.0.attn.key.weight"].relative == 0.0
    assert analysis.drift is not None
    assert (analysis.drift.rows, analysis.drift.still) == (50, 10)
    assert analysis.drift.cosine == pytest.approx((10 - 40) / 50)


def test_what_cannot_be_compared_is_left_out_and_said() -> None:
    model, smaller = born(gpt2(n_mlp=256)), born(gpt2())

    analysis = analysis_of(model, no_heads="the data are gone")
    against = analysis_of(model, before=dict(smaller.named_parameters()))

    assert analysis.left_out == (
        "attention: the data are gone",
        "change: there is no earlier state to compare with",
    )
    # of both layers up, its bias and down; and 15 other biases and shifts, which were zero
    assert (
        against.left_out[1] == "change of 21 tensors: they were zero, missing, or of another shape"
    )
    assert "blocks.0.mlp.up.weight" not in {change.name for change in against.changes}
    assert all(change.relative_per_step is None for change in against.changes)


def test_blocks_are_not_compared_by_name_where_their_number_is_another() -> None:
    model, shallower = born(gpt2(n_layer=3)), born(gpt2())

    analysis = analysis_of(model, tokens_BT=TOKENS, before=dict(shallower.named_parameters()))

    assert {change.name.partition(".")[0] for change in analysis.changes} == {
        "token_embedding",
        "position_embedding",
        "final_norm",
    }
    assert analysis.left_out == (
        "change of the blocks: their number and so their names differ",
        "change of 1 tensors: they were zero, missing, or of another shape",
    )


def test_an_analysis_is_json() -> None:
    model = born(llama())
    analysis = analysis_of(model, tokens_BT=TOKENS, before=dict(model.named_parameters()), steps=1)
    assert json.loads(json.dumps(analysis.to_dict()))["energies"] == [0.9, 0.99]
