"""What the growth study computes from its runs, and how it cuts arms into runs."""

from __future__ import annotations

import importlib
import math
import random
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def curves(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("curves")


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("study")


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


def test_arms_share_their_trunks_and_end_with_a_decay(study: ModuleType) -> None:
    rate = study.Rate(1e-3, 10)
    plain = study.Arm("scratch", 1, rate, 6, (100, 200))
    grown = [
        study.Arm(
            name,
            1,
            rate,
            3,
            (150, 200),
            (study.Change(50, (f"stack_layers=2 moments={name}",), 6),),
        )
        for name in ("mapped", "reset")
    ]

    ends = study.ends_of([plain, *grown])

    long = ends[plain][200]
    assert long.until == 200
    assert long.parent.until == 160
    assert long.parent.parent == ends[plain][100].parent
    assert "learning_rate.decay_fraction=0.2" in long.settings
    mapped, reset = (ends[arm][150].parent for arm in grown)
    assert mapped.operations == ("stack_layers=2 moments=mapped",)
    assert mapped.parent == reset.parent
    assert mapped.parent.until == 50
    assert ends[grown[0]][200].parent.parent == mapped


def test_a_rate_that_begins_anew_decays_by_its_own_count(study: ModuleType) -> None:
    change = study.Change(40, ("reset_lr_schedule",), 6, resets_rate=True)
    arm = study.Arm("rewarmed", 1, study.Rate(1e-3, 10), 6, (100,), (change,))

    settings = study.ends_of([arm])[arm][100].settings

    assert "learning_rate.lr_decay_iters=60" in settings
    assert f"learning_rate.decay_fraction={20 / 60}" in settings


def test_no_change_comes_within_a_decay(study: ModuleType) -> None:
    late = study.Change(90, ("stack_layers=2",), 6)
    arm = study.Arm("late", 1, study.Rate(1e-3, 10), 3, (100,), (late,))
    with pytest.raises(ValueError, match="within the shortest decay"):
        study.ends_of([arm])


def test_equal_compute_is_more_steps_of_a_smaller_size(study: ModuleType) -> None:
    shape = study.Shape(layers=6, heads=2, width=16, context=32, vocabulary=300, batch=2)
    full = 1000 * shape.flops_per_step(6)
    small = shape.flops_per_step(3) / shape.flops_per_step(6)

    assert study.last_step(shape, 6, (), full) == 1000
    assert study.last_step(shape, 3, (), full) == round(1000 / small)
    grown = study.last_step(shape, 3, (study.Change(500, (), 6),), full)
    assert grown == 500 + round(1000 - 500 * small)
