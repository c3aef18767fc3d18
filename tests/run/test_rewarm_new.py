"""`lr: {rewarm_new: n}`: what growth makes warms up, and what is old does not notice."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from live import change_if_due, restore
from torch import Tensor

from instar.checkpoint.listing import latest_checkpoint
from instar.checkpoint.store import load_checkpoint
from instar.record.events import Train, read_events
from instar.run.trainer import Trainer
from instar.schedule.settings import learning_rate

Make = Callable[..., Trainer]

GROWN_AT, ITERS = 3, 4


def schedule(*entries: Mapping[str, Any]) -> str:
    return f"schedule={json.dumps(entries)}"


def insertion(lr: object, step: int = GROWN_AT, **more: Any) -> Mapping[str, Any]:
    return {"name": "insert_layers", "value": 1, "lr": lr, "when": {"at_step": step}, **more}


def run_until(run: Trainer, step: int) -> Trainer:
    while run.state.progress.step < step:
        change_if_due(run)
        run.step()
    return run


def values(run: Trainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in run.parts.stepper.parameters.items()}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_the_first_step_of_what_is_old_is_that_of_the_model_that_did_not_grow(
    trainer: Make, optimizer: str, tmp_path: Path
) -> None:
    keys = (f"optimizer.name={optimizer}", "train.clip=null", "optimizer.lr=0.01")
    arms = {
        "ungrown": (),
        "warm": (insertion({"rewarm_new": ITERS}),),
        "cold": (insertion("keep"),),
    }
    weights_of = {
        name: values(run_until(trainer(*keys, schedule(*arm), name=name), GROWN_AT + 1))
        for name, arm in arms.items()
    }
    for name, tensor in weights_of["ungrown"].items():
        torch.testing.assert_close(weights_of["warm"][name], tensor, rtol=1e-5, atol=1e-7)
    for name in ("attn.output", "mlp.down"):  # began at zero
        full, rising = (weights_of[arm][f"blocks.2.{name}.weight"] for arm in ("cold", "warm"))
        assert full.abs().max() > 1e-5
        torch.testing.assert_close(rising, full / ITERS, rtol=1e-4, atol=1e-9)
    events = [event for event in read_events(tmp_path / "warm.jsonl") if isinstance(event, Train)]
    shares = [event.extra.get("lr_new", 0.0) / (event.lr or 1.0) for event in events]
    assert shares == pytest.approx([0, 0, 0, 1 / ITERS])


def test_a_resume_and_later_growth_go_on_with_what_is_warming_up(
    trainer: Make, tmp_path: Path
) -> None:
    entries = schedule(
        insertion({"rewarm_new": 20}),
        insertion({"rewarm_new": 2}, GROWN_AT + 1, where="start", **{"from": "copy"}),
    )
    run = run_until(trainer(entries, "optimizer.name=muon", name="whole"), GROWN_AT + 2)
    births = run.state.settings.new_param_warmups
    assert [(birth.step, birth.iters) for birth in births] == [(3, 20), (4, 2)]
    assert {name.rpartition(".")[0][:8] for name in births[0].names} == {"blocks.3"}
    assert {name.rpartition(".")[0][:8] for name in births[1].names} == {"blocks.0"}
    run.save("here", must=True)
    groups = [
        group for optimizer in run.parts.stepper.optimizers for group in optimizer.param_groups
    ]
    lr = learning_rate(run.state.settings, GROWN_AT + 1)
    shares = {(group["birth"], group["lr"] / group["lr_ratio"] / lr) for group in groups}
    assert {birth: round(share, 9) for birth, share in shares} == {
        None: 1.0,
        births[0]: 2 / 20,
        births[1]: 1 / 2,
    }
    run_until(run, GROWN_AT + 4)
    after = [
        group for optimizer in run.parts.stepper.optimizers for group in optimizer.param_groups
    ]
    assert all(group_before is other for group_before, other in zip(groups, after, strict=True))
    continuation = trainer(entries, "optimizer.name=muon", name="again")
    restore(continuation, load_checkpoint(latest_checkpoint(tmp_path / "whole")))
    assert continuation.state.settings == run.state.settings
    run_until(continuation, GROWN_AT + 4)
    other = values(continuation)
    assert all(torch.equal(tensor, other[name]) for name, tensor in values(run).items())


def test_new_adapters_of_a_model_of_the_same_shape_warm_up_after_a_resume(
    trainer: Make, tmp_path: Path
) -> None:
    entries = schedule(
        {
            "name": "set_lora_rank",
            "value": {"target": "attn", "rank": 2},
            "when": {"at_step": 0},
        },
        {"name": "merge_lora", "lr": {"rewarm_new": 9}, "when": {"at_step": 2}},
    )
    run = run_until(trainer(entries, name="whole"), 3)
    run.save("here", must=True)
    continuation = trainer(entries, name="again")
    restore(continuation, load_checkpoint(latest_checkpoint(tmp_path / "whole")))
    for live_run in (run, continuation):
        (birth,) = live_run.state.settings.new_param_warmups
        assert all(name.rpartition(".")[2] in ("lora_a", "lora_b") for name in birth.names)
        live_run.step()
        rates = {
            g["birth"]: g["lr"] for o in live_run.parts.stepper.optimizers for g in o.param_groups
        }
        assert rates[birth] == pytest.approx(rates[None] * 2 / 9)
