"""Optimizers of torch by name are torch's, bit for bit, on any ranks, resumed, and through growth."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import parametrize_first
from growing import batch, build_model, grow_optimizer, operation, random_gpt, values
from safetensors.torch import load_file
from science import forks
from tiny_run import TEXT, Place, codes, events, output_of, weights
from torch.nn import Parameter

from instar.config.errors import ConfigError
from instar.config.language import ModelConfig
from instar.config.load import load_config
from instar.config.schema import OptimizerConfig
from instar.config.torch_optim.optimizers import OPTIMIZERS, constructor_arguments
from instar.growth import operators
from instar.growth.apply import apply, grow_state
from instar.growth.states import KNOWN_STATES, Role
from instar.models.architecture import resolve_architecture
from instar.run.optimizer import (
    build_optimizers,
    check_states,
    load_optimizer_tensors,
    optimizer_tensors,
    set_learning_rate,
    shapes_of,
)
from instar.run.start.preflight import preflight
from instar.schedule.checks import load_checked
from instar.schedule.forecast import ScheduleError
from instar.schedule.operations import carried_out, initial_state

NEW = [name for name, spec in OPTIMIZERS.items() if spec.is_torchs]
VARIANTS: Mapping[str, dict[str, Any]] = {
    **{name: {"name": name} for name in NEW},
    "adafactor, other eps": {"name": "adafactor", "options": {"eps": [1e-4, 0.01], "d": 2.0}},
    "adagrad, from 0.1": {
        "name": "adagrad",
        "options": {"initial_accumulator_value": 0.1, "lr_decay": 0.1},
    },
    "adam, amsgrad": {"name": "adam", "beta1": 0.8, "options": {"amsgrad": True}},
    "adamw, amsgrad": {"name": "adamw", "options": {"amsgrad": True}},
    "asgd, averaging": {"name": "asgd", "options": {"t0": 3, "lambd": 0.01}},
    "nadam, decoupled": {"name": "nadam", "options": {"decoupled_weight_decay": True}},
    "rmsprop, centered": {"name": "rmsprop", "momentum": 0.9, "options": {"centered": True}},
    "rprop, other etas": {
        "name": "rprop",
        "options": {"etas": [0.4, 1.3], "step_sizes": [1e-4, 1]},
    },
    "sgd, dampening": {"name": "sgd", "options": {"dampening": 0.2}},
}
SHAPES = {"w": (7, 5), "norm.weight": (5,), "conv": (4, 3, 3), "number": ()}


def section(values: Mapping[str, Any]) -> OptimizerConfig:
    decay = {"weight_decay": 0.1} if "weight_decay" in OPTIMIZERS[values["name"]].keys else {}
    return OptimizerConfig.model_validate({**decay, **values})


def parameters(seed: int = 0) -> dict[str, Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {n: Parameter(torch.randn(shape, generator=generator)) for n, shape in SHAPES.items()}


def reference(
    parameters: Mapping[str, Parameter], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """torch's own, as a plain loop has it: matrices decay, vectors do not."""
    spec = OPTIMIZERS[config.name]
    arguments = constructor_arguments(config.name, config.model_dump())
    decay = arguments.pop("weight_decay", None)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters.values() if p.ndim > 1]},
        {"params": [p for p in parameters.values() if p.ndim < 2]},
    ]
    if decay is not None:
        groups[0]["weight_decay"], groups[1]["weight_decay"] = decay, 0.0
    arguments |= {"adam": {"fused": True}, "adamw": {"fused": True}, "sgd": {"foreach": True}}.get(
        config.name, {}
    )
    kind: Any = getattr(torch.optim, spec.target)
    optimizer: torch.optim.Optimizer = kind(groups, lr=config.lr, **arguments)
    return optimizer


def give_gradients(sides: tuple[Mapping[str, Parameter], ...], step: int) -> None:
    """The same ones to both; of one parameter only from the sixth step on."""
    generator = torch.Generator().manual_seed(100 + step)
    for name, shape in SHAPES.items():
        gradient = torch.randn(shape, generator=generator)
        for side in sides:
            side[name].grad = None if name == "conv" and step < 5 else gradient.clone()


@pytest.mark.parametrize("resumes", [False, True], ids=["in one go", "resumed at every step"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_optimizer_by_name_is_torchs_bit_for_bit(variant: str, resumes: bool) -> None:
    config = section(VARIANTS[variant])
    actual, expected = parameters(), parameters()
    plain = reference(expected, config)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(plain, 0.9)
    follows = OPTIMIZERS[config.name].follows_rate
    optimizers = build_optimizers(actual, config)
    rate = config.lr
    for step in range(25):
        if resumes and step:
            states = {n: t.clone() for n, t in optimizer_tensors(optimizers, actual).items()}
            optimizers = build_optimizers(actual, config)
            load_optimizer_tensors(optimizers, actual, states)
        give_gradients((actual, expected), step)
        set_learning_rate(optimizers, rate, step)
        for optimizer in optimizers:
            optimizer.step()
        plain.step()
        if follows:
            scheduler.step()
            rate = plain.param_groups[0]["lr"]
        for name in SHAPES:
            assert torch.equal(actual[name], expected[name]), (step, name)
    changes = [not torch.equal(actual[name], initial) for name, initial in parameters().items()]
    assert all(changes)


@pytest.mark.parametrize(
    ("state", "changes"),
    [("momentum_buffer", {"momentum": 0.9}), ("grad_avg", {"options": {"centered": True}})],
)
def test_a_state_that_is_asked_for_later_begins_at_0(state: str, changes: dict[str, Any]) -> None:
    """As in a run that sets a momentum, or was resumed with other options."""
    before = OptimizerConfig.model_validate({"name": "rmsprop"})
    named_parameters = parameters()
    states: dict[str, torch.Tensor] = {}
    for config in (before, before.model_copy(update=changes)):
        optimizers = build_optimizers(named_parameters, config)
        load_optimizer_tensors(optimizers, named_parameters, states)
        give_gradients((named_parameters,), 7)
        set_learning_rate(optimizers, 0.01, 0)
        for optimizer in optimizers:
            optimizer.step()
        states = optimizer_tensors(optimizers, named_parameters)
    gradient, square = named_parameters["w"].grad, states["w/square_avg"]
    assert gradient is not None
    mean = 0.01 * gradient
    expected = mean if state == "grad_avg" else gradient / (square.sqrt() + 1e-8)
    torch.testing.assert_close(states[f"w/{state}"], expected)


RUN = """\
name: by-name
model: {n_layer: 1, n_head: 2, n_embd: 32, context: 16}
data: {source: squares.txt, path: tokens, tokenizer: char}
train: {until: 8it, batch_size: 8, gradient_accumulation_steps: 1}
reproducible: elastic
learning_rate: {shape: constant, warmup_iters: 0}
eval: {eval_interval: 4}
checkpoint: {on_best: false, on_growth: false}
record: {log_interval: 1, sample_tokens: 0, report: false}
"""
GROWING = [
    {"name": "widen_mlp", "value": "x2", "how": "split", "when": {"at_step": 2}},
    {"name": "stack_layers", "value": 2, "when": {"at_step": 3}},
    {"name": "set_lora_rank", "value": {"target": "mlp", "rank": 2}, "when": {"at_step": 4}},
    {"name": "widen_hidden", "value": 48, "when": {"at_step": 6}},
]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "squares.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "run.yaml").write_text(RUN, encoding="utf-8")
    return Place(tmp_path, forks())


@parametrize_first(
    "name",
    [
        *(ODD := ("adafactor", "rprop", "asgd", "adagrad")),
        *(name for name in NEW if name not in ODD),
    ],
    first=1,
)
def test_a_run_grows_and_is_the_same_on_two_ranks_and_resumed(name: str, place: Place) -> None:
    """Its proof of growth holds, under DDP and, where rows can be updated alone, in shards."""
    keys = (f"optimizer.name={name}", f"schedule={json.dumps(GROWING)}")
    full_run, parts = place.path / "whole", place.path / "parts"
    children = place.train(full_run, *keys)
    assert codes(children) == [0], output_of(children)
    strategy = "fsdp" if OPTIMIZERS[name].is_elementwise else "ddp"
    in_parts = (*keys, "train.until=[5it]", f"parallel.strategy={strategy}")
    children = place.train(parts, *in_parts, ranks=2)
    assert codes(children) == [0, 0], output_of(children)
    children = place.resume(parts, "--until", "8it", "--set", "parallel.strategy=ddp", ranks=2)
    assert codes(children) == [0, 0], output_of(children)
    assert weights(parts, 8) == weights(full_run, 8)
    operations = [event["name"] for event in events(full_run, "operation")]
    assert operations == [entry["name"] for entry in GROWING]
    states = load_file(full_run / "checkpoints/step-8/optimizer.safetensors")
    parameter_names = load_file(full_run / "checkpoints/step-8/model.safetensors").keys()
    assert {key.rpartition("/")[0] for key in states} <= parameter_names
    steps = {key: value.item() for key, value in states.items() if key.endswith("/step")}
    assert max(steps.values()) == 8


ARCH = resolve_architecture(ModelConfig(n_layer=2, n_head=2, n_embd=16, context=8), 20)


def train_model(config: OptimizerConfig) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model and the states of its optimizer after some steps."""
    model = random_gpt(ARCH)
    parameters = dict(model.named_parameters())
    optimizers = build_optimizers(parameters, config)
    inputs, targets = batch(ARCH)
    for step in range(5):
        set_learning_rate(optimizers, config.lr, step)
        logits = model(inputs)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model, {n: t.clone() for n, t in optimizer_tensors(optimizers, parameters).items()}


GROWTH = {
    "split": operation("widen_mlp", "x2", how="split"),
    "zero": operation("widen_mlp", "x2"),
    "hidden": operation("widen_hidden", 24),
    "stack": operation("stack_layers", 2),
    "lora": operation("set_lora_rank", {"target": "attn", "rank": 2}),
}


@pytest.mark.parametrize("growth", GROWTH)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_state_grows_by_the_plan_and_the_optimizer_goes_on(variant: str, growth: str) -> None:
    config = section(VARIANTS[variant])
    model, states = train_model(config)
    check_states(shapes_of(states), shapes_of(dict(model.named_parameters())))
    arch, plan = operators.plan(ARCH, GROWTH[growth], step=0)
    new_states = grow_optimizer(plan, states, (7, 0))
    new = build_model(arch, apply(plan, values(model), Role.PARAMETER, (7, 0)))
    new_parameters = dict(new.named_parameters())
    check_states(shapes_of(new_states), shapes_of(new_parameters))
    sizes = [state for state, role in KNOWN_STATES.items() if role.is_size]
    for key, state in new_states.items():
        assert state.isfinite().all(), key
        if key.rpartition("/")[2] in (*sizes, "row_var", "col_var"):
            assert (state >= 0).all(), key
    optimizers = build_optimizers(new_parameters, config)
    load_optimizer_tensors(optimizers, new_parameters, new_states)
    set_learning_rate(optimizers, config.lr, 5)
    inputs, targets = batch(arch)
    torch.nn.functional.cross_entropy(new(inputs).flatten(0, 1), targets.flatten()).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert all(parameter.isfinite().all() for parameter in new_parameters.values())


def test_factors_of_adafactor_are_those_of_the_grown_mean_of_squares() -> None:
    """Row and column means of rank 1: the grown factors are the means of the grown matrix."""
    _, states = train_model(section({"name": "adafactor"}))
    _, plan = operators.plan(ARCH, GROWTH["hidden"], step=0)
    name = "blocks.0.mlp.up.weight"
    row, column = states[f"{name}/row_var"], states[f"{name}/col_var"]
    for state, factor, dim in (("row_var", row, -1), ("col_var", column, -2)):
        square = {f"{name}/exp_avg_sq": factor.expand(row.shape[0], column.shape[1])}
        new_square = grow_state(plan, f"{name}/exp_avg_sq", square.__getitem__, (7, 0))
        new_factor = grow_state(plan, f"{name}/{state}", states.__getitem__, (7, 0))
        torch.testing.assert_close(new_factor, new_square.mean(dim, keepdim=True))
        assert new_factor.shape != factor.shape or dim == -1


def test_sizes_of_new_slices_are_means_and_averages_of_parameters_are_parameters() -> None:
    model, states = train_model(section({"name": "rprop"}))
    _, plan = operators.plan(ARCH, GROWTH["zero"], step=0)
    name = "blocks.0.mlp.up.weight"
    old = states[f"{name}/step_size"]
    new = grow_optimizer(plan, states, (7, 0))[f"{name}/step_size"]
    assert torch.equal(new[: len(old)], old)
    torch.testing.assert_close(new[len(old) :], old.mean(0).expand(len(new) - len(old), -1))
    model, states = train_model(section({"name": "asgd"}))
    new_states = grow_optimizer(plan, states, (7, 0))
    parameters = apply(plan, values(model), Role.PARAMETER, (7, 0))
    for key, tensor in parameters.items():
        if (
            f"{key}/ax" in new_states
        ):  # what is averaged from the first step is the parameter itself
            assert torch.equal(new_states[f"{key}/ax"], tensor), key


def test_steps_of_shared_weights_are_shared_and_those_of_gradients_are_not() -> None:
    """A reader's weight is divided among copies, whose gradient is the old one."""
    _, plan = operators.plan(ARCH, GROWTH["split"], step=0)
    name = "blocks.0.mlp.down.weight"
    old_state = torch.ones(16, 64)
    half = {"step_size": 0.5, "acc_delta": 0.25, "exp_inf": 1.0, "sum": 1.0, "ax": 0.5}
    for state, factor in half.items():
        new_state = grow_state(plan, f"{name}/{state}", lambda _: old_state, (7, 0))
        assert new_state.unique().tolist() == [factor], state


def refusal_of(name: str, op: str, value: Any = None, **options: Any) -> str:
    """Why a run with an optimizer cannot carry out an operation; empty: it can."""
    constant = ["learning_rate.shape=constant", "learning_rate.warmup_iters=0"]
    config = load_checked(None, [f"optimizer.name={name}", *constant]).config
    try:
        carried_out(initial_state(config, ARCH), operation(op, value, **options), 3)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_operation_that_an_optimizer_has_no_dial_for_is_refused_by_name(name: str) -> None:
    reads = OPTIMIZERS[name].keys
    for op, value, key, what in (
        ("set_betas", [0.8, 0.9], "beta1", "betas"),
        ("set_momentum", 0.5, "momentum", "momentum"),
        ("change_weight_decay", 0.5, "weight_decay", "weight decay"),
    ):
        reason = refusal_of(name, op, value)
        assert (key in reads) is (reason == ""), op
        assert not reason or reason.startswith(f"{op}: optimizer.name {name} has no {what}")
    rates: list[tuple[str, Any, dict[str, Any]]] = [
        ("set_lr", 0.1, {}),
        ("change_lr", 0.5, {}),
        ("set_warmup_iters", 3, {}),
        ("change_batch_size", 2, {"lr": "sqrt"}),
        ("widen_mlp", "x2", {"lr": {"rewarm_new": 5}}),
    ]
    for op, value, options in rates:
        reason = refusal_of(name, op, value, **options)
        assert (name == "rprop") is ("finds its steps itself" in reason), (op, reason)


def test_dials_turn_in_a_run_and_equal_a_resume_with_the_key(place: Place) -> None:
    """What an operation sets in mid-run is what a resume sets, also where a state begins with it."""
    schedule = [
        {"name": "set_momentum", "value": 0.8, "when": {"at_step": 4}},
        {"name": "set_weight_decay", "value": 0.2, "when": {"at_step": 4}},
        {"name": "set_lr", "value": 0.002, "when": {"at_step": 4}},
    ]
    keys = ("optimizer.name=rmsprop", "reproducible=fixed")
    by_operation, by_resume = place.path / "turned", place.path / "resumed"
    children = place.train(by_operation, *keys, f"schedule={json.dumps(schedule)}")
    assert codes(children) == [0], output_of(children)
    children = place.train(by_resume, *keys, "train.until=[4it]")
    assert codes(children) == [0], output_of(children)
    sets = [f"optimizer.{key}" for key in ("momentum=0.8", "weight_decay=0.2", "lr=0.002")]
    words = [word for text in sets for word in ("--set", text)]
    children = place.resume(by_resume, "--until", "8it", *words)
    assert codes(children) == [0], output_of(children)
    assert weights(by_operation, 8) == weights(by_resume, 8)


def test_an_operation_without_a_dial_in_a_schedule_is_refused_before_the_start() -> None:
    schedule = "schedule=[{name: set_betas, value: [0.8, 0.9], when: {at_step: 3}}]"
    loaded_config = load_config(None, ["optimizer.name=rmsprop", schedule, "data.path=none"])
    with pytest.raises((ConfigError, ScheduleError), match=r"optimizer\.name rmsprop has no betas"):
        preflight(loaded_config, 1, assume=lambda _: None)
