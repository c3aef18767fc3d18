"""Windows of layers change in mid-run, move with their blocks, and are what the forecast counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from growing import grow_model, operation, proof, random_gpt
from shapes import gpt2, llama
from started import run_ranks
from tiny_trainers import config, config_in, corpus, prepare_run, trainer

from instar.checkpoint.listing import latest_checkpoint
from instar.checkpoint.manifest import CheckpointError
from instar.checkpoint.store import load_checkpoint
from instar.config.errors import ConfigError
from instar.config.load import Loaded
from instar.growth.operators import plan
from instar.growth.plan import GrowthError
from instar.models.architecture import Architecture
from instar.models.cost import flops_per_token
from instar.models.hf.config import to_config
from instar.record.events import Train, read_events
from instar.run.start.preflight import Prepared
from instar.run.trainer import Trainer

__all__ = ["config", "config_in", "corpus", "prepare_run", "trainer"]

SIZES = {"vocab_size": 11, "n_layer": 3, "n_embd": 16, "n_mlp": 12, "context": 12}
LLAMA = llama(**SIZES)
SOME = replace(LLAMA, windows=(2, None, 5))


@pytest.mark.parametrize(
    ("arch", "name", "value", "windows"),
    [
        (LLAMA, "set_window", 4, (4, 4, 4)),
        (LLAMA, "set_window", {"layers": [2, 0], "size": 4}, (4, None, 4)),
        (SOME, "set_window", 5, (5, 5, 5)),
        (SOME, "set_window", None, ()),
        (SOME, "set_window", {"layers": [0, 1], "size": None}, (None, None, 5)),
        (SOME, "set_window", {"layers": [0, 2], "size": None}, ()),
        (SOME, "change_window", "x2", (4, None, 10)),
        (SOME, "change_window", 0.5, (1, None, 3)),
        (SOME, "change_window", 0.1, (1, None, 1)),
    ],
)
def test_windows_are_as_requested(
    arch: Architecture, name: str, value: Any, windows: tuple[int | None, ...]
) -> None:
    model = random_gpt(arch)
    new, growth_plan = grow_model(model, operation(name, value))
    assert new.arch == replace(arch, windows=windows)
    assert growth_plan.label == "lossy"
    assert proof(model, new, growth_plan).max_logit_diff_relative > 1e-3


@pytest.mark.parametrize(
    ("name", "value", "windows"),
    [
        ("stack_layers", 2, (2, None, 5, 2, None, 5)),
        ("stack_layers", [0, 0, 1, 2, 2], (2, 2, None, 5, 5)),
        ("widen_mlp", "x2", (2, None, 5)),
        ("widen_hidden", "x2", (2, None, 5)),
        ("add_heads", 4, (2, None, 5)),
        ("extend_context", "x2", (2, None, 5)),
        ("upcycle", 2, (2, None, 5)),
        ("set_lora_rank", {"target": "all", "rank": 2}, (2, None, 5)),
    ],
)
def test_growth_carries_windows(name: str, value: Any, windows: tuple[int | None, ...]) -> None:
    assert plan(SOME, operation(name, value))[0].windows == windows


@pytest.mark.parametrize("origin", ["neighbour", "normal", "copy", "average"])
def test_a_new_block_has_the_window_of_the_one_below(origin: str) -> None:
    new, _ = plan(SOME, operation("insert_layers", 3, where=[0, 2, 3], **{"from": origin}))
    assert new.windows == (2, 2, None, None, 5, 5)
    plain, _ = plan(LLAMA, operation("insert_layers", 1, **{"from": origin}))
    assert plain.windows == ()


@pytest.mark.parametrize(
    ("arch", "name", "value", "message"),
    [
        (
            LLAMA,
            "set_window",
            12,
            "a window of 12 is not shorter than the context of 12: choose less",
        ),
        (SOME, "change_window", 3, "a window of 15 is not shorter than the context"),
        (LLAMA, "set_window", {"layers": [0, 3], "size": 4}, "no layer 3: layers are 0 to 2"),
        (LLAMA, "set_window", None, "the model has no windows already"),
        (SOME, "set_window", {"layers": [0], "size": 2}, "2 in layers 0; 5 in layers 2 already"),
        (SOME, "change_window", 1, "the model has windows of 2 in layers 0; 5 in layers 2 already"),
        (LLAMA, "change_window", 2, "no layer has a window: set_window sets one"),
        (LLAMA, "set_window", 0, "needs a whole number of tokens above 0, or null"),
        (LLAMA, "set_window", True, "needs a whole number of tokens above 0, or null"),
        (LLAMA, "set_window", {"layers": [0]}, "needs a size, null, or"),
        (LLAMA, "set_window", {"layers": [], "size": 4}, "must be a list of different layers"),
        (LLAMA, "set_window", {"layers": [1, 1], "size": 4}, "must be a list of different layers"),
        (LLAMA, "set_window", {"layers": [-1], "size": 4}, "must be a list of different layers"),
        (LLAMA, "set_window", {"layers": 0, "size": 4}, "must be a list of different layers"),
    ],
)
def test_what_is_not_possible_is_refused(
    arch: Architecture, name: str, value: Any, message: str
) -> None:
    with pytest.raises(GrowthError, match=f"{name}: .*{message}"):
        plan(arch, operation(name, value))


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        (replace(gpt2(), windows=(4, 4)), r"model.windows: \(4, 4\), but GPT-2 has none"),
        (replace(llama(), windows=(4, 5)), r"model.windows: \(4, 5\), but Llama has none, and Mis"),
        (
            replace(llama(), windows=(4, None), bias=True),
            "model.bias: true, but Llama with windows",
        ),
    ],
)
def test_export_refuses_other_windows_by_name(arch: Architecture, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        to_config(arch)


def test_a_run_is_checked_before_it_starts(prepare_run: Callable[..., Prepared]) -> None:
    entry = {"name": "set_window", "when": {"at_step": 1}}
    for value, message in (
        (16, "not shorter than the context"),
        ({"layers": [2], "size": 4}, "no layer 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            prepare_run(f"schedule={json.dumps([{**entry, 'value': value}])}")


SCHEDULE = [
    {"name": "set_window", "value": 3, "when": {"at_step": 2}},
    {"name": "insert_layers", "value": 1, "when": {"at_step": 3}},
    {"name": "set_window", "value": {"layers": [1], "size": None}, "when": {"at_step": 4}},
    {"name": "extend_context", "value": "x2", "when": {"at_step": 6}},
    {"name": "change_window", "value": "x2", "when": {"at_step": 8}},
]
WINDOWS = [6, None, 6]


def test_the_forecast_counts_what_the_run_counts(
    prepare_run: Callable[..., Prepared], trainer: Callable[..., Trainer]
) -> None:
    keys = ("train.until=[10it]", f"schedule={json.dumps(SCHEDULE)}", "eval.eval_interval=4")
    keys = (*keys, "learning_rate.lr_decay_iters=10", "model.dropout=0.1")
    ready, run = prepare_run(*keys), trainer(*keys)
    run.train()
    shapes = [stage.architecture for stage in ready.forecast.stages]
    assert all(isinstance(shape, Architecture) for shape in shapes)
    assert run.state.in_force.architecture == shapes[-1]
    assert shapes[-1].to_dict()["windows"] == WINDOWS
    assert ready.forecast.early is not None
    assert run.state.progress.flops == ready.forecast.early.flops
    assert flops_per_token(shapes[1], 16) < flops_per_token(shapes[0], 16)
    memory = [stage.memory["ddp"].step["activations"] for stage in ready.forecast.stages[:2]]
    assert memory[0] != memory[1]


def curve(run_dir: Path) -> list[float]:
    events = read_events(run_dir / "events.jsonl")
    return [event.loss for event in events if isinstance(event, Train)]


@pytest.mark.torture
@pytest.mark.parametrize("reproducible", ["elastic", "fixed"])
def test_any_number_of_ranks_and_any_strategy_train_alike(
    config_in: Callable[..., Loaded], tmp_path: Path, reproducible: str
) -> None:
    """Also saved between two of the operations and resumed by others, and with shards."""
    run_config = config_in(
        tmp_path,
        f"schedule={json.dumps(SCHEDULE)}",
        "train.until=[10it]",
        "train.batch_size=4",
        "train.gradient_checkpointing=true",
        "learning_rate.lr_decay_iters=10",
        f"reproducible={reproducible}",
    )
    path = tmp_path / "run.yaml"
    path.write_text(run_config.to_yaml(origin=False), encoding="utf-8")
    runs: dict[str, tuple[int, list[str], int]] = {
        "one": (1, [], 1),
        "four": (4, [], 1),
        "sharded": (2, ["--set", "parallel.strategy=fsdp"], 2),
    }
    curves = {}
    for name, (ranks, keys, after) in runs.items():
        run_dir = tmp_path / name
        place = ("--set", f"record.run_dir={run_dir}", *keys)
        end = () if name == "one" else ("--until", "5it")
        run_ranks(ranks, tmp_path, "train", path, *place, *end)
        if end:
            run_ranks(after, tmp_path, "resume", run_dir, "--until", "10it")
        curves[name] = curve(run_dir)
        manifest = load_checkpoint(latest_checkpoint(run_dir)).manifest
        assert manifest.architecture["windows"] == WINDOWS
    assert len(curves["one"]) == 10
    relative = 0 if reproducible == "elastic" else 1e-5
    for name in ("four", "sharded"):
        assert curves[name] == pytest.approx(curves["one"], rel=relative, abs=0)
