"""`optimizer.lr_base_width` and `lr_base_depth`: rates follow the fan-in of matrices and the number of blocks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from growing import operation, random_gpt
from shapes import gpt2, llama
from small_models import model_of

from instar.config.schema import OptimizerConfig
from instar.growth.operators import plan
from instar.models.gpt import GPT
from instar.models.hf.pretrained import PretrainedShape
from instar.models.shape import Fixed, layer_of
from instar.run.optimizer import build_optimizers, set_learning_rate, split_groups
from instar.run.rates import Update, rate_factors

GPT2 = gpt2(n_embd=32, n_mlp=128, tied=False)
LLAMA = llama(n_embd=32, n_mlp=96)


WRITERS = {f"{part}.{kind}" for part in ("attn.output", "mlp.down") for kind in ("weight", "bias")}
"""What a block of GPT-2 adds to the residual stream, without the block's number."""


def factors(
    arch: Any, update: Update, *operations: Any, base: int | None = 32, depth: int | None = None
) -> dict[str, float]:
    """The factors that are not 1 after growth, without numbers of layers."""
    now = arch
    for entry in operations:
        now, _ = plan(now, entry)
    config = OptimizerConfig(lr_base_width=base, lr_base_depth=depth)
    by_name = rate_factors(now, arch, config, update)
    assert by_name.keys() == now.parameters().keys()
    return {
        name.replace("blocks.0.", ""): round(factor, 9)
        for name, factor in by_name.items()
        if factor != 1.0 and (layer_of(name) or 0) == 0
    }


DOUBLED = [operation("widen_hidden", "x2", how="duplicate"), operation("widen_mlp", "x2")]


@pytest.mark.parametrize("update", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize("arch", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_at_the_base_width_no_rate_changes(arch: Any, update: Update) -> None:
    assert factors(arch, update) == {}
    assert factors(arch, update, operation("stack_layers", 2)) == {}
    assert factors(arch, update, operation("resize_vocab", "x2")) == {}


def test_rates_of_adamw_fall_as_the_fan_in_grows() -> None:
    hidden = dict.fromkeys(["attn.query.weight", "attn.key.weight", "attn.value.weight"], 0.5)
    assert factors(LLAMA, "adamw", DOUBLED[0]) == {
        **hidden,
        "mlp.gate.weight": 0.5,
        "mlp.up.weight": 0.5,
        "head.weight": 0.5,
    }
    assert factors(LLAMA, "adamw", DOUBLED[1]) == {"mlp.down.weight": 0.5}
    heads = operation("add_heads", 4)
    assert factors(LLAMA, "adamw", heads) == {"attn.output.weight": 0.5}


def test_rates_of_sgd_follow_fan_out_over_fan_in() -> None:
    factor_of = factors(GPT2, "sgd", *DOUBLED)
    assert {name for name, factor in factor_of.items() if factor == 2.0} == {
        "token_embedding.weight",
        "position_embedding.weight",
        "mlp.up.bias",
        *(f"{part}.bias" for part in ("attn.output", "mlp.down", "attn_norm", "mlp_norm")),
        *(f"{part}.weight" for part in ("attn_norm", "mlp_norm")),
        "final_norm.weight",
        "final_norm.bias",
        "attn.output.weight",
    }
    halves = {f"attn.{part}.weight" for part in ("query", "key", "value")} | {"head.weight"}
    assert {name for name, factor in factor_of.items() if factor == 0.5} == halves


def test_rates_of_muon_are_spectral() -> None:
    factor_of = factors(LLAMA, "muon", DOUBLED[1])
    assert factor_of == {"mlp.down.weight": round(math.sqrt(1 / 2), 9)}
    factor_of = factors(LLAMA, "muon", DOUBLED[0])
    assert factor_of["attn.query.weight"] == round(math.sqrt(1 / 2), 9)
    # its own scale of a high matrix, √(rows / columns), is the spectral one already
    assert "mlp.up.weight" not in factor_of
    assert "attn.output.weight" not in factor_of


def test_a_base_of_another_width_has_the_proportions_of_the_start() -> None:
    factor_of = factors(LLAMA, "adamw", base=16)
    assert set(factor_of.values()) == {0.5}
    assert {"mlp.down.weight", "attn.output.weight", "mlp.up.weight"} <= factor_of.keys()
    assert "token_embedding.weight" not in factor_of


def test_a_model_without_a_stream_has_no_width() -> None:
    shape = Fixed((("a.weight", (3, 4)),))
    with pytest.raises(ValueError, match=r"optimizer\.lr_base_width is the width of the residual"):
        rate_factors(shape, shape, OptimizerConfig(lr_base_width=64), "adamw")
    with pytest.raises(ValueError, match=r"optimizer\.lr_base_depth is the number of blocks that"):
        rate_factors(shape, shape, OptimizerConfig(lr_base_depth=2), "adamw")


@pytest.mark.parametrize("update", ["adamw", "muon"])
def test_rates_of_what_writes_the_stream_fall_as_blocks_are_added(update: Update) -> None:
    stack = operation("stack_layers", 2)
    assert factors(GPT2, update, base=None, depth=2) == {}
    assert factors(GPT2, update, stack, base=None, depth=2) == dict.fromkeys(WRITERS, 0.5)
    loop = operation("loop_layers", {"from": 0, "to": 1, "times": 3})
    third = dict.fromkeys(WRITERS, round(1 / 3, 9))
    assert factors(GPT2, update, loop, base=None, depth=2) == third
    deeper_and_wider, wider = (
        factors(GPT2, update, DOUBLED[1], *operations, depth=2) for operations in ([stack], [])
    )
    assert deeper_and_wider["mlp.down.weight"] == pytest.approx(wider["mlp.down.weight"] / 2)
    assert deeper_and_wider["mlp.down.bias"] == 0.5


def test_where_a_norm_follows_the_branch_its_gain_decides() -> None:
    arch = PretrainedShape(model_of("gemma2").config.to_dict())
    assert factors(arch, "adamw", base=None, depth=6) == {
        "post_attention_layernorm.weight": 2.0,
        "post_feedforward_layernorm.weight": 2.0,
    }


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_four_blocks_train_as_with_half_of_each_branch(name: str) -> None:
    """CompleteP's own form: the same rate for all, and a factor of 1/2 in front of the branches of twice as many blocks."""
    arch = gpt2(n_layer=4)
    values = {"name": name, "eps": 1e-16, "weight_decay": 0.0}
    config = OptimizerConfig(**values, lr_base_depth=2)
    model, reference, plain = (random_gpt(arch) for _ in range(3))
    for module_name, module in reference.named_modules():
        if module_name.endswith(("attn.output", "mlp.down")):
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(2)
            module.register_forward_hook(lambda _, __, output: output / 2)
    x = torch.randint(0, arch.vocab_size, (20, 4, 9), generator=torch.manual_seed(0))
    losses = losses_of(model, x, config), losses_of(reference, x, OptimizerConfig(**values))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6 if name == "adamw" else 1e-4)
    plain_losses = losses_of(plain, x, OptimizerConfig(**values))
    assert max(abs(a - b) for a, b in zip(losses[0], plain_losses, strict=True)) > 1e-2


def losses_of(model: GPT, x: torch.Tensor, config: OptimizerConfig) -> list[float]:
    """Losses of a step for each batch of x, (step, sample, token)."""
    parameters = dict(model.named_parameters())
    optimizers = build_optimizers(parameters, config)
    split_groups(
        optimizers,
        parameters,
        (),
        lambda update: rate_factors(model.arch, model.arch, config, update),
    )
    losses = []
    for step, batch in enumerate(x):
        set_learning_rate(optimizers, 0.003, step)
        logits = model(batch[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses
