"""`optimizer.lr_base_width` and `lr_base_depth` in live runs: a larger model trains at the rates of the small one."""

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
    losses = []
    run.parts.stepper.unwrapped_model.double()
    while run.state.progress.step < 12:
        change_if_due(run)
        run.parts.stepper.unwrapped_model.double()
        run.step()
        losses.append(run.parts.logger.last_loss or 0.0)
    return losses


def test_copies_with_mapped_moments_train_as_the_narrow_model_does(trainer: Make) -> None:
    """Exactly, if the rates of readers fall as their fan-in grows; otherwise the losses part at once."""
    narrow = losses_of(trainer(*KEYS, name="narrow"))
    follows = losses_of(trainer(*KEYS, SCHEDULE, FOLLOWS, name="follows"))
    does_not = losses_of(trainer(*KEYS, SCHEDULE, name="does not"))
    assert follows == pytest.approx(narrow, rel=1e-4)
    off = [abs(loss - other) / other for loss, other in zip(does_not, narrow, strict=True)]
    assert max(off[:4]) < 1e-4  # the growth itself is exact
    assert max(off[4:]) > 1e-2


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
def test_the_base_is_kept_by_a_resume(trainer: Make, optimizer: str, tmp_path: Path) -> None:
    """Also of the depth, of which SGD has none."""
    deeper = [*WIDENED, {"name": "stack_layers", "value": 2}]
    schedule = json.dumps([{**entry, "when": {"at_step": 3}} for entry in deeper])
    depth = () if optimizer == "sgd" else ("optimizer.lr_base_depth=2",)
    keys = (f"optimizer.name={optimizer}", f"schedule={schedule}", FOLLOWS, *depth)
    run = trainer(*keys, name="whole")
    while run.state.progress.step < 5:
        change_if_due(run)
        run.step()
    run.save("here", must=True)
    continuation = trainer(*keys, name="again")
    restore(continuation, load_checkpoint(latest_checkpoint(tmp_path / "whole")))
    assert len(set(ratios_of(run).values())) > 1
    assert ratios_of(continuation) == ratios_of(run)
    run.step()
    continuation.step()
    for name, tensor in run.parts.stepper.parameters.items():
        assert torch.equal(tensor, continuation.parts.stepper.parameters[name])


def ratios_of(run: Trainer) -> dict[str, float]:
    """The rate of each parameter as a multiple of that of the run."""
    names = {parameter: name for name, parameter in run.parts.stepper.parameters.items()}
    return {
        names[parameter]: group["lr_ratio"]
        for optimizer in run.parts.stepper.optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


@pytest.mark.parametrize(
    "growth",
    [
        {"name": "stack_layers", "value": 2},
        {"name": "loop_layers", "value": {"from": 0, "to": 1, "times": 2}},
    ],
    ids=["stacked", "looped"],
)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_rates_of_the_branches_halve_where_the_model_runs_twice_as_many_blocks(
    trainer: Make, optimizer: str, growth: dict[str, object]
) -> None:
    schedule = f"schedule={json.dumps([{**growth, 'when': {'at_step': 3}}])}"
    run = trainer(f"optimizer.name={optimizer}", schedule, "optimizer.lr_base_depth=2")
    before = ratios_of(run)
    while run.state.progress.step < 5:
        change_if_due(run)
        run.step()
    after = ratios_of(run)
    for name in before:
        writes = ".attn.output." in name or ".mlp.down." in name
        assert after[name] == before[name] * (0.5 if writes else 1.0)
