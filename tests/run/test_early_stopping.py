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
from needed import needs

from instar.checkpoint.listing import list_checkpoints, pointer_target
from instar.checkpoint.manifest import read_manifest
from instar.config.load import load_config
from instar.record.events import Eval, read_events
from instar.run.checkpointing import best_is_now, state_json
from instar.run.start.restore import restore_state
from instar.run.state.early_stopping import MetricState, MetricTracker, RuleState
from instar.run.trainer import Trainer


def judge(**sections: Any) -> MetricTracker:
    """The rules of a run of `science.Halves`: loss (min), accuracy (max), doubt (min)."""
    return MetricTracker(
        load_config(
            None, ["task=science:Halves", *(f"{k}={json.dumps(v)}" for k, v in sections.items())]
        ).config
    )


def after(
    rules: MetricTracker, *rows: Sequence[float], state: MetricState | None = None
) -> MetricState:
    """What is remembered of evaluations of loss, accuracy and doubt, at steps 10, 20 …"""
    state = state or MetricState()
    first = state.best["loss"].seen if state.best else 0
    for number, row in enumerate(rows, first + 1):
        state = rules.update(
            state, dict(zip(("loss", "accuracy", "doubt"), row, strict=True)), 10 * number
        )
    return state


def test_pointers_say_whose_best_they_are() -> None:
    assert judge().pointers == {"loss": "best"}
    two_metrics = judge(checkpoint={"best_of": ["accuracy", "loss"]})
    assert two_metrics.pointers == {"accuracy": "best", "loss": "best-loss"}


@needs("graphs")
def test_names_of_pointers_are_names_of_files() -> None:
    best_of = 'checkpoint.best_of=["loss", "manifold/accuracy"]'
    graph = MetricTracker(load_config(None, ["task=graph", best_of]).config)
    assert graph.pointers == {"loss": "best", "manifold/accuracy": "best-manifold%2Faccuracy"}


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
            standing = state.best.get(metric, RuleState())
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
    rules = judge(early_stopping={"stop_when": mode, "rules": TWO})
    assert rules.stop_reason(after(rules, *rows)) == (given_up or None)


def test_without_rules_no_run_is_given_up() -> None:
    rules = judge()
    assert rules.stop_reason(after(rules, *[(1, 1, 1)] * 50)) is None
    assert rules.lower_lr(after(rules, *[(1, 1, 1)] * 50), 0.1)[1] is None


def test_the_rate_falls_to_its_floor_and_no_further() -> None:
    plateau = {"metric": "accuracy", "factor": 0.5, "patience": 2, "min_lr_ratio": 0.2}
    rules = judge(optimizer={"lr": 0.1}, learning_rate={"plateau": plateau})
    state, lr, rates = MetricState(), 0.1, []
    for _ in range(12):
        state = after(rules, (0, 0.5, 0), state=state)
        state, lower_rate = rules.lower_lr(state, lr)
        rates.append(lr := lower_rate or lr)
    expected = [0.1] * 2 + [0.05] * 2 + [0.025] * 2 + [0.02] * 6
    assert rates == pytest.approx(expected)


@given(rows=ROWS, cut=st.integers(0, 12))
def test_a_judgement_goes_on_from_json_as_if_nothing_had_been(
    rows: list[tuple[float, ...]], cut: int
) -> None:
    rules = judge(early_stopping={"rules": TWO}, checkpoint={"best_of": ["accuracy"]})
    state = after(rules, *rows[:cut])
    text = json.dumps(msgspec.to_builtins(state), allow_nan=False)
    parsed_state = msgspec.convert(json.loads(text), MetricState)
    assert parsed_state == state
    assert after(rules, *rows[cut:], state=parsed_state) == after(rules, *rows)


def test_a_rule_that_is_another_than_it_was_begins_anew() -> None:
    """Also one of as many as before; one of which only the patience has changed goes on."""
    rows = [(1, 0.9, 0), (2, 0.8, 0), (2, 0.8, 0)]
    before = after(judge(early_stopping={"rules": [{"metric": "accuracy", "patience": 9}]}), *rows)
    loss = judge(early_stopping={"rules": [{"metric": "loss", "patience": 3}]})
    state, given_up = before, []
    for _ in range(4):
        state = after(loss, (0.95, 0.8, 0), state=state)
        given_up.append(loss.stop_reason(state))
    assert given_up == [None] * 3 + [
        "loss has not been better than 0.95 (step 40) for 3 evaluations"
    ]
    eager = judge(early_stopping={"rules": [{"metric": "accuracy", "patience": 2}]})
    reason = "accuracy has not been better than 0.9 (step 10) for 2 evaluations"
    assert eager.stop_reason(before) == reason
    other = judge(learning_rate={"plateau": {"metric": "loss", "factor": 0.5, "patience": 2}})
    on_accuracy = judge(learning_rate={"plateau": {"metric": "accuracy", "patience": 2}})
    assert other.lower_lr(after(on_accuracy, *rows), 0.1)[1] is None
    none, two = judge(), judge(early_stopping={"rules": TWO})
    assert none.stop_reason(before) is None
    reason = "accuracy has not been better than 0.9 (step 10) for 3 evaluations"
    assert two.stop_reason(after(two, (0.5, 0.5, 0), state=before)) == reason


def test_a_trainer_gives_and_takes_it_up_with_its_state(trainer: Callable[..., Trainer]) -> None:
    keys = ["eval.eval_interval=2", "early_stopping.rules=[{metric: loss, patience: 9}]"]
    first, second = trainer(*keys, name="first"), trainer(*keys, name="second")
    first.train()
    assert first.state.metrics.best["loss"].seen == 4
    state = json.loads(json.dumps(state_json(first.state, first.parts), allow_nan=False))
    second.state = restore_state(second.state, second.parts, state, first.state.history)
    assert second.state.metrics == first.state.metrics
    best = [best_is_now(run.state, run.parts) for run in (first, second)]
    assert best == [("loss",)] * 2


STACKED = [
    {"name": "stack_layers", "value": [0, 1, 1, 1], "when": {"at_step": 4}, "reevaluate": True}
]


def test_what_a_lossy_change_leaves_is_not_the_best_that_was_before(
    trainer: Callable[..., Trainer],
) -> None:
    """Evaluated anew at the same step, it is not judged: neither as the best nor as no better."""
    keys = ["eval.eval_interval=4", "checkpoint.on_best=true", "optimizer.lr=1e-2"]
    keys += ["checkpoint.keep_best=9", "train.until=[5it]", f"schedule={json.dumps(STACKED)}"]
    run = trainer(*keys, "early_stopping.rules=[{metric: loss, patience: 1}]")
    run.train()
    run.parts.saver.finish()
    assert run.state.progress.step == 5
    root = run.parts.saver.root
    evaluations = [e for e in read_events(root.with_suffix(".jsonl")) if isinstance(e, Eval)]
    assert [(e.step, e.best) for e in evaluations[:2]] == [(4, True), (4, False)]
    assert evaluations[0].loss < evaluations[1].loss
    best = read_manifest(pointer_target(root, "best") or root)
    assert (best.step, best.history, best.loss) == (4, [], evaluations[0].loss)
    assert len(list_checkpoints(root)) == 2
