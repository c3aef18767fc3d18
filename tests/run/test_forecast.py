"""Operations fire where the forecast says, in a real run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import parametrize_first

from instar.record.events import OperationEvent, Train, read_events
from instar.run.start.preflight import Prepared
from instar.run.trainer import Trainer
from instar.schedule.operations import Change, carried_out, initial_state, when_due
from instar.schedule.settings import learning_rate
from instar.schedule.triggers import schedule_entries

COUNTED = [
    {"name": "change_lr", "value": 0.5, "when": {"at_step": 2}},
    {"name": "change_batch_size", "value": 2, "when": {"at_tokens": 600}},
    {"name": "insert_layers", "value": 1, "mask": 3, "when": {"waited": 2}},
    {"name": "widen_mlp", "value": 192, "when": {"waited": 1}},
    {"name": "set_context", "value": 8, "when": {"any": [{"at_fraction": 0.6}, {"waited": 9}]}},
    {"name": "set_lr", "value": 1e-3, "when": {"all": [{"at_tokens": 1800}, {"waited": 1}]}},
]
ON_LOSS = [
    {"name": "change_lr", "value": 0.9, "trigger_loss": 99.0, "max_wait_iters": 7},
    {"name": "change_lr", "value": 0.9, "trigger_loss": 99.0, "reevaluate": True},
    {"name": "set_eval_interval", "value": 4, "when": {"loss_below": 99.0, "at_step": 5}},
    {"name": "widen_mlp", "value": 192, "when": {"loss_below": 99.0}, "min_steps": 2},
]
"""Every evaluation is below the bounds, as the earliest steps of a forecast suppose."""


@parametrize_first("schedule", [COUNTED, ON_LOSS], first=1)
def test_operations_fire_where_the_forecast_says(
    trainer: Callable[..., Trainer],
    prepare_run: Callable[..., Prepared],
    schedule: Sequence[Mapping[str, Any]],
    tmp_path: Path,
) -> None:
    keys = (f"schedule={json.dumps(schedule)}", "train.until=[16it]", "eval.eval_interval=3")
    keys = (*keys, "checkpoint.every_minutes=null")
    trainer(*keys).train()
    operations = [
        e for e in read_events(tmp_path / "events.jsonl") if isinstance(e, OperationEvent)
    ]
    actual = [(event.name, event.step) for event in operations if event.name != "fold_masks"]
    stages = prepare_run(*keys).forecast.stages[1:]
    expected = [stage for stage in stages if stage.first_step is not None]
    assert actual == [(stage.operation.split()[0], stage.first_step) for stage in expected]
    assert len(actual) == len(schedule)


RATES: tuple[tuple[list[dict[str, Any]], tuple[str, ...]], ...] = (
    ([{"name": "change_warmup_iters", "value": 2.0, "when": {"at_step": 3}}], ()),
    (
        [{"name": "set_warmup_iters", "value": 5, "when": {"at_step": 3}}],
        ("learning_rate.shape=wsd",),
    ),
    ([{"name": "reset_lr_schedule", "when": {"at_step": 6}}], ("learning_rate.shape=linear",)),
    ([{"name": "change_batch_size", "value": 3.0, "lr": "sqrt", "when": {"at_tokens": 600}}], ()),
    (COUNTED, ()),
    (ON_LOSS, ()),
    (
        [
            {"name": "set_eval_iters", "value": 2, "trigger_loss": 99.0},
            {"name": "set_lr", "value": 1e-4, "when": {"loss_below": 99.0}},
            {"name": "change_warmup_iters", "value": 0.5, "when": {"waited": 2}},
        ],
        ("train.until=[2ep]", "train.batch_size=64"),
    ),
)


@parametrize_first("number", range(len(RATES)), first=4)
def test_steps_rates_samples_and_epochs_are_those_of_the_forecast(
    trainer: Callable[..., Trainer],
    prepare_run: Callable[..., Prepared],
    number: int,
    tmp_path: Path,
) -> None:
    schedule, more = RATES[number]
    keys = (f"schedule={json.dumps(schedule)}", "train.until=[16it]", "eval.eval_interval=3")
    keys = (*keys, "checkpoint.every_minutes=null", *more)
    run = trainer(*keys)
    run.train()
    ready = prepare_run(*keys)
    totals = ready.forecast.early
    assert totals is not None
    progress = run.state.progress
    assert (progress.step, progress.samples) == (totals.steps, totals.samples)
    # the last window of a text is shorter
    assert 0 <= totals.tokens - progress.tokens < 16 * math.ceil(run.state.epochs)
    assert run.state.epochs == pytest.approx(totals.epochs)
    # what a stage's settings say, at the step at which the forecast says that it begins
    initial = initial_state(ready.config, ready.spec.architecture, ready.spec.facts)
    stages = zip(schedule_entries(ready.config), ready.forecast.stages[1:], strict=True)
    history = [
        Change(entry.operation, stage.first_step, 0)
        for entry, stage in stages
        if stage.first_step is not None
    ]
    train_events = [e for e in read_events(tmp_path / "events.jsonl") if isinstance(e, Train)]
    assert [event.step for event in train_events] == list(range(1, totals.steps + 1))
    for event in train_events:
        before = event.step - 1
        state = initial
        for change in history:
            if change.step <= before:
                state = when_due(state, change.operation)
                state = carried_out(state, change.operation, change.step)
        assert event.lr == pytest.approx(learning_rate(state.settings, before), rel=1e-9)
    # the forecast's own settings differ in nothing but when a schedule or a warm-up began
    for stage, change in zip(ready.forecast.stages[1:], history, strict=False):
        state = initial
        for earlier in history[: history.index(change) + 1]:
            state = carried_out(when_due(state, earlier.operation), earlier.operation, earlier.step)
        began = {"lr_start": 0, "rewarm_start": 0, "new_param_warmups": (), "frozen": ()}
        assert replace(stage.settings, **began) == replace(state.settings, **began)
