"""A run in slices, with a later end each time, equals the run in one go; and what a short run says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunCli = Callable[..., str]
STILL = ("--set", "optimizer.lr=1e-12", "--set", "learning_rate.shape=constant")
SCHEDULE = [{"name": "set_batch_size", "value": 2, "when": {"loss_below": 99.0, "at_step": 5}}]
JUDGED = (
    *("--set", "eval.eval_interval=4"),
    *("--set", "early_stopping.rules=[{metric: loss, patience: 3, delta: 0.01}]"),
    *("--set", "learning_rate.plateau={factor: 0.5, patience: 2, delta: 0.01}"),
    *("--set", f"schedule={json.dumps(SCHEDULE)}"),
)


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [event for event in lines if event["kind"] == kind]


def operations(run: Path) -> list[tuple[int, str]]:
    operation_events = events(run, "operation")
    return [
        (event["step"], event["name"]) for event in operation_events if event["name"] != "override"
    ]


def test_slices_stop_and_change_where_one_go_does(run_cli: RunCli, place: Path) -> None:
    """The evaluation at the end of a slice counts neither for patience, nor plateau, nor triggers."""
    start = ("train", "tiny.yaml", *STILL, *JUDGED, "--set")
    run_cli(*start, "record.run_dir=whole", "--until", "40it")
    run_cli(*start, "record.run_dir=parts", "--until", "6it")
    output = ""
    for end in (10, 14, 18):
        output = run_cli("resume", "parts", "--until", f"{end}it")
    full, parts = place / "whole", place / "parts"
    assert operations(full) == operations(parts)
    assert [step for step, _ in operations(full)] == [8, 12]
    stops = [events(run, "stop")[-1] for run in (full, parts)]
    assert stops[0]["step"] == stops[1]["step"] == 16
    assert stops[0]["reason"] == stops[1]["reason"]
    weights = [
        (run / "checkpoints" / "step-16" / "model.safetensors").read_bytes()
        for run in (full, parts)
    ]
    assert weights[0] == weights[1]

    # the command that is printed then goes on
    assert "for 3 evaluations" in output
    output = run_cli("resume", "parts", "--until", "24it")
    command = output[output.index("instar resume") :].split("\n")[0].split()
    assert command == ["instar", "resume", "parts", "--set", "early_stopping=null"]
    run_cli(*command[1:], "--until", "20it")
    assert events(parts, "run_finished")[-1]["step"] == 20


def test_a_later_end_leaves_the_decay_where_it_was_whichever_way_it_is_set(
    run_cli: RunCli, place: Path
) -> None:
    outputs = []
    for run, command in (
        ("typed", ("resume", "typed", "--until", "8it")),
        ("read", ("train", "later.yaml", "--set", "record.run_dir=read", "--set", "resume=auto")),
    ):
        run_cli("train", "tiny.yaml", "--until", "4it", "--set", f"record.run_dir={run}")
        (place / "later.yaml").write_text((place / "tiny.yaml").read_text())
        outputs.append(run_cli(*command))
    rates = [
        {e["step"]: e["lr"] for e in events(place / run, "train")} for run in ("typed", "read")
    ]
    assert rates[0] == rates[1]
    for text in outputs:
        assert "the learning rate's decay ends at step 4 as before" in text
        assert "--set learning_rate.lr_decay_iters=8" in text


def test_a_short_run_says_what_does_not_happen_in_it(run_cli: RunCli) -> None:
    output = run_cli("train", "tiny.yaml", "--dry-run", "--set", "learning_rate.warmup_iters=40")
    assert "learning_rate.warmup_iters (40) is more than the 8 steps of the run" in output
    assert "rises to 20% of optimizer.lr" in output
    run_cli("data", "prepare", "tiny.yaml")
    output = run_cli("train", "tiny.yaml", "--dry-run", "--set", "train.batch_size=4096")
    assert "fewer than the 4,096 of a step: every step is an epoch of its own" in output
    large = (
        "--set",
        "model.n_embd=65536",
        "--set",
        "model.n_layer=200",
        "--set",
        "model.n_head=64",
    )
    output = run_cli("train", "tiny.yaml", "--dry-run", *large)
    assert "does not fit in this machine's memory: a rank needs about" in output


@pytest.mark.parametrize(
    ("operation", "settings", "reason"),
    [
        ("set_eval_interval", ("eval.eval_epochs=1",), "eval.eval_epochs is 1"),
        ("change_eval_iters", (), "eval.eval_iters is not set"),
    ],
)
def test_an_operation_without_effect_is_said_to_be_one(
    run_cli: RunCli, place: Path, operation: str, settings: tuple[str, ...], reason: str
) -> None:
    schedule = json.dumps([{"name": operation, "value": 2, "when": {"at_step": 2}}])
    words = [word for setting in settings for word in ("--set", setting)]
    output = run_cli(
        "train", "tiny.yaml", *words, "--set", f"schedule={schedule}", "--until", "3it"
    )
    assert f"schedule[0] {operation} has no effect: {reason}" in output
    assert ("nothing changes" in output) == (operation == "change_eval_iters")
    (place / "s.json").write_text(schedule)
    output = run_cli("schedule", "check", "s.json", "--config", "tiny.yaml", *words)
    assert f"has no effect: {reason}" in output


def test_the_former_key_of_early_stopping_is_refused_with_both_meanings(run_cli: RunCli) -> None:
    output = run_cli("train", "tiny.yaml", "--set", "early_stopping.mode=any", code=2)
    assert "unknown key 'mode' in early_stopping" in output
    for meaning in ("it is stop_when now", "which is stop_when: all", "is stop_when: any"):
        assert meaning in " ".join(output.split())
