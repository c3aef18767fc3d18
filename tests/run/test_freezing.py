"""What is frozen in a live run stays so while the model grows around it, also after a resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from live import change_if_due, restore

from instar.checkpoint.listing import latest_checkpoint
from instar.checkpoint.store import load_checkpoint
from instar.run.optimizer import optimizer_tensors
from instar.run.start.preflight import Prepared
from instar.run.trainer import Trainer

Make = Callable[..., Trainer]

ENTRIES = [
    {"name": "freeze", "value": ["blocks.0.*", "*_embedding.*"], "when": {"at_step": 0}},
    {"name": "insert_layers", "value": 1, "where": "start", "when": {"at_step": 2}},
    {"name": "insert_layers", "value": 1, "where": [1], "when": {"at_step": 4}},
    {"name": "unfreeze", "value": "*_embedding.*", "when": {"at_step": 5}},
]
SCHEDULE = f"schedule={json.dumps(ENTRIES)}"


def frozen_names(run: Trainer) -> set[str]:
    return {name for name, p in run.parts.stepper.parameters.items() if not p.requires_grad}


def block(run: Trainer, number: int) -> dict[str, torch.Tensor]:
    prefix = f"blocks.{number}."
    return {
        name.removeprefix(prefix): parameter.detach().clone()
        for name, parameter in run.parts.stepper.parameters.items()
        if name.startswith(prefix)
    }


def test_a_frozen_block_stays_frozen_where_insertions_move_it(
    trainer: Make, tmp_path: Path
) -> None:
    run = trainer(SCHEDULE, name="whole")
    first = block(run, 0)
    while run.state.progress.step < 7:
        change_if_due(run)
        if run.state.progress.step == 6:
            run.save("here", must=True)
        run.step()
    assert run.state.in_force.architecture.sizes()["layers"] == 4
    assert frozen_names(run) == {f"blocks.2.{name}" for name in first}
    assert all(torch.equal(value, first[name]) for name, value in block(run, 2).items())
    for new in (0, 1):
        # what writes to the stream begins at zero
        assert block(run, new)["mlp.down.weight"].any()
    continuation = trainer(SCHEDULE, name="again")
    restore(continuation, load_checkpoint(latest_checkpoint(tmp_path / "whole")))
    assert frozen_names(continuation) == frozen_names(run)
    continuation.step()
    for name, parameter in run.parts.stepper.parameters.items():
        assert torch.equal(parameter, continuation.parts.stepper.parameters[name])


@pytest.mark.parametrize("entries", [ENTRIES, ENTRIES[:2]])
def test_the_optimizer_remembers_what_the_forecast_says_of_moved_blocks(
    trainer: Make, prepare_run: Callable[..., Prepared], entries: list[object]
) -> None:
    text = f"schedule={json.dumps(entries)}"
    run = trainer(text)
    run.train()
    forecast_bytes = prepare_run(text).forecast.stages[-1].memory_bytes
    states = optimizer_tensors(run.parts.stepper.optimizers, run.parts.stepper.parameters)
    assert forecast_bytes["optimizer"] == sum(
        tensor.nbytes for tensor in states.values() if tensor.dim()
    )
