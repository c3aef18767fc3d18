"""Evaluations on another basis: what remembers a best value begins anew, and every reader says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from instar.checkpoint.manifest import read_manifest

RunCli = Callable[..., str]
SETTLED = ("--set", "optimizer.lr=1e-12", "--set", "learning_rate.shape=constant")
EVALUATED = ("--set", "eval.eval_interval=2", "--set", "eval.eval_iters=1")
PATIENT = ("--set", "early_stopping.rules=[{metric: loss, patience: 3}]")
LARGER = ("--set", "schedule=[{name: set_eval_iters, value: 40, when: {at_step: 6}}]")


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [event for event in lines if event["kind"] == kind]


def losses(run: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events(run, "eval")}


def pointer_target(run: Path, pointer: str) -> str:
    return (run / "checkpoints" / pointer).read_text().strip()


@pytest.fixture
def run(run_cli: RunCli, place: Path) -> Path:
    """A run that learns nothing, whose evaluations after step 6 are of more samples."""
    output = run_cli("train", "tiny.yaml", *SETTLED, *EVALUATED, *PATIENT, *LARGER,
                 "--set", "record.run_dir=run", "--set", "seed=2", "--until", "12it")  # fmt: skip
    assert "evaluations from here on are not comparable with earlier ones" in output
    return place / "run"


def test_best_and_patience_begin_anew_where_other_samples_are_evaluated(
    run_cli: RunCli, run: Path
) -> None:
    losses_by_step = losses(run)
    assert losses_by_step[2] < losses_by_step[8], (
        "the few samples must be easier, or nothing is shown"
    )
    (restart,) = events(run, "begins_anew")
    assert restart["step"] == 8
    assert restart["reasons"][0].startswith("evaluated samples 4 → ")
    end = events(run, "run_finished")[-1]
    assert (end["step"], end["best_step"]) == (12, 8), "or patience ended it at step 8"
    assert pointer_target(run, "best") == "step-8"
    assert read_manifest(run / "checkpoints" / "step-8").basis != ""

    (row,) = json.loads(run_cli("logs", "list", "run", "--json"))
    assert (row["best"], row["best_step"]) == (losses_by_step[8], 8)
    (summary,) = json.loads(run_cli("logs", "summary", "run", "--json"))
    assert summary["best"]["val/loss"]["step"] == 8
    assert "comparable since step 8: evaluated samples" in run_cli("logs", "summary", "run")

    # one resume changes nothing, and patience ends it; the next changes back what is evaluated
    run_cli("resume", "run", "--until", "20it")
    assert len(events(run, "begins_anew")) == 1
    assert events(run, "run_finished")[-1]["step"] == 14
    run_cli("resume", "run", "--until", "20it", "--set", "eval.eval_iters=1")
    assert [event["step"] for event in events(run, "begins_anew")] == [8, 16]
    end = events(run, "run_finished")[-1]
    assert (end["step"], end["best_step"]) == (20, 16)


@pytest.mark.usefixtures("run")
def test_runs_with_such_a_change_are_compared_with_a_warning_and_not_at_a_loss(
    run_cli: RunCli,
) -> None:
    run_cli("train", "tiny.yaml", *SETTLED, "--set", "record.run_dir=other", "--until", "2it")
    output = run_cli("logs", "compare", "run", "other")
    assert "evaluations before and after step 8 are not comparable" in output
    output = run_cli("logs", "compare", "run", "other", "--at-loss", "3.0", code=2)
    assert "evaluations before and after step 8 are not comparable" in output


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"name": "set_context", "value": 8}, "tokens per sample 16 → 8"),
        ({"name": "resize_vocab", "value": 80}, "vocabulary"),
        ({"name": "set_batch_size", "value": 2}, ""),
        ({"name": "widen_mlp", "value": 160}, ""),
    ],
)
def test_only_what_evaluations_depend_on_makes_them_begin_anew(
    run_cli: RunCli, place: Path, change: dict[str, Any], reason: str
) -> None:
    schedule = json.dumps([{**change, "when": {"at_step": 2}}])
    run_cli("train", "tiny.yaml", *EVALUATED, "--set", f"schedule={schedule}",
          "--set", "record.run_dir=run", "--until", "4it")  # fmt: skip
    reasons = [str(event["reasons"]) for event in events(place / "run", "begins_anew")]
    assert [reason in text for text in reasons] == ([True] if reason else [])


def test_eval_context_set_at_a_resume_makes_them_begin_anew(run_cli: RunCli, place: Path) -> None:
    run_cli("train", "tiny.yaml", *EVALUATED, "--set", "record.run_dir=run", "--until", "2it")
    run_cli("resume", "run", "--until", "4it", "--set", "eval.context=8")
    (restart,) = events(place / "run", "begins_anew")
    assert restart["reasons"] == ["tokens per sample 16 → 8"]


def _train(run_cli: RunCli, name: str, *settings: str) -> None:
    words = [
        word for text in (f"record.run_dir=runs/{name}", *settings) for word in ("--set", text)
    ]
    run_cli("train", "tiny.yaml", "--until", "2it", *words)


def test_runs_are_compared_by_what_they_were_evaluated_on_not_by_keys(
    run_cli: RunCli, place: Path
) -> None:
    """The same text under another name is comparable; another number of samples, which no key of the data says,
    is not, and is named."""
    _train(run_cli, "a")
    (place / "copy.txt").write_bytes((place / "squares.txt").read_bytes())
    _train(run_cli, "renamed", "data.source=copy.txt", "data.path=other")
    _train(run_cli, "fewer", "eval.eval_iters=1")
    comparison = json.loads(run_cli("logs", "compare", "runs/a", "runs/renamed", "--json"))
    assert comparison["warnings"] == [
        "the runs differ in data.source: their training losses, which are measured on different data, are "
        "not comparable"
    ]
    differs = "are not comparable with those of a: evaluated samples 44 → 4"
    comparison = json.loads(run_cli("logs", "compare", "runs/a", "runs/fewer", "--json"))
    assert comparison["warnings"] == [f"held-out losses of fewer {differs}"]
    assert differs in run_cli("logs", "compare", "runs/a", "runs/fewer", "--at-loss", "4", code=2)
    run_cli("logs", "compare", "runs/a", "runs/renamed", "--at-loss", "4")
    listing = run_cli("logs", "list", "runs")
    assert f"held-out values of fewer {differs}" in listing
    assert "renamed are" not in listing
    line = run_cli("logs", "list", "runs", "--json").splitlines()[0]
    bases = {row["id"]: row["basis"] for row in json.loads(line)}
    assert bases["a"] == bases["renamed"] != bases["fewer"]
    (state,) = (place / "runs" / "fewer" / "checkpoints").glob("step-2/state.json")
    state.write_text("damaged")
    assert run_cli("logs", "compare", "runs/a", "runs/fewer").startswith("val/loss"), (
        "no basis, no claim"
    )


@pytest.mark.usefixtures("place")
def test_seeds_of_a_group_are_compared_with_the_same_seeds_of_another(run_cli: RunCli) -> None:
    for seed in (1, 2):
        for name, rate, iters in (("slow", 1e-4, 2), ("fast", 1e-3, 2), ("few", 1e-4, 1)):
            settings = (f"seed={seed}", f"optimizer.lr={rate}", f"eval.eval_iters={iters}")
            _train(run_cli, f"{name}{seed}", *settings)
    words = ("logs", "compare", "runs/slow*", "--by", "seed", "--json")
    same = json.loads(run_cli(*words, "runs/fast*").splitlines()[-1])
    assert [len(arm["runs"]) for arm in same["arms"]] == [2, 2]
    assert same["warnings"] == []
    (warning,) = json.loads(run_cli(*words, "runs/few*").splitlines()[-1])["warnings"]
    expected = "few1, few2 are not comparable with those of slow1: evaluated samples 8 → 4"
    assert expected in warning
