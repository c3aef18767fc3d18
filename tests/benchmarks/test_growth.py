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
def study(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return part("study", monkeypatch)


def test_compute_at_a_loss_is_found_again(curves: ModuleType) -> None:
    def points(efficiency: float) -> list[object]:
        budgets = (1e13, 2e13, 4e13)
        return [curves.Point(c, 5.0 - 0.1 * math.log(efficiency * c)) for c in budgets]

    assert curves.needed(points(1.0), points(1.0)) == pytest.approx(1.0)
    assert curves.needed(points(1.25), points(1.0)) == pytest.approx(0.8)
    assert curves.needed(points(0.5), points(1.0)) == pytest.approx(2.0)


def test_an_arm_that_does_not_learn_is_out_of_reach(curves: ModuleType) -> None:
    falling = [curves.Point(1e13, 3.0), curves.Point(2e13, 2.9)]
    flat = [curves.Point(1e13, 3.0), curves.Point(2e13, 3.0)]
    assert curves.needed(flat, falling) == curves.MOST


def test_the_interval_covers_the_mean_as_often_as_it_says(curves: ModuleType) -> None:
    draw = random.Random(1)
    hits = 0
    for trial in range(60):
        ratios = [math.exp(draw.gauss(math.log(0.8), 0.1)) for _ in range(20)]
        found = curves.interval(ratios, seed=trial)
        assert found.low <= found.mean <= found.high
        hits += found.low <= 0.8 <= found.high
    assert hits >= 50


def test_one_seed_has_no_spread(curves: ModuleType) -> None:
    assert curves.interval([0.7]) == curves.Interval(*[pytest.approx(0.7)] * 3)


def test_runs_of_one_beginning_are_branches_of_the_last_to_leave_it(study: ModuleType) -> None:
    shape = tiny(study)
    grown = study.Change(0.6, "stack_layers 4", "lr: {rewarm_new: 5}", layers=4)
    arm = study.Arm("muon", replace(shape, layers=1), 0.02, 0.3, (grown,), 32)
    early, late = study.Run(arm, 1, 50), study.Run(arm, 1, 100)
    plain = study.Run(replace(arm, changes=()), 1, 60)
    other = study.Run(arm, 2, 50)

    family, alone = study.segments([late, early, plain, other])

    assert (family.name, family.until) == (late.name, 100)
    assert family.branches == ((early.name, "0", 50), (plain.name, "1", 60))
    assert alone.branches == ()
    *_, schedule = family.settings
    assert '{name: branch, value: "0", when: {at_step: 30}, iters: 20, decay: 15, ' in schedule
    assert '{name: branch, value: "1", when: {at_step: 42}, iters: 18, decay: 18, ' in schedule
    operation = "{name: stack_layers, value: 4, lr: {rewarm_new: 5}, when: {at_step: 60}}"
    assert schedule.endswith(f", {operation}]")
    assert "learning_rate.decay_fraction=0.3" in family.settings


def test_many_runs_of_one_beginning_are_shared_out(study: ModuleType) -> None:
    arm = study.Arm("adamw", tiny(study), 0.01, 0.5, read=32)
    runs = [study.Run(arm, 1, steps) for steps in (40, 50, 60)]
    made = study.segments(runs, most=2)
    assert [segment.until for segment in made] == [50, 60]
    assert set().union(*(segment.names for segment in made)) == {run.name for run in runs}


def test_a_run_leaves_the_others_where_its_rate_falls_or_it_changes(study: ModuleType) -> None:
    changes = (study.Change(0.6, "stack_layers 4", layers=4),)
    arm = study.Arm("muon", replace(tiny(study), layers=1), 0.02, 0.3, changes, 32)
    assert study.Run(arm, 1, 100).leaves_at == 60
    assert study.Run(replace(arm, decay=0.5), 1, 100).leaves_at == 50
    assert study.Run(replace(arm, changes=()), 1, 100).leaves_at == 70


def test_equal_compute_is_more_steps_of_a_smaller_size(study: ModuleType) -> None:
    shape = tiny(study)
    half = replace(shape, layers=2)
    full = 1000 * study.flops_per_step(shape)
    small = study.flops_per_step(half) / study.flops_per_step(shape)

    def steps(first: Any, *changes: Any) -> int:
        steps: int = study.Arm("muon", first, 0.02, 0.3, changes, 32).steps(full)
        return steps

    assert steps(shape) == 1000
    assert steps(half) == round(1000 / small)
    assert steps(half, study.Change(0.5, "stack_layers 2", layers=4)) == round(2000 / (1 + small))
    shorter = study.Change(0.5, "change_batch_size 2", batch=4)
    assert steps(shape, shorter) == round(2000 / 3)


def test_a_column_tries_the_whole_budget(columns: ModuleType, study: ModuleType) -> None:
    shape = tiny(study)
    ways = (columns.Way(4, ((0.4, 2), (0.7, 2))), columns.Way(2, inserted=0.6, decay=0.2))
    tuned = ((0.02, 0.5), (0.01, 0.3))
    column = columns.column("here", "muon", shape, 10, tuned, ways, (1, 2), 0.65)
    trials = column.trials()
    steps = round(10 * shape.parameters / (shape.batch * shape.context))
    assert {run.steps for run in trials["scratch"]} == {steps}
    for run in trials["grown"]:
        assert run.arm.flops(run.steps) == pytest.approx(column.share * column.flops, rel=0.01)
        assert run.arm.changes[-1].layers == shape.layers
    assert {run.seed for runs in trials.values() for run in runs}.isdisjoint(column.seeds)


def tiny(study: ModuleType) -> Any:
    return study.Shape(layers=4, heads=2, width=16, context=32, vocabulary=300, batch=2)
