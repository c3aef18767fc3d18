"""Optimizers, parameter groups and schedules of a custom task."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import science
import torch
from ruamel.yaml import YAML
from safetensors.torch import load_file
from tiny_run import codes, events, output_of, weights

from instar.config.errors import ConfigError
from instar.config.load import load_config
from instar.distributed.world import World
from instar.run.optimizer import set_learning_rate, task_optimizers
from instar.run.start.preflight import preflight
from instar.run.start.smoke_test_step import run_trial

WIDER = [{"name": "widen", "value": {"axis": "hidden", "size": 32}, "when": {"at_step": 5}}]
SETTINGS = (
    "task=own_optimizers:Own",
    "train.until=[12it]",
    f"schedule={json.dumps(WIDER)}",
    "early_stopping.rules=[]",
    "test.at_end=false",
    "checkpoint.on_best=false",
    "learning_rate.lr_decay_iters=12",
)


def settings(task: str, *overrides: str) -> list[str]:
    """A config of `task` without a file."""
    config = YAML().load(science.CONFIG)
    keys = [f"{name}={json.dumps(value)}" for name, value in config.items() if name != "task"]
    return [*keys, f"task=own_optimizers:{task}", "precision=fp32", *overrides]


def test_its_state_grows_and_a_resumed_run_on_two_ranks_is_the_same(tmp_path: Path) -> None:
    """Also if the first part is on shards, and the second with whole models."""
    place = science.place(tmp_path)
    full_run, parts = place.path / "whole", place.path / "parts"
    keys = (*SETTINGS, "reproducible=elastic")
    children = place.train(full_run, *keys, ranks=2)
    assert codes(children) == [0, 0], output_of(children)
    rates = [event["lr"] for event in events(full_run, "train")]
    np.testing.assert_allclose(rates, [0.03 * (1 - step / 12) for step in range(12)])
    first_half = ("train.until=[6it]", "parallel.strategy=fsdp")
    children = place.train(parts, *keys, *first_half, ranks=2)
    assert codes(children) == [0, 0], output_of(children)
    children = place.resume(parts, "--until", "12it", "--set", "parallel.strategy=ddp", ranks=2)
    assert codes(children) == [0, 0], output_of(children)
    assert weights(parts, 12) == weights(full_run, 12)
    states = load_file(full_run / "checkpoints/step-12/optimizer.safetensors")
    assert states["up.weight/velocity"].shape == (32, 2)
    assert states["up.weight/step.number"].item() == 12
    assert set(states) >= {"down.bias/square_avg", "down.bias/step"}


def test_rates_keep_their_ratio_to_the_configs() -> None:
    loaded_config = load_config(None, settings("Grouped", "optimizer.name=sgd"))
    prepared_run = preflight(loaded_config, 1)
    task = prepared_run.spec.task(prepared_run.config)
    (optimizer,) = task_optimizers(task, task.build(), prepared_run.config.optimizer)
    assert isinstance(optimizer, torch.optim.SGD)
    set_learning_rate([optimizer], 0.1, 0)
    values = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert values == [(pytest.approx(0.3), 0.0), (pytest.approx(0.1), 0.5)]


def test_parameter_groups_are_also_for_optimizers_of_torch_by_name() -> None:
    loaded_config = load_config(
        None, settings("Grouped", "optimizer={name: rmsprop, momentum: 0.5}")
    )
    prepared_run = preflight(loaded_config, 1)
    task = prepared_run.spec.task(prepared_run.config)
    (optimizer,) = task_optimizers(task, task.build(), prepared_run.config.optimizer)
    assert isinstance(optimizer, torch.optim.RMSprop)
    set_learning_rate([optimizer], 0.1, 0)
    values = [(group["lr"], group["momentum"]) for group in optimizer.param_groups]
    assert values == [(pytest.approx(0.3), 0.5), (pytest.approx(0.1), 0.5)]


def test_a_schedule_of_ones_own_is_refused_where_the_rate_is_read_once() -> None:
    rate = ("learning_rate.shape=constant", "learning_rate.warmup_iters=0")
    _assert_refusal(
        "schedule() gives rates, and rprop reads only the first",
        "Scheduled",
        "optimizer={name: rprop, weight_decay: null}",
        *rate,
    )


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("Partial", "optimizer() gives down.weight to 0 optimizers or groups"),
        ("Twice", "optimizer() gives up.weight to 2 optimizers or groups"),
        ("Named", "must return an optimizer of torch, several, or parameter groups, not str"),
        ("Counted", "a step changes values of the parameter groups, which no checkpoint contains"),
        ("Listed", "the state up.weight/history of Remembering is a list"),
        ("Rowwise", "cannot grow the optimizer state up.weight/rows: it is [24, 3]"),
    ],
)
def test_what_cannot_be_saved_or_grown_is_named_before_the_run(task: str, message: str) -> None:
    _assert_refusal(message, task, f"schedule={json.dumps(WIDER)}")


def test_rates_follow_the_width_only_of_a_model_with_one_and_under_known_optimizers() -> None:
    _assert_refusal(
        "this model names none: give its shape `streams`", "Grouped", "optimizer.lr_base_width=8"
    )


def test_rates_follow_the_depth_only_of_a_model_with_blocks_and_not_under_sgd() -> None:
    _assert_refusal("names no stream or no axis `layers`", "Grouped", "optimizer.lr_base_depth=2")
    with pytest.raises(ConfigError, match=r"lr_base_depth is for adamw and muon"):
        load_config(None, ("optimizer.name=sgd", "optimizer.lr_base_depth=2"))


def _assert_refusal(message: str, task: str, *keys: str) -> None:
    prepared_run = preflight(load_config(None, settings(task, *keys)), 1)
    with pytest.raises(ConfigError) as caught:
        run_trial(prepared_run, World(0, 0, 1, torch.device("cpu"), "none"))
    assert message in str(caught.value)


def test_parameter_groups_of_an_elastic_run_are_updated_by_kernels_that_round_alike() -> None:
    """Rows that do not fill vector registers would be rounded as a rank's place in the tensor is."""
    loaded_config = load_config(None, settings("Grouped"))
    prepared_run = preflight(loaded_config, 1)
    task = prepared_run.spec.task(prepared_run.config)
    kernels = {}
    for elastic in (False, True):
        optimizers = task_optimizers(
            task, task.build(), prepared_run.config.optimizer, elastic=elastic
        )
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        kernels[elastic] = {
            group["fused"] for group in groups for p in group["params"] if p.ndim < 2
        }
    assert kernels == {False: {True}, True: {False}}
