"""What evaluations come to: the best of each metric, when to give up, when to slow down."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from instar.config.load import load
from instar.run.judge import Judge, Judgement
from instar.run.standstill import Standing
from instar.run.trainer import Trainer


def judge(**sections: Any) -> Judge:
    """The rules of a run of `science.Halves`: loss (min), accuracy (max), doubt (min)."""
    return Judge(
        load(
            None, ["task=science:Halves", *(f"{k}={json.dumps(v)}" for k, v in sections.items())]
        ).config
    )


def after(rules: Judge, *rows: Sequence[float], state: Judgement | None = None) -> Judgement:
    """What is remembered of evaluations of loss, accuracy and doubt, at steps 10, 20 …"""
    state = state or rules.begun()
    begun = state.plateau.seen
    for number, row in enumerate(rows, begun + 1):
        state = rules.see(
            state, dict(zip(("loss", "accuracy", "doubt"), row, strict=True)), 10 * number
        )
    return state


def test_pointers_say_whose_best_they_are() -> None:
    assert judge().pointers == {"loss": "best"}
    both = judge(checkpoint={"best_of": ["accuracy", "loss"]})
    assert both.pointers == {"accuracy": "best", "loss": "best-loss"}
    graph = Judge(
        load(None, ["task=graph", 'checkpoint.best_of=["loss", "manifold/accuracy"]']).config
    )
    assert graph.pointers == {"loss": "best", "manifold/accuracy": "best-manifold-accuracy"}


VALUES = st.sampled_from([0.0, 0.25, 0.5, 1.0, math.nan, math.inf, -math.inf])
ROWS = st.lists(st.tuples(VALUES, VALUES, VALUES), max_size=12)


@given(rows=ROWS)
def test_the_best_of_each_metric_is_its_first_best_finite_value(
    rows: list[tuple[float, ...]],
) -> None:
    rules = judge(checkpoint={"best_of": ["accuracy", "doubt"]})
    for count in range(len(rows) + 1):
        state = after(rules, *rows[:count])
        at_last = set()
        for place, (metric, choose) in enumerate(
            {"loss": min, "accuracy": max, "doubt": min}.items()
        ):
            values = [row[place] for row in rows[:count]]
            finite = [value for value in values if math.isfinite(value)]
            standing = state.best.get(metric, Standing())
            assert standing.best == choose(finite, default=None)
            if finite:
                assert standing.best_step == 10 * (values.index(choose(finite)) + 1)
            if standing.best_step == 10 * count and metric != "loss":
                at_last.add(metric)
        # the loss is known to be told, and has no checkpoint of its own here
        assert set(rules.best_at(state, 10 * count) if count else ()) == at_last


TWO = [{"metric": "loss", "patience": 2}, {"metric": "accuracy", "patience": 3}]
LOSS_STILL = [(1, 0.1, 0), (1, 0.2, 0), (1, 0.3, 0)]
BOTH_STILL = [(1, 0.5, 0), (0.5, 0.5, 0), (0.5, 0.5, 0), (0.5, 0.5, 0)]


@pytest.mark.parametrize(
    ("mode", "rows", "given_up"),
    [
        ("any", LOSS_STILL[:2], ""),
        ("any", LOSS_STILL, "loss has not been better than 1 (step 10) for 2 evaluations"),
        ("all", LOSS_STILL, ""),
        ("all", BOTH_STILL[:3], ""),
        (
            "all",
            BOTH_STILL,
            "loss has not been better than 0.5 (step 20) for 2 evaluations and "
            "accuracy has not been better than 0.5 (step 10) for 3 evaluations",
        ),
    ],
)
def test_a_run_is_given_up_where_one_or_all_stand_still(
    mode: str, rows: list[tuple[float, ...]], given_up: str
) -> None:
    rules = judge(early_stopping={"mode": mode, "rules": TWO})
    assert rules.give_up(after(rules, *rows)) == (given_up or None)


def test_without_rules_no_run_is_given_up() -> None:
    rules = judge()
    assert rules.give_up(after(rules, *[(1, 1, 1)] * 50)) is None
    assert rules.slow_down(after(rules, *[(1, 1, 1)] * 50), 0.1)[1] is None


def test_the_rate_falls_to_its_floor_and_no_further() -> None:
    plateau = {"metric": "accuracy", "factor": 0.5, "patience": 2, "min_lr_ratio": 0.2}
    rules = judge(optimizer={"lr": 0.1}, learning_rate={"plateau": plateau})
    state, lr, found = rules.begun(), 0.1, []
    for _ in range(12):
        state = after(rules, (0, 0.5, 0), state=state)
        state, fallen = rules.slow_down(state, lr)
        found.append(lr := fallen or lr)
    wanted = [0.1] * 2 + [0.05] * 2 + [0.025] * 2 + [0.02] * 6
    assert found == pytest.approx(wanted)
    assert state.plateau.best == 0.5


@given(rows=ROWS, cut=st.integers(0, 12))
def test_a_judgement_goes_on_from_json_as_if_nothing_had_been(
    rows: list[tuple[float, ...]], cut: int
) -> None:
    rules = judge(early_stopping={"rules": TWO}, checkpoint={"best_of": ["accuracy"]})
    state = after(rules, *rows[:cut])
    text = json.dumps(msgspec.to_builtins(state), allow_nan=False)
    again = rules.begun(msgspec.convert(json.loads(text), Judgement))
    assert again == state
    assert after(rules, *rows[cut:], state=again) == after(rules, *rows)


def test_a_trainer_gives_and_takes_it_up_with_its_state(trainer: Callable[..., Trainer]) -> None:
    keys = ["eval.eval_interval=2", "early_stopping.rules=[{metric: loss, patience: 9}]"]
    first, second = trainer(*keys, name="first"), trainer(*keys, name="second")
    first.train()
    assert first.judgement.stopping[0].seen == 4
    state = json.loads(json.dumps(first.state(), allow_nan=False))
    second.restore(state, first.history)
    assert second.judgement == first.judgement
    assert second.best_is_now == first.best_is_now == ("loss",)
