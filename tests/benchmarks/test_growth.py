"""What the growth study computes from its runs, and which of them share a trunk."""

from __future__ import annotations

import importlib
import math
import random
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "benchmarks", ROOT / "studies" / "growth")


def part(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for folder in FOLDERS:
        monkeypatch.syspath_prepend(folder)
    return importlib.import_module(name)


@pytest.fixture
def curves(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return part("curves", monkeypatch)


@pytest.fixture
def columns(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return part("columns", monkeypatch)


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return part("search", monkeypatch)


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return part("study", monkeypatch)


def test_compute_at_a_loss_is_found_again(curves: ModuleType) -> None:
    def points(efficiency: float) -> list[object]:
        budgets = (1e13, 2e13, 4e13)
        return [curves.Point(c, 5.0 - 0.1 * math.log(efficiency * c)) for c in budgets]

    assert curves.needed_compute(points(1.0), points(1.0)) == pytest.approx(1.0)
    assert curves.needed_compute(points(1.25), points(1.0)) == pytest.approx(0.8)
    assert curves.needed_compute(points(0.5), points(1.0)) == pytest.approx(2.0)


def test_an_arm_that_does_not_learn_is_out_of_reach(curves: ModuleType) -> None:
    falling = [curves.Point(1e13, 3.0), curves.Point(2e13, 2.9)]
    flat = [curves.Point(1e13, 3.0), curves.Point(2e13, 3.0)]
    assert curves.needed_compute(flat, falling) == curves.MOST


def test_the_interval_covers_the_mean_as_often_as_it_says(curves: ModuleType) -> None:
    draw = random.Random(1)
    hits = 0
    for trial in range(60):
        ratios = [math.exp(draw.gauss(math.log(0.8), 0.1)) for _ in range(20)]
        interval = curves.interval(ratios, seed=trial)
        assert interval.low <= interval.mean <= interval.high
        hits += interval.low <= 0.8 <= interval.high
    assert hits >= 50


def test_one_seed_has_no_spread(curves: ModuleType) -> None:
    assert curves.interval([0.7]) == curves.Interval(*[pytest.approx(0.7)] * 3)


def test_runs_of_one_beginning_are_branches_of_the_last_to_leave_it(study: ModuleType) -> None:
    shape = tiny(study)
    growth = study.Change(0.6, "stack_layers 4", 4)
    arm = study.Arm(replace(shape, layers=1), 0.02, 0.3, (growth,), rest=0.01, base_depth=2)
    early, late = study.Run(arm, 1, 50), study.Run(arm, 1, 100)
    plain = study.Run(replace(arm, changes=()), 1, 60)
    other = study.Run(arm, 2, 50)

    family, single = study.segments([late, early, plain, other])

    assert (family.name, family.until) == (late.name, 100)
    assert family.branches == ((early.name, "0", 50), (plain.name, "1", 60))
    assert single.branches == ()
    *_, schedule = family.settings
    assert '{name: branch, value: "0", when: {at_step: 30}, iters: 20, decay: 15, ' in schedule
    assert '{name: branch, value: "1", when: {at_step: 42}, iters: 18, decay: 18, ' in schedule
    operation = "{name: stack_layers, value: 4, when: {at_step: 60}}"
    assert schedule.endswith(f", {operation}]")
    assert {
        "learning_rate.decay_fraction=0.3",
        "optimizer.muon_lr=0.02",
        "optimizer.lr=0.01",
        "optimizer.lr_base_depth=2",
    } <= {*family.settings}


def test_many_runs_of_one_beginning_are_shared_out(study: ModuleType) -> None:
    arm = study.Arm(tiny(study), 0.01, 0.5)
    runs = [study.Run(arm, 1, steps) for steps in (40, 50, 60)]
    segments = study.segments(runs, max_runs=2)
    assert [segment.until for segment in segments] == [50, 60]
    assert set().union(*(segment.names for segment in segments)) == {run.name for run in runs}


def test_a_run_leaves_the_others_where_its_rate_falls_or_it_changes(study: ModuleType) -> None:
    changes = (study.Change(0.6, "stack_layers 4", 4),)
    arm = study.Arm(replace(tiny(study), layers=1), 0.02, 0.3, changes)
    assert study.Run(arm, 1, 100).leaves_at == 60
    assert study.Run(replace(arm, decay=0.5), 1, 100).leaves_at == 50
    assert study.Run(replace(arm, changes=()), 1, 100).leaves_at == 70


def test_equal_compute_is_more_steps_of_a_smaller_size(study: ModuleType) -> None:
    shape = tiny(study)
    half = replace(shape, layers=2)
    full = 1000 * study.flops_per_step(shape)
    small = study.flops_per_step(half) / study.flops_per_step(shape)

    def steps(first: Any, *changes: Any) -> int:
        steps: int = study.Arm(first, 0.02, 0.3, changes).steps(full)
        return steps

    assert steps(shape) == 1000
    assert steps(half) == round(1000 / small)
    assert steps(half, study.Change(0.5, "stack_layers 2", 4)) == round(2000 / (1 + small))


def test_runs_have_different_names_where_a_dial_differs(study: ModuleType) -> None:
    """Names are the keys under which results are kept; those of the first edition are as they were."""
    arm = study.Arm(tiny(study), 0.02, 0.5)
    assert str(arm) == "muon-4x16-b2-r0.02-d0.5"
    other_arms = [
        replace(arm, rate=0.03),
        replace(arm, rest=0.01),
        replace(arm, decay=0.3),
        replace(arm, base_depth=2),
        replace(arm, changes=(study.Change(0.6, "stack_layers 2", 8),)),
    ]
    assert len({str(other) for other in (arm, *other_arms)}) == 6


def test_a_column_tries_both_ways_with_equal_effort_and_the_whole_budget(
    columns: ModuleType, study: ModuleType
) -> None:
    shape = tiny(study)
    plans = (columns.Plan(4, ((0.4, 2), (0.7, 2))), columns.Plan(2, ((0.6, 2),)))
    column = columns.Column("here", shape, 10, (1, 2), 0.75, trials=9, plans=plans, start=0)
    steps = round(10 * shape.parameters / (shape.batch * shape.context))
    for way, share in (("scratch", 1.0), ("grown", column.share)):
        choice = column.first_choice(way)
        assert all(value in dial for value, dial in zip(choice, column.dials(way), strict=True))
        trials = column.trial(way, choice)
        assert {run.seed for run in trials}.isdisjoint(column.seeds)
        for run in trials:
            assert run.arm.flops(run.steps) == pytest.approx(share * column.flops, rel=0.01)
            final = run.arm.changes[-1].layers if way == "grown" else run.arm.shape.layers
            assert final == shape.layers
            assert way == "grown" or run.steps == steps


def test_a_descent_finds_the_lowest_loss_of_a_bowl_and_stops_there(search: ModuleType) -> None:
    dials = (range(6), range(5), range(4))
    lowest = (4, 1, 3)
    trials: list[Any] = []

    def losses_of(choices: Any) -> list[float]:
        trials.extend(choices)
        pairs = [zip(choice, lowest, strict=True) for choice in choices]
        return [float(sum((value - best) ** 2 for value, best in pair)) for pair in pairs]

    losses = search.descend(dials, (0, 4, 0), losses_of, max_trials=100)
    assert min(losses, key=losses.__getitem__) == lowest
    assert list(losses) == trials
    assert len(trials) == len(set(trials)) < 50


def test_a_descent_tries_no_more_than_it_may(search: ModuleType) -> None:
    dials = (range(9), range(9))
    losses = search.descend(dials, (0, 0), lambda choices: [-sum(c) for c in choices], max_trials=6)
    assert len(losses) == 6
    with pytest.raises(ValueError, match="9 is none of 0, 1"):
        search.descend(dials, (9, 0), lambda choices: [-sum(c) for c in choices], max_trials=6)


def tiny(study: ModuleType) -> Any:
    return study.Shape(layers=4, heads=2, width=16, context=32, vocabulary=300, batch=2)
