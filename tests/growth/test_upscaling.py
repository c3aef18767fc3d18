"""Deeper models of copies and of means, and contexts of scaled RoPE: as transformers computes them."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from small_models import model_of
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.optimization import Adafactor

from instar.config.sections import Operation
from instar.growth import GrowthError, grow, plan_growth
from instar.growth.folders import grow_folder
from instar.growth.plan import Averaged
from instar.models.hf.pretrained_folder import open_folder

LAYER = "self_attn.q_proj.weight"


@torch.no_grad()
def logits(model: PreTrainedModel, length: int = 24) -> Tensor:
    ids = torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(1))
    result: Tensor = model.eval()(ids).logits
    return result


def trained_model(optimizer_of: object, kind: str = "llama") -> tuple[PreTrainedModel, Tensor]:
    model = copy.deepcopy(model_of(kind)).train()
    optimizer = optimizer_of(model.parameters())
    for number in range(2):
        ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("value", "options", "order"),
    [
        (2, {"how": "stack"}, [0, 1, 2, 0, 1, 2]),
        (2, {"how": "interleave"}, [0, 0, 1, 1, 2, 2]),
        (2, {"how": "overlap"}, [0, 1, 1, 2]),
        (3, {"how": "overlap", "drop": 1}, [0, 1, 1, 1, 2]),
    ],
)
def test_each_way_to_stack_is_the_map_of_its_paper(
    value: int, options: dict[str, object], order: list[int]
) -> None:
    config = model_of("llama").config
    assert (
        plan_growth(config, "stack_layers", value, **options)[1]
        == (plan_growth(config, "stack_layers", order)[1])
    )


def test_means_of_neighbours_come_between_them() -> None:
    model, old = copy.deepcopy(model_of("llama")), model_of("llama").model.layers
    grow(model, "stack_layers", 4, how="interpolate")
    layers = model.model.layers
    assert len(layers) == 12
    for new, below, share in ((0, 0, 0.0), (1, 0, 0.25), (3, 0, 0.75), (6, 1, 0.5), (10, 2, 0.0)):
        for name, tensor in layers[new].state_dict().items():
            above = old[min(below + 1, 2)].state_dict()[name]
            mean = torch.lerp(old[below].state_dict()[name], above, share)
            torch.testing.assert_close(tensor, mean)
    assert torch.equal(layers[4].mlp.up_proj.weight, old[1].mlp.up_proj.weight)


def test_inserted_copies_and_means_are_stacked_ones_at_the_places_that_are_named() -> None:
    config = model_of("gemma3_text").config
    of_all = plan_growth(config, "stack_layers", 2, how="interpolate")
    insertion = plan_growth(config, "insert_layers", 3, where=[1, 2, 3], **{"from": "average"})
    assert insertion[1].tensors == of_all[1].tensors
    assert insertion[0] == of_all[0]
    assert insertion[1].label == "lossy"
    copies = plan_growth(config, "insert_layers", 2, where=[1, 3], **{"from": "copy"})
    stacking = plan_growth(config, "stack_layers", [0, 0, 1, 2, 2])
    assert copies[1].tensors == stacking[1].tensors
    assert copies[0] == stacking[0]


def test_several_means_at_one_place_are_evenly_apart() -> None:
    model, old = copy.deepcopy(model_of("llama")), model_of("llama").model.layers
    grow(model, "insert_layers", 3, where=[2, 2, 0], **{"from": "average"})
    below, above = (old[layer].get_parameter(LAYER) for layer in (1, 2))
    weights = [block.get_parameter(LAYER) for block in model.model.layers]
    assert torch.equal(weights[0], weights[1])  # nothing is below the first
    for at, share in ((3, 1 / 3), (4, 2 / 3)):
        torch.testing.assert_close(weights[at], torch.lerp(below, above, share))


@pytest.mark.parametrize("moments", ["asymmetric", "mapped", "reset"])
def test_moments_of_a_mean_are_means(moments: str) -> None:
    model, optimizer = trained_model(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    old = [copy.deepcopy(optimizer.state[b.get_parameter(LAYER)]) for b in model.model.layers]
    grow(model, "stack_layers", 2, how="interpolate", optimizer=optimizer, moments=moments)
    state = optimizer.state[model.model.layers[1].get_parameter(LAYER)]
    if moments == "reset":
        assert not state
        return
    for name in ("exp_avg", "exp_avg_sq"):
        mean = (old[0][name] + old[1][name]) / 2
        zero = name == "exp_avg" and moments == "asymmetric"
        torch.testing.assert_close(state[name], torch.zeros_like(mean) if zero else mean)
    assert state["step"] == old[0]["step"]
    ids = torch.randint(0, 64, (2, 16))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


def test_factored_moments_of_a_mean_are_means() -> None:
    model, optimizer = trained_model(lambda parameters: Adafactor(parameters, beta1=0.9))
    old = [copy.deepcopy(optimizer.state[b.get_parameter(LAYER)]) for b in model.model.layers]
    grow(model, "stack_layers", 2, how="interpolate", optimizer=optimizer, moments="mapped")
    state = optimizer.state[model.model.layers[3].get_parameter(LAYER)]
    for name in ("exp_avg", "exp_avg_sq_row", "exp_avg_sq_col"):
        torch.testing.assert_close(state[name], (old[1][name] + old[2][name]) / 2)


def test_a_folder_gets_the_same_means(tmp_path: Path) -> None:
    model = copy.deepcopy(model_of("gemma3_text"))
    model.save_pretrained(tmp_path / "small")
    operation = Operation("stack_layers", 2, {"how": "interpolate"})
    grow_folder(open_folder(tmp_path / "small"), tmp_path / "grown", [operation])
    grow(model, operation)
    loaded_model = AutoModelForCausalLM.from_pretrained(tmp_path / "grown")
    assert torch.equal(logits(loaded_model), logits(model))
    growth_plan = plan_growth(model_of("gemma3_text").config, operation)[1]
    assert sum(isinstance(entry, Averaged) for entry in growth_plan.tensors.values()) == 2 * 13


@pytest.mark.parametrize(
    ("value", "options", "message"),
    [
        ([0, 1, 2, 2], {"how": "stack"}, "a layer map says itself where copies are"),
        (2, {"drop": 1}, "drop requires how: overlap"),
        (2, {"how": "overlap", "drop": 2}, "choose at most 1"),
        (2, {"how": "mean"}, "how: must be stack or interleave"),
    ],
)
def test_what_no_stack_is(value: object, options: dict[str, object], message: str) -> None:
    with pytest.raises(GrowthError, match=message):
        plan_growth(model_of("llama").config, "stack_layers", value, **options)


@pytest.mark.parametrize("rope", ["linear", "yarn", "dynamic"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_a_scaled_context_is_what_transformers_makes_of_its_config(
    kind: str, rope: str, tmp_path: Path
) -> None:
    model = model_of(kind)
    model.save_pretrained(tmp_path / "small")
    operation = Operation("extend_context", "x4", {"rope": rope})
    growth = grow_folder(open_folder(tmp_path / "small"), tmp_path / "grown", [operation])
    grown_model = AutoModelForCausalLM.from_pretrained(tmp_path / "grown")
    config = copy.deepcopy(model.config)
    config.max_position_embeddings = 32 if rope == "dynamic" else 128
    config.rope_parameters |= {"rope_type": rope, "factor": 4.0}
    if rope == "yarn":
        config.rope_parameters["original_max_position_embeddings"] = 32
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "small", config=config)
    assert torch.equal(logits(grown_model), logits(expected))
    assert torch.equal(logits(grown_model, 100), logits(expected, 100))
    assert growth.proof is not None
    assert growth.proof.label == ("exact" if rope == "dynamic" else "lossy")
    plain = logits(model, 100)
    assert (logits(grown_model, 100) - plain).abs().max() > 1e-4


def test_only_layers_with_full_attention_are_scaled() -> None:
    model: nn.Module = copy.deepcopy(model_of("gemma3_text"))
    grow(model, "extend_context", "x2", rope="linear")
    rope = model.config.rope_parameters
    assert rope["full_attention"] == {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}
    assert (
        rope["sliding_attention"]
        == model_of("gemma3_text").config.rope_parameters["sliding_attention"]
    )


@pytest.mark.parametrize(
    ("kind", "times", "message"),
    [
        ("llama", 2, "RoPE is scaled already, by 'linear'"),
        ("phi3", 1, "RoPE is not scaled by 'linear'"),
        ("gpt2", 1, "models of transformers with RoPE only"),
    ],
)
def test_what_is_not_scaled_is_refused(kind: str, times: int, message: str) -> None:
    shape = model_of(kind).config.to_dict()
    for _ in range(times - 1):
        shape = plan_growth(shape, "extend_context", "x2", rope="linear")[0].to_dict()
    with pytest.raises(GrowthError, match=message):
        plan_growth(shape, "extend_context", "x2", rope="linear")
