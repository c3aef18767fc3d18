"""Families of transformers: the tables of axes are those of the real classes, and growth by them is exact as
transformers computes it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_models import EXACT, OTHER, REFUSED, model_of
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from instar.config.sections import Operation
from instar.growth.apply import apply
from instar.growth.operators import plan
from instar.growth.plan import GrowthError
from instar.growth.states import Role
from instar.models.hf.families import FAMILIES
from instar.models.hf.pretrained import PretrainedShape
from instar.models.shape import ArchitectureError


def shape_of(model: PreTrainedModel) -> PretrainedShape:
    return PretrainedShape(model.config.to_dict())


def grow_model(model: PreTrainedModel, operation: Operation) -> tuple[PreTrainedModel, Any]:
    """The model after an operation, built by transformers alone from the new config."""
    shape = shape_of(model)
    larger, growth = plan(shape, operation)
    tensors = {shape.name(name): p.detach() for name, p in model.named_parameters()}
    config = CONFIG_MAPPING[shape.config["model_type"]].from_dict(copy.deepcopy(larger.to_dict()))
    larger_model = AutoModelForCausalLM.from_config(config).eval()
    new = apply(growth, tensors, Role.PARAMETER, (0, 0))
    with torch.no_grad():
        for name, parameter in larger_model.named_parameters():
            parameter.copy_(new[larger.name(name)])
    return larger_model, growth


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    ids = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(1))
    result: Tensor = model(ids).logits[..., :64]
    return result


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_table_names_every_parameter_with_its_shape(kind: str) -> None:
    model = model_of(kind)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    shape = shape_of(model)
    assert shape.mismatches(shapes) == []
    del shapes[next(iter(shapes))]
    shapes["lm_head.extra"] = (3,)
    assert [line.partition(":")[0] for line in shape.mismatches(shapes)] == [
        "lm_head.extra",
        next(name for name, _ in model.named_parameters()),
    ]


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("kind", FAMILIES)
def test_exact_operations_leave_what_transformers_computes(kind: str, name: str) -> None:
    model, operation = model_of(kind), EXACT[name]
    if name in REFUSED.get(kind, ()):
        with pytest.raises(GrowthError, match=rf"^{operation.name}: "):
            plan(shape_of(model), operation)
        return
    larger, growth = grow_model(model, operation)
    assert growth.label == "exact"
    before, after = logits(model), logits(larger)
    assert (before - after).abs().max() <= 1e-5 * before.abs().max()
    assert sum(p.numel() for p in larger.parameters()) > sum(
        p.numel() for p in model.parameters()
    ) or (name == "extend_context")


@pytest.mark.parametrize("name", OTHER)
@pytest.mark.parametrize("kind", FAMILIES)
def test_other_operations_lead_to_models_that_transformers_runs(kind: str, name: str) -> None:
    model = model_of(kind)
    larger, growth = grow_model(model, OTHER[name])
    assert growth.label == ("bounded" if name == "resize_vocab" else "lossy")
    difference = (logits(larger) - logits(model)).abs().max()
    assert difference < 1e-5 if name == "resize_vocab" else difference > 1e-3


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_is_new_receives_gradients(kind: str) -> None:
    """Two steps after new blocks: the zero is one factor of what they write."""
    larger, _ = grow_model(model_of(kind), EXACT["insert_layers"])
    larger.train()
    optimizer = torch.optim.SGD(larger.parameters(), lr=1e-2)
    ids = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        optimizer.zero_grad()
        larger(ids, labels=ids).loss.backward()
        optimizer.step()
    dead = [name for name, p in larger.named_parameters() if p.grad is None or not p.grad.any()]
    assert dead == []


def test_an_unknown_family_or_config_is_refused_by_name() -> None:
    with pytest.raises(ArchitectureError, match="'bloom' is not a known family"):
        PretrainedShape({"model_type": "bloom"})
    config = model_of("qwen3_moe").config.to_dict() | {
        "decoder_sparse_step": 2,
        "hidden_size": "32",
    }
    with pytest.raises(
        ArchitectureError, match=r"(?s)decoder_sparse_step is 2.*hidden_size must be"
    ):
        PretrainedShape(config)


def test_scaled_rope_keeps_heads_as_they_are() -> None:
    config = model_of("llama").config.to_dict()
    config["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(GrowthError, match="grow_head_dim: RoPE of this model is scaled"):
        plan(PretrainedShape(config), EXACT["grow_head_dim"])
