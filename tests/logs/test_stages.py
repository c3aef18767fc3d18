"""The stages of a run: one for each shape, and together all of it."""

from pathlib import Path

import pytest
from shown_runs import LARGE, SMALL, START, place, start_event, steps, told_run, widen_event, write

from instar.logs.query.stages import last_place, place_at, stages
from instar.logs.read.record import read_record
from instar.record.events import Eval, encode_event
from instar.record.rundir import RunDir


def test_a_stage_ends_where_the_shape_changes(tmp_path: Path) -> None:
    first, second = stages(read_record(told_run(tmp_path / "told")))
    assert (first.from_step, first.to_step, second.from_step, second.to_step) == (0, 20, 20, 40)
    assert (first.parameters, second.parameters) == (20_000, 24_096)
    assert (dict(first.architecture), dict(second.architecture)) == (SMALL, LARGE)
    assert (first.operation, second.operation) == ("", "widen_mlp 64→96")
    assert second.reason == "val 3.12 < 3.50"
    assert second.model == "2L/32d"


def test_stages_add_up_to_the_run(tmp_path: Path) -> None:
    run_stages = stages(read_record(told_run(tmp_path / "told")))
    totals = place(40, 2)
    assert sum(stage.steps for stage in run_stages) == 40
    assert sum(stage.tokens for stage in run_stages) == totals["tokens"]
    assert sum(stage.flops for stage in run_stages) == pytest.approx(totals["flops"])
    assert sum(stage.active_s for stage in run_stages) == pytest.approx(totals["active_s"])
    assert sum(stage.wall_s for stage in run_stages) == pytest.approx(totals["wall_s"])


def test_the_losses_are_the_last_ones_that_count(tmp_path: Path) -> None:
    first, second = stages(read_record(told_run(tmp_path / "told")))
    assert first.loss == pytest.approx(2 + 4 / 3)
    assert first.val_loss == pytest.approx(2.125 + 4 / 3)
    assert second.loss == pytest.approx(2 + 4 / 5)
    assert second.val_loss == pytest.approx(2.125 + 4 / 5)


def test_a_growth_that_was_superseded_begins_no_stage(tmp_path: Path) -> None:
    lines = [(start_event(), 1), *steps(1, 20), (widen_event(20), 1), *steps(21, 25)]
    run = write(tmp_path / "back", [*lines, (start_event(2, 10), 2), *steps(11, 30, 2)])
    (only,) = stages(read_record(run))
    assert (only.from_step, only.to_step, only.parameters) == (0, 30, 20_000)


@pytest.mark.parametrize("begin", [0, 10])
def test_an_operation_of_a_start_that_saved_nothing_counts_once(tmp_path: Path, begin: int) -> None:
    first = [(start_event(1, begin), 1), (widen_event(begin), 1), *steps(begin + 1, begin + 5)]
    again = [(start_event(2, begin), 2), (widen_event(begin), 2), *steps(begin + 1, begin + 9, 2)]
    run_stages = stages(read_record(write(tmp_path / "killed", [*first, *again])))
    assert [stage.operation for stage in run_stages] == ["", "widen_mlp 64→96"]


def test_a_run_that_has_not_trained_yet_has_an_empty_stage(tmp_path: Path) -> None:
    (only,) = stages(read_record(write(tmp_path / "new", [(start_event(), 1)])))
    assert (only.steps, only.tokens, only.loss) == (0, 0, None)


def test_places_between_train_lines_are_interpolated(tmp_path: Path) -> None:
    lines = [(start_event(), 1), *steps(10, 10), *steps(20, 20)]
    record = read_record(write(tmp_path / "sparse", lines))
    assert place_at(record, 15)["tokens"] == 128 * 15
    assert place_at(record, 5)["tokens"] == 128 * 5
    assert last_place(record)["step"] == 20


def test_an_evaluation_after_a_growth_at_its_step_is_of_the_grown_model(tmp_path: Path) -> None:
    """As with `reevaluate: true`."""
    before, after = (Eval(split="val", loss=loss, **place(20)) for loss in (3.0, 9.0))
    run = RunDir(tmp_path / "again")
    run.path.mkdir()
    train_events = [
        (event, START + event.step) for event, _ in steps(1, 20) if event.step is not None
    ]
    events = [
        (start_event(), START),
        *train_events,
        (before, START + 21),
        (widen_event(20), START + 22),
    ]
    with run.events.open("wb") as file:
        file.writelines(encode_event(*event, 1) for event in (*events, (after, START + 23)))
    first, second = stages(read_record(run))
    assert (first.val_loss, second.val_loss) == (3.0, 9.0)
