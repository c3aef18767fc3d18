"""`instar train`, `resume` and `sample` as a person types them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Instar = Callable[..., subprocess.CompletedProcess[str]]


def test_a_run_leaves_everything_it_should(instar: Instar, place: Path) -> None:
    instar("train", "tiny.yaml", "--set", "record.run_dir=run")
    run = place / "run"
    names = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    assert names == {
        "run.yaml",
        "tokenizer.json",
        "events.jsonl",
        "lock",
        "report.html",
        "logs/rank_0.log",
        "checkpoints/best",
        "checkpoints/latest",
        "checkpoints/step-8/manifest.json",
        "checkpoints/step-8/model.safetensors",
        "checkpoints/step-8/optimizer.safetensors",
        "checkpoints/step-8/rng/rank-0.safetensors",
        "checkpoints/step-8/state.json",
    }
    kinds = [json.loads(line)["kind"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert kinds == ["run_started", "train", "eval", "sample", "checkpoint", "stop", "run_finished"]


def test_the_resolved_config_trains_the_same_run_again(instar: Instar, place: Path) -> None:
    instar("train", "tiny.yaml", "--set", "record.run_dir=one")
    instar("train", "one/run.yaml", "--set", "record.run_dir=two")
    weights = "checkpoints/step-8/model.safetensors"
    assert (place / "one" / weights).read_bytes() == (place / "two" / weights).read_bytes()


def test_a_resumed_run_ends_as_one_that_never_stopped(instar: Instar, place: Path) -> None:
    course = ["--set", "learning_rate.lr_decay_iters=8", "--set", "train.ema=0.9"]
    instar("train", "tiny.yaml", *course, "--set", "record.run_dir=whole")
    instar("train", "tiny.yaml", *course, "--set", "record.run_dir=parts", "--until", "3it")
    instar("resume", "parts", "--until", "8it")
    for component in ("model", "optimizer", "ema"):
        file = f"checkpoints/step-8/{component}.safetensors"
        assert (place / "whole" / file).read_bytes() == (place / "parts" / file).read_bytes()
    lines = (place / "parts" / "events.jsonl").read_text().splitlines()
    started = [e for e in map(json.loads, lines) if e["kind"] == "run_started"]
    assert [(event["segment"], event["step"]) for event in started] == [(1, 0), (2, 3)]


def test_a_run_refuses_to_go_on_with_other_data(instar: Instar, place: Path) -> None:
    instar("train", "tiny.yaml", "--set", "record.run_dir=run")
    text = (place / "squares.txt").read_text()
    (place / "squares.txt").write_text(text[: len(text) // 2])
    for file in (place / "tokens").iterdir():
        file.unlink()
    (place / "tokens").rmdir()
    said = instar("resume", "run", "--until", "9it", code=3).stderr
    assert "trained with another data (fingerprint" in said
    assert "--allow data" in said
    instar("resume", "run", "--until", "9it", "--allow", "data", "--allow", "tokenizer")


def test_a_model_speaks_the_same_words_for_the_same_seed(instar: Instar) -> None:
    instar("train", "tiny.yaml", "--set", "record.run_dir=run")
    ask = ("sample", "run", "--prompt", "7 squared", "--tokens", "30")
    one, same, other = instar(*ask), instar(*ask), instar(*ask, "--seed", "5")
    assert one.stdout.startswith("7 squared")
    assert one.stdout == same.stdout != other.stdout


def test_a_dry_run_says_what_would_be_and_starts_nothing(instar: Instar, place: Path) -> None:
    said = instar("train", "tiny.yaml", "--dry-run", "--nproc", "2").stdout
    for word in ("2 layers × 32 wide", "parameters", "FLOPs per token", "memory", "tokens"):
        assert word in said
    assert "torchrun --nproc_per_node=2 -m instar.train tiny.yaml" in said
    assert said.endswith("Nothing was started.\n")
    assert not (place / "runs").exists()
    facts = json.loads(instar("train", "tiny.yaml", "--dry-run", "--json").stdout)
    assert facts["steps"] == 8


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("modle.n_embd=3", "unknown key 'modle'; did you mean 'model'?"),
        ("train.batch_size=0", "train.batch_size must be"),
        ("train.batch_size=two", "train.batch_size must be"),
        ("model.n_embd=31", "divisible"),
        ("data.source=nothing.txt", "nothing.txt"),
        ("data.source=empty.txt", "empty.txt"),
        ("device=cuda", "cuda:0 is not there"),
        ("model.context=100000", "a context of 100,000"),
        ("record.out_dir=squares.txt", "is a file, not a folder"),
    ],
)
def test_bad_input_is_refused_by_name_and_nothing_is_started(
    instar: Instar, place: Path, change: str, said: str
) -> None:
    (place / "empty.txt").write_text("")
    arguments = ["--set", change]
    if "source" in change:
        arguments += ["--set", "data.path=elsewhere"]
    done = instar("train", "tiny.yaml", *arguments, code=2)
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert "Nothing was started." in done.stderr
    assert not (place / "runs").exists()


def test_devices_that_are_not_there_are_refused(instar: Instar, place: Path) -> None:
    done = instar("train", "tiny.yaml", "--devices", "0,1", code=2)
    assert "devices 0,1 were asked for, but no GPU is there" in done.stderr
    assert done.stderr.count("no GPU is there") == 1
    assert not (place / "runs").exists()


def test_samples_of_no_run(instar: Instar) -> None:
    assert "no run in runs" in instar("sample", "latest", code=2).stderr
