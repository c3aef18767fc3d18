"""How a run's end stands in its record."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from forks import Forks, children_as_ranks
from needed import needs
from tiny_run import CONFIG, STEPS, TEXT, Place, codes, events, output_of

from instar.record.rundir import RunDir

REPORT = "record.report=true"
DIVERGING = "train.max_skipped_steps=2"
NAN = "failures:last_rank_has_nan_for_good"


@pytest.fixture
def place(tmp_path: Path, forks: Forks) -> Place:
    (tmp_path / "squares.txt").write_text(TEXT)
    (tmp_path / "run.yaml").write_text(CONFIG)
    return Place(tmp_path, forks)


@needs("board")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_fails_says_why_and_leaves_a_report(place: Place, ranks: int) -> None:
    run_dir = place.path / "failed"
    children = place.train(run_dir, DIVERGING, REPORT, ranks=ranks, body=NAN)
    assert codes(children) == [4] * ranks, output_of(children)
    (failure,) = events(run_dir, "failed")
    assert "the gradient was not finite for 2 steps in a row" in failure["message"]
    assert failure["step"] == events(run_dir, "skip")[-1]["step"]
    assert events(run_dir)[-1] == failure
    assert RunDir(run_dir).report.exists()


@needs("board")
def test_a_run_that_ends_well_says_nothing_of_failure(place: Place) -> None:
    run_dir = place.path / "well"
    children = place.train(run_dir, REPORT, "train.until=2it")
    assert codes(children) == [0], output_of(children)
    assert events(run_dir, "failed") == []
    assert [event["step"] for event in events(run_dir, "sample")] == [2]
    assert RunDir(run_dir).report.exists()


def test_no_report_where_none_is_wanted(place: Place) -> None:
    run_dir = place.path / "plain"
    children = place.train(run_dir, "record.sample_tokens=0", "train.until=2it")
    assert codes(children) == [0], output_of(children)
    assert not RunDir(run_dir).report.exists()
    assert events(run_dir, "sample") == []


def losses(run_dir: Path) -> dict[int, tuple[float, int]]:
    """By step: the loss of an interval that ends there, and how many steps it has."""
    return {event["step"]: (event["loss"], event["steps"]) for event in events(run_dir, "train")}


def means(single: Path, ends: Sequence[int]) -> dict[int, float]:
    """The means over intervals that end at these steps, of a run that told of every step."""
    sums, begin, tokens = dict[int, float](), 0, 0
    rows = events(single, "train")
    for end in ends:
        part = [row for row in rows if begin < row["step"] <= end]
        before = [tokens, *(row["tokens"] for row in part[:-1])]
        weights = [row["tokens"] - last for row, last in zip(part, before, strict=True)]
        total = sum(row["loss"] * weight for row, weight in zip(part, weights, strict=True))
        sums[end] = total / sum(weights)
        begin, tokens = end, part[-1]["tokens"]
    return sums


@pytest.mark.torture
@pytest.mark.parametrize("ranks", [2, 1])
def test_every_step_is_in_the_record_also_of_a_run_that_was_stopped(
    place: Place, ranks: int
) -> None:
    """A stop inside of an interval tells it so far; the run that goes on tells what one does that
    was never stopped."""
    tens = "record.log_interval=10"
    single, full_run, parts = (place.path / name for name in ("single", "whole", "parts"))
    for run_dir, settings in (
        (single, ()),
        (full_run, (tens,)),
        (parts, (tens, "train.until=17it")),
    ):
        children = place.train(run_dir, *settings, ranks=ranks)
        assert codes(children) == [0] * ranks, output_of(children)
    full_losses = losses(full_run)
    assert {step: steps for step, (_, steps) in full_losses.items()} == {1: 1, 10: 9, 20: 10, 24: 4}
    expected = means(single, [1, 10, 20, 24])
    assert {step: loss for step, (loss, _) in full_losses.items()} == pytest.approx(
        expected, rel=1e-5
    )
    assert events(full_run, "run_finished")[-1]["loss"] == full_losses[24][0]

    assert losses(parts)[17] == (pytest.approx(means(single, [10, 17])[17], rel=1e-5), 7)
    children_of_resume = place.resume(parts, "--until", f"{STEPS}it", ranks=ranks)
    assert codes(children_of_resume) == [0] * ranks, output_of(children_of_resume)
    after = losses(parts)
    del after[17]
    assert after == full_losses


def test_an_interval_ends_where_the_model_grows(place: Place) -> None:
    run_dir = place.path / "grown"
    growth = 'schedule=[{"name": "widen_mlp", "value": 160, "when": {"at_step": 15}}]'
    children = place.train(run_dir, "record.log_interval=10", growth)
    assert codes(children) == [0], output_of(children)
    assert {step: steps for step, (_, steps) in losses(run_dir).items()} == {
        1: 1, 10: 9, 15: 5, 20: 5, 24: 4
    }  # fmt: skip


def test_a_run_that_fails_tells_its_last_steps(place: Place) -> None:
    run_dir = place.path / "failed"
    children = place.train(run_dir, DIVERGING, "record.log_interval=10", body=NAN)
    assert codes(children) == [4], output_of(children)
    last = events(run_dir, "skip")[-1]["step"]
    assert last % 10
    assert max(losses(run_dir)) == last


def test_a_run_leaves_nothing_half_deleted(place: Place) -> None:
    run_dir = place.path / "run"
    saving = "checkpoint.every_steps=8", "checkpoint.keep_last=1", "checkpoint.keep_best=0"
    children = place.train(run_dir, *saving, body="failures:deletes_slowly")
    assert codes(children) == [0], output_of(children)
    folder = run_dir / "checkpoints"
    assert [path.name for path in folder.glob("step-*")] == ["step-24"]
    assert list(folder.glob(".*")) == []

    for name in (".trash-step-8-0a1b2c3d", ".tmp-0a1b2c3d4e5f6071"):
        (folder / name).mkdir()
    children_of_resume = place.resume(run_dir)
    assert codes(children_of_resume) == [0], output_of(children_of_resume)
    assert list(folder.glob(".*")) == []


@pytest.mark.torture
@pytest.mark.parametrize("ranks", [2, 1])
def test_a_script_that_trains_again_and_again_keeps_nothing(place: Place, ranks: int) -> None:
    settings = ["train.until=4it"]
    settings += ["reproducible=elastic", "parallel.elastic.threads=1"] if ranks == 1 else []
    body = "failures:trains_again_and_again"
    children = children_as_ranks(place.forks, ranks, body, 5, settings, place=place.path)
    assert codes(children) == [0] * ranks, output_of(children)
    texts_by_rank = [re.findall(r"left ({.*?})", child.output()) for child in children]
    usages = [
        json.loads(text) for one_time in zip(*texts_by_rank, strict=True) for text in one_time
    ]
    assert len(usages) == 5 * ranks
    assert all(usage["flags"] for usage in usages)
    assert {usage["trainers"] for usage in usages} == {
        ranks - 1
    }  # of several ranks, the last one stays
    early, late = usages[2 * ranks : 3 * ranks], usages[-ranks:]
    assert max(e["threads"] for e in late) <= max(e["threads"] for e in early)
    assert max(e["rss"] for e in late) - max(e["rss"] for e in early) < 40 << 20


@pytest.mark.torture
def test_a_resume_starts_no_workers_for_what_is_over(place: Place) -> None:
    run_dir = place.path / "run"
    contexts = [(3, 8), (6, 12), (9, 16), (12, 8)]
    entries = [
        {"name": "set_context", "value": size, "when": {"at_step": step}} for step, size in contexts
    ]
    settings = "data.workers=1", f"schedule={json.dumps(entries)}", "train.until=14it"
    assert codes(place.train(run_dir, *settings)) == [0]
    (child,) = place.resume(run_dir, "--until", "16it", body="failures:counts_workers")
    assert child.finish() == 0, child.output()
    lines = [line for line in child.output().splitlines() if line.startswith("workers")]
    assert set(lines) == {
        "workers 2 1"
    }  # those the config begins with, and those of the last change
