"""Blocks that run several times with shared weights, and their passes as blocks of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from shapes import gpt2, llama
from started import run_ranks
from tiny_trainers import config, config_in, corpus, prepare_run

from instar.checkpoint.listing import latest_checkpoint
from instar.checkpoint.store import load_checkpoint
from instar.config.load import Loaded
from instar.config.schema import OptimizerConfig
from instar.growth.operators import plan
from instar.growth.plan import GrowthError
from instar.models.architecture import Architecture
from instar.models.cost import TrainingSetup, flops_per_token, memory_estimate
from instar.models.gpt import GPT
from instar.models.lora import Lora
from instar.models.shape import ArchitectureError, Loop
from instar.record.events import Train, read_events
from instar.run.optimizer import (
    build_optimizers,
    load_optimizer_tensors,
    optimizer_tensors,
    set_learning_rate,
)

__all__ = ["config", "config_in", "corpus", "prepare_run"]

SIZES = {"vocab_size": 11, "n_embd": 16, "n_mlp": 12, "context": 6, "n_layer": 3}
STYLES: dict[str, Architecture] = {
    "gpt2": gpt2(**SIZES),
    "llama": llama(**SIZES),
    "adapters": replace(
        llama(**SIZES), lora=(Lora("blocks.1.*", 2, 3.0), Lora("embedding", 1, 1.0))
    ),
    "experts": replace(
        llama(**SIZES), num_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.01
    ),
    "convolutions": replace(gpt2(**SIZES), conv_size=3),
    "windows": replace(llama(**SIZES), windows=(None, 3, 2)),
}
LOOP = {"from": 1, "to": 2, "times": 3}
PASSES = (0, 1, 2, 1, 2, 1, 2)


@pytest.mark.parametrize("arch", STYLES.values(), ids=STYLES)
def test_a_loop_is_the_model_of_its_passes_and_unlooping_changes_nothing(
    arch: Architecture,
) -> None:
    model = random_gpt(arch)
    looped_model, growth_plan = grow_model(model, operation("loop_layers", LOOP))
    assert growth_plan.label == "lossy"
    assert values(looped_model).keys() == values(model).keys()
    inputs, targets = batch(arch)
    assert (looped_model(inputs) - model(inputs)).abs().max() > 1e-3
    unlooped_model, growth_plan = grow_model(looped_model, operation("unloop", True))
    assert growth_plan.label == "exact"
    assert proof(looped_model, unlooped_model, growth_plan).holds
    assert unlooped_model.arch.n_layer == len(PASSES)
    for name, value in values(unlooped_model).items():
        if name.startswith("blocks."):
            layer, _, suffix = name.removeprefix("blocks.").partition(".")
            name = f"blocks.{PASSES[int(layer)]}.{suffix}"
        assert torch.equal(value, values(model)[name])
    # shared weights have the gradients of all their passes
    looped_model(inputs, targets).backward()
    unlooped_model(inputs, targets).backward()
    for name, parameter in looped_model.named_parameters():
        if not name.startswith("blocks."):
            continue
        layer, _, suffix = name.removeprefix("blocks.").partition(".")
        gradients = [
            unlooped_model.get_parameter(f"blocks.{number}.{suffix}").grad
            for number, source in enumerate(PASSES)
            if source == int(layer)
        ]
        present = [gradient for gradient in gradients if gradient is not None]
        if parameter.grad is not None:
            assert torch.allclose(parameter.grad, sum(present[1:], present[0]), atol=1e-10), name


@pytest.mark.parametrize("arch", STYLES.values(), ids=STYLES)
def test_costs_are_those_of_the_passes(arch: Architecture) -> None:
    looped_arch, _ = plan(arch, operation("loop_layers", LOOP))
    unlooped_arch, _ = plan(looped_arch, operation("unloop", True))
    assert flops_per_token(looped_arch, 5) == flops_per_token(unlooped_arch, 5)
    assert flops_per_token(looped_arch, 5) > flops_per_token(arch, 5)
    for checkpointing in (False, True):
        setup = TrainingSetup(4, gradient_checkpointing=checkpointing)
        looped_memory, unlooped_memory = (
            memory_estimate(shape, setup) for shape in (looped_arch, unlooped_arch)
        )
        if not arch.lora:
            assert looped_memory["activations"] == unlooped_memory["activations"]
        assert looped_memory["weights"] == memory_estimate(arch, setup)["weights"]


@pytest.mark.parametrize("arch", STYLES.values(), ids=STYLES)
def test_a_cache_tells_passes_apart(arch: Architecture) -> None:
    model, _ = grow_model(random_gpt(arch), operation("loop_layers", LOOP))
    model.eval()
    inputs, _ = batch(arch)
    expected, cache = model(inputs), model.new_cache()
    first = model(inputs[:, :3], cache=cache)
    later = [model(inputs[:, at : at + 1], cache=cache) for at in range(3, inputs.shape[1])]
    assert torch.allclose(torch.cat((first, *later), 1), expected, atol=1e-10)


def test_recomputed_blocks_of_a_loop_have_the_same_gradients() -> None:
    arch, _ = plan(STYLES["llama"], operation("loop_layers", LOOP))
    gradients = []
    for checkpointing in (False, True):
        model = random_gpt(arch)
        model.gradient_checkpointing = checkpointing
        model(*batch(arch)).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("update", ["adamw", "muon"])
def test_twenty_steps_are_those_of_a_model_born_with_these_blocks_and_states(update: str) -> None:
    optimizer = OptimizerConfig(name=update, lr=0.01, weight_decay=0.1)
    model, _ = grow_model(random_gpt(STYLES["llama"]), operation("loop_layers", LOOP))
    states = optimizer_tensors(train(model, optimizer, 5), dict(model.named_parameters()))
    unlooped_model, growth_plan = grow_model(model, operation("unloop", True))
    grown_states = grow_optimizer(growth_plan, states, (7, 0))

    def of_pass(name: str) -> str:
        if not name.startswith("blocks."):
            return name
        layer, _, suffix = name.removeprefix("blocks.").partition(".")
        return f"blocks.{PASSES[int(layer)]}.{suffix}"

    born = build_model(
        replace(STYLES["llama"], n_layer=len(PASSES)),
        {name: values(model)[of_pass(name)].clone() for name in unlooped_model.arch.parameters()},
    )
    born_states = {name: states[of_pass(name)].clone() for name in grown_states}
    assert len({state.data_ptr() for state in grown_states.values()}) == len(grown_states)
    train(unlooped_model, optimizer, 20, grown_states)
    train(born, optimizer, 20, born_states)
    for name, value in values(born).items():
        assert torch.equal(values(unlooped_model)[name], value), name
    assert not torch.equal(
        values(born)["blocks.1.mlp.up.weight"], values(born)["blocks.3.mlp.up.weight"]
    )


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


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("loop_layers", {"from": 1, "to": 3, "times": 2}, "there are no layers 1 to 3"),
        ("loop_layers", {"from": 2, "to": 1, "times": 2}, "there are no layers 2 to 1"),
        ("loop_layers", {"from": -1, "to": 1, "times": 2}, "needs the number of a layer"),
        ("loop_layers", {"from": 0, "to": 1, "times": 1}, "needs a whole factor of at least 2"),
        ("loop_layers", 2, r"needs \{from: …, to: …, times: …\}"),
        ("unloop", True, "no layers are looped"),
        ("unloop", 2, "must be true"),
    ],
)
def test_other_loops_are_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises((GrowthError, ArchitectureError), match=message):
        plan(STYLES["llama"], operation(name, value))


@pytest.mark.parametrize(
    ("name", "value"), [("stack_layers", 2), ("insert_layers", 1), ("loop_layers", LOOP)]
)
def test_depth_does_not_change_while_layers_are_looped(name: str, value: Any) -> None:
    looped_arch = replace(STYLES["llama"], loop=Loop(0, 1, 2))
    with pytest.raises(GrowthError, match="unloop first"):
        plan(looped_arch, operation(name, value))
    wider, _ = plan(looped_arch, operation("widen_mlp", "x2"))
    assert wider.loop == Loop(0, 1, 2)
    assert Architecture.from_dict(json.loads(json.dumps(wider.to_dict()))) == wider


SCHEDULE = [
    {"name": "loop_layers", "value": {"from": 0, "to": 1, "times": 2}, "when": {"at_step": 3}},
    {"name": "widen_mlp", "value": "x1.5", "when": {"at_step": 5}},
    {"name": "untie_embeddings", "value": True, "when": {"at_step": 6}},
    {"name": "unloop", "value": True, "when": {"at_step": 9}},
]


@pytest.mark.torture
@pytest.mark.parametrize("reproducible", ["elastic", "fixed"])
def test_any_number_of_ranks_and_any_strategy_train_a_loop_alike(
    config_in: Callable[..., Loaded], tmp_path: Path, reproducible: str
) -> None:
    """Resumed while layers are looped."""
    run_config = config_in(
        tmp_path,
        f"schedule={json.dumps(SCHEDULE)}",
        "train.until=[12it]",
        "train.batch_size=4",
        "train.ema=0.9",
        "optimizer.name=muon",
        "learning_rate.lr_decay_iters=12",
        f"reproducible={reproducible}",
    )
    path = tmp_path / "run.yaml"
    path.write_text(run_config.to_yaml(origin=False), encoding="utf-8")
    curves = {}
    for name, ranks, keys in (
        ("one", 1, ()),
        ("two", 2, ()),
        ("sharded", 2, ("--set", "parallel.strategy=fsdp")),
    ):
        run = tmp_path / name
        place = ("--set", f"record.run_dir={run}", *keys)
        run_ranks(ranks, tmp_path, "train", path, *place, "--until", "7it")
        run_ranks(ranks, tmp_path, "resume", run, "--until", "12it")
        events = read_events(run / "events.jsonl")
        curves[name] = [event.loss for event in events if isinstance(event, Train)]
        manifest = load_checkpoint(latest_checkpoint(run)).manifest
        names = [entry["operation"]["name"] for entry in manifest.history]
        assert [n for n in names if n != "override"] == [entry["name"] for entry in SCHEDULE]
        assert manifest.architecture["n_layer"] == 4
        assert "loop" not in manifest.architecture
    assert len(curves["one"]) == 12
    exact = reproducible == "elastic"
    for name in ("two", "sharded"):
        close = pytest.approx(curves["one"], rel=0 if exact else 1e-5, abs=0)
        assert curves[name] == close
