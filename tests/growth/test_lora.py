"""Adapters that come, grow, shrink, are rescaled, merged and taken away."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from growing import KEY, batch, grow_model, grow_optimizer, operation, proof, random_gpt, values
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import gpt2, llama

from instar.growth.operators import check_growth, plan
from instar.growth.plan import GrowthError
from instar.growth.planners.lora import adapters_of_blocks
from instar.models.architecture import Architecture
from instar.models.gpt import GPT
from instar.models.lora import Lora, adapter_of
from instar.run.state.gradient_stats import dead_ranks

SIZES = {"vocab_size": 11, "n_embd": 16, "n_mlp": 12, "context": 6}
GPT2, LLAMA = gpt2(**SIZES), llama(**SIZES)
STYLES = pytest.mark.parametrize("base", [GPT2, LLAMA], ids=["gpt2", "llama"])
TARGETS = ["attn", "mlp", "embedding", "all", "blocks.1.*", "blocks.*.attn.query"]


def lora_gpt(base: Architecture, *lora: Lora) -> GPT:
    return random_gpt(replace(base, lora=lora))


def rank(target: str, size: int) -> dict[str, str | int]:
    return {"target": target, "rank": size}


def output_change(old: GPT, new: GPT) -> float:
    inputs, _ = batch(old.arch)
    return (new(inputs) - old(inputs)).abs().max().item()


def product(model: GPT, name: str) -> torch.Tensor:
    """What an adapter adds to its weight."""
    adapter = adapter_of(model.arch.lora, name)
    assert adapter is not None
    a, b = (model.get_parameter(f"{name}.lora_{part}") for part in "ab")
    return adapter.scale * (b @ a).detach()


@STYLES
@pytest.mark.parametrize("target", TARGETS)
def test_new_adapters_change_nothing_and_learn(base: Architecture, target: str) -> None:
    model = random_gpt(base)
    new, growth_plan = grow_model(model, operation("set_lora_rank", rank(target, 3)))
    assert growth_plan.label == "exact"
    assert proof(model, new, growth_plan).holds
    assert new.arch.lora == (Lora(target, 3, 6.0),)
    fresh = [name for name in new.arch.parameters() if ".lora_" in name]
    before = values(new)
    before = {name: before[name].clone() for name in fresh}
    optimizer = torch.optim.AdamW(new.parameters(), lr=0.01, weight_decay=0.0)
    for _ in range(2):
        new(*batch(base)).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = values(new)
    assert not [name for name in fresh if torch.equal(before[name], after[name])]


@STYLES
@pytest.mark.parametrize("rank_stabilized", [False, True])
def test_growing_holds_the_scale(base: Architecture, rank_stabilized: bool) -> None:
    model = lora_gpt(base, Lora("attn", 2, 3.0, rank_stabilized), Lora("embedding", 1, 1.0))
    new, growth_plan = grow_model(model, operation("set_lora_rank", rank("attn", 6)))
    assert growth_plan.label == "exact"
    assert proof(model, new, growth_plan).holds
    alpha = 3.0 * (math.sqrt(3.0) if rank_stabilized else 3.0)
    entry = adapter_of(new.arch.lora, "blocks.0.attn.query")
    assert entry is not None
    assert (entry.rank, entry.alpha) == (6, pytest.approx(alpha))
    assert growth_plan.notes[0].startswith("8 × rank 2, scale")


def test_growing_draws_rows_of_a_and_makes_columns_of_b_zero() -> None:
    model = lora_gpt(GPT2, Lora("mlp", 2, 3.0))
    new, _ = grow_model(model, operation("change_lora_rank", {"target": "mlp", "factor": 2}))
    for name in ("blocks.0.mlp.up", "blocks.1.mlp.down"):
        a, b = new.get_parameter(f"{name}.lora_a"), new.get_parameter(f"{name}.lora_b")
        assert torch.equal(a[:2], model.get_parameter(f"{name}.lora_a"))
        assert torch.equal(b[:, :2], model.get_parameter(f"{name}.lora_b"))
        assert a[2:].abs().min() > 0
        assert not b[:, 2:].any()


def test_what_the_optimizer_knows_of_old_rows_stays() -> None:
    model = lora_gpt(GPT2, Lora("mlp", 2, 3.0))
    _, growth_plan = plan(model.arch, operation("set_lora_rank", rank("mlp", 5)))
    name = "blocks.0.mlp.up.lora_a"
    state = torch.rand(2, 16, dtype=torch.float64)
    memory = {f"{name}/{key}": state for key in ("exp_avg", "exp_avg_sq")}
    memory[f"{name}/step"] = torch.tensor(9.0)
    states = grow_optimizer(growth_plan, memory, KEY)
    assert torch.equal(states[f"{name}/exp_avg"][:2], state)
    assert torch.equal(states[f"{name}/exp_avg_sq"][:2], state)
    assert not states[f"{name}/exp_avg"][2:].any()
    assert states[f"{name}/step"] == 9


def test_gradients_follow_the_scale() -> None:
    """B at zero, so that the function and all other gradients stay as they are."""
    model = random_gpt(GPT2)
    model, _ = grow_model(model, operation("set_lora_rank", rank("mlp", 2), alpha=4.0))
    new, growth_plan = grow_model(
        model, operation("set_lora_alpha", {"target": "mlp", "alpha": 12.0})
    )
    for network in (model, new):
        network(*batch(GPT2)).backward()
    name = "blocks.0.mlp.up.lora_b"
    before, after = model.get_parameter(name).grad, new.get_parameter(name).grad
    assert before is not None
    torch.testing.assert_close(after, 3 * before)
    memory = grow_optimizer(
        growth_plan, {f"{name}/exp_avg": before, f"{name}/exp_avg_sq": before}, KEY
    )
    torch.testing.assert_close(memory[f"{name}/exp_avg"], 3 * before)
    torch.testing.assert_close(memory[f"{name}/exp_avg_sq"], 9 * before)


def test_without_holding_the_scale_falls() -> None:
    model = lora_gpt(LLAMA, Lora("attn", 2, 4.0))
    new, growth_plan = grow_model(model, operation("set_lora_rank", rank("attn", 4), hold=False))
    assert growth_plan.label == "lossy"
    assert new.arch.lora == (Lora("attn", 4, 4.0),)
    torch.testing.assert_close(
        product(new, "blocks.0.attn.key"), product(model, "blocks.0.attn.key") / 2
    )


def test_factors_are_rounded_and_leave_a_rank_of_one_at_least() -> None:
    model = lora_gpt(GPT2, Lora("attn", 3, 3.0), Lora("mlp", 1, 1.0))
    for factor, ranks in ((1.5, (5, 2)), (0.5, (2, 1)), (0.1, (1, 1))):
        new, _ = grow_model(
            model, operation("change_lora_rank", {"target": "all", "factor": factor})
        )
        entries = [adapter_of(new.arch.lora, f"blocks.0.{part}") for part in ("attn.key", "mlp.up")]
        assert tuple(entry.rank for entry in entries if entry) == ranks
        assert not [
            name for name in new.arch.parameters() if name.startswith("token_e") and "lora" in name
        ]


@STYLES
def test_shrinking_keeps_the_best_of_the_product(base: Architecture) -> None:
    model = lora_gpt(base, Lora("attn", 5, 5.0), Lora("embedding", 4, 2.0))
    new, growth_plan = grow_model(model, operation("set_lora_rank", rank("all", 2)))
    assert growth_plan.label == "lossy"
    assert output_change(model, new) > 1e-3
    for name in ("blocks.0.attn.query", "blocks.1.attn.output", "token_embedding"):
        difference = torch.linalg.matrix_norm(product(new, name) - product(model, name))
        singular = torch.linalg.svdvals(product(model, name))
        torch.testing.assert_close(difference, singular[2:].norm())


@STYLES
def test_a_rank_that_was_not_used_is_given_back_at_no_loss(base: Architecture) -> None:
    model = lora_gpt(base, Lora("all", 2, 3.0))
    more, _ = grow_model(model, operation("set_lora_rank", rank("all", 6)))
    less, growth_plan = grow_model(more, operation("set_lora_rank", rank("all", 2)), number=1)
    assert (less.arch, growth_plan.label) == (model.arch, "lossy")
    assert output_change(model, less) < 1e-10


def unused_ranks(base: Architecture) -> dict[str, GPT]:
    """Models with adapters of rank 6 of which at least 4 ranks have no part in the product."""
    fresh, _ = grow_model(random_gpt(base), operation("set_lora_rank", rank("mlp", 6)))
    low_rank = lora_gpt(base, Lora("mlp", 2, 3.0))
    merged_model, _ = grow_model(lora_gpt(base, Lora("mlp", 6, 9.0)), operation("merge_lora"))
    return {
        "just added": fresh,
        "right after merging": merged_model,
        "some just added": grow_model(low_rank, operation("set_lora_rank", rank("mlp", 6)))[0],
        "in a new block": grow_model(
            lora_gpt(base, Lora("mlp", 6, 9.0)), operation("insert_layers", 1)
        )[0],
    }


@STYLES
@pytest.mark.parametrize(
    "case", ["just added", "right after merging", "some just added", "in a new block"]
)
def test_ranks_that_were_not_used_can_learn_after_shrinking(base: Architecture, case: str) -> None:
    model = unused_ranks(base)[case]
    new, _ = grow_model(model, operation("set_lora_rank", rank("mlp", 4)), number=3)
    if case != "in a new block":
        assert output_change(model, new) < 1e-10
    assert dead_ranks(new.arch.parameters(), new.get_parameter) == ""
    last = "blocks.1.mlp.down" if case != "in a new block" else "blocks.2.mlp.down"
    a, b = new.get_parameter(f"{last}.lora_a"), new.get_parameter(f"{last}.lora_b")
    is_unused = ~b.any(dim=0)
    assert is_unused.sum() == (2 if case == "some just added" else 4)
    # drawn from the seed, the operation's number and the name, as all new values
    same, other = (
        grow_model(model, operation("set_lora_rank", rank("mlp", 4)), number=number)[
            0
        ].get_parameter(f"{last}.lora_a")
        for number in (3, 4)
    )
    assert torch.equal(same, a)
    assert a[is_unused].abs().min() > 0
    assert (other != a).all(dim=1).equal(is_unused)


def test_ranks_that_are_zero_in_both_factors_are_counted() -> None:
    model = lora_gpt(GPT2, Lora("mlp", 4, 3.0), Lora("attn", 2, 3.0))
    assert dead_ranks(model.arch.parameters(), model.get_parameter) == ""
    with torch.no_grad():
        for name in ("blocks.0.mlp.up", "blocks.1.mlp.down"):
            model.get_parameter(f"{name}.lora_a")[1:].zero_()
            model.get_parameter(f"{name}.lora_b")[:, 1:].zero_()
        model.get_parameter("blocks.0.attn.key.lora_b").zero_()
    message = dead_ranks(model.arch.parameters(), model.get_parameter)
    assert message.startswith("6 ranks of adapters (blocks.0.mlp.up, blocks.1.mlp.down)")
    last_model = model
    for name in ("blocks.0.mlp.up", "blocks.1.mlp.down"):
        for size in (1, 4):
            last_model, _ = grow_model(
                last_model, operation("set_lora_rank", rank(name, size)), number=size
            )
    assert output_change(model, last_model) < 1e-10
    assert dead_ranks(last_model.arch.parameters(), last_model.get_parameter) == ""


@STYLES
def test_adapters_taken_away_are_gone_unless_merged_before(base: Architecture) -> None:
    model = lora_gpt(base, Lora("attn", 2, 3.0), Lora("embedding", 2, 1.0))
    without_adapters, growth_plan = grow_model(model, operation("set_lora_rank", rank("all", 0)))
    assert (without_adapters.arch, growth_plan.label) == (base, "lossy")
    assert "to keep what the adapters have learned, use merge_lora first" in growth_plan.notes
    assert output_change(model, without_adapters) > 1e-3
    merged_model, _ = grow_model(model, operation("merge_lora"))
    merged_without_adapters, _ = grow_model(
        merged_model, operation("set_lora_rank", rank("all", 0))
    )
    assert merged_without_adapters.arch == base
    assert output_change(model, merged_without_adapters) < 1e-10


@STYLES
@pytest.mark.parametrize("target", [None, "attn", "embedding", "blocks.1.*"])
def test_merging_changes_nothing_and_begins_anew(base: Architecture, target: str | None) -> None:
    model = lora_gpt(base, Lora("all", 2, 3.0, True))
    new, growth_plan = grow_model(model, operation("merge_lora", target))
    assert (new.arch, growth_plan.label) == (model.arch, "exact")
    assert proof(model, new, growth_plan).holds
    adapter = Lora(target or "all", 1, 1.0)
    for name in model.arch.adaptable():
        a, b = new.get_parameter(f"{name}.lora_a"), new.get_parameter(f"{name}.lora_b")
        is_merged = adapter.matches(name)
        assert is_merged == (not b.any())
        assert is_merged == (not torch.equal(a, model.get_parameter(f"{name}.lora_a")))
    second_merge, _ = grow_model(new, operation("merge_lora", target), number=1)
    first = "blocks.1.attn.query.lora_a" if target != "embedding" else "token_embedding.lora_a"
    assert not torch.equal(second_merge.get_parameter(first), new.get_parameter(first))


@STYLES
@pytest.mark.parametrize("size", [1, 2, 5, 0])
def test_a_rank_is_set_anew_after_merging_and_changes_nothing(
    base: Architecture, size: int
) -> None:
    """Also a smaller one, which else loses what the adapters have learned, and the same."""
    model = lora_gpt(base, Lora("attn", 2, 3.0), Lora("embedding", 2, 1.0))
    for target in ("attn", "embedding"):
        new, growth_plan = grow_model(
            model, operation("set_lora_rank", rank(target, size), merge=True)
        )
        assert growth_plan.label == "exact"
        assert proof(model, new, growth_plan).holds
        assert output_change(model, new) < 1e-5
        weight = "token_embedding" if target == "embedding" else "blocks.1.attn.query"
        merged_weight = model.get_parameter(f"{weight}.weight") + product(model, weight)
        assert torch.allclose(new.get_parameter(f"{weight}.weight"), merged_weight, rtol=1e-12)
        entry = adapter_of(new.arch.lora, weight)
        assert (entry.rank if entry else 0) == size
        if entry:
            assert entry.scale == pytest.approx(3.0 / 2 if target == "attn" else 1.0 / 2)
            assert not product(new, weight).any()
    other, _ = grow_model(model, operation("set_lora_rank", rank("attn", 4), merge=True, alpha=8.0))
    entry = adapter_of(other.arch.lora, "blocks.0.attn.query")
    assert entry is not None
    assert entry.alpha == 8.0


def test_a_factor_of_the_rank_with_merging_is_exact_both_ways() -> None:
    model = lora_gpt(LLAMA, Lora("attn", 4, 3.0))
    for factor, size in ((0.5, 2), ("x2", 8), (1, 4)):
        value = {"target": "attn", "factor": factor}
        new, growth_plan = grow_model(model, operation("change_lora_rank", value, merge=True))
        assert proof(model, new, growth_plan).holds
        assert growth_plan.label == "exact"
        assert {entry.rank for entry in new.arch.lora} == {size}
    lossy, growth_plan = grow_model(
        model, operation("change_lora_rank", {"target": "attn", "factor": 0.5})
    )
    assert growth_plan.label == "lossy"
    assert output_change(model, lossy) > 1e-4


def test_a_factor_of_alpha_is_one_of_the_scale() -> None:
    model = lora_gpt(LLAMA, Lora("attn", 2, 3.0), Lora("embedding", 2, 1.0))
    every, growth_plan = grow_model(model, operation("change_lora_alpha", "x2"))
    assert growth_plan.label == "lossy"
    for name in ("blocks.0.attn.query", "token_embedding"):
        assert torch.allclose(product(every, name), 2 * product(model, name))
    value = {"target": "embedding", "factor": 0.5}
    embedding_model, _ = grow_model(model, operation("change_lora_alpha", value))
    assert torch.allclose(
        product(embedding_model, "token_embedding"), product(model, "token_embedding") / 2
    )
    assert torch.equal(
        product(embedding_model, "blocks.0.attn.query"), product(model, "blocks.0.attn.query")
    )


def test_an_untied_table_is_merged_apart_from_the_head() -> None:
    model = lora_gpt(LLAMA, Lora("embedding", 2, 3.0))
    new, _ = grow_model(model, operation("merge_lora"))
    assert torch.equal(new.get_parameter("head.weight"), model.get_parameter("head.weight"))
    assert output_change(model, new) < 1e-10


def test_another_alpha_is_another_scale() -> None:
    model = lora_gpt(GPT2, Lora("attn", 2, 3.0), Lora("mlp", 2, 3.0))
    new, growth_plan = grow_model(model, operation("set_lora_alpha", {"target": "mlp", "alpha": 9}))
    assert growth_plan.label == "lossy"
    assert set(new.arch.lora) == {Lora("attn", 2, 3.0), Lora("mlp", 2, 9.0)}
    for name, times in (("blocks.0.mlp.up", 3), ("blocks.0.attn.key", 1)):
        torch.testing.assert_close(product(new, name), times * product(model, name))


def test_every_weight_keeps_its_own_scale() -> None:
    model = lora_gpt(GPT2, Lora("attn", 4, 8.0), Lora("blocks.1.mlp.up", 2, 1.0))
    new, growth_plan = grow_model(model, operation("set_lora_rank", rank("blocks.*", 6), alpha=3.0))
    assert growth_plan.label == "exact"
    assert proof(model, new, growth_plan).holds
    scales = {
        name: adapter_of(new.arch.lora, f"blocks.1.{name}")
        for name in ("attn.key", "mlp.up", "mlp.down")
    }
    assert {name: entry and entry.scale for name, entry in scales.items()} == {
        "attn.key": 2.0,
        "mlp.up": 0.5,
        "mlp.down": 0.5,
    }


def test_an_entry_for_the_same_target_takes_the_old_ones_place() -> None:
    model = lora_gpt(GPT2, Lora("blocks.*.up", 2, 3.0))
    new, _ = grow_model(model, operation("set_lora_rank", rank("blocks.*.up", 4)))
    assert new.arch.lora == (Lora("blocks.*.up", 4, 6.0),)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_adapters_follow_their_blocks(data: st.DataObject) -> None:
    three = replace(GPT2, n_layer=3)
    targets = ["attn", "blocks.0.*", "blocks.1.attn.*", "blocks.2.mlp.up", "*.key", "embedding"]
    loras: list[Lora] = []
    for target in data.draw(st.permutations(targets))[: data.draw(st.integers(1, 4))]:
        entry = Lora(target, data.draw(st.integers(1, 2)), 1.0)
        if not any(entry.matches(n) and adapter_of(loras, n) for n in three.adaptable()):
            loras.append(entry)
    arch = replace(three, lora=tuple(loras))
    sources: Sequence[int | None] = data.draw(
        st.lists(st.one_of(st.none(), st.integers(0, 2)), min_size=1, max_size=6)
    )
    grown_arch = replace(arch, n_layer=len(sources), lora=adapters_of_blocks(arch, sources))

    def rank_and_alpha(shape: Architecture, name: str) -> tuple[int, float] | None:
        entry = adapter_of(shape.lora, name)
        return (entry.rank, entry.alpha) if entry else None

    assert rank_and_alpha(grown_arch, "token_embedding") == rank_and_alpha(arch, "token_embedding")
    parts = [
        name.removeprefix("blocks.0.") for name in arch.adaptable() if name.startswith("blocks.0.")
    ]
    for layer, source in enumerate(sources):
        for part in parts:
            pairs = {rank_and_alpha(arch, f"blocks.{old}.{part}") for old in range(3)}
            shared = pairs.pop() if len(pairs) == 1 else None
            expected = shared if source is None else rank_and_alpha(arch, f"blocks.{source}.{part}")
            assert rank_and_alpha(grown_arch, f"blocks.{layer}.{part}") == expected


IMPOSSIBLE = [
    (
        "set_lora_rank",
        rank("atn", 2),
        {},
        r"'atn' names no weight of this model; possible: all, attn, mlp",
    ),
    ("set_lora_rank", rank("head", 2), {}, r"the head is tied: its table is the embedding"),
    ("set_lora_rank", rank("mlp", 13), {}, r"up of shape \(12, 16\) can have; at most 12"),
    ("set_lora_rank", rank("attn", 2), {}, r"the adapters of 'attn' already are as requested"),
    ("set_lora_rank", rank("attn", 3), {"alpha": 3.0}, r"alpha applies to new adapters"),
    ("set_lora_rank", rank("mlp", 0), {}, r"'mlp' has no adapters; set_lora_rank adds them"),
    ("change_lora_rank", {"target": "mlp", "factor": 2}, {}, r"'mlp' has no adapters"),
    ("change_lora_rank", {"target": "attn", "factor": 1.1}, {}, r"already are as requested"),
    ("set_lora_alpha", {"target": "mlp", "alpha": 2.0}, {}, r"'mlp' has no adapters"),
    ("merge_lora", "mlp", {}, r"'mlp' has no adapters"),
]


@pytest.mark.parametrize(("name", "value", "options", "message"), IMPOSSIBLE)
def test_the_impossible_is_refused_with_what_is_possible(
    name: str, value: object, options: dict[str, object], message: str
) -> None:
    arch = replace(GPT2, lora=(Lora("attn", 2, 3.0),))
    with pytest.raises(GrowthError, match=f"{name}: .*{message}"):
        plan(arch, operation(name, value, **options))


@pytest.mark.parametrize(
    ("name", "value", "options"),
    [
        ("set_lora_rank", 8, {}),
        ("set_lora_rank", {"target": "attn"}, {}),
        ("set_lora_rank", rank("attn", -1), {}),
        ("set_lora_rank", {"target": "attn", "rank": 2.5}, {}),
        ("set_lora_rank", {"target": ["attn"], "rank": 2}, {}),
        ("set_lora_rank", rank("attn", 2), {"alpha": 0}),
        ("set_lora_rank", rank("attn", 2), {"hold": "yes"}),
        ("set_lora_rank", rank("attn", 2), {"mask": 5}),
        ("change_lora_rank", {"target": "attn", "factor": 0}, {}),
        ("set_lora_alpha", {"target": "attn", "alpha": -1.0}, {}),
        ("merge_lora", 3, {}),
    ],
)
def test_another_form_is_refused(name: str, value: object, options: dict[str, object]) -> None:
    with pytest.raises(GrowthError, match=f"^{name}: "):
        check_growth(operation(name, value, **options))
