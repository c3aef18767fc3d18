"""Hooks run on every rank at their moments; their state is resumed; their errors name them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import science
from forks import children_as_ranks
from hooked import states
from science import evaluations
from tiny_run import Place, codes, events, output_of

SETTINGS = (
    "train.until=[12it]",
    "early_stopping.rules=[]",
    "checkpoint.on_best=false",
    "test.weights=last",
)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return science.place(tmp_path)


def script(place: Place, run_dir: Path, *settings: str, ranks: int) -> None:
    """`instar.api.train(…, hooks=…)` on each rank."""
    arguments = "hooked:train_with_hooks", str(run_dir), ["resume=auto", *SETTINGS, *settings]
    children = children_as_ranks(place.forks, ranks, *arguments, place=place.path)
    assert codes(children) == [0] * ranks, output_of(children)


def test_state_is_saved_with_checkpoints_and_resumed_on_each_rank(place: Place) -> None:
    run_dir = place.path / "run"
    script(place, run_dir, "train.until=[7it]", ranks=2)
    before = states(run_dir, 7)
    assert set(before) == {"Counting", "Counting 2"}
    assert before["Counting"] == before["Counting 2"]
    script(place, run_dir, ranks=2)
    after = states(run_dir, 12)["Counting"]
    losses = [metrics["loss"] for _, metrics in evaluations(run_dir)]
    for rank, (earlier, later) in enumerate(zip(before["Counting"], after, strict=True)):
        assert earlier["rank"] == later["rank"] == rank
        assert (earlier["calls"]["on_step_end"], later["calls"]["on_step_end"]) == (7, 12)
        assert later["calls"]["on_step_begin"] == 12
        assert later["calls"]["on_train_begin"] == later["calls"]["on_train_end"] == 2
        assert (
            later["calls"]["on_evaluate_begin"] == later["calls"]["on_evaluate_end"] == len(losses)
        )
        # of each process, the last save had begun when its state was taken
        assert later["calls"]["on_save_begin"] == later["calls"]["on_save_end"] + 2
        assert later["best"] == min(losses)

    script(place, run_dir, "train.until=[13it]", ranks=1)
    (state,) = states(run_dir, 13)["Counting"]
    assert state["calls"]["on_step_end"] == 13


def test_a_run_without_them_says_that_their_state_is_lost(place: Place) -> None:
    run_dir = place.path / "run"
    script(place, run_dir, "train.until=[3it]", ranks=1)
    children = place.resume(run_dir, "--until", "4it")
    assert codes(children) == [0], output_of(children)
    (message,) = [e["message"] for e in events(run_dir, "warning") if "hooks" in e["message"]]
    assert "Counting, Counting 2" in message


def test_methods_of_the_task_are_hooks_that_log_and_see_growth(place: Place) -> None:
    growth = [{"name": "widen", "value": {"axis": "hidden", "size": 32}, "when": {"at_step": 5}}]
    children = place.train(
        place.path / "run",
        "task=hooked:Noting",
        *SETTINGS,
        f"schedule={json.dumps(growth)}",
        ranks=2,
    )
    assert codes(children) == [0, 0], output_of(children)
    assert {(place.path / f"grown-{rank}").read_text() for rank in (0, 1)} == {"widen 5"}
    largest = [event["extra"]["largest"] for event in events(place.path / "run", "train")]
    assert len(largest) == 12
    assert 0 < max(largest) <= 2


def test_what_a_hook_set_on_submodules_stays_or_is_named_after_growth(place: Place) -> None:
    growth = [{"name": "widen", "value": {"axis": "hidden", "size": 32}, "when": {"at_step": 3}}]
    until = "train.until=[4it]"
    entries = f"schedule={json.dumps(growth)}"
    run = place.path / "run"
    children = place.train(run, "task=hooked:Setting", *SETTINGS, until, entries, ranks=2)
    assert codes(children) == [0, 0], output_of(children)
    assert {(place.path / f"set-{rank}").read_text() for rank in (0, 1)} == {"0.0 0.03125"}
    (message,) = [e["message"] for e in events(run, "warning") if "by hand" in e["message"]]
    assert "widen: set by hand, and now as the class sets it: share (0.5, now 0.03125);" in message


def test_an_error_of_one_rank_ends_all_and_names_the_hook(place: Place) -> None:
    run_dir = place.path / "run"
    children = place.train(run_dir, "task=hooked:Failing", *SETTINGS, ranks=2)
    assert 0 not in codes(children)
    (failure,) = events(run_dir, "failed")
    assert failure["rank"] == 1
    assert "the hook Failing.on_step_end failed: KeyError: 'lost' (" in failure["message"]
    assert "hooked.py:" in failure["message"]
    log = (run_dir / "logs" / "rank_1.log").read_text("utf-8")
    assert "Traceback (most recent call last)" in log
    assert 'hooked.py", line' in log
    assert [event["step"] for event in events(run_dir, "train")] == [1, 2]


def test_a_state_that_one_rank_alone_has_is_refused_before_it_hangs_a_save(place: Place) -> None:
    children = place.train(place.path / "run", "task=hooked:SavingOnOne", *SETTINGS, ranks=2)
    assert codes(children) == [2, 2], output_of(children)
    assert "the ranks have different hooks" in output_of(children)
    assert not (place.path / "run").exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_hook_can_end_the_run(place: Place, ranks: int) -> None:
    run_dir = place.path / "run"
    children = place.train(run_dir, "task=hooked:Stopping", *SETTINGS, ranks=ranks)
    assert codes(children) == [0] * ranks, output_of(children)
    (stop,) = events(run_dir, "stop")
    assert stop["reason"] == "low enough"
    # the first evaluation is at the end of the first epoch, and the step after it is still made
    assert stop["step"] in (5, 6)
    assert (run_dir / "test" / "result.json").exists()


REFUSED = {
    "Misspelt": ("on_step_finish, which is never called", "on_step_end"),
    "Unwritable": ("the hook Unwritable.state_dict failed: TypeError", "not JSON serializable"),
}


@pytest.mark.parametrize("task", REFUSED)
def test_mistakes_are_named(place: Place, task: str) -> None:
    children = place.train(place.path / "run", f"task=hooked:{task}", *SETTINGS)
    assert codes(children) != [0]
    for message in REFUSED[task]:
        assert message in output_of(children)
    assert (place.path / "run").exists() == (task == "Unwritable")
