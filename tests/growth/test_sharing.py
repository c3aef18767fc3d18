"""A head that parts from the table of tokens: exact, and the optimizer as if the model had been born so."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from growing import (
    batch,
    build_model,
    grow_model,
    grow_optimizer,
    operation,
    proof,
    random_gpt,
    values,
)
from live import change_if_due, restore
from shapes import gpt2, llama
from small_models import model_of
from tiny_trainers import config, config_in, corpus, prepare_run, trainer
from transformers import AutoModelForCausalLM

from instar.checkpoint.listing import latest_checkpoint
from instar.checkpoint.store import load_checkpoint
from instar.config.schema import OptimizerConfig
from instar.growth import grow
from instar.growth.operators import plan
from instar.growth.plan import GrowthError
from instar.models.architecture import Architecture
from instar.models.gpt import GPT
from instar.models.lora import Lora
from instar.run.optimizer import (
    build_optimizers,
    load_optimizer_tensors,
    optimizer_tensors,
    set_learning_rate,
)
from instar.run.trainer import Trainer

__all__ = ["config", "config_in", "corpus", "prepare_run", "trainer"]

SIZES = {"vocab_size": 11, "n_embd": 16, "n_mlp": 12, "context": 6}
GPT2, LLAMA = gpt2(**SIZES), replace(llama(**SIZES), tied=True)
UNTIE = operation("untie_embeddings", True)
STYLES = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "with adapters of all": replace(LLAMA, lora=(Lora("all", 2, 3.0),)),
    "with one of the table": replace(GPT2, lora=(Lora("embedding", 2, 3.0), Lora("mlp", 1, 1.0))),
    "scaled embeddings": replace(LLAMA, embedding_multiplier=3.0),
}


@pytest.mark.parametrize("arch", STYLES.values(), ids=STYLES)
def test_the_head_begins_as_the_table_and_parts_from_it(arch: Architecture) -> None:
    model = random_gpt(arch)
    new, growth_plan = grow_model(model, UNTIE)
    assert growth_plan.label == "exact"
    assert proof(model, new, growth_plan).holds
    assert not new.arch.tied
    inputs, _ = batch(arch)
    assert torch.allclose(new(inputs), model(inputs), atol=1e-12)
    assert [entry for entry in new.arch.lora if entry.matches("head")] == []
    assert {name for name in new.arch.parameters() if ".lora_" in name} == {
        name for name in arch.parameters() if ".lora_" in name
    }
    new(*batch(arch)).backward()
    table, head = new.token_embedding.weight.grad, new.head.weight.grad
    assert table is not None
    assert head is not None
    assert not torch.allclose(table, head)


@pytest.mark.parametrize("update", ["adamw", "muon", "sgd"])
@pytest.mark.parametrize("arch", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_twenty_steps_are_those_of_a_model_born_untied_with_these_states(
    arch: Architecture, update: str
) -> None:
    """Its own optimizer, with groups made for an untied model: the head decays, the table does not."""
    config = OptimizerConfig(name=update, lr=0.01, weight_decay=0.1)
    model = random_gpt(arch)
    optimizers = train(model, config, 5)
    states = optimizer_tensors(optimizers, dict(model.named_parameters()))
    assert all(bool(state.any()) for state in states.values())
    grown_model, growth_plan = grow_model(model, UNTIE)
    grown_states = grow_optimizer(growth_plan, states, (7, 0))

    born_values = values(model) | {"head.weight": values(model)["token_embedding.weight"].clone()}
    born = build_model(replace(arch, tied=False), born_values)
    of_table = "token_embedding.weight/"
    born_states = states | {
        f"head.weight/{name.removeprefix(of_table)}": state.clone()
        for name, state in states.items()
        if name.startswith(of_table)
    }
    assert grown_states.keys() == born_states.keys()
    memory = [tensor.data_ptr() for tensor in grown_states.values()]
    assert len({*memory}) == len(memory)  # or one of them would be trained twice
    train(born, config, 20, {name: state.clone() for name, state in born_states.items()})
    train(grown_model, config, 20, grown_states)
    for name, value in values(born).items():
        assert torch.equal(values(grown_model)[name], value), name
    assert not torch.allclose(born.head.weight, born.token_embedding.weight)


def train(
    model: GPT, config: OptimizerConfig, steps: int, states: dict[str, torch.Tensor] | None = None
) -> list[torch.optim.Optimizer]:
    parameters = dict(model.named_parameters())
    optimizers = build_optimizers(parameters, config)
    if states is not None:
        load_optimizer_tensors(optimizers, parameters, states)
    for step in range(steps):
        set_learning_rate(optimizers, config.lr, step)
        model(*batch(model.arch)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return optimizers


def test_a_run_goes_on_with_two_tables(trainer: Callable[..., Trainer]) -> None:
    """And their states and averages; saved in the middle, it goes on alike."""
    keys = (
        "train.until=[6it]",
        "learning_rate.lr_decay_iters=6",
        "train.ema=0.9",
        "model.tied=true",
    )
    schedule = json.dumps([{"name": "untie_embeddings", "value": True, "when": {"at_step": 2}}])
    runs = [trainer(*keys, f"schedule={schedule}", name=name) for name in ("whole", "resumed")]
    full_run, resumed_run = runs
    for _ in range(4):
        change_if_due(full_run)
        full_run.step()
    full_run.save("now")
    full_run.parts.saver.finish()
    restore(resumed_run, load_checkpoint(latest_checkpoint(full_run.parts.saver.root)))
    for run in runs:
        run.train()
        stepper = run.parts.stepper
        table, head = (stepper.parameters[f"{name}.weight"] for name in ("token_embedding", "head"))
        tensors = [table, head, *stepper.states().values(), *(stepper.ema or {}).values()]
        assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)
        assert not torch.allclose(table, head, atol=1e-4)
    for name, parameter in full_run.parts.stepper.parameters.items():
        assert torch.equal(parameter, resumed_run.parts.stepper.parameters[name]), name
    (change,) = [c for c in full_run.state.history if c.operation.name == "untie_embeddings"]
    assert (change.step, change.skipped) == (2, "")


def test_a_head_of_its_own_is_not_untied_again() -> None:
    with pytest.raises(GrowthError, match="untie_embeddings: the head has a table of its own"):
        plan(replace(GPT2, tied=False), UNTIE)
    with pytest.raises(GrowthError, match="untie_embeddings: must be true, not 1"):
        plan(GPT2, operation("untie_embeddings", 1))


@pytest.mark.parametrize("kind", ["gpt2", "qwen2", "gemma2", "gemma3_text"])
def test_models_of_transformers_are_untied_and_load_from_their_folder(
    tmp_path: Path, kind: str
) -> None:
    model = copy.deepcopy(model_of(kind))
    inputs = torch.arange(1, 13).reshape(2, 6)
    before = model(inputs).logits
    larger = grow(model, UNTIE)
    assert larger.config.tie_word_embeddings is False
    table, head = larger.get_input_embeddings().weight, larger.get_output_embeddings().weight
    assert table.data_ptr() != head.data_ptr()
    assert torch.allclose(larger.eval()(inputs).logits, before, atol=1e-6)
    larger.save_pretrained(tmp_path / "untied")
    loaded_model = AutoModelForCausalLM.from_pretrained(tmp_path / "untied").eval()
    assert torch.allclose(loaded_model(inputs).logits, before, atol=1e-6)
    loaded_model.get_output_embeddings().weight.data.mul_(2)
    assert not torch.allclose(loaded_model(inputs).logits, before, atol=1e-3)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3", "olmo2", "phi3", "mixtral"])
def test_heads_of_their_own_are_refused_in_models_of_transformers(kind: str) -> None:
    with pytest.raises(GrowthError, match="the head has a table of its own already"):
        grow(copy.deepcopy(model_of(kind)), UNTIE)


def test_dropout_changes_nothing_but_training() -> None:
    model = random_gpt(GPT2).eval()
    new, growth_plan = grow_model(model, operation("set_dropout", 0.25))
    assert (growth_plan.label, new.arch.dropout) == ("exact", 0.25)
    new.eval()
    assert proof(model, new, growth_plan).holds
    inputs, _ = batch(GPT2)
    eval_logits = new(inputs)
    assert torch.equal(eval_logits, model(inputs))
    new.train()
    assert not torch.equal(new(inputs), eval_logits)
    half, _ = grow_model(new, operation("change_dropout", 0.5))
    assert half.arch.dropout == 0.125
    for value, message in ((8, "the result would be 2"), (0.0, "must be a factor above 0")):
        with pytest.raises(GrowthError, match=message):
            plan(new.arch, operation("change_dropout", value))
