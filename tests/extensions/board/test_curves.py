"""What a page draws of a run: thinned, masked, marked, and fit for JSON."""

import json
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from records import make_run
from shown_runs import START, place, start_event, steps, told_run, write

from instar.extensions.board.curves import SIGNIFICANT_FIGURES, _round_values, chart_data
from instar.extensions.board.sections import page_sections
from instar.logs.read.record import AXES, read_record
from instar.record.events import Asked, OperationEvent, Train


def test_a_run_is_json_without_words_for_numbers(tmp_path: Path) -> None:
    data = chart_data(read_record(told_run(tmp_path / "told-r7f3a")))
    assert json.loads(msgspec.json.encode(data)) == json.loads(json.dumps(data, allow_nan=False))
    assert (data["id"], data["name"], data["state"]) == ("r7f3a", "told", "finished")
    assert "val/loss:error" not in data["series"]


def test_what_was_superseded_is_apart(tmp_path: Path) -> None:
    loss = chart_data(read_record(told_run(tmp_path / "told")))["series"]["loss"]
    assert loss["x"]["step"] == list(range(1, 41))
    (lost,) = loss["superseded"]
    assert lost["segment"] == 1
    assert lost["x"]["step"] == [31, 32, 33, 34, 35]
    assert all(value > 3 for value in lost["value"])


def test_every_axis_has_as_many_places_as_there_are_values(tmp_path: Path) -> None:
    for found in chart_data(read_record(told_run(tmp_path / "told")))["series"].values():
        for piece in [found, *found["superseded"]]:
            assert set(piece["x"]) == set(AXES)
            assert {len(xs) for xs in piece["x"].values()} == {len(piece["value"])}


def test_spikes_survive_thinning(tmp_path: Path) -> None:
    record = read_record(make_run(tmp_path / "made", 20_000, spikes=3))
    values = chart_data(record, 200, metrics=["loss"])["series"]["loss"]["value"]
    assert len(values) <= 200
    assert sum(value > 40 for value in values) == 3


def test_a_value_that_is_not_finite_is_a_gap(tmp_path: Path) -> None:
    lines = [
        (Train(loss=loss, **place(n)), 1) for n, loss in enumerate([2.0, math.nan, math.inf, 1.0])
    ]
    data = chart_data(read_record(write(tmp_path / "gap", [(start_event(), 1), *lines])))
    assert data["series"]["loss"]["value"] == [2.0, None, None, 1.0]


def test_marks_say_what_happened_where(tmp_path: Path) -> None:
    marks = chart_data(read_record(told_run(tmp_path / "told")))["marks"]
    kinds = [mark["kind"] for mark in marks]
    assert kinds == ["operation", "checkpoint", "checkpoint", "alert", "failed", "resume", "stop"]
    grown = marks[0]
    assert grown["title"] == "widen_mlp 64→96"
    assert grown["text"].split("\n") == [
        "because val 3.12 < 3.50",
        "20.0k→24.1k, optimizer mapped",
        "exact, max |Δlogit| 2.5e-07, Δloss 0",
        "took 0.12 s",
    ]
    assert grown["x"]["tokens"] == 128 * 20
    assert [mark["kind"] for mark in marks if mark["superseded"]] == ["alert"]


def test_what_was_asked_for_says_by_whom_and_what_became_of_it(tmp_path: Path) -> None:
    asked = Asked(
        id="3f",
        by="ann",
        outcome="refused",
        operation="freeze",
        reason="no such tensor",
        **place(3),
    )
    record = read_record(write(tmp_path / "asked", [(start_event(), 1), *steps(1, 3), (asked, 1)]))
    (mark,) = chart_data(record)["marks"]
    assert (mark["kind"], mark["sign"], mark["name"]) == ("asked", "asked", "")
    assert (mark["title"], mark["text"]) == ("freeze refused", "asked for by ann\nno such tensor")
    (table,) = [s for s in page_sections("stages", record) if s["title"] == "Asked for"]
    assert table["rows"] == [
        ["3", {"strong": "freeze", "text": ""}, "ann", "refused", "no such tensor"]
    ]


def test_a_resume_stands_at_its_step_and_at_its_own_time(tmp_path: Path) -> None:
    marks = chart_data(read_record(told_run(tmp_path / "told")))["marks"]
    (resume,) = [mark for mark in marks if mark["kind"] == "resume"]
    assert resume["x"]["step"] == 30
    assert resume["x"]["tokens"] == 128 * 30
    assert resume["x"]["time"] == START + 60
    assert resume["text"].startswith("segment 2 from step-30")


def test_metrics_can_be_chosen(tmp_path: Path) -> None:
    record = read_record(told_run(tmp_path / "told"))
    assert list(chart_data(record, metrics=["lr", "nothing"])["series"]) == ["lr"]


def test_names_that_are_not_unicode_are_escaped(tmp_path: Path) -> None:
    strange = tmp_path / "strange-\udcff"
    data = chart_data(read_record(write(strange, [(start_event(), 1), *steps(1, 3)])))
    assert "\\udcff" in data["name"]
    msgspec.json.encode(data)


def test_an_operation_without_a_change_has_its_value_for_a_title(tmp_path: Path) -> None:
    lines = [
        (start_event(), 1),
        *steps(1, 3),
        (OperationEvent(name="set_lr", value=0.5, **place(3)), 1),
    ]
    (mark,) = chart_data(read_record(write(tmp_path / "set", lines)))["marks"]
    assert mark["title"] == "set_lr 0.5"


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=20))
def test_rounding_keeps_six_figures(values: list[float]) -> None:
    column = np.array(values, np.float64)
    for before, after in zip(column.tolist(), _round_values(column).tolist(), strict=True):
        if not math.isfinite(before):
            assert math.isnan(before) == math.isnan(after)
            assert math.isnan(before) or before == after
        elif abs(before) > 1e-290:
            assert after == pytest.approx(before, rel=10.0 ** (1 - SIGNIFICANT_FIGURES))
