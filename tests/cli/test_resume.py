"""Going on: from which checkpoint, with what changed, in whose folder."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from instar.config.written import lines_of, origins_of

Instar = Callable[..., subprocess.CompletedProcess[str]]

EVERY_2 = ("--set", "checkpoint.every_steps=2", "--set", "checkpoint.keep_last=9")
COURSE = ("--set", "learning_rate.lr_decay_iters=8")


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [event for event in lines if event["kind"] == kind]


def weights(run: Path, step: str = "step-8") -> bytes:
    return (run / "checkpoints" / step / "model.safetensors").read_bytes()


@pytest.fixture
def run(instar: Instar, place: Path) -> Path:
    """A run of 8 steps, saved every 2."""
    instar("train", "tiny.yaml", *EVERY_2, "--set", "record.run_dir=run")
    return place / "run"


def test_it_goes_on_from_the_step_that_is_named(instar: Instar, run: Path) -> None:
    before = weights(run)
    instar("resume", "run", "--from", "4")
    assert [event["resumed_from"] for event in events(run, "run_started")[1:]] == ["step-4"]
    assert events(run, "checkpoint")[-1]["step"] == 8
    assert weights(run) == before


def test_it_walks_back_past_a_broken_one_and_says_so(instar: Instar, run: Path) -> None:
    expected = weights(run)
    for step in ("step-8", "step-6"):
        model = run / "checkpoints" / step / "model.safetensors"
        content = bytearray(model.read_bytes())
        content[-1] ^= 1
        model.write_bytes(content)
    said = instar("resume", "run").stderr
    assert "passed over" in said
    assert "step-8/model.safetensors: not what was saved" in said
    assert events(run, "run_started")[-1]["resumed_from"] == "step-4"
    latest = (run / "checkpoints" / "latest").read_text().strip()
    assert latest == "step-8.1"
    assert weights(run, latest) == expected


def test_it_says_what_there_is_when_the_step_is_not(instar: Instar, run: Path) -> None:
    said = instar("resume", run.name, "--from", "5", code=3).stderr
    assert "no checkpoint step-5; there are step-2, step-4, step-6, step-8" in said
    (run / "checkpoints" / "best").unlink()
    assert "no checkpoint is its best" in instar("resume", "run", "--from", "best", code=3).stderr


def test_it_goes_on_from_the_best(instar: Instar, place: Path) -> None:
    best = ("--set", "checkpoint.on_best=true", "--set", "eval.eval_interval=3")
    instar("train", "tiny.yaml", *best, "--set", "record.run_dir=run")
    named = (place / "run" / "checkpoints" / "best").read_text().strip()
    instar("resume", "run", "--from", "best", "--until", "9it")
    assert events(place / "run", "run_started")[-1]["resumed_from"] == named


def test_what_is_set_otherwise_is_recorded_and_stays(instar: Instar, run: Path) -> None:
    said = instar("resume", "run", "--until", "10it", "--set", "optimizer.lr=1e-4").stderr
    changed = [event["change"] for event in events(run, "operation")]
    assert "optimizer.lr 0.001 → 0.0001" in changed
    assert "optimizer.lr: 0.001 → 0.0001" in said
    assert "lr: 0.0001" in (run / "run.yaml").read_text()
    assert "lr: 0.001" in (run / "run-until-step-8.yaml").read_text()
    instar("resume", "run", "--until", "12it")
    origins = origins_of(lines_of((run / "run.yaml").read_text()))
    assert origins["model.n_mlp"] == "derived"
    assert origins["model.norm"] == "default"
    assert origins["optimizer.lr"] == origins["train.until"] == "--set"
    assert origins["model.n_layer"].endswith("tiny.yaml:2:9"), origins
    changed = [event["change"] for event in events(run, "operation")]
    assert [change for change in changed if "lr" in change] == ["optimizer.lr 0.001 → 0.0001"]


def test_what_cannot_change_any_more_is_refused_by_name(instar: Instar, run: Path) -> None:
    before = (run / "events.jsonl").read_bytes()
    said = instar(
        "resume", "run", "--set", "model.n_layer=3", "--set", "seed=5", "--until", "9it", code=2
    ).stderr
    assert "model.n_layer was 2 when the run began and cannot become 3" in said
    assert "seed was 1337 when the run began and cannot become 5" in said
    assert (run / "events.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("part", "loss"),
    [
        ("optimizer", "moments start at zero"),
        ("scheduler", "course begins again"),
        ("dataset", "begin again at the first sample"),
        ("rng", "seeded anew"),
    ],
)
def test_what_was_left_out_is_said_with_what_it_costs(
    instar: Instar, place: Path, part: str, loss: str
) -> None:
    without = ("--set", f"checkpoint.save_{part}_state=false", *COURSE)
    instar("train", "tiny.yaml", *without, "--set", "record.run_dir=run", "--until", "3it")
    said = instar("resume", "run", "--until", "5it").stderr
    assert f"saved without its {part} state" in said
    assert loss in said
    samples = 8 if part == "dataset" else 20
    assert events(place / "run", "run_finished")[-1]["samples"] == samples


def test_automatic_begins_a_run_and_then_goes_on_with_it(instar: Instar, place: Path) -> None:
    auto = ("train", "tiny.yaml", "--set", "resume=auto", "--set", "record.run_dir=run", *COURSE)
    instar(*auto, "--until", "3it")
    instar(*auto, "--until", "8it")
    steps = [event["step"] for event in events(place / "run", "run_started")]
    assert steps == [0, 3]
    instar("train", "tiny.yaml", *COURSE, "--set", "record.run_dir=whole")
    assert weights(place / "run") == weights(place / "whole")


def test_a_missing_component_is_named(instar: Instar, run: Path) -> None:
    folder = run / "checkpoints" / "step-8"
    (folder / "optimizer.safetensors").unlink()
    said = instar("resume", "run", "--from", "8", "--until", "9it", code=3).stderr
    assert "step-8/optimizer.safetensors: missing" in said


def test_switches_of_the_same_tensors_may_change_where_one_says_so(
    instar: Instar, run: Path
) -> None:
    more = ("--until", "9it", "--set", "model.dropout=0.1")
    said = instar("resume", "run", *more, code=2).stderr
    assert "model.dropout was 0.0 when the run began" in said
    instar("resume", "run", *more, "--allow", "architecture")
    changed = [event["value"] for event in events(run, "operation")]
    assert {"model.dropout": 0.1} in changed
    assert events(run, "run_started")[-1]["architecture"]["dropout"] == 0.1
    # it is the run's own from then on
    instar("resume", "run", "--until", "10it")


def test_other_tensors_are_refused_even_so(instar: Instar, run: Path) -> None:
    wider = ("--set", "model.n_mlp=64", "--allow", "architecture")
    said = instar("resume", run.name, "--until", "9it", *wider, code=3).stderr
    assert "of another architecture than the config's" in said
    assert "n_mlp" in said
