"""Operations fire where the forecast says, in a real run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from instar.record.events import OperationEvent, read_events
from instar.run.lifecycle.preflight import Prepared
from instar.run.loop.trainer import Trainer

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


@pytest.mark.parametrize("schedule", [COUNTED, ON_LOSS])
def test_operations_fire_where_the_forecast_says(
    trainer: Callable[..., Trainer],
    prepared: Callable[..., Prepared],
    schedule: Sequence[Mapping[str, Any]],
    tmp_path: Path,
) -> None:
    keys = (f"schedule={json.dumps(schedule)}", "train.until=[16it]", "eval.eval_interval=3")
    keys = (*keys, "checkpoint.every_minutes=null")
    trainer(*keys).train()
    told = [e for e in read_events(tmp_path / "events.jsonl") if isinstance(e, OperationEvent)]
    fired = [(event.name, event.step) for event in told if event.name != "fold_masks"]
    stages = prepared(*keys).forecast.stages[1:]
    reached = [stage for stage in stages if stage.first_step is not None]
    assert fired == [(stage.operation.split()[0], stage.first_step) for stage in reached]
    assert len(fired) == len(schedule)
