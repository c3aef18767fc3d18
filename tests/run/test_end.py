"""How a run's end stands in its record."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from forks import Forks
from tiny_run import CONFIG, TEXT, Place, codes, events, said

from instar.record.rundir import RunDir

DIVERGING = ("optimizer.lr=1e30", "train.clip=null", "train.max_skipped_steps=2")


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks("instar.cli.main", "instar.run.rank", "torch.distributed") as server:
        yield server


@pytest.fixture
def place(tmp_path: Path, forks: Forks) -> Place:
    (tmp_path / "squares.txt").write_text(TEXT)
    (tmp_path / "run.yaml").write_text(CONFIG)
    return Place(tmp_path, forks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_fails_says_why_and_leaves_a_report(place: Place, ranks: int) -> None:
    run_dir = place.path / "failed"
    children = place.train(run_dir, *DIVERGING, ranks=ranks)
    assert codes(children) == [4] * ranks, said(children)
    (failed,) = events(run_dir, "failed")
    assert "the gradient was not finite for 2 steps in a row" in failed["message"]
    assert failed["step"] == events(run_dir, "skip")[-1]["step"]
    assert events(run_dir)[-1] == failed
    assert RunDir(run_dir).report.exists()


def test_a_run_that_ends_well_says_nothing_of_failure(place: Place) -> None:
    run_dir = place.path / "well"
    children = place.train(run_dir)
    assert codes(children) == [0], said(children)
    assert events(run_dir, "failed") == []
    assert [event["step"] for event in events(run_dir, "sample")] == [24]
    assert RunDir(run_dir).report.exists()


def test_no_report_where_none_is_wanted(place: Place) -> None:
    run_dir = place.path / "plain"
    children = place.train(run_dir, "record.report=false", "record.sample_tokens=0")
    assert codes(children) == [0], said(children)
    assert not RunDir(run_dir).report.exists()
    assert events(run_dir, "sample") == []
