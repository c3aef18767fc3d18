"""`optimizer.lr_base_width` in live runs: a widened model trains at the rate of the narrow one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from live import change_if_due, restore

from instar.checkpoint.listing import latest_checkpoint
from instar.checkpoint.store import load_checkpoint
from instar.run.trainer import Trainer

Make = Callable[..., Trainer]

WIDENED = [
    {"name": "widen_hidden", "value": "x2", "how": "duplicate", "moments": "mapped"},
    {"name": "widen_mlp", "value": "x2", "how": "split", "moments": "mapped"},
]
SCHEDULE = f"schedule={json.dumps([{**entry, 'when': {'at_step': 3}} for entry in WIDENED])}"
KEYS = (
    "model.tied=false",
    "model.bias=false",
    "train.clip=null",
    "optimizer.weight_decay=0.0",
    "optimizer.eps=1e-12",
    "optimizer.lr=0.003",
    "train.until=[12it]",
)
FOLLOWS = "optimizer.lr_base_width=32"


def losses_of(run: Trainer) -> list[float]:
    """Losses of all steps, in float64."""
    found = []
    run.parts.stepper.unwrapped_model.double()
    while run.state.progress.step < 12:
        change_if_due(run)
        run.parts.stepper.unwrapped_model.double()
        run.step()
        found.append(run.parts.logger.last_loss or 0.0)
    return found


def test_copies_with_mapped_moments_train_as_the_narrow_model_does(trainer: Make) -> None:
    """Exactly, if the rates of readers fall as their fan-in grows; otherwise the losses part at once."""
    narrow = losses_of(trainer(*KEYS, name="narrow"))
    follows = losses_of(trainer(*KEYS, SCHEDULE, FOLLOWS, name="follows"))
    does_not = losses_of(trainer(*KEYS, SCHEDULE, name="does not"))
    assert follows == pytest.approx(narrow, rel=1e-4)
    off = [abs(one - other) / other for one, other in zip(does_not, narrow, strict=True)]
    assert max(off[:4]) < 1e-4  # the growth itself is exact
    assert max(off[4:]) > 1e-2


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
def test_the_base_is_kept_by_a_resume(trainer: Make, optimizer: str, tmp_path: Path) -> None:
    keys = (f"optimizer.name={optimizer}", SCHEDULE, FOLLOWS)
    run = trainer(*keys, name="whole")
    while run.state.progress.step < 5:
        change_if_due(run)
        run.step()
    run.save("here", must=True)
    again = trainer(*keys, name="again")
    restore(again, load_checkpoint(latest_checkpoint(tmp_path / "whole")))
    for each in (run, again):
        ratios = {g["lr_ratio"] for o in each.parts.stepper.optimizers for g in o.param_groups}
        assert len(ratios) > 1
        each.step()
    for name, tensor in run.parts.stepper.parameters.items():
        assert torch.equal(tensor, again.parts.stepper.parameters[name])
