"""Early stopping and the plateau on real ranks: all leave at the step that the metrics say."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import science
from cases import parametrize_first
from science import evaluations, last_step, pointer_target, result, still_since
from tiny_run import Place, codes, events, output_of, weights

DIRECTIONS = {"loss": "min", "accuracy": "max", "doubt": "min"}
ENDLESS = ("train.until=[300it]", "learning_rate.lr_decay_iters=300")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return science.place(tmp_path)


def first_stop(rows: list[science.Row], rules: list[dict[str, Any]], mode: str) -> int | None:
    """The step of the first evaluation after which the run should end: the definition."""
    enough = any if mode == "any" else all
    for count in range(1, len(rows) + 1):
        if enough(
            still_since(
                [metrics[rule["metric"]] for _, metrics in rows[:count]],
                better=DIRECTIONS[rule["metric"]],
                delta=rule.get("delta", 0),
                grace=rule.get("grace", 0),
            )
            >= rule["patience"]
            for rule in rules
        ):
            return rows[count - 1][0]
    return None


CASES: dict[str, tuple[str, list[dict[str, Any]], tuple[str, ...]]] = {
    "unequal shares": ("any", [{"metric": "loss", "patience": 3}], ("train.batch_size=7",)),
    "fewer training samples than ranks": (
        "any",
        [{"metric": "accuracy", "patience": 9}, {"metric": "doubt", "patience": 4, "grace": 6}],
        ("data.samples=47", "eval.eval_epochs=3"),
    ),
    "fewer validation samples than ranks": (
        "all",
        [{"metric": "loss", "patience": 2, "delta": 0.01}, {"metric": "accuracy", "patience": 3}],
        ("data.val=3", "data.test=2"),
    ),
}


@parametrize_first("case", CASES, first=1)
def test_all_ranks_leave_at_the_step_that_the_metrics_say(place: Place, case: str) -> None:
    mode, rules, settings = CASES[case]
    stopping = f"early_stopping={json.dumps({'stop_when': mode, 'rules': rules})}"
    for ranks in (1, 4):
        run_dir = place.path / f"w{ranks}"
        children = place.train(run_dir, *ENDLESS, stopping, *settings, ranks=ranks)
        assert codes(children) == [0] * ranks, output_of(children)
        rows = evaluations(run_dir)
        expected_step = first_stop(rows, rules, mode)
        assert expected_step == rows[-1][0] < 300
        assert {last_step(run_dir, rank) for rank in range(ranks)} == {expected_step}
        (stop,) = events(run_dir, "stop")
        assert (stop["step"], stop["resumable"]) == (expected_step, False)
        assert "has not been better" in stop["reason"]
        assert pointer_target(run_dir, "latest") == f"step-{expected_step}"
        best = min(rows, key=lambda row: row[1]["loss"])[0]
        assert pointer_target(run_dir, "best") == f"step-{best}"
        assert result(run_dir)["step"] == best


@pytest.mark.torture
def test_elastic_ranks_judge_stop_and_test_bit_for_bit_alike(place: Place) -> None:
    """Two ranks are compared in tests/examples/test_causal_sets.py."""
    results = {}
    for ranks in (1, 4):
        run_dir = place.path / f"w{ranks}"
        children = place.train(run_dir, *ENDLESS, "reproducible=elastic", ranks=ranks)
        assert codes(children) == [0] * ranks, output_of(children)
        stop, best = last_step(run_dir, ranks - 1), pointer_target(run_dir, "best")
        results[ranks] = {
            "metrics": evaluations(run_dir),
            "stop": stop,
            "pointers": (best, pointer_target(run_dir, "best-accuracy")),
            "best": weights(run_dir, int(best.removeprefix("step-"))),
            "last": weights(run_dir, stop),
            "test": result(run_dir),
            "predictions": (run_dir / "test" / "predictions.parquet").read_bytes(),
        }
    assert results[1]["stop"] < 300
    for what, expected in results[1].items():
        assert results[4][what] == expected, what


GROWTH = [
    {
        "name": "widen",
        "value": {"axis": "hidden", "size": 40},
        "when": {"at_step": 10},
        "reevaluate": True,
    }
]


def test_a_run_that_goes_on_from_a_change_is_judged_as_it_was(place: Place) -> None:
    """A model that was evaluated again at the same step was not judged again."""
    rules = "early_stopping.rules=[{metric: loss, patience: 1}]", f"schedule={json.dumps(GROWTH)}"
    run_dir = place.path / "run"
    assert codes(place.train(run_dir, *rules)) == [0]
    assert [step for step, _ in evaluations(run_dir)][:3] == [5, 10, 10]
    rows = evaluations(run_dir)
    del rows[2]
    expected_step = first_stop(rows, [{"metric": "loss", "patience": 1}], "any")
    children = place.resume(run_dir, "--from", 10)
    assert codes(children) == [0], output_of(children)
    assert [event["step"] for event in events(run_dir, "stop")] == [expected_step, expected_step]
    assert expected_step == rows[-1][0] > 10


PLATEAU = (
    "early_stopping.rules=[]",
    "learning_rate.plateau={metric: loss, factor: 0.5, patience: 2, min_lr_ratio: 0.2}",
    "test.at_end=false",
    "checkpoint.on_best=false",
)
STEPS = 80
FIRST, FLOOR = 0.03, 0.2 * 0.03


def falls(rows: list[science.Row]) -> list[tuple[int, float]]:
    """The steps after which the rate falls, and the peak from there on: the definition."""
    drops, rate, begin = [], FIRST, 0
    losses = [metrics["loss"] for _, metrics in rows]
    for count in range(1, len(rows) + 1):
        # the best stays, and counting begins anew after each fall, also one that was none
        age = count - begin
        if min(still_since(losses[:count], better="min"), age) < 2:
            continue
        begin, lower = count, max(rate / 2, FLOOR)
        if lower < rate:
            rate = lower
            drops.append((rows[count - 1][0], rate))
    return drops


def drops_of(run_dir: Path, step: int) -> list[tuple[int, float]]:
    """What the checkpoint's history says."""
    manifest = run_dir / "checkpoints" / f"step-{step}" / "manifest.json"
    history = json.loads(manifest.read_text("utf-8"))["history"]
    history = [change for change in history if change["operation"]["name"] != "override"]
    assert {change["operation"]["name"] for change in history} == {"set_lr"}
    assert all("has not been better" in change["reason"] for change in history)
    return [(change["step"], change["operation"]["value"]) for change in history]


def rates(run_dir: Path) -> dict[int, float]:
    return {event["step"]: event["lr"] for event in events(run_dir, "train")}


@pytest.mark.torture
@pytest.mark.parametrize("ranks", [2, 1])
def test_the_rate_falls_where_the_metric_stands_still_and_so_after_resuming(
    place: Place, ranks: int
) -> None:
    """Stopped just as it is about to fall, or between two falls."""
    full_run = place.path / "whole"
    assert (
        codes(place.train(full_run, *PLATEAU, f"train.until=[{STEPS}it]", ranks=ranks))
        == [0] * ranks
    )
    expected = falls(evaluations(full_run))
    assert drops_of(full_run, STEPS) == expected
    assert expected[-1][1] == FLOOR
    for (step, rate), (after, _) in pairwise([*expected, (STEPS, 0.0)]):
        assert {round(rates(full_run)[n], 12) for n in range(step + 1, after + 1)} == {
            round(rate, 12)
        }

    for until in (expected[0][0], expected[1][0] + 5)[: 3 - ranks]:
        parts = place.path / f"parts-{until}"
        children = place.train(parts, *PLATEAU, f"train.until=[{until}it]", ranks=ranks)
        assert codes(children) == [0] * ranks
        resumed_children = place.resume(parts, "--until", f"{STEPS}it", ranks=ranks)
        assert codes(resumed_children) == [0] * ranks, output_of(resumed_children)
        assert drops_of(parts, STEPS) == expected
        assert rates(parts) == rates(full_run)
        assert weights(parts, STEPS) == weights(full_run, STEPS)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stop_that_is_withdrawn_once_it_is_agreed_ends_the_run_as_interrupted(
    place: Place, ranks: int
) -> None:
    run_dir = place.path / "run"
    # the folder of checkpoints, which tells where the run is, is there from the first save on
    settings = (*ENDLESS, "checkpoint.every_steps=2", "checkpoint.asynchronous=false")
    children = place.train(run_dir, *settings, ranks=ranks, body="failures:stop_is_withdrawn")
    assert codes(children) == [75] * ranks, output_of(children)
    (stop,) = events(run_dir, "stop")
    assert (stop["reason"], stop["resumable"]) == ("instar control stop", True)
    assert not (run_dir / "test").exists()
    assert pointer_target(run_dir, "latest") == f"step-{stop['step']}"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_out_of_time_is_evaluated_and_tested(place: Place, ranks: int) -> None:
    run_dir = place.path / "run"
    children = place.train(
        run_dir, "train.until=[0.5s]", "learning_rate.lr_decay_iters=300", "eval.eval_epochs=100",
        "early_stopping.rules=[]", ranks=ranks,
    )  # fmt: skip
    assert codes(children) == [0] * ranks, output_of(children)
    (stop,) = events(run_dir, "stop")
    assert stop["reason"].startswith("reached ")
    assert [step for step, _ in evaluations(run_dir)][-1] == stop["step"]
    assert result(run_dir)["samples"] == 23
