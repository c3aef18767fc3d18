"""Parameters that an operation made and that no gradient reaches are noticed, also a part of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from growing import batch, grow_model, operation, random_gpt
from shapes import gpt2, llama
from transformers import LlamaConfig, LlamaForCausalLM

from instar.growth import prepare
from instar.growth.plan import GrowthPlan
from instar.models.architecture import Architecture
from instar.models.gpt import GPT
from instar.models.lora import Lora
from instar.run.state.gradient_stats import MAX_WATCHED_STEPS, GradientWatch

SIZES = {"vocab_size": 11, "n_embd": 16, "n_mlp": 12, "context": 6}
GPT2, LLAMA = gpt2(**SIZES), llama(**SIZES)
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
STYLES = pytest.mark.parametrize("base", [GPT2, LLAMA], ids=["gpt2", "llama"])


def watch_gradients(model: GPT, plan: GrowthPlan) -> GradientWatch:
    """After as many steps as the watch wants to see."""
    watch = GradientWatch(plan, "growth", model.arch.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    while not watch.is_over:
        model(*batch(model.arch)).backward()
        watch.update({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return watch


@STYLES
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("widen_mlp", 20),
        ("widen_hidden", 24),
        ("add_heads", 2),
        ("insert_layers", 1),
        ("stack_layers", 2),
        ("resize_vocab", 17),
        ("set_lora_rank", {"target": "all", "rank": 3}),
    ],
)
def test_every_part_of_what_operations_make_is_reached(
    base: Architecture, name: str, value: object
) -> None:
    model, plan = grow_model(random_gpt(base), operation(name, value))
    watch = watch_gradients(model, plan)
    assert (len(watch.norms), watch.dead, watch.parameters_without_gradient) == (3, False, {})


@STYLES
def test_a_new_block_with_adapters_takes_three_steps(base: Architecture) -> None:
    """The block's writers are zero, and behind them the adapters' B, and behind these A."""
    lora_model = random_gpt(replace(base, lora=(Lora("attn", 2, 4.0),)))
    model, plan = grow_model(lora_model, operation("insert_layers", 1, **{"from": "normal"}))
    watch = GradientWatch(plan, "growth", model.arch.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    names_at_step = []
    for _ in range(3):
        model(*batch(model.arch)).backward()
        watch.update({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
        names_at_step.append(set(watch.parameters_without_gradient))
    assert any(name.endswith("query.lora_a") for name in names_at_step[1])
    assert not names_at_step[2]
    assert watch.is_over
    assert not watch.dead


@STYLES
def test_a_part_that_no_gradient_reaches_is_noticed(base: Architecture) -> None:
    model, plan = grow_model(
        random_gpt(base), operation("set_lora_rank", {"target": "mlp", "rank": 4})
    )
    with torch.no_grad():
        model.get_parameter("blocks.0.mlp.up.lora_a")[1:].zero_()
    watch = watch_gradients(model, plan)
    assert len(watch.norms) == MAX_WATCHED_STEPS
    assert not watch.dead
    dead = {f"blocks.0.mlp.up.lora_{side}": 3 for side in "ab"}
    assert watch.parameters_without_gradient == dead


def test_new_units_that_are_zero_on_both_sides_are_noticed() -> None:
    model, plan = grow_model(random_gpt(LLAMA), operation("widen_mlp", 20))
    with torch.no_grad():
        for name in ("gate", "up"):
            model.get_parameter(f"blocks.0.mlp.{name}.weight")[15:].zero_()
    dead = watch_gradients(model, plan).parameters_without_gradient
    assert dead == {f"blocks.0.mlp.{name}.weight": 5 for name in ("gate", "up", "down")}


@pytest.mark.parametrize("per_token", [1, 2])
def test_a_router_whose_gradient_is_rounding_alone_is_noticed(per_token: int) -> None:
    """A Mixtral gives a token's only expert the weight 1; what is left of its gradient is 1e-11, not 0."""
    dense = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, **SMALL))
    growth = prepare(dense, "upcycle", 4, num_experts_per_tok=2)
    model, plan = growth.model.train(), growth.plan
    for module in model.modules():
        if hasattr(module, "top_k"):
            module.top_k = per_token
    name_of = growth.shape.name  # type: ignore[attr-defined]
    watch = GradientWatch(plan, "upcycle", growth.shape.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))
    while not watch.is_over:
        model(input_ids=ids, labels=ids).loss.backward()
        gradients = {name_of(n): p.grad for n, p in model.named_parameters() if p.grad is not None}
        watch.update(gradients)
        optimizer.step()
        optimizer.zero_grad()
    assert watch.dead is (per_token == 1)
    assert any(new > 0.0 for _, new in watch.norms)


def test_a_step_without_an_update_tells_nothing() -> None:
    model, plan = grow_model(random_gpt(GPT2), operation("widen_mlp", 20))
    watch = GradientWatch(plan, "growth", model.arch.parameters())
    for _ in range(4):
        watch.update({n: torch.full_like(p, torch.nan) for n, p in model.named_parameters()})
    assert not watch.is_over
    for _ in range(MAX_WATCHED_STEPS):
        gradients = {n: torch.ones_like(p) for n, p in model.named_parameters()}
        for gradient in gradients.values():
            for dim, size in enumerate(gradient.shape):
                if size == 20:
                    gradient.narrow(dim, 12, 8).zero_()
        watch.update(gradients)
    assert watch.is_over
    assert watch.dead
