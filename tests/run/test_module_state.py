"""Buffers and modes of a module: in evaluations, saves, skipped steps and growth."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import science
import states
import torch
from live import change_if_due
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from instar.checkpoint.layout import read_header
from instar.checkpoint.store import Checkpoint, load_checkpoint
from instar.cli.checkpoint_output import parameter_count
from instar.config.errors import ConfigError
from instar.config.load import load_config
from instar.growth import proof
from instar.run.start.preflight import preflight
from instar.run.start.restore import load_model_state
from instar.run.state.sync_point import Stopped
from instar.run.step.stepper import Stepper
from instar.run.trainer import Trainer


@pytest.fixture(autouse=True)
def config(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(states.CONFIG)


def running(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def same(tensors: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return tensors.keys() == other.keys() and all(
        torch.equal(tensors[name], other[name]) for name in tensors
    )


def test_what_stands_in_eval_mode_stays_there(tmp_path: Path) -> None:
    with science.trainer(tmp_path / "run", "model.kind=dropout in eval") as run:
        run.train()
        modes = {
            name: module.training
            for name, module in run.parts.stepper.unwrapped_model.named_modules()
        }
    assert modes == {"": True, "up": True, "middle": False, "down": True}


def test_evaluating_leaves_buffers_and_generators_as_they_are(tmp_path: Path) -> None:
    with science.trainer(tmp_path / "run", "model.kind=noise") as run:
        state = torch.get_rng_state()
        run.evaluate()
        first = run.state.evaluated_metrics
        run.evaluate()
        assert torch.equal(torch.get_rng_state(), state)
        assert first is not None
        assert first == run.state.evaluated_metrics != {}
    with science.trainer(tmp_path / "other", "model.kind=running") as run:
        run.step()
        run.parts.stepper.unwrapped_model.register_forward_hook(
            lambda model, *_: model.get_submodule("middle").count.add_(1)
        )
        before = running(run.parts.stepper.unwrapped_model)
        run.evaluate()
        assert same(running(run.parts.stepper.unwrapped_model), before)


def test_a_skipped_step_leaves_running_statistics_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with science.trainer(tmp_path / "run", "model.kind=batch norm") as run:
        run.step()
        before = running(run.parts.stepper.unwrapped_model)
        loss = states.States.loss

        def nan_loss(self: Any, model: nn.Module, batch: Any) -> Tensor:
            return loss(self, model, {**batch, "x": batch["x"] * torch.nan})

        monkeypatch.setattr(states.States, "loss", nan_loss)
        run.step()
        assert run.state.skipped_in_a_row == 1
        assert same(running(run.parts.stepper.unwrapped_model), before)
        monkeypatch.undo()
        run.step()
        assert not same(running(run.parts.stepper.unwrapped_model), before)


def test_a_step_that_a_stop_ends_leaves_running_statistics_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends after the forward passes, because another rank waits for its samples."""

    def stop() -> None:
        raise Stopped

    with science.trainer(tmp_path / "run", "model.kind=batch norm") as run:
        run.step()
        before = running(run.parts.stepper.unwrapped_model)
        original = Stepper.step
        monkeypatch.setattr(
            Stepper,
            "step",
            lambda *args, **options: original(*args, **{**options, "before_sync": stop}),
        )
        run.step()
        assert run.state.step == 1
        assert same(running(run.parts.stepper.unwrapped_model), before)


def test_a_checkpoint_without_buffers_says_so_when_it_is_restored(tmp_path: Path) -> None:
    """As earlier versions saved them."""
    with science.trainer(tmp_path / "run", "model.kind=batch norm") as run:
        run.step()
        run.save("now", must=True)
        checkpoint = load_checkpoint(next((tmp_path / "run").rglob("step-1")))
        model = run.parts.task.shell()
        assert load_model_state(model, checkpoint) == []
        assert same(running(model), running(run.parts.stepper.unwrapped_model))
        headers = {"model.safetensors": read_header(checkpoint.path / "model.safetensors")}
        assert parameter_count(checkpoint.manifest, headers) == 4 * 6 + 2 * 6 + 7
        file = checkpoint.path / "model.safetensors"
        tensors = {n: t for n, t in load_file(file).items() if "running" not in n}
        save_file(tensors, file)
        model = run.parts.task.shell()
        (warning,) = load_model_state(
            model, Checkpoint(checkpoint.path, checkpoint.manifest, checkpoint.state)
        )
        assert "without the buffers middle.running_mean, middle.running_var" in warning
        assert torch.equal(model.get_buffer("middle.running_mean"), torch.zeros(6))


GROWTH = '[{"name": "widen", "value": {"axis": "hidden", "size": 9}, "when": {"at_step": 2}}]'


def buffers_around_growth(run: Trainer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Buffers just before the second step's growth, and after it."""
    run.step()
    run.step()
    before = running(run.parts.stepper.unwrapped_model)
    change_if_due(run)
    return before, running(run.parts.stepper.unwrapped_model)


def test_running_statistics_follow_the_axis_that_is_widened(tmp_path: Path) -> None:
    with science.trainer(tmp_path / "run", "model.kind=batch norm", f"schedule={GROWTH}") as run:
        before, after = buffers_around_growth(run)
        assert run.state.history[0].operation.name == "widen"
    assert after["middle.num_batches_tracked"] == before["middle.num_batches_tracked"] == 4
    for name, new in (("middle.running_mean", 0.0), ("middle.running_var", 1.0)):
        assert torch.equal(after[name], torch.cat([before[name], torch.full((3,), new)]))


def test_copies_of_units_take_their_statistics_along(tmp_path: Path) -> None:
    schedule = json.loads(GROWTH)
    schedule[0]["how"] = "split"
    text = f"schedule={json.dumps(schedule)}"
    with science.trainer(tmp_path / "run", "model.kind=batch norm", text) as run:
        before, after = buffers_around_growth(run)
        assert len(run.state.history) == 1
    for name in ("middle.running_mean", "middle.running_var"):
        assert torch.equal(after[name], torch.cat([before[name], before[name][:3]]))


@pytest.mark.parametrize("kind", ["batch norm", "running", "double", "bfloat16"])
def test_rounding_is_judged_in_float64_with_the_samples_and_the_buffers(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a deep model rounds by more than is allowed."""
    monkeypatch.setitem(proof.TOLERANCE, torch.float32, -1.0)
    monkeypatch.setitem(proof.TOLERANCE, torch.bfloat16, -1.0)
    text = f"schedule={GROWTH}"
    with (
        caplog.at_level(logging.INFO, "instar.run.changes.live_growth"),
        science.trainer(tmp_path / "run", f"model.kind={kind}", text) as run,
    ):
        buffers_around_growth(run)
        assert [change.operation.name for change in run.state.history] == ["widen"]
    assert not [entry for entry in caplog.records if entry.name == "instar.run.changes.live_growth"]


def weights(run: Trainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in run.parts.stepper.parameters.items()}


def test_what_the_module_froze_is_not_trained_until_somebody_says_so(tmp_path: Path) -> None:
    schedule = json.loads(GROWTH)
    schedule.append({"name": "unfreeze", "value": "up.bias", "when": {"at_step": 3}})
    text = f"schedule={json.dumps(schedule)}"
    with science.trainer(tmp_path / "run", "model.kind=frozen", text) as run:
        before = weights(run)
        run.step()
        run.step()
        after = weights(run)
        changes = [name for name in before if not torch.equal(before[name], after[name])]
        assert changes == ["down.weight", "down.bias"]
        assert not [key for key in run.parts.stepper.optimizers[0].state if key.shape == (6, 3)]
        change_if_due(run)
        assert run.parts.stepper.unwrapped_model.get_parameter("up.weight").shape == (9, 3)
        assert run.state.settings.frozen == ("up.*",)
        run.step()
        change_if_due(run)
        trains = {name for name, p in run.parts.stepper.parameters.items() if p.requires_grad}
        assert trains == {"up.bias", "down.weight", "down.bias"}
    events = (tmp_path / "run" / "events.jsonl").read_text("utf-8")
    assert "up.bias is trained from now on, although the task's module froze it" in events


def test_a_forecast_leaves_out_what_the_module_froze(tmp_path: Path) -> None:
    plain, frozen = (
        preflight(
            load_config(
                str(tmp_path / "run.yaml"),
                [f"model.kind={kind}", f"record.run_dir={tmp_path / 'x'}"],
            ),
            1,
        ).forecast.stages[0]
        for kind in ("plain", "frozen")
    )
    assert frozen.settings.frozen == ("up.*",)
    assert plain.memory_bytes["optimizer"] - frozen.memory_bytes["optimizer"] == 2 * 4 * (18 + 6)


def test_growth_that_would_change_a_buffer_nobody_named_is_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(_: states.Axes, table: Any) -> None:
        table.linear("up", "hidden", "inputs")
        table.linear("down", "outputs", "hidden")

    monkeypatch.setattr(states.Axes, "table", without)
    loaded_config = load_config(
        str(tmp_path / "run.yaml"),
        ["model.kind=running", f"schedule={GROWTH}", f"record.run_dir={tmp_path / 'x'}"],
    )
    with pytest.raises(ConfigError) as caught:
        preflight(loaded_config, 1)
    assert "the buffer middle.mean would change from [6] to [9]" in str(caught.value)


def test_a_table_that_names_a_buffer_wrongly_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = states.Axes.table

    def wrong(self: states.Axes, axes_table: Any) -> None:
        table(self, axes_table)
        axes_table.buffer("middle.scratch", "hidden")

    monkeypatch.setattr(states.Axes, "table", wrong)
    loaded_config = load_config(
        str(tmp_path / "run.yaml"), ["model.kind=running", f"record.run_dir={tmp_path / 'x'}"]
    )
    with pytest.raises(ConfigError) as caught:
        preflight(loaded_config, 1)
    assert "the buffer middle.scratch is 6, and in the model it is not there" in str(caught.value)


def test_a_module_that_indexes_has_the_same_gradients_every_time(tmp_path: Path) -> None:
    """On several threads; their order would decide by default."""
    rows = torch.randint(500, (20_000,))
    weights = torch.randn(20_000, 64)
    threads = torch.get_num_threads()

    def grad() -> Tensor:
        table = torch.zeros(500, 64, requires_grad=True)
        table[rows].backward(weights)
        assert table.grad is not None
        return table.grad

    with science.trainer(tmp_path / "run"):
        torch.set_num_threads(4)
        try:
            first, *repeats = (grad() for _ in range(5))
        finally:
            torch.set_num_threads(threads)
    assert all(torch.equal(first, other) for other in repeats)
