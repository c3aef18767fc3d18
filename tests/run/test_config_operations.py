"""Weight decay, clipping, betas, momentum, the average's decay and dropout change in mid-run, as a resume would set them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import parametrize_first
from live import carry_out
from started import run_ranks

from instar.checkpoint.listing import latest_checkpoint
from instar.checkpoint.store import load_checkpoint
from instar.config.errors import ConfigError
from instar.config.load import Loaded
from instar.config.sections import Operation
from instar.distributed.failure import RunFailed
from instar.record.events import OperationEvent, Train, read_events
from instar.run.start import restore as restoring
from instar.run.start.preflight import Prepared
from instar.run.trainer import Trainer
from instar.schedule.checks import load_checked
from instar.schedule.operations import override
from instar.schedule.render import render, render_change

Make = Callable[..., Trainer]
LONG = ("train.until=[8it]", "learning_rate.lr_decay_iters=8", "checkpoint.every_steps=4")

CASES: list[tuple[str, Any, tuple[str, ...], dict[str, Any]]] = [
    ("set_weight_decay", 0.5, (), {"optimizer.weight_decay": 0.5}),
    ("set_weight_decay", 0.5, ("optimizer.weight_decay=0",), {"optimizer.weight_decay": 0.5}),
    ("change_weight_decay", "x3", (), {"optimizer.weight_decay": 0.30000000000000004}),
    ("set_weight_decay", 0.5, ("optimizer.name=muon",), {"optimizer.weight_decay": 0.5}),
    ("set_clip", 0.05, (), {"train.clip": 0.05}),
    ("set_clip", None, ("train.clip=0.05",), {"train.clip": None}),
    ("change_clip", 0.1, (), {"train.clip": 0.1}),
    ("set_betas", [0.5, 0.6], (), {"optimizer.beta1": 0.5, "optimizer.beta2": 0.6}),
    (
        "set_betas",
        [0.5, 0.6],
        ("optimizer.name=muon",),
        {"optimizer.beta1": 0.5, "optimizer.beta2": 0.6},
    ),
    ("set_momentum", 0.3, ("optimizer.name=muon",), {"optimizer.momentum": 0.3}),
    ("set_momentum", 0.3, ("optimizer.name=sgd",), {"optimizer.momentum": 0.3}),
    ("change_momentum", 0.5, ("optimizer.name=sgd",), {"optimizer.momentum": 0.45}),
    ("set_ema_decay", 0.5, ("train.ema=0.9",), {"train.ema": 0.5}),
    ("change_ema_decay", 0.5, ("train.ema=0.9",), {"train.ema": 0.45}),
]


def tensors(run: Trainer) -> dict[str, torch.Tensor]:
    stepper = run.parts.stepper
    return {
        **{f"model/{name}": p.detach().clone() for name, p in stepper.parameters.items()},
        **{f"state/{name}": state.clone() for name, state in stepper.states().items()},
        **{f"ema/{name}": mean.clone() for name, mean in (stepper.ema or {}).items()},
    }


@parametrize_first(
    ("name", "value", "keys", "changes"), CASES, ids=lambda part: json.dumps(part)[:40], first=7
)
def test_a_value_is_in_force_from_its_step_on_as_if_a_resume_had_set_it(
    trainer: Make, name: str, value: Any, keys: tuple[str, ...], changes: dict[str, Any]
) -> None:
    entry = {"name": name, "value": value, "when": {"at_step": 4}}
    by_schedule = trainer(*LONG, *keys, f"schedule={json.dumps([entry])}", name="scheduled")
    by_schedule.train()
    plain = trainer(*LONG, *keys, name="plain")
    plain.train()
    plain.parts.saver.finish()
    sets = [f"{key}={json.dumps(number)}" for key, number in changes.items()]
    by_resume = trainer(*LONG, *keys, *sets, name="resumed")
    checkpoint = load_checkpoint(plain.parts.saver.root / "checkpoints" / "step-4")
    by_resume.state, _ = restoring.restore(
        by_resume.state, by_resume.parts, checkpoint, override=override(changes, {})
    )
    by_resume.train()
    actual, expected, without = tensors(by_schedule), tensors(by_resume), tensors(plain)
    assert actual.keys() == expected.keys()
    assert [key for key in actual if not torch.equal(actual[key], expected[key])] == []
    assert any(not torch.equal(actual[key], without[key]) for key in actual if key in without)
    (change,) = by_schedule.state.history
    assert (change.operation.name, change.step, change.skipped) == (name, 4, "")


def test_growth_and_other_operations_after_it_keep_the_value(trainer: Make) -> None:
    run = trainer(*LONG, "train.ema=0.9")
    run.step()
    for name, value in (
        ("set_weight_decay", 0.25),
        ("set_betas", [0.5, 0.75]),
        ("set_clip", 0.5),
        ("set_ema_decay", 0.5),
        ("insert_layers", 1),
        ("freeze", "blocks.0.*"),
    ):
        carry_out(run, Operation(name, value))
        run.step()
    stepper = run.parts.stepper
    (optimizer,) = stepper.optimizers
    assert {tuple(group["betas"]) for group in optimizer.param_groups} == {(0.5, 0.75)}
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, 0.25}
    assert (stepper.clip, stepper.ema_decay) == (0.5, 0.5)


def test_what_has_changed_is_recorded(trainer: Make, tmp_path: Path) -> None:
    run = trainer(*LONG)
    for name, value in (
        ("change_weight_decay", 0.5),
        ("set_betas", [0.5, 0.95]),
        ("set_clip", None),
        ("set_dropout", 0.1),
    ):
        carry_out(run, Operation(name, value))
    events = [e for e in read_events(tmp_path / "events.jsonl") if isinstance(e, OperationEvent)]
    texts = [event.change for event in events]
    assert texts == ["0.1→0.05", "0.9→0.5", "1→none", "0→0.1"]


@pytest.mark.parametrize(
    ("name", "value", "keys", "message"),
    [
        ("set_betas", [0.9, 0.9], ("optimizer.name=sgd",), "optimizer.name sgd has no betas"),
        ("set_momentum", 0.9, (), "optimizer.name adamw has no momentum"),
        ("set_ema_decay", 0.9, (), "the run keeps no moving average: set train.ema"),
        ("change_clip", 2, ("train.clip=null",), "gradients are not clipped: set_clip"),
        ("change_momentum", 2, ("optimizer.name=muon",), "optimizer.momentum 1.9"),
        ("set_weight_decay", -1, (), "must be a number of at least 0, got -1"),
        ("set_clip", 0, (), "must be a number above 0, or null"),
        ("set_betas", [0.9], (), "must be two numbers from 0 to less than 1"),
        ("set_betas", [0.9, 1.0], (), "must be two numbers from 0 to less than 1"),
        ("set_momentum", True, ("optimizer.name=sgd",), "must be a number from 0 to less than 1"),
        ("set_ema_decay", 0, ("train.ema=0.9",), "must be a number between 0 and 1"),
        ("change_weight_decay", "2x", (), "must be a factor above 0, such as 0.5 or x2"),
        ("set_dropout", 1, (), "needs|must be a number from 0 to less than 1"),
        ("set_dropout", 0, (), "the dropout is 0 already"),
        ("change_dropout", 2, (), "the result would be 0"),
    ],
)
def test_what_a_run_cannot_do_is_refused_before_it_starts(
    prepare_run: Callable[..., Prepared],
    name: str,
    value: Any,
    keys: tuple[str, ...],
    message: str,
) -> None:
    entry = json.dumps([{"name": name, "value": value, "when": {"at_step": 1}}])

    def check() -> None:
        load_checked(None, ["train.until=9it", *keys, f"schedule={entry}"])
        prepare_run(*keys, f"schedule={entry}")

    with pytest.raises(ConfigError, match=message):
        check()


def test_a_task_with_optimizers_of_its_own_refuses_their_keys(
    trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(*LONG)
    monkeypatch.setattr(
        type(run.parts.task), "optimizer", lambda _, model: torch.optim.SGD(model.parameters(), 0.1)
    )
    with pytest.raises(RunFailed, match=r"optimizer\(\) of the task gives its own optimizers"):
        carry_out(run, Operation("set_weight_decay", 0.5))
    carry_out(run, Operation("set_clip", 0.5))
    assert run.parts.stepper.clip == 0.5


SCHEDULE = [
    {"name": "set_weight_decay", "value": 0.3, "when": {"at_step": 2}},
    {"name": "set_clip", "value": 0.5, "when": {"at_step": 3}},
    {"name": "set_betas", "value": [0.8, 0.9], "when": {"at_step": 4}},
    {"name": "set_momentum", "value": 0.8, "when": {"at_step": 5}},
    {"name": "set_ema_decay", "value": 0.5, "when": {"at_step": 5}},
    {"name": "insert_layers", "value": 1, "when": {"at_step": 6}},
    {"name": "change_weight_decay", "value": 0.5, "when": {"at_step": 7}},
    {"name": "set_dropout", "value": 0.1, "when": {"at_step": 8}},
    {"name": "change_dropout", "value": 2, "when": {"at_step": 9}},
]


def curve(run_dir: Path) -> list[float]:
    events = read_events(run_dir / "events.jsonl")
    return [event.loss for event in events if isinstance(event, Train)]


@pytest.mark.torture
@pytest.mark.parametrize("reproducible", ["elastic", "fixed"])
def test_any_number_of_ranks_and_any_strategy_have_the_same_values(
    config_in: Callable[..., Loaded], tmp_path: Path, reproducible: str
) -> None:
    """Resumed in the middle, and with sharded parameters."""
    loaded_config = config_in(
        tmp_path,
        f"schedule={json.dumps(SCHEDULE)}",
        "train.until=[11it]",
        "train.batch_size=4",
        "train.ema=0.9",
        "optimizer.name=muon",
        "learning_rate.lr_decay_iters=11",
        f"reproducible={reproducible}",
    )
    path = tmp_path / "run.yaml"
    path.write_text(loaded_config.to_yaml(origin=False), encoding="utf-8")
    curves = {}
    for name, ranks, keys in (
        ("one", 1, ()),
        ("two", 2, ()),
        ("sharded", 2, ("--set", "parallel.strategy=fsdp")),
    ):
        place = ("--set", f"record.run_dir={tmp_path / name}")
        if name == "sharded":
            run_ranks(ranks, tmp_path, "train", path, *place, *keys, "--until", "7it")
            run_ranks(ranks, tmp_path, "resume", tmp_path / name, "--until", "11it")
        else:
            run_ranks(ranks, tmp_path, "train", path, *place, *keys)
        curves[name] = curve(tmp_path / name)
        history = load_checkpoint(latest_checkpoint(tmp_path / name)).manifest.history
        names = [entry["operation"]["name"] for entry in history]
        assert [n for n in names if n != "override"] == [entry["name"] for entry in SCHEDULE]
    assert len(curves["one"]) == 11
    exact = reproducible == "elastic"
    for name in ("two", "sharded"):
        # dropout of a rank draws its own numbers unless the run is elastic
        steps = 11 if exact else 8
        close = pytest.approx(curves["one"][:steps], rel=0 if exact else 1e-4, abs=0)
        assert curves[name][:steps] == close


def test_a_forecast_says_which_keys_change_and_what_changes_nothing(
    prepare_run: Callable[..., Prepared],
) -> None:
    schedule = [
        {"name": "set_clip", "value": 0.5, "when": {"at_step": 1}},
        {"name": "set_clip", "value": 0.5, "when": {"at_step": 2}},
        {"name": "set_lr", "value": 0.001, "when": {"at_step": 3}},
        {"name": "reset_lr_schedule", "when": {"at_step": 4}},
        {"name": "set_betas", "value": [0.9, 0.99], "when": {"at_step": 5}},
    ]
    ready = prepare_run(f"schedule={json.dumps(schedule)}")
    idle = [stage.is_idle for stage in ready.forecast.stages]
    assert idle == [False, False, True, True, False, False]
    text = render(ready.forecast)
    assert "train.clip 1.0 → 0.5" in text
    assert "optimizer.beta2 0.95 → 0.99" in text
    assert text.count("changes     nothing") == 2
    messages = [warning for warning in ready.warnings if "changes nothing" in warning]
    assert messages == [
        "schedule[1] set_clip 0.5 changes nothing: it is so already",
        "schedule[2] set_lr 0.001 changes nothing: it is so already",
    ]
    before, after = ready.forecast.stages[:2]
    change_text = render_change(before, after, "token", 1)
    assert "train.clip 1.0 → 0.5" in change_text
    assert "nothing changes" not in change_text
    again, rate, restart = ready.forecast.stages[2:5]
    assert "nothing changes" in render_change(after, again, "token", 1)
    assert "nothing changes" in render_change(again, rate, "token", 1)
    restart_text = render_change(rate, restart, "token", 1)
    assert "the learning rate schedule restarts at this step" in restart_text
    assert "nothing changes" not in restart_text
