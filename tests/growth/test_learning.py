"""What is new learns: gradients reach it, and copies become different from each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from growing import KEY, batch, grow_model, grow_optimizer, operation, random_gpt, values
from shapes import gpt2, llama

from instar.config.schema import OptimizerConfig
from instar.config.sections import Operation
from instar.growth.apply import Mode, copies_stay_equal
from instar.models.architecture import Architecture
from instar.models.gpt import GPT
from instar.models.lora import Lora
from instar.run.optimizer import (
    build_optimizers,
    load_optimizer_tensors,
    optimizer_tensors,
    set_learning_rate,
)
from instar.run.state.gradient_stats import split_grad_norms

SIZES = {"vocab_size": 11, "n_embd": 16, "n_mlp": 12, "context": 6}
GPT2 = gpt2(**SIZES)
LLAMA = llama(**SIZES)
STYLES = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "relu2": replace(LLAMA, activation="relu2", qk_norm=True),
    "convolutions": replace(GPT2, conv_size=3, embedding_multiplier=3.0),
    "adapters": replace(GPT2, lora=(Lora("all", 2, 3.0),)),
}
OPERATIONS = [
    operation("stack_layers", 2),
    operation("insert_layers", 1),
    operation("insert_layers", 1, where="start", **{"from": "normal"}),
    operation("insert_layers", 2, where="even", **{"from": "average"}),
    operation("widen_mlp", 19),
    operation("widen_mlp", 19, how="split"),
    operation("widen_hidden", 24),
    operation("widen_hidden", 32, how="duplicate"),
    operation("add_heads", 2),
    operation("resize_vocab", 14),
    operation("extend_context", 8),
]
GROWN = [
    pytest.param(arch, op, id=f"{style}: {op.name} {op.value} {dict(op.options)}")
    for style, arch in STYLES.items()
    for op in OPERATIONS
]
GROWN.append(pytest.param(LLAMA, operation("split_kv_heads", 2), id="llama: split_kv_heads"))
GROWN += [
    pytest.param(STYLES[style], operation("grow_head_dim", 6), id=f"{style}: grow_head_dim")
    for style in ("gpt2", "llama", "adapters")
]


def adamw(model: GPT) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)


def gradients(model: GPT) -> dict[str, torch.Tensor]:
    inputs, targets = batch(model.arch, samples=4)
    model.zero_grad()
    (model(inputs, targets) / targets.numel()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("arch", "op"), GROWN)
def test_gradients_reach_all_that_is_new_within_two_steps(
    arch: Architecture, op: Operation
) -> None:
    model, plan = grow_model(random_gpt(arch), op)
    optimizer = adamw(model)
    with_gradient: set[str] = set()
    with_new: set[str] = set()
    for _ in range(3):
        for name, gradient in gradients(model).items():
            # where there is something new, ones are split into two parts
            if split_grad_norms(plan, {name: torch.ones_like(gradient)})[1] > 0:
                with_new.add(name)
            if split_grad_norms(plan, {name: gradient})[1] > 1e-12:
                with_gradient.add(name)
        optimizer.step()
    # a shift of all keys moves no attention weight (softmax), unless the keys are normalised
    assert {
        name for name in with_new - with_gradient if not name.endswith("attn.key.bias")
    } == set()
    assert with_new or op.name == "extend_context"


def optimizer_memory(model: GPT, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]}/{key}": tensor
        for parameter, state in optimizer.state.items()
        for key, tensor in state.items()
    }


def trained_before_and_after(op: Operation, mode: Mode, arch: Architecture = LLAMA) -> GPT:
    """Ten steps, the operation, and ten more with what the optimizer is to remember."""
    old = random_gpt(arch)
    before = adamw(old)
    for _ in range(10):
        gradients(old)
        before.step()
    new, plan = grow_model(old, op)
    memory = grow_optimizer(plan, optimizer_memory(old, before), KEY, mode)
    after = adamw(new)
    for name, parameter in new.named_parameters():
        state = {
            key.rpartition("/")[2]: t for key, t in memory.items() if key.startswith(f"{name}/")
        }
        after.state[parameter] = {key: tensor.clone() for key, tensor in state.items()}
    for _ in range(10):
        gradients(new)
        after.step()
    return new


def row_difference(model: GPT, name: str, count: int) -> float:
    """The largest difference between a tensor's first `count` rows and its last."""
    rows = values(model)[name]
    return (rows[:count] - rows[-count:]).abs().max().item()


def test_copied_units_part_when_only_the_source_remembers() -> None:
    op = operation("widen_mlp", "x2", how="split")
    assert (
        row_difference(trained_before_and_after(op, "asymmetric"), "blocks.0.mlp.up.weight", 12)
        > 1e-4
    )
    assert (
        row_difference(trained_before_and_after(op, "mapped"), "blocks.0.mlp.up.weight", 12) < 1e-12
    )


def train(model: GPT, optimizers: list[torch.optim.Optimizer]) -> None:
    set_learning_rate(optimizers, 0.01, 0)
    for _ in range(10):
        gradients(model)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("mode", ["asymmetric", "mapped", "reset"])
@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
@pytest.mark.parametrize("arch", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_a_duplicated_stream_parts_in_every_tensor_when_only_the_source_remembers(
    arch: Architecture, name: str, mode: Mode
) -> None:
    """And in none when both remember the same, or neither anything."""
    config = OptimizerConfig.model_validate({"name": name, "lr": 0.01})
    old = random_gpt(arch)
    before = build_optimizers(dict(old.named_parameters()), config)
    train(old, before)
    new, plan = grow_model(old, operation("widen_hidden", "x2", how="duplicate"))
    states = optimizer_tensors(before, dict(old.named_parameters()))
    assert copies_stay_equal(plan, states, mode) == (mode != "asymmetric")
    assert copies_stay_equal(plan, {}, mode)
    after = build_optimizers(dict(new.named_parameters()), config)
    memory = grow_optimizer(plan, states, KEY, mode)
    load_optimizer_tensors(
        after, dict(new.named_parameters()), {key: state.clone() for key, state in memory.items()}
    )
    train(new, after)
    distances = {}
    for tensor, entry in new.arch.parameters().items():
        for dim in (dim for dim, axis in enumerate(entry.axes) if axis == "embed"):
            source, copies = values(new)[tensor].chunk(2, dim)
            distances[tensor] = ((source - copies).norm() / source.norm()).item()
    assert len(distances) > 15
    if mode == "asymmetric":
        assert min(distances.values()) > 1e-3, distances
    else:
        assert max(distances.values()) < 1e-13, distances


def test_split_key_heads_part_by_themselves() -> None:
    new = trained_before_and_after(operation("split_kv_heads", 2), "mapped")
    heads = values(new)["blocks.0.attn.key.weight"].unflatten(0, (4, 4))
    assert (heads[0] - heads[1]).abs().max() > 1e-4
