"""A GPT whose MLPs are experts, of which each token uses some."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import parametrize_first
from growing import batch, random_gpt
from shapes import gpt2, llama
from torch import Tensor

from instar.config.language import ModelConfig, shape_checks
from instar.config.sections import Operation
from instar.growth.operators import plan
from instar.models.architecture import Architecture, resolve_architecture, section_of
from instar.models.cost import TrainingSetup, flops_per_token, memory_estimate, state_bytes
from instar.models.experts import (
    Groups,
    each_linear,
    expert_parameters,
    grouped_linear,
    load_balancing_loss,
)
from instar.models.gpt import GPT, KVCache
from instar.models.hf.pretrained import PretrainedShape
from instar.models.loss import IGNORED
from instar.models.shape import ArchitectureError, count_parameters

SIZES = {"n_embd": 16, "n_mlp": 12, "context": 6, "vocab_size": 11, "num_experts": 4}
GPT2, LLAMA = gpt2(**SIZES, num_experts_per_tok=1), llama(**SIZES)
CONFIG = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "vocab_size": 11,
    "max_position_embeddings": 6,
}
STYLES = {"one per token": GPT2, "two per token": LLAMA}
EACH_STYLE = pytest.mark.parametrize("arch", STYLES.values(), ids=list(STYLES))


def one_by_one(model: GPT, x_BTD: Tensor) -> Tensor:
    """The experts of the first block, a token at a time, by the definition."""
    mlp = model.blocks[0].mlp
    rows = []
    for x in x_BTD.flatten(0, 1):
        p = (mlp.router.weight @ x).softmax(0)
        experts = p.topk(mlp.per_token).indices.tolist()
        total = torch.zeros_like(x)
        for expert in experts:
            h = mlp.up.weight[expert] @ x
            if mlp.gate is not None:
                h = F.silu(mlp.gate.weight[expert] @ x) * h
            else:
                h = F.gelu(h + mlp.up.bias[expert])
            y = mlp.down.weight[expert] @ h
            y = y if mlp.down.bias is None else y + mlp.down.bias[expert]
            total = total + p[expert] / p[experts].sum() * y
        rows.append(total)
    return torch.stack(rows).view_as(x_BTD)


@EACH_STYLE
def test_a_token_gets_the_weighted_sum_of_its_experts(arch: Architecture) -> None:
    model = random_gpt(arch)
    x_BTD = torch.randn(2, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    output, logits_BTE = model.blocks[0].mlp(x_BTD, None)
    torch.testing.assert_close(output, one_by_one(model, x_BTD), rtol=1e-12, atol=1e-12)
    assert logits_BTE.shape == (2, 6, 4)


def results(function: Any) -> list[Tensor]:
    """Output and gradients of five experts, of which the second and the last have no rows."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(size, generator=generator, requires_grad=True)
        for size in ((20, 16), (5, 24, 16), (5, 24))
    )
    groups = Groups(
        torch.tensor([0] * 7 + [2] * 5 + [3] * 8), torch.tensor([7, 7, 12, 20, 20]).int()
    )
    y = function(x, weight, bias, groups)
    return [y, *torch.autograd.grad((y * torch.arange(24.0)).sin().sum(), (x, weight, bias))]


def test_the_grouped_kernel_computes_the_same_as_one_expert_after_the_other() -> None:
    loop_results, kernel_results = results(each_linear), results(grouped_linear)
    for tensor, other in zip(loop_results, kernel_results, strict=True):
        torch.testing.assert_close(tensor, other, rtol=1e-4, atol=1e-4)


def test_an_expert_without_tokens_has_a_gradient_of_zero() -> None:
    """And not none: ranks under DDP wait for one."""
    _, _, weight, bias = results(each_linear)
    for gradient in (weight, bias):
        assert [bool(expert_gradient.any()) for expert_gradient in gradient] == [
            True,
            False,
            True,
            True,
            False,
        ]


@EACH_STYLE
def test_the_router_learns_from_the_loss(arch: Architecture) -> None:
    model = random_gpt(arch)
    inputs, targets = batch(arch)
    model(inputs, targets).backward()
    for block in model.blocks:
        assert block.mlp.router.weight.grad.abs().max() > 1e-4


def test_balance_is_that_of_each_sample() -> None:
    """Whichever samples it is computed with; targets that do not count do not."""
    generator = torch.Generator().manual_seed(0)
    logits_LBTE = torch.randn(3, 4, 8, 5, generator=generator, dtype=torch.float64)
    targets_BT = torch.randint(9, (4, 8), generator=generator)
    targets_BT[1, 5:] = IGNORED
    targets_BT[3] = IGNORED
    expected = 0.0
    for layer in logits_LBTE:
        for sample, targets in zip(layer, targets_BT, strict=True):
            p_TE = sample.softmax(-1)[targets != IGNORED]
            if len(p_TE):
                f_E = F.one_hot(p_TE.topk(2).indices, 5).sum((0, 1)).double() / (2 * len(p_TE))
                expected += len(p_TE) * 5 * (f_E * p_TE.mean(0)).sum().item()
    loss = load_balancing_loss(logits_LBTE, targets_BT, 2)
    halves = (load_balancing_loss(logits_LBTE[:, h], targets_BT[h], 2) for h in ([0, 1], [2, 3]))
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert sum(half.item() for half in halves) == pytest.approx(expected, rel=1e-12)


def test_even_routing_has_the_least_balance_loss() -> None:
    even = torch.eye(4).repeat(2, 1)[None, None] * 1e-3
    uneven = torch.zeros(1, 1, 8, 4)
    uneven[..., 0] = 20.0
    targets = torch.zeros(1, 8, dtype=torch.long)
    assert load_balancing_loss(even, targets, 1).item() / 8 == pytest.approx(1.0, abs=1e-3)
    assert load_balancing_loss(uneven, targets, 1).item() / 8 == pytest.approx(4.0, abs=1e-3)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # by dynamo
@parametrize_first("arch", STYLES.values(), first=1, ids=list(STYLES))
def test_recomputed_and_compiled_blocks_have_the_same_gradients(arch: Architecture) -> None:
    model = random_gpt(arch)
    inputs, targets = batch(arch)

    def gradients(run: Any) -> list[Tensor]:
        loss, balance = run(inputs, targets, balance=True)
        return list(torch.autograd.grad(loss + balance, list(model.parameters())))

    expected = gradients(model)
    compiled = gradients(torch.compile(model, backend="eager"))
    model.gradient_checkpointing = True
    for gradient, other, checkpoint_gradient in zip(
        expected, compiled, gradients(model), strict=True
    ):
        torch.testing.assert_close(gradient, other)
        assert torch.equal(gradient, checkpoint_gradient)


@EACH_STYLE
def test_kept_keys_and_values_change_nothing(arch: Architecture) -> None:
    model = random_gpt(arch)
    tokens = batch(arch)[0]
    cache = KVCache()
    with torch.no_grad():
        parts = [model(tokens[:, at], cache=cache) for at in ([0, 1, 2], [3], [4], [5])]
        torch.testing.assert_close(torch.cat(parts, 1), model(tokens), rtol=1e-9, atol=1e-9)


def test_flops_count_the_experts_that_a_token_uses_and_memory_all() -> None:
    dense = replace(LLAMA, num_experts=None, num_experts_per_tok=None, router_aux_loss_coef=None)
    mlp, router = 3 * 16 * 12, 4 * 16
    assert flops_per_token(LLAMA) - flops_per_token(dense) == 6 * 2 * (mlp + router)
    more = count_parameters(LLAMA).total - count_parameters(dense).total
    assert more == 2 * (3 * mlp + router)
    assert (
        state_bytes(LLAMA.parameters())["weights"] - state_bytes(dense.parameters())["weights"]
        == 4 * more
    )
    activations = [
        memory_estimate(arch, TrainingSetup(batch_size=4))["activations"] for arch in (dense, LLAMA)
    ]
    assert activations[1] > activations[0]


def test_flops_of_a_model_of_transformers_count_the_experts_that_a_token_uses() -> None:
    sizes = {**CONFIG, "num_local_experts": 4, "num_experts_per_tok": 1}
    arch = PretrainedShape({**sizes, "model_type": "mixtral"})
    dense = PretrainedShape({**CONFIG, "model_type": "mistral"})
    assert flops_per_token(arch) - flops_per_token(dense) == 6 * 2 * 4 * 16


def test_routers_and_biases_are_vectors_of_experts() -> None:
    """Neither is orthogonalised by Muon, and neither decays."""
    names = expert_parameters(GPT(GPT2))
    assert {name.removeprefix("blocks.0.mlp.") for name in names if "blocks.0" in name} == {
        "router.weight",
        *(f"{part}.{kind}" for part in ("up", "down") for kind in ("weight", "bias")),
    }
    table = GPT2.parameters()
    assert table["blocks.0.mlp.up.weight"].dimensions == 2
    assert table["blocks.0.mlp.up.bias"].dimensions == 1
    assert table["blocks.0.mlp.router.weight"].dimensions == 1


@EACH_STYLE
def test_a_shape_is_the_same_after_json_and_as_a_section(arch: Architecture) -> None:
    assert Architecture.from_dict(arch.to_dict()) == arch
    assert resolve_architecture(section_of(arch), arch.vocab_size) == arch
    assert "num_experts" not in gpt2().to_dict()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 5}, "must be a whole number from 1 to 4 experts, not 5"),
        ({"num_experts_per_tok": None}, "not None"),
        ({"num_experts": 0}, "num_experts: must be a whole number above 0, not 0"),
        ({"num_experts": 10**9}, "num_experts: must be at most 4,096"),
        ({"num_experts": None}, "num_experts_per_tok: has no effect without num_experts"),
        ({"router_aux_loss_coef": -1.0}, "router_aux_loss_coef: must be a number from 0 on"),
    ],
)
def test_no_model_has_a_shape_that_contradicts_itself(changes: Any, message: str) -> None:
    with pytest.raises(ArchitectureError, match=message):
        Architecture.from_dict({**LLAMA.to_dict(), **changes})


def test_a_config_with_more_experts_per_token_than_experts_is_refused() -> None:
    (problem,) = shape_checks(ModelConfig(num_experts_per_tok=3, num_experts=2))
    assert problem.keys == ("model.num_experts_per_tok", "model.num_experts")
    (problem,) = shape_checks(ModelConfig(num_experts_per_tok=3))
    assert "which is not set" in problem.message


def test_all_experts_of_an_upcycled_model_get_tokens() -> None:
    """Routers are drawn: of equal logits, the largest would be the same for every token."""
    arch, _ = plan(gpt2(n_embd=64, context=64), Operation("upcycle", 4, {}))
    model = GPT(arch)
    model.init_weights(0)
    loads = []
    for block in model.blocks:
        block.mlp.register_forward_hook(lambda _m, _i, out: loads.append(out[1].topk(2).indices))
    model(batch(arch, 8)[0])
    for experts in loads:
        share = experts.flatten().bincount(minlength=4) / experts.numel()
        assert share.min() > 0.02


@pytest.mark.torture
def test_models_are_imported_without_the_compiler() -> None:
    """It takes a second."""
    code = "import sys, instar.models.gpt; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
