"""Which parameter gets which update, and at which rate."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from small_models import model_of
from torch.nn import Parameter

from instar.config.schema import OptimizerConfig
from instar.data.loader import MicroBatch, StepBatch
from instar.data.order import StepPlan
from instar.distributed.world import World
from instar.models.hf.families import FAMILIES
from instar.run.optimizer import (
    build_optimizers,
    check_covered,
    group_parameters,
    load_optimizer_tensors,
    optimizer_tensors,
    set_learning_rate,
)
from instar.run.parallel.replicated import VirtualRanks
from instar.run.parallel.strategy import MicroBatchCalls

SHAPES = {
    "token_embedding.weight": 2,
    "blocks.0.attn_norm.weight": 1,
    "blocks.0.attn.query.weight": 2,
    "blocks.0.attn.query.bias": 1,
    "head.weight": 2,
}


def groups(**changes: object) -> dict[tuple[str, float], tuple[str, ...]]:
    config = OptimizerConfig.model_validate({"weight_decay": 0.1, **changes})
    return {(g.update, g.weight_decay): g.names for g in group_parameters(SHAPES, config)}


def test_vectors_and_named_patterns_are_not_decayed() -> None:
    assert groups() == {
        ("adamw", 0.0): (
            "token_embedding.weight",
            "blocks.0.attn_norm.weight",
            "blocks.0.attn.query.bias",
        ),
        ("adamw", 0.1): ("blocks.0.attn.query.weight", "head.weight"),
    }


@pytest.mark.parametrize("kind", FAMILIES)
def test_embeddings_of_transformers_models_are_not_decayed_and_all_other_matrices_are(
    kind: str,
) -> None:
    """As those of a GPT."""
    model = model_of(kind)
    modules = model.named_modules()
    embeddings = {f"{n}.weight" for n, module in modules if isinstance(module, torch.nn.Embedding)}
    shapes = {name: parameter.ndim for name, parameter in model.named_parameters()}
    decay = {
        n: g.weight_decay for g in group_parameters(shapes, OptimizerConfig()) for n in g.names
    }
    assert embeddings
    assert {name for name in shapes if shapes[name] > 1 and not decay[name]} == embeddings


def test_muon_takes_the_matrices_of_blocks_and_nothing_else() -> None:
    names_of = groups(name="muon", no_decay=())
    assert names_of["muon", 0.1] == ("blocks.0.attn.query.weight",)
    assert names_of["adamw", 0.1] == ("token_embedding.weight", "head.weight")


def test_sgd_is_torchs_and_has_no_weight_decay_unless_it_is_set() -> None:
    assert set(groups(name="sgd")) == {("sgd", 0.0), ("sgd", 0.1)}
    parameter = Parameter(torch.ones(2, 2))
    config = OptimizerConfig.model_validate({"name": "sgd", "nesterov": True})
    (optimizer,) = build_optimizers({"head.weight": parameter}, config)
    assert isinstance(optimizer, torch.optim.SGD)
    (group,) = optimizer.param_groups
    assert (group["momentum"], group["nesterov"], group["weight_decay"]) == (0.9, True, 0.0)


def test_every_group_keeps_its_ratio_to_the_learning_rate() -> None:
    parameters = {name: Parameter(torch.ones(*[2] * n)) for name, n in SHAPES.items()}
    config = OptimizerConfig.model_validate({"name": "muon", "lr": 1e-3, "muon_lr": 2e-2})
    optimizers = build_optimizers(parameters, config)
    set_learning_rate(optimizers, 5e-4, 0)
    rates = {type(o).__name__: {g["lr"] for g in o.param_groups} for o in optimizers}
    assert rates == {"AdamW": {5e-4}, "BatchedMuon": {1e-2}}


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("muon", "blocks.0.attn.query.weight/momentum_buffer"),
        ("sgd", "head.weight/momentum_buffer"),
    ],
)
def test_state_travels_by_name(name: str, state: str) -> None:
    def parameters() -> dict[str, Parameter]:
        return {name: Parameter(torch.ones(*[2] * n)) for name, n in SHAPES.items()}

    def update(parameters: dict[str, Parameter], optimizers: list[torch.optim.Optimizer]) -> None:
        set_learning_rate(optimizers, 0.1, 0)
        for number, parameter in enumerate(parameters.values()):
            parameter.grad = torch.full_like(parameter, 0.1 * (number + 1))
        for optimizer in optimizers:
            optimizer.step()

    config = OptimizerConfig.model_validate({"name": name})
    first = parameters()
    first_optimizers = build_optimizers(first, config)
    update(first, first_optimizers)
    second = {name: Parameter(p.detach().clone()) for name, p in first.items()}
    second_optimizers = build_optimizers(second, config)
    tensors = {
        key: tensor.clone() for key, tensor in optimizer_tensors(first_optimizers, first).items()
    }
    load_optimizer_tensors(second_optimizers, second, tensors)
    update(first, first_optimizers)
    update(second, second_optimizers)
    assert state in tensors
    for name in first:
        assert torch.equal(first[name], second[name])


STEPS = """
import sys
import torch
from instar.config.schema import OptimizerConfig
from instar.config.torch_optim.optimizers import OPTIMIZERS
from instar.run.optimizer import build_optimizers

def trained(make):
    torch.manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(4, 16))
    for optimizer in make({"blocks.0.weight": weight}):
        for _ in range(3):
            optimizer.zero_grad()
            weight.square().sum().backward()
            optimizer.param_groups[0]["lr"] = 0.1
            optimizer.step()
    return weight

configs = {name: OptimizerConfig.model_validate({"name": name}) for name in OPTIMIZERS}
for name in ("adamw", "muon"):
    configs[name] = OptimizerConfig(name=name, weight_decay=0.0)
ours = {name: trained(lambda p: build_optimizers(p, config)) for name, config in configs.items()}
assert "torch._dynamo" not in sys.modules
adamw, sgd = configs["adamw"], configs["sgd"]
theirs = {
    "adamw": lambda p: [
        torch.optim.AdamW(
            [*p.values()], betas=(adamw.beta1, adamw.beta2), eps=adamw.eps, weight_decay=0.0, fused=True
        )
    ],
    "sgd": lambda p: [
        torch.optim.SGD([*p.values()], momentum=sgd.momentum, nesterov=sgd.nesterov, foreach=True)
    ],
}
for name, make in theirs.items():
    assert torch.equal(ours[name], trained(make)), name
"""


def test_optimizers_are_torchs_without_the_import_of_its_compiler() -> None:
    """The import takes a third of the time to the first step."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", STEPS], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


LAYOUTS = {
    "contiguous": lambda: torch.randn(6, 4),
    "transposed": lambda: torch.randn(4, 6).t(),
    "with gaps": lambda: torch.randn(6, 8)[:, ::2],
    "channels last": lambda: torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last),
    "empty": lambda: torch.randn(0, 4),
    "a number": lambda: torch.tensor(0.5),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_updates_follow_the_elements_however_they_lie_in_memory_also_with_loaded_states(
    name: str, layout: str
) -> None:
    """As torch's own optimizer of a contiguous copy, one element at a time."""
    torch.manual_seed(0)
    lying = LAYOUTS[layout]()
    config = OptimizerConfig.model_validate({"name": name, "weight_decay": 0.1})
    actual = Parameter(lying)
    expected = Parameter(lying.clone(memory_format=torch.contiguous_format))
    gradients = [torch.randn(lying.shape) for _ in range(4)]
    decay = 0.1 if lying.ndim > 1 else 0.0
    reference: torch.optim.Optimizer = (
        torch.optim.AdamW(
            [expected],
            lr=0.1,
            betas=(config.beta1, config.beta2),
            weight_decay=decay,
            foreach=False,
        )
        if name == "adamw"
        else torch.optim.SGD(
            [expected], lr=0.1, momentum=config.momentum, weight_decay=decay, foreach=False
        )
    )
    states: dict[str, torch.Tensor] = {}
    for gradient in gradients:
        # as a resumed run does at every step
        optimizers = build_optimizers({"w": actual}, config)
        set_learning_rate(optimizers, 0.1, 0)
        load_optimizer_tensors(optimizers, {"w": actual}, states)
        (actual * gradient).sum().backward()
        optimizers[0].step()
        actual.grad, expected.grad = None, gradient.clone()
        reference.step()
        new_states = optimizer_tensors(optimizers, {"w": actual})
        states = {
            name: tensor.clone(memory_format=torch.contiguous_format)
            for name, tensor in new_states.items()
        }
    torch.testing.assert_close(actual, expected)


def test_an_elastic_gradient_lies_as_its_parameter_does() -> None:
    world = World(0, 0, 1, torch.device("cpu"), "none")
    model = torch.nn.Conv2d(4, 4, 2).to(memory_format=torch.channels_last)
    strategy = VirtualRanks(world, model, 2)
    x = np.ones((2, 4, 3, 3), dtype=np.float32)
    micro = tuple(MicroBatch({"x": x}, 1.0, 2, rank, 0) for rank in range(2))
    calls = MicroBatchCalls(
        lambda micro: model(torch.from_numpy(micro.arrays["x"])).square().sum(),
        torch.autograd.backward,
        lambda: None,
    )
    strategy.accumulate(StepBatch(StepPlan(0, 0, 0, 4), micro, 1.0, (1, 1), 4), calls)
    assert model.weight.grad is not None
    assert model.weight.grad.stride() == model.weight.stride() != (16, 4, 2, 1)
    gradient = model.weight.grad.clone()
    model.weight.grad = None
    (2 * model(torch.from_numpy(x)).square().sum()).backward()
    torch.testing.assert_close(gradient, model.weight.grad)


def test_a_fused_optimizer_of_ones_own_is_refused_a_view_with_gaps() -> None:
    model = torch.nn.Linear(2, 2)
    model.weight = Parameter(torch.randn(2, 4)[:, ::2])
    with pytest.raises(ValueError, match="fused AdamW, and weight is a view with gaps in memory"):
        check_covered(
            [torch.optim.AdamW(model.parameters(), fused=True)], dict(model.named_parameters())
        )
    check_covered(
        [torch.optim.AdamW(model.parameters(), fused=False)], dict(model.named_parameters())
    )
