"""A batch that fills a share of the device's memory: measured, agreed by all ranks, and kept by the history."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from live import carry_out, restore
from started import run_ranks

from instar.checkpoint.listing import latest_checkpoint
from instar.checkpoint.store import load_checkpoint
from instar.config.load import Loaded
from instar.config.sections import Operation
from instar.distributed.failure import RunFailed
from instar.record.events import OperationEvent, Train, read_events
from instar.run.changes import batch_fit
from instar.run.trainer import Trainer
from instar.schedule.operations import fold_history

Make = Callable[..., Trainer]
FIXED, PER_SAMPLE = 10_000_000, 100_000


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A device on which a step takes `fixed` bytes, and `sample` for each sample of its micro-batch."""
    memory = {
        "usable": 100_000_000,
        "fixed": FIXED,
        "sample": PER_SAMPLE,
        "peak": FIXED,
        "tried": 0,
    }

    def peak(_: str, *, reset: bool = False) -> int:
        if reset:
            memory["peak"] = memory["fixed"]
        return memory["peak"]

    original = batch_fit.to_device

    def counting(arrays: object, where: torch.device) -> object:
        batch = original(arrays, where)  # type: ignore[arg-type]
        samples = len(next(iter(batch.values())))
        memory["peak"] = memory["fixed"] + memory["sample"] * samples
        memory["tried"] = max(memory["tried"], samples)
        memory["columns"] = sum(math.prod(column.shape[1:]) for column in batch.values())
        return batch

    monkeypatch.setattr(batch_fit, "peak_bytes", peak)
    monkeypatch.setattr(batch_fit, "usable_bytes", lambda _: memory["usable"])
    monkeypatch.setattr(batch_fit, "to_device", counting)
    return memory


def adjust(share: float, **options: object) -> Operation:
    return Operation("adjust_batch_size", share, options)


@pytest.mark.parametrize(
    ("share", "options", "accumulation", "batch"),
    [
        (0.5, {}, 1, 400),  # 40 of 50 MB
        (0.2, {}, 2, 100),
        (0.5, {"max": 64}, 1, 64),
        (0.5, {"batch_size": 7}, 1, 400),  # what a forecast assumed
    ],
)
def test_the_batch_is_the_largest_whose_measured_memory_fits(
    trainer: Make,
    device: dict[str, int],
    share: float,
    options: dict[str, object],
    accumulation: int,
    batch: int,
) -> None:
    run = trainer(f"train.gradient_accumulation_steps={accumulation}")
    run.step()
    before = {name: p.detach().clone() for name, p in run.parts.stepper.parameters.items()}
    generator = torch.random.get_rng_state()
    carry_out(run, adjust(share, **options))
    assert run.state.settings.batch_size == batch
    (change,) = run.state.history
    assert change.operation.options["batch_size"] == (400 if "max" in options else batch)
    assert f"fit into {share:.0%} of 95.4 MiB, 97.7 KiB each (measured)" in change.reason
    assert device["tried"] == 8  # twice the present micro-batch of 4
    # nothing but the batch has changed
    assert torch.equal(torch.random.get_rng_state(), generator)
    after = run.parts.stepper.parameters
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(p.grad is None for p in after.values())
    replayed_state = fold_history(run.parts.initial, run.state.history)
    assert replayed_state.settings == run.state.settings
    run.step()


def test_a_trial_needs_no_more_than_there_is(trainer: Make, device: dict[str, int]) -> None:
    run = trainer()
    run.step()
    device["usable"] = FIXED + 2 * PER_SAMPLE
    carry_out(run, adjust(1.0))
    assert run.state.settings.batch_size == 2
    assert device["tried"] == 4


def test_samples_are_as_long_as_in_training(trainer: Make, device: dict[str, int]) -> None:
    columns = set()
    for context in (4, 16):
        run = trainer("data.context=8", f"eval.context={context}", name=str(context))
        carry_out(run, adjust(0.5))
        assert run.parts.stepper.task.context == 8
        columns.add(device["columns"])
    run = trainer("data.context=8", name="alike")
    carry_out(run, adjust(0.5))
    assert columns == {device["columns"]}


@pytest.mark.usefixtures("device")
def test_where_not_one_sample_fits_the_run_is_unchanged(trainer: Make) -> None:
    run = trainer()
    run.step()
    with pytest.raises(RunFailed, match=r"not even one sample fits into 5% of the 95\.4 MiB"):
        carry_out(run, adjust(0.05))
    assert run.state.settings.batch_size == 4
    assert run.state.history == ()


def test_where_nothing_can_be_measured_the_forecast_tells(
    trainer: Make, device: dict[str, int]
) -> None:
    """As on a CPU whose allocator keeps what was freed."""
    run = trainer()
    run.step()
    device.update(sample=0, usable=10**9)
    carry_out(run, adjust(0.5))
    (change,) = run.state.history
    assert "(forecast)" in change.reason
    assert run.state.settings.batch_size > 100


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_agree_and_a_resume_has_the_batch_that_was_measured(
    config_in: Callable[..., Loaded], tmp_path: Path, ranks: int
) -> None:
    """On this machine's own memory."""
    schedule = [
        {"name": "adjust_batch_size", "value": 0.5, "max": 6, "lr": "sqrt", "when": {"at_step": 3}}
    ]
    keys = ("train.gradient_accumulation_steps=1", "learning_rate.shape=constant")
    loaded_config = config_in(
        tmp_path, f"schedule={json.dumps(schedule)}", "train.until=[5it]", *keys
    )
    path = tmp_path / "run.yaml"
    path.write_text(loaded_config.to_yaml(origin=False), encoding="utf-8")
    run_dir = tmp_path / "run"
    run_ranks(ranks, tmp_path, "train", path, "--set", f"record.run_dir={run_dir}")
    run_ranks(ranks, tmp_path, "resume", run_dir, "--until", "7it")
    events = list(read_events(run_dir / "events.jsonl"))
    changes = [event for event in events if isinstance(event, OperationEvent)]
    change, until = changes
    assert until.name == "override"
    assert (change.step, change.change) == (3, "lr 0.001→0.001225, batch_size 4→6")
    assert "samples fit into 50% of" in change.reason
    train = [event for event in events if isinstance(event, Train)]
    assert [event.samples for event in train] == [4, 8, 12, 18, 24, 30, 36]
    assert [event.lr for event in train[-2:]] == pytest.approx([1e-3 * math.sqrt(1.5)] * 2)
    history = load_checkpoint(latest_checkpoint(run_dir)).manifest.history
    assert history[0]["operation"]["options"]["batch_size"] >= 6


def test_a_checkpoint_goes_on_with_what_was_measured_elsewhere(
    trainer: Make, device: dict[str, int]
) -> None:
    first = trainer("train.until=[3it]", name="first")
    first.step()
    carry_out(first, adjust(0.5, max=100))
    first.save("now")
    first.parts.saver.finish()
    device["usable"] = 10  # on this device nothing would fit
    second = trainer("train.until=[3it]", name="second")
    restore(second, load_checkpoint(latest_checkpoint(first.parts.saver.root)))
    assert second.state.settings.batch_size == 100
