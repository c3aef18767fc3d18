"""Every operator does to the function what its label says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from cases import parametrize_first
from growing import grow_model, operation, proof, random_gpt
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import gpt2, llama

from instar.config.sections import Operation
from instar.growth.plan import Grown
from instar.models.architecture import Architecture
from instar.models.lora import Lora
from instar.models.shape import layer_of

SIZES = {"vocab_size": 11, "n_embd": 16, "n_mlp": 12, "context": 6}
ADAPTERS = (Lora("attn", 2, 3.0), Lora("mlp", 3, 4.0), Lora("embedding", 2, 1.0))
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.01}

GPT2 = gpt2(**SIZES)
LLAMA = llama(**SIZES)
STYLES = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "normed queries": replace(LLAMA, qk_norm=True, activation="relu2", bias=True, tied=True),
    "convolutions": replace(GPT2, conv_size=3, embedding_multiplier=3.0),
    "layernorm without bias": replace(GPT2, bias=False, positions="rope", tied=False),
    "gpt2 with adapters": replace(GPT2, lora=ADAPTERS),
    "llama with adapters": replace(LLAMA, lora=(*ADAPTERS, Lora("head", 1, 1.0))),
    "gpt2 with experts": replace(GPT2, **EXPERTS),
    "llama with experts": replace(LLAMA, **EXPERTS, conv_size=4),
    "windows": replace(LLAMA, windows=(3, None), lora=ADAPTERS),
}


def operations(arch: Architecture) -> Iterator[Operation]:
    """At least one of every kind that this model can take."""
    groups = arch.n_head // arch.n_kv_head
    yield operation("stack_layers", 2)
    yield operation("stack_layers", 2, how="interpolate")
    yield operation("stack_layers", [*range(arch.n_layer), 0])
    yield operation("insert_layers", 1)
    yield operation("insert_layers", 3, where="even", **{"from": "normal"})
    yield operation("insert_layers", 2, where=[0, 1])
    yield operation("insert_layers", 3, where=[0, 1, 1], **{"from": "average"})
    yield operation("widen_mlp", "x1.5")
    yield operation("widen_mlp", arch.n_mlp * 3 + 1, how="split", share=0.3)
    yield operation("widen_hidden", "x1.5")
    yield operation("widen_hidden", "x3", how="duplicate")
    yield operation("add_heads", groups)
    yield operation("add_heads", arch.n_kv_head, where="inside")
    yield operation("resize_vocab", arch.vocab_size + 5)
    yield operation("extend_context", "x2")
    if arch.num_experts is None and not arch.lora:
        yield operation("upcycle", 4)
        yield operation("upcycle", 3, num_experts_per_tok=1)
        yield operation("upcycle", 2, noise=0.1)
    if arch.lora:
        yield operation("merge_lora", "mlp" if arch.num_experts is None else None)
    else:
        yield operation("set_lora_rank", {"target": "all", "rank": 2})
    if groups > 1:
        yield operation("split_kv_heads", groups)
    if not arch.qk_norm:
        yield operation("grow_head_dim", arch.head_dim + 2)
    if arch.tied:
        yield operation("untie_embeddings", True)
    yield operation("set_window", None if arch.windows else 2)
    if any((window or 0) > 1 for window in arch.windows):
        yield operation("change_window", 0.5)


def operation_id(op: Operation) -> str:
    return " ".join(str(part) for part in (op.name, op.value, *op.options.values()))


SINGLE = [
    pytest.param(arch, op, id=f"{style}: {operation_id(op)}")
    for style, arch in STYLES.items()
    for op in operations(arch)
]


@pytest.mark.parametrize(("arch", "op"), SINGLE)
def test_the_label_holds(arch: Architecture, op: Operation) -> None:
    model = random_gpt(arch)
    new, plan = grow_model(model, op)
    measurement = proof(model, new, plan)
    assert measurement.holds, measurement
    if plan.label == "lossy":
        assert measurement.max_logit_diff_relative > 1e-3


PAIRS = [
    pytest.param(arch, first, id=f"{style}: {operation_id(first)}")
    for style, arch in (("gpt2", STYLES["gpt2 with adapters"]), ("llama", LLAMA))
    for first in operations(arch)
]


@parametrize_first(("arch", "first"), PAIRS, first=6)
def test_the_label_holds_after_any_other(arch: Architecture, first: Operation) -> None:
    model, _ = grow_model(random_gpt(arch), first)
    for second in operations(model.arch):
        new, plan = grow_model(model, second, number=1)
        assert proof(model, new, plan).holds, operation_id(second)


@given(st.sampled_from(sorted(STYLES)), st.data())
@settings(max_examples=50, deadline=None)
def test_labels_hold_in_any_order(style: str, data: st.DataObject) -> None:
    model = random_gpt(STYLES[style])
    for number in range(data.draw(st.integers(2, 5))):
        op = data.draw(st.sampled_from(list(operations(model.arch))))
        new, plan = grow_model(model, op, number)
        assert proof(model, new, plan).holds, operation_id(op)
        model = new


MASKED = [
    pytest.param(arch, operation(name, value, mask=4), id=f"{style}: {name}")
    for style, arch in STYLES.items()
    for name, value in (
        ("insert_layers", 2),
        ("widen_mlp", "x2"),
        ("widen_hidden", 21),
        ("add_heads", 2 * arch.n_head),
    )
]


@pytest.mark.parametrize(("arch", "op"), MASKED)
def test_under_a_mask_nothing_changes_at_first(arch: Architecture, op: Operation) -> None:
    model = random_gpt(arch)
    new, plan = grow_model(model, op, step=30)
    assert proof(model, new, plan).holds
    new.set_step(32)
    assert not proof(model, new, plan).holds


@pytest.mark.parametrize(
    ("op", "arch", "changes"),
    [
        (operation("widen_mlp", "x1.5"), GPT2, {"n_mlp": 18}),
        (operation("widen_mlp", 13), GPT2, {"n_mlp": 13}),
        (operation("widen", {"axis": "mlp", "size": "x2"}), GPT2, {"n_mlp": 24}),
        (operation("widen", {"axis": "vocab", "size": 12}), GPT2, {"vocab_size": 12}),
        (operation("widen_hidden", 20), GPT2, {"n_embd": 20, "norm_eps": 8e-6}),
        (operation("widen_hidden", 20), LLAMA, {"n_embd": 20, "norm_eps": 8e-6}),
        (operation("widen_hidden", 32, how="duplicate"), GPT2, {"n_embd": 32}),
        (operation("add_heads", 1), GPT2, {"n_head": 5, "n_kv_head": 5}),
        (operation("add_heads", 4), LLAMA, {"n_head": 8, "n_kv_head": 4}),
        (operation("add_heads", 4, where="inside"), LLAMA, {"n_head": 8}),
        (operation("split_kv_heads", 2), LLAMA, {"n_kv_head": 4}),
        (operation("grow_head_dim", 6), GPT2, {"head_dim": 6}),
        (operation("grow_head_dim", "x2"), LLAMA, {"head_dim": 8, "rope_base": 1e8}),
        (operation("resize_vocab", "x2"), GPT2, {"vocab_size": 22}),
        (operation("extend_context", 8), LLAMA, {"context": 8}),
        (operation("stack_layers", [0, 0, 1]), GPT2, {"n_layer": 3}),
        (operation("insert_layers", 2), GPT2, {"n_layer": 4}),
    ],
    ids=lambda part: operation_id(part) if isinstance(part, Operation) else "",
)
def test_no_more_of_the_shape_changes_than_must(
    op: Operation, arch: Architecture, changes: dict[str, float]
) -> None:
    new, plan = grow_model(random_gpt(arch), op)
    expected = replace(arch, **changes)
    assert replace(new.arch, norm_eps=0, rope_base=0) == replace(expected, norm_eps=0, rope_base=0)
    assert (new.arch.norm_eps, new.arch.rope_base) == pytest.approx(
        (expected.norm_eps, expected.rope_base), rel=1e-12
    )
    assert list(plan.tensors) == list(new.arch.parameters())


def test_inserted_blocks_come_where_they_are_asked_for() -> None:
    model = random_gpt(replace(GPT2, n_layer=4))

    def old_places(**options: object) -> list[int]:
        new, _ = grow_model(model, operation("insert_layers", 2, **options))
        norms = [block.mlp_norm.weight for block in new.blocks]
        dead = [bool((block.mlp.down.weight == 0).all()) for block in new.blocks]
        old = [block.mlp_norm.weight for block in model.blocks]
        assert all(any(n.equal(o) for o in old) for n in norms)
        return [place for place, new_one in enumerate(dead) if not new_one]

    assert old_places() == [0, 1, 2, 3]
    assert old_places(where="start") == [2, 3, 4, 5]
    assert old_places(where="even") == [0, 1, 3, 4]
    assert old_places(where=[0, 3]) == [1, 2, 3, 5]


@pytest.mark.parametrize(("where", "below"), [("start", [0]), ([1], [0]), ([2], [1]), ("end", [3])])
def test_an_inserted_block_is_a_copy_of_the_one_below(where: Any, below: list[int]) -> None:
    model = random_gpt(replace(GPT2, n_layer=4))
    _, plan = grow_model(model, operation("insert_layers", 1, where=where))
    copies = {how.source for how in plan.tensors.values() if isinstance(how, Grown) and how.is_copy}
    assert sorted({layer_of(source) for source in copies}) == below


def test_a_block_takes_its_adapters_along() -> None:
    arch = replace(GPT2, lora=(Lora("blocks.1.mlp.up", 2, 2.0),))
    new, _ = grow_model(random_gpt(arch), operation("insert_layers", 1, where="start"))
    lora_names = [name for name in new.arch.parameters() if name.endswith("lora_a")]
    assert lora_names == ["blocks.2.mlp.up.lora_a"]
