"""Schedules of the nanoGPT orchestrator's form are read as ours, or refused with what to write instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sized import spec_for_tokens

from instar.config.errors import ConfigError
from instar.config.load import Loaded, loaded_from_json
from instar.schedule.aliases import REMEDIES, translate
from instar.schedule.checks import load_checked
from instar.schedule.forecast import Forecast, checked_forecast
from instar.schedule.operations import check_operation
from instar.schedule.triggers import operation

SMALL = ["model.n_layer=2", "model.n_head=4", "model.n_embd=32", "model.context=16"]
ADAPTED = {"name": "set_attn_lora_rank", "value": 4}
ADAPTED_TABLE = {"name": "set_embedding_lora_rank", "value": 4}


def theirs(name: str, value: Any = None, **keys: Any) -> dict[str, Any]:
    """An entry with the keys that all of theirs have."""
    common = {"trigger_loss": 6.0, "max_wait_iters": 10, "reevaluate": False}
    return {"name": name, "value": value, **common, **keys}


def load(path: Path, *entries: dict[str, Any]) -> Loaded:
    path.write_text(json.dumps([theirs(**entry) for entry in entries], indent=1))
    return load_checked(None, [*SMALL, "train.until=900it", f"schedule={path}"])


def forecast(loaded: Loaded) -> Forecast:
    return checked_forecast(loaded, spec_for_tokens(loaded.config, 4001, 64), 1)


@pytest.mark.parametrize(
    ("name", "value", "ours"),
    [
        ("merge_lora_weights", None, ("merge_lora", None, {})),
        ("freeze_layer", "attn.1", ("freeze", "blocks.1.attn.*", {})),
        ("freeze_layer", "ln_1.0", ("freeze", "blocks.0.attn_norm.*", {})),
        ("unfreeze_layer", "mlp.0", ("unfreeze", "blocks.0.mlp.*", {})),
        ("unfreeze_layer", "wte", ("unfreeze", "token_embedding.*", {})),
        ("freeze_layer", "ln_f", ("freeze", "final_norm.*", {})),
        ("set_embedding_freeze_mode", True, ("freeze", ["blocks.*", "final_norm.*"], {})),
        ("set_embedding_finetune_mode", False, ("unfreeze", "*", {})),
        ("set_batch_size_relative", 0.5, ("change_batch_size", 0.5, {})),
        (
            "adjust_batch_size",
            {"max_batch_size": 512, "target_vram_percent": 85.0},
            ("adjust_batch_size", 0.85, {"max": 512}),
        ),
        (
            "set_layer_lora_rank",
            ["attn.0", 3],
            ("set_lora_rank", {"target": "blocks.0.attn.[qkv]*", "rank": 3}, {"merge": True}),
        ),
        (
            "set_layer_lora_rank",
            ["wte", 3],
            ("set_lora_rank", {"target": "embedding", "rank": 3}, {"merge": True}),
        ),
        (
            "decrease_attn_lora_scaling",
            0.5,
            ("change_lora_rank", {"target": "attn", "factor": 0.5}, {"merge": True}),
        ),
        (
            "decrease_vocab_lora_scaling",
            2,
            ("change_lora_rank", {"target": "embedding", "factor": 2}, {"merge": True}),
        ),
        ("widen_mlp", 2, ("widen_mlp", "x2", {})),
        ("widen_mlp", 1.5, ("widen_mlp", "x1.5", {})),
        ("widen_mlp", 256, ("widen_mlp", 256, {})),
        ("stack_layers", 2, ("stack_layers", 2, {})),
        ("stack_layers", [0, 0, 1], ("stack_layers", [0, 0, 1], {})),
        ("change_lora_alpha", 0.5, ("change_lora_alpha", 0.5, {})),
        ("change_lr", 2.0, ("change_lr", 2.0, {})),
    ],
)
def test_an_entry_of_theirs_is_one_of_ours_and_says_so(
    tmp_path: Path, name: str, value: Any, ours: tuple[str, Any, dict[str, Any]]
) -> None:
    loaded = load(tmp_path / "s.json", ADAPTED, ADAPTED_TABLE, {"name": name, "value": value})
    read = operation(loaded.config.schedule[-1])
    assert (read.name, read.value, dict(read.options)) == ours
    check_operation(read)
    stages = forecast(loaded).stages
    assert len(stages) == 4
    assert not stages[-1].skipped
    said = [note for note in loaded.notes if f" {name} " in note]
    assert bool(said) == (
        (name, value) != (ours[0], ours[1]) or name in ("adjust_batch_size", "change_lora_alpha")
    )
    assert all(ours[0] in note and "in 1 entry" in note for note in said)


def test_their_other_keys_are_read_and_a_comment_stays(tmp_path: Path) -> None:
    first = {"name": "change_lr", "value": 2.0, "completed": True, "desc": "faster"}
    at_once = {"name": "change_lr", "value": 0.5, "max_wait_iters": 0, "completed": False}
    before = {"name": "change_lr", "value": 0.5, "max_wait_iters": -2}
    loaded = load(tmp_path / "s.json", first, at_once, before)
    entries = loaded.config.schedule
    assert entries[0].desc == "faster"
    assert [entry.max_wait_iters for entry in entries] == [10, 0, 0]
    assert not any(entry.model_extra for entry in entries)
    assert loaded.notes == (
        "schedule: completed is ignored: a run begins with the first entry, in 1 entry",
        "schedule: max_wait_iters below 0 is read as 0, in 1 entry",
    )
    assert loaded_from_json(loaded.to_json()) == loaded
    # at the latest: the second and the third at the next evaluations, one each
    steps = [stage.latest_step for stage in forecast(loaded).stages[1:]]
    assert steps == [250, 500, 750]


@pytest.mark.parametrize("name", REMEDIES)
def test_what_cannot_be_translated_is_refused_with_what_to_write(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "s.json", {"name": name, "value": 0.5})
    (problem,) = caught.value.problems
    assert problem.hint == REMEDIES[name]
    assert problem.where.startswith(f"{tmp_path / 's.json'}:3:")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("freeze_layer", "attn"),
        ("freeze_layer", "moe.1"),
        ("set_layer_lora_rank", ["mlp.0", 3]),
        ("set_layer_lora_rank", 3),
        ("set_embedding_freeze_mode", "yes"),
    ],
)
def test_a_value_of_no_known_form_is_refused_with_our_name(
    tmp_path: Path, name: str, value: Any
) -> None:
    with pytest.raises(ConfigError, match=r"here it is (freeze|set_lora_rank)"):
        load(tmp_path / "s.json", {"name": name, "value": value})


def test_without_adapters_theirs_go_on_and_ours_are_refused(tmp_path: Path) -> None:
    loaded = load(
        tmp_path / "s.json",
        {"name": "merge_lora_weights"},
        {"name": "decrease_attn_lora_scaling", "value": 0.5},
        {"name": "change_lora_alpha", "value": 0.5},
        {"name": "change_lr", "value": 0.5},
    )
    skipped = [stage.skipped for stage in forecast(loaded).stages]
    assert skipped[0] == skipped[4] == ""
    assert all("has no adapters" in reason for reason in skipped[1:4])
    strict = [{"name": "merge_lora", "when": {"at_step": 3}}]
    text = json.dumps(strict)
    with pytest.raises(ConfigError, match="has no adapters"):
        forecast(load_checked(None, [*SMALL, f"schedule={text}", "train.until=50it"]))


def test_ours_are_never_read_as_theirs() -> None:
    ours = [
        {"name": "widen_mlp", "value": 2, "when": {"at_step": 3}},
        {"name": "adjust_batch_size", "value": 0.5, "max": 3, "max_wait_iters": 4},
        {"name": "merge_lora", "value": None, "trigger_loss": 3.0},
        {"name": "branch", "value": "b", "iters": 3, "when": {"at_step": 3}},
        "no entry",
    ]
    assert translate(ours) == (ours, ())


def test_the_schedule_of_a_branch_is_read_alike() -> None:
    branch = {"name": "branch", "value": "b", "iters": 9, "when": {"at_step": 3}}
    (read,), notes = translate([branch | {"schedule": [theirs("freeze_layer", "wte")]}])
    assert read["schedule"][0]["name"] == "freeze"
    assert len(notes) == 1
