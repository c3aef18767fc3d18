"""Evaluations on another basis: what remembers a best value begins anew, and every reader says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from instar.checkpoint.manifest import read_manifest

Typed = Callable[..., str]
SETTLED = ("--set", "optimizer.lr=1e-12", "--set", "learning_rate.shape=constant")
EVALUATED = ("--set", "eval.eval_interval=2", "--set", "eval.eval_iters=1")
PATIENT = ("--set", "early_stopping.rules=[{metric: loss, patience: 3}]")
LARGER = ("--set", "schedule=[{name: set_eval_iters, value: 40, when: {at_step: 6}}]")


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [event for event in lines if event["kind"] == kind]


def losses(run: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events(run, "eval")}


def pointed(run: Path, pointer: str) -> str:
    return (run / "checkpoints" / pointer).read_text().strip()


@pytest.fixture
def run(typed: Typed, place: Path) -> Path:
    """A run that learns nothing, whose evaluations after step 6 are of more samples."""
    said = typed("train", "tiny.yaml", *SETTLED, *EVALUATED, *PATIENT, *LARGER,
                 "--set", "record.run_dir=run", "--set", "seed=2", "--until", "12it")  # fmt: skip
    assert "evaluations from here on are not comparable with earlier ones" in said
    return place / "run"


def test_best_and_patience_begin_anew_where_other_samples_are_evaluated(
    typed: Typed, run: Path
) -> None:
    measured = losses(run)
    assert measured[2] < measured[8], "the few samples must be easier, or nothing is shown"
    (anew,) = events(run, "begins_anew")
    assert anew["step"] == 8
    assert anew["reasons"][0].startswith("evaluated samples 4 → ")
    finished = events(run, "run_finished")[-1]
    assert (finished["step"], finished["best_step"]) == (12, 8), "or patience ended it at step 8"
    assert pointed(run, "best") == "step-8"
    assert read_manifest(run / "checkpoints" / "step-8").basis != ""

    (row,) = json.loads(typed("logs", "list", "run", "--json"))
    assert (row["best"], row["best_step"]) == (measured[8], 8)
    (summary,) = json.loads(typed("logs", "summary", "run", "--json"))
    assert summary["best"]["val/loss"]["step"] == 8
    assert "comparable since step 8: evaluated samples" in typed("logs", "summary", "run")

    # one resume changes nothing, and patience ends it; the next changes back what is evaluated
    typed("resume", "run", "--until", "20it")
    assert len(events(run, "begins_anew")) == 1
    assert events(run, "run_finished")[-1]["step"] == 14
    typed("resume", "run", "--until", "20it", "--set", "eval.eval_iters=1")
    assert [event["step"] for event in events(run, "begins_anew")] == [8, 16]
    finished = events(run, "run_finished")[-1]
    assert (finished["step"], finished["best_step"]) == (20, 16)


@pytest.mark.usefixtures("run")
def test_runs_with_such_a_change_are_compared_with_a_warning_and_not_at_a_loss(
    typed: Typed,
) -> None:
    typed("train", "tiny.yaml", *SETTLED, "--set", "record.run_dir=other", "--until", "2it")
    said = typed("logs", "compare", "run", "other")
    assert "evaluations before and after step 8 are not comparable" in said
    said = typed("logs", "compare", "run", "other", "--at-loss", "3.0", code=2)
    assert "evaluations before and after step 8 are not comparable" in said


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
    typed: Typed, place: Path, change: dict[str, Any], reason: str
) -> None:
    schedule = json.dumps([{**change, "when": {"at_step": 2}}])
    typed("train", "tiny.yaml", *EVALUATED, "--set", f"schedule={schedule}",
          "--set", "record.run_dir=run", "--until", "4it")  # fmt: skip
    said = [str(event["reasons"]) for event in events(place / "run", "begins_anew")]
    assert [reason in each for each in said] == ([True] if reason else [])


def test_eval_context_set_at_a_resume_makes_them_begin_anew(typed: Typed, place: Path) -> None:
    typed("train", "tiny.yaml", *EVALUATED, "--set", "record.run_dir=run", "--until", "2it")
    typed("resume", "run", "--until", "4it", "--set", "eval.context=8")
    (anew,) = events(place / "run", "begins_anew")
    assert anew["reasons"] == ["tokens per sample 16 → 8"]
