"""Runs side by side."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from written_runs import write_run, writing

from instar.config.errors import ConfigError
from instar.logs.query.alignment import (
    AxisValue,
    LossReached,
    at_loss,
    axis_named,
    even_places,
    parse_place,
    saving,
    values_at,
)
from instar.logs.query.compare import Comparison, compare_groups, comparison_to_json
from instar.logs.query.groups import RunGroup, group_runs, run_labels
from instar.logs.read.record import read_record
from instar.logs.text.comparison import comparison_markdown, comparison_text
from instar.record.rundir import RunDir


def side_by_side(*runs: RunDir, by: Any = "run", **more: Any) -> Comparison:
    sides, faults = group_runs(runs, by)
    assert faults == []
    return compare_groups(sides, [read_record(run) for run in runs], **more)


def means(comparison: Comparison, metric: str) -> list[list[float | None]]:
    return [[cell.mean for cell in row] for row in comparison.metrics[metric]]


@pytest.fixture
def two(tmp_path: Path) -> tuple[RunDir, RunDir]:
    """One goes from 4 to 2 in 40 steps, the other in 20."""
    slow = write_run(tmp_path / "slow", {10: 3.5, 20: 3.0, 40: 2.0}, {20: 3.0, 40: 2.0})
    fast = write_run(
        tmp_path / "fast", {10: 3.0, 20: 2.0}, {10: 3.0, 20: 2.0}, {"optimizer.lr": 0.1}
    )
    return slow, fast


def test_values_at_equal_steps_lie_on_the_line_between_measurements(
    two: tuple[RunDir, RunDir],
) -> None:
    comparison = side_by_side(*two, places=[AxisValue("step", s) for s in (5, 10, 15, 20, 30)])
    assert means(comparison, "loss") == [[None, 3.5, 3.25, 3.0, 2.5], [None, 3.0, 2.5, 2.0, None]]
    assert means(comparison, "val/loss")[0] == [None, None, None, 3.0, 2.5]


@pytest.mark.parametrize(
    ("place", "same"),
    [
        ("tokens=960", "step=15"),
        ("samples=60", "step=15"),
        ("flops=1.5e7", "step=15"),
        ("wall=15s", "step=15"),
        ("active=7.5", "step=15"),
        ("epoch=0.15", "step=15"),
        ("0.96ktok", "step=15"),
        ("15it", "step=15"),
    ],
)
def test_runs_are_compared_along_any_axis(
    two: tuple[RunDir, RunDir], place: str, same: str
) -> None:
    comparison, other = (side_by_side(*two, places=[parse_place(p)]) for p in (place, same))
    for losses, other_losses in zip(means(comparison, "loss"), means(other, "loss"), strict=True):
        assert losses == pytest.approx(other_losses)


def test_without_a_place_there_are_five_up_to_where_all_have_come(
    two: tuple[RunDir, RunDir],
) -> None:
    comparison = side_by_side(*two)
    assert comparison.places == tuple(AxisValue("step", float(s)) for s in (4, 8, 12, 16, 20))
    assert side_by_side(*two, axis="tokens").places[-1] == AxisValue("tokens", 20 * 64)


def test_what_was_superseded_is_compared_with_nothing(tmp_path: Path) -> None:
    with writing(tmp_path / "a") as writer:
        writer.start()
        writer.train(10, 4.0)
        writer.save(10)
        writer.train(20, 9.0)
        writer.start(step=10, resumed_from="step-10")
        writer.train(20, 2.0)
    plain = write_run(tmp_path / "b", {10: 4.0, 20: 2.0})
    comparison = side_by_side(
        writer.run, plain, places=[AxisValue("step", 15), AxisValue("step", 20)]
    )
    assert means(comparison, "loss") == [[3.0, 2.0], [3.0, 2.0]]


def test_a_run_that_diverged_is_not_taken_for_one_that_has_not_come_so_far(tmp_path: Path) -> None:
    nan_run = write_run(tmp_path / "lost", {10: 4.0, 20: math.nan})
    short = write_run(tmp_path / "short", {10: 4.0})
    comparison = side_by_side(nan_run, short, places=[AxisValue("step", 10), AxisValue("step", 20)])
    lines = [line.split() for line in comparison_text(comparison)]
    assert ["lost", "4.0000", "nan"] in lines
    assert ["short", "4.0000", "-"] in lines


def test_runs_alike_but_for_the_seed_are_one_group(tmp_path: Path) -> None:
    runs = [
        write_run(
            tmp_path / f"{name}-{seed}",
            {10: loss + seed},
            config={"name": name, "seed": seed, "optimizer.lr": lr},
        )
        for name, lr, loss in (("a", 0.1, 1.0), ("b", 0.2, 5.0))
        for seed in (1, 2, 3)
    ]
    comparison = side_by_side(*runs, by="seed", places=[AxisValue("step", 10)])
    assert [(group.name, group.seeds) for group in comparison.groups] == [
        ("a-1", (1, 2, 3)),
        ("b-1", (1, 2, 3)),
    ]
    cell = comparison.metrics["loss"][0][0]
    assert (cell.mean, cell.deviation, cell.low, cell.high, cell.runs) == (3.0, 1.0, 2.0, 4.0, 3)
    assert cell.error == pytest.approx(3**-0.5)
    assert comparison.config["optimizer.lr"] == (0.1, 0.2)
    assert "seed" not in comparison.config
    assert any("3.0000 ±1.0000" in line for line in comparison_text(comparison))


def test_runs_of_one_name_are_one_group(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / f"{name}-{ids}", {1: loss})
        for name, ids, loss in (("a", "abcde", 1.0), ("b", "abcde", 9.0), ("a", "fghjk", 3.0))
    ]
    comparison = side_by_side(*runs, by="name", places=[AxisValue("step", 1)])
    assert [group.name for group in comparison.groups] == ["a", "b"]
    assert means(comparison, "loss") == [[2.0], [9.0]]


def test_only_keys_that_differ_are_told(two: tuple[RunDir, RunDir]) -> None:
    comparison = side_by_side(*two)
    assert dict(comparison.config) == {"optimizer.lr": (0.001, 0.1)}


def test_a_config_that_cannot_be_read_does_not_keep_curves_from_being_compared(
    two: tuple[RunDir, RunDir],
) -> None:
    two[1].config.write_text("mdoel: {}\n")
    sides, faults = group_runs(two)
    assert len(faults) == 1
    assert str(two[1].config) in faults[0]
    comparison = compare_groups(sides, [read_record(run) for run in two])
    assert means(comparison, "loss")[1][-1] == 2.0
    assert comparison.config == {}


@pytest.mark.parametrize("format_", [comparison_text, comparison_markdown])
def test_reaching_a_loss_is_told_as_a_sentence(two: tuple[RunDir, RunDir], format_: Any) -> None:
    comparison = side_by_side(*two, target=2.5)
    text = "\n".join(format_(comparison))
    assert (
        "fast reaches val/loss 2.5 with 50% fewer FLOPs, 50% fewer tokens, 50% fewer steps, "
        "50% less active time than slow"
    ) in text
    assert comparison.to_loss is not None
    ((slow,), (fast,)) = comparison.to_loss.reached
    assert slow is not None
    assert fast is not None
    assert (slow.at["step"], fast.at["step"]) == (30.0, 15.0)


def test_a_loss_that_is_not_reached_is_told(two: tuple[RunDir, RunDir]) -> None:
    comparison = side_by_side(*two, target=1.0)
    text = "\n".join(comparison_text(comparison))
    assert text.count("not reached") == 2
    assert "fast and slow cannot be compared: slow and fast do not reach it" in text
    assert text.count("fewer") == 0


def test_a_loss_that_is_reached_before_the_first_step_is_told(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, {10: 3.5}, {0: 4.0, 10: 2.0}) for name in ("a", "b")]
    text = "\n".join(comparison_text(side_by_side(*runs, target=5.0)))
    assert "b and a cannot be compared: it is reached at step 0 already" in text


def test_groups_are_compared_seed_by_seed(tmp_path: Path) -> None:
    ends = {("a", 1): 10, ("a", 2): 20, ("a", 3): 99, ("b", 1): 5, ("b", 2): 8}
    runs = [
        write_run(
            tmp_path / f"{name}-{seed}",
            {1: 4.0},
            {1: 4.0, end: 2.0 if end < 99 else 3.5},
            {"seed": seed, "optimizer.lr": {"a": 0.1, "b": 0.2}[name]},
        )
        for (name, seed), end in ends.items()
    ]
    comparison = side_by_side(*runs, by="seed", target=2.0)
    assert comparison.to_loss is not None
    (savings,) = comparison.to_loss.savings
    steps = savings["step"]
    assert steps is not None
    ratios = [5 / 10, 8 / 20]
    assert steps.share == pytest.approx(1 - math.sqrt(ratios[0] * ratios[1]))
    assert steps.spread == pytest.approx(np.std(ratios, ddof=1))
    assert (steps.pairs, steps.left_out) == (2, 0)


def reach_at(step: float) -> LossReached:
    return LossReached({"step": step}, from_the_start=False, left_at_step=None)


def test_pairs_of_which_one_does_not_arrive_are_counted() -> None:
    base = {1: reach_at(10), 2: reach_at(10), 3: None}
    result = saving(base, {1: reach_at(5), 2: None, 3: reach_at(1)}, "step")
    assert result is not None
    assert result.share == pytest.approx(0.5)
    assert (result.spread, result.pairs, result.left_out) == (None, 1, 2)


def test_arms_without_a_common_seed_are_compared_by_their_means() -> None:
    result = saving({1: reach_at(8), 2: reach_at(2)}, {5: reach_at(2), 6: None}, "step")
    assert result is not None
    assert result.share == pytest.approx(0.5)
    assert (result.pairs, result.left_out) == (0, 1)
    assert result.spread == pytest.approx(0.5 * np.std(np.log([8, 2]), ddof=1))


def test_a_value_that_is_lost_again_is_told(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {1: 1.0}, {10: 4.0, 20: 2.0, 30: 3.5, 40: 2.0})
    crossing = at_loss(read_record(run).series("val/loss"), 3.0)
    assert crossing is not None
    assert (crossing.at["step"], crossing.left_at_step, crossing.from_the_start) == (
        15.0,
        30,
        False,
    )
    assert at_loss(read_record(run).series("val/loss"), 1.0) is None
    first = at_loss(read_record(run).series("val/loss"), 5.0)
    assert first is not None
    assert (first.at["step"], first.from_the_start) == (10.0, True)


def test_a_value_that_is_reached_in_a_decay_is_told(tmp_path: Path) -> None:
    rates = {10: 0.5, 20: 1.0, 30: 1.0, 40: 1.0, 50: 0.6, 60: 0.3, 70: 0.0}
    with writing(tmp_path / "run") as writer:
        writer.start()
        for step, lr in rates.items():
            writer.train(step, 8.0 - step / 10, lr=lr)
            writer.val(step, 8.0 - step / 10)
    plain = write_run(tmp_path / "plain", {10: 4.0, 20: 2.0}, {10: 4.0, 20: 2.0})
    shares = {}
    for target in (5.0, 3.0, 1.0):
        comparison = side_by_side(writer.run, plain, target=target)
        assert comparison.to_loss is not None
        ((crossing,), _) = comparison.to_loss.reached
        assert crossing is not None
        shares[target] = crossing.decays_for
        lines = [
            line for line in comparison_text(comparison) if "while its learning rate falls" in line
        ]
        assert len(lines) == (target == 3.0)
    # at the stable rate, 20 of 70 steps before the end, and at the end
    assert shares == {5.0: 0.0, 3.0: pytest.approx(2 / 7), 1.0: 0.0}


def test_accuracies_are_reached_from_below(tmp_path: Path) -> None:
    with writing(tmp_path / "run") as writer:
        writer.start()
        for step, accuracy in ((10, 0.2), (20, 0.6), (30, 0.9)):
            writer.val(step, 1.0, extra={"accuracy": accuracy})
    crossing = at_loss(read_record(writer.run).series("val/accuracy"), 0.5)
    assert crossing is not None
    assert crossing.at["step"] == pytest.approx(17.5)


def test_json_says_all_of_it_by_name(two: tuple[RunDir, RunDir]) -> None:
    comparison = side_by_side(*two, target=2.5)
    document = json.loads(json.dumps(comparison_to_json(comparison), allow_nan=False))
    assert set(document) == {
        "arms",
        "warnings",
        "places",
        "metrics",
        "results",
        "config",
        "to_loss",
    }
    assert document["warnings"] == []
    assert document["metrics"]["loss"]["fast"][-1]["mean"] == 2.0
    assert document["config"]["optimizer.lr"] == {"slow": 0.001, "fast": 0.1}
    assert document["to_loss"]["savings"]["fast"]["flops"]["share"] == pytest.approx(0.5)


def test_metrics_are_chosen_by_name_and_pattern(two: tuple[RunDir, RunDir]) -> None:
    assert list(side_by_side(*two).metrics) == ["val/loss", "loss"]
    assert list(side_by_side(*two, metrics=["lr", "val/*"]).metrics)[:2] == ["lr", "val/loss"]
    with pytest.raises(ConfigError, match="did you mean 'val/loss'"):
        side_by_side(*two, metrics=["val/los"])


@pytest.mark.parametrize("width", [40, 80, 200])
def test_text_keeps_to_its_width(two: tuple[RunDir, RunDir], width: int) -> None:
    assert max(map(len, comparison_text(side_by_side(*two, target=2.5), width))) <= width


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("setp=3", "unknown axis 'setp'; did you mean 'step'?"),
        ("step=x", "'step=x' is not a place"),
        ("step=3min", "'step=3min' is not a place"),
        ("wall=3k", "'wall=3k' is not a place"),
        ("loss<3", "use --at-loss"),
        ("half", "'half' is not a place"),
    ],
)
def test_what_is_no_place_is_told(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_place(text)
    assert message in str(error.value)


def test_axes_have_other_names() -> None:
    assert [axis_named(name) for name in ("wall", "iteration", "tokens")] == [
        "wall_s",
        "step",
        "tokens",
    ]


finite = st.floats(-1e6, 1e6)
curves = st.lists(st.tuples(st.integers(0, 50), finite), min_size=1, max_size=30)


@given(curves, st.lists(st.floats(-10, 60), max_size=20))
def test_a_value_lies_between_its_neighbours_and_never_beyond_the_ends(
    points: list[tuple[int, float]], places: list[float]
) -> None:
    last = dict(points)  # of several values at one place the last
    x, values = (np.array(column, np.float64) for column in zip(*points, strict=True))
    results = values_at(x, values, np.array(places, np.float64))
    for place, value in zip(places, results, strict=True):
        if place < min(last) or place > max(last):
            assert math.isnan(value)
        elif place in last:
            assert value == last[int(place)]
        else:
            ends = max(k for k in last if k < place), min(k for k in last if k > place)
            low, high = sorted(last[end] for end in ends)
            assert low - 1e-6 <= value <= high + 1e-6


@given(st.floats(0.001, 1e15), st.sampled_from(["step", "tokens", "flops", "wall_s"]))
def test_even_places_rise_to_the_furthest(furthest: float, axis: str) -> None:
    amounts = [place.amount for place in even_places(axis, furthest)]
    assert all(amount < other for amount, other in pairwise(amounts))
    if axis in ("flops", "wall_s"):
        assert amounts[-1] == furthest


def test_an_arm_pairs_runs_of_one_seed_by_their_order(tmp_path: Path) -> None:
    runs = tuple(RunDir(tmp_path / str(n)) for n in range(3))
    group = RunGroup("a", runs, ({"seed": 1}, {"seed": 1}, {"seed": 2}))
    assert group.keys == ((1, None, 0), (1, None, 1), (2, None, 0))
    folds = tuple({"seed": 1, "data.folds": 3, "data.fold": fold} for fold in (2, 0, 2))
    assert RunGroup("b", runs, folds).keys == ((1, 2, 0), (1, 0, 0), (1, 2, 1))


def test_a_long_value_does_not_stand_whole_in_a_name(tmp_path: Path) -> None:
    one_operation = "[{name: change_lr, value: 0.5, max_wait_iters: 4}]"
    two_operations = f"{one_operation[:-1]}, {one_operation[1:]}"
    runs = [
        write_run(tmp_path / f"run{n}" / "same", {1: 1.0}, config={"schedule": text})
        for n, text in enumerate((one_operation, two_operations))
    ]
    assert run_labels(runs) == ["same schedule=1 operation", "same schedule=2 operations"]


@pytest.mark.parametrize("n_others", [1, 4])
def test_a_long_value_stands_in_a_short_form_in_the_table_of_differences(
    tmp_path: Path, n_others: int
) -> None:
    """With a column for each run, or a row for each value."""
    operation = "{name: change_lr, value: 0.5, max_wait_iters: 4}"
    schedules = [f"[{operation}, {operation}]"]
    schedules += [
        f"[{operation.replace('0.5', f'0.{n + 6}')}, {operation}]" for n in range(n_others)
    ]
    runs = [
        write_run(tmp_path / f"run-{n}", {1: 1.0}, config={"schedule": schedule})
        for n, schedule in enumerate(schedules)
    ]
    comparison = side_by_side(*runs)
    for lines in (comparison_text(comparison), comparison_markdown(comparison)):
        text = "\n".join(lines)
        assert "change_lr" not in text
        assert text.count("2 operations") == n_others + 1
        assert text.count("2 operations, differs") == n_others
    schedule_by_run = comparison_to_json(comparison)["config"]["schedule"]
    assert [op["value"] for op in schedule_by_run["run-1"]] == [0.6, 0.5]


@pytest.mark.parametrize("key", ["data.tokenizer=char", "data.source=other.txt"])
def test_a_loss_on_other_data_is_not_looked_for(tmp_path: Path, key: str) -> None:
    name, value = key.split("=")
    runs = [
        write_run(tmp_path / "a-one", {1: 3.0, 2: 1.0}, {2: 1.0}),
        write_run(tmp_path / "b-two", {1: 3.0, 2: 1.0}, {2: 1.0}, config={name: value}),
    ]
    sides, _ = group_runs(runs)
    with pytest.raises(ConfigError, match=name):
        compare_groups(sides, [read_record(run) for run in runs], target=2.0)


SAME_HELD_OUT = {"data.val_source": "held-out.txt"}


@pytest.mark.parametrize(
    ("config", "other", "keys", "losses"),
    [
        ({}, {"data.tokenizer": "char"}, "data.tokenizer", "losses, which"),
        ({}, {"data.source": "other.txt"}, "data.source", "losses, which"),
        ({"data.tokenizer": "bpe"}, {"data.vocab_size": 300}, "data.vocab_size", "losses, which"),
        (SAME_HELD_OUT, {"data.source": "other.txt"}, "data.source", "training losses"),
        ({}, {"data.vocab_size": 300}, "", ""),
        ({}, {"data.order": "sequential", "optimizer.lr": 0.1}, "", ""),
    ],
)
def test_losses_on_different_data_stand_under_a_warning(
    tmp_path: Path, config: dict[str, object], other: dict[str, object], keys: str, losses: str
) -> None:
    runs = [
        write_run(tmp_path / "a-one", {1: 3.0, 2: 1.0}, {1: 3.0, 2: 1.0}, config=config),
        write_run(tmp_path / "b-two", {1: 3.0, 2: 1.0}, {1: 3.0, 2: 1.0}, config=config | other),
    ]
    comparison = side_by_side(*runs)
    plain, markdown = (
        "\n".join(comparison_text(comparison)),
        "\n".join(comparison_markdown(comparison)),
    )
    if not keys:
        assert comparison.warnings == ()
        assert "not comparable" not in plain + markdown
        return
    (warning,) = comparison_to_json(comparison)["warnings"]
    assert f"the runs differ in {keys}: their {losses}" in warning
    assert plain.index("warning") < plain.index(warning) < plain.index("val/loss")
    assert warning in markdown


def test_a_held_out_loss_on_the_same_text_is_looked_for_whatever_was_trained_on(
    tmp_path: Path,
) -> None:
    runs = [
        write_run(
            tmp_path / f"run-{n}",
            {1: 3.0, 2: 1.0},
            {1: 3.0, 2: 1.0},
            config=SAME_HELD_OUT | {"data.source": source},
        )
        for n, source in enumerate(("one.txt", "other.txt"))
    ]
    assert side_by_side(*runs, target=2.0).to_loss is not None
    with pytest.raises(ConfigError, match=r"data\.source"):
        side_by_side(*runs, target=2.0, target_metric="loss")
