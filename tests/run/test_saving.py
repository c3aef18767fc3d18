"""When a run is saved, in the background or not, and what happens where that fails."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import science
import torch
from cases import parametrize_first
from live import carry_out, restore, save_when_due
from tiny_run import codes, events, output_of

from instar.checkpoint import tensor_file
from instar.checkpoint.listing import BEST, list_checkpoints, pointer_target
from instar.checkpoint.manifest import CheckpointError
from instar.checkpoint.store import load_checkpoint
from instar.config.budget import Counters
from instar.config.load import load_config
from instar.config.schema import CheckpointConfig
from instar.config.sections import Operation
from instar.distributed.failure import RunFailed
from instar.record.control import send_request
from instar.record.events import Saved, Warn, read_events
from instar.run.checkpointing import intervals, snapshot
from instar.run.output.save import MAX_FAILURES
from instar.run.start.preflight import preflight
from instar.run.trainer import Trainer
from instar.schedule.render import render

Make = Callable[..., Trainer]


def names(run: Trainer) -> list[str]:
    return [path.name for path in list_checkpoints(run.parts.saver.root)]


def train_to_end(run: Trainer) -> Trainer:
    run.train()
    run.parts.saver.finish()
    return run


def forbid(run: Trainer) -> Path:
    """Make every save fail: where its folder would be, a file is."""
    folder = run.parts.saver.root / "checkpoints"
    shutil.rmtree(folder, ignore_errors=True)
    folder.touch()
    return folder


@pytest.mark.parametrize("background", ["true", "false"])
def test_it_is_saved_every_so_many_steps_but_for_the_end(trainer: Make, background: str) -> None:
    run = train_to_end(trainer("checkpoint.every_steps=3", f"checkpoint.asynchronous={background}"))
    assert names(run) == ["step-3", "step-6"]
    assert (
        load_checkpoint(run.parts.saver.root / "checkpoints" / "step-6").manifest.reason
        == "every 3 steps"
    )


def test_counts_that_a_step_passes_by_are_not_missed(trainer: Make) -> None:
    config = CheckpointConfig(every_steps=10, every_tokens=1000)
    before, now = Counters(step=8, tokens=900), Counters(step=9, tokens=3100)
    later, state_at_start = Counters(step=12, tokens=3200), trainer().state

    def reasons(config: CheckpointConfig, before: Counters, now: Counters) -> list[str]:
        state = replace(state_at_start, before=before, progress=now)
        return [text for every, text in intervals(config) if state.due(every)]

    assert reasons(config, before, now) == ["every 1,000 tokens"]
    assert reasons(config, now, later) == ["every 10 steps"]
    assert reasons(CheckpointConfig(), before, now) == []


EPOCH = 36
"""samples that `science.Halves` trains on"""
CHANGES = (
    "schedule=[{name: set_batch_size, value: 7, when: {at_step: 7}}, "
    "{name: set_batch_size, value: 36, when: {at_step: 14}}]"
)


@pytest.mark.parametrize(
    ("every", "keys", "samples"),
    [
        (1, (), [EPOCH * n for n in range(1, 9)]),
        (3, (), [EPOCH * n for n in (3, 6, 8)]),  # and at the end
        (2, (CHANGES,), [EPOCH * n for n in (2, 4, 6, 8)]),
        # the step with which the batch grows passes the rest of epoch 4 and is all of epoch 5
        (1, (CHANGES, "data.drop_last=true"), [EPOCH * n for n in (1, 2, 3, 5, 6, 7, 8)]),
    ],
)
def test_it_is_saved_at_the_ends_of_epochs_whatever_the_batch(
    tmp_path: Path, every: int, keys: tuple[str, ...], samples: list[int]
) -> None:
    science.place(tmp_path)
    epochs = ("train.until=[8ep]", f"checkpoint.every_epochs={every}", "checkpoint.keep_last=9")
    other = ("checkpoint.on_best=false", "early_stopping.rules=[]", "test.at_end=false")
    with science.trainer(tmp_path / "run", *epochs, *other, *keys) as run:
        run.train()
        run.save("the end")
        run.parts.saver.finish()
        manifests = [
            load_checkpoint(path).manifest for path in list_checkpoints(run.parts.saver.root)
        ]
    assert [manifest.progress["samples"] for manifest in manifests] == samples
    text = "every epoch" if every == 1 else f"every {every} epochs"
    assert {manifest.reason for manifest in manifests[:-1]} == {text}


def steps_of_epochs(run: Trainer) -> list[int]:
    manifests = [load_checkpoint(path).manifest for path in list_checkpoints(run.parts.saver.root)]
    assert {manifest.reason for manifest in manifests} == {"every epoch"}
    return [manifest.step for manifest in manifests]


@parametrize_first("at_end", [True, False], first=4)
@pytest.mark.parametrize("stopped_at", [None, 3, 6, 7])
def test_an_operation_that_changes_the_samples_ends_no_epoch_and_hides_none(
    trainer: Make, at_end: bool, stopped_at: int | None
) -> None:
    """784 windows are 6 steps; of half their length, 1,567 are 12."""
    at_step = 6 if at_end else 3
    keys = (
        *("train.batch_size=131", "train.gradient_accumulation_steps=1", "eval.eval_epochs=1"),
        *("checkpoint.every_epochs=1", "checkpoint.keep_last=9", "checkpoint.on_best=false"),
        f"schedule=[{{name: set_context, value: 8, when: {{at_step: {at_step}}}}}]",
    )
    until = "train.until=[31it]"
    run = trainer(*keys, until if stopped_at is None else f"train.until=[{stopped_at}it]")
    assert run.state.phase.samples_per_epoch == 784
    train_to_end(run)
    if stopped_at is not None:
        run.save("every epoch", wait=True)
        state_at_stop = run.state.to_json()
        after = trainer(*keys, until, name="resumed")
        path = run.parts.saver.root / "checkpoints" / f"step-{stopped_at}"
        restore(after, load_checkpoint(path))
        assert after.state.to_json()["course"] == state_at_stop["course"]
        run = train_to_end(after)
        first = [step for step in (6,) if at_end and stopped_at < step]
    else:
        first = [6] * at_end
    ends = [*first, at_step + 12, at_step + 24]
    assert steps_of_epochs(run) == ends
    assert [step for step, _ in run.state.losses][-1:] == ends[-1:]


def test_ranks_save_at_the_ends_of_the_same_epochs(tmp_path: Path) -> None:
    place = science.place(tmp_path)
    saves = []
    for ranks in (1, 2):
        run_dir = tmp_path / f"{ranks}"
        keys = (
            CHANGES,
            "checkpoint.every_epochs=2",
            "checkpoint.on_best=false",
            "train.until=[5ep]",
            "test.at_end=false",
        )
        children = place.train(run_dir, *keys, "data.strategy=dispatched", ranks=ranks)
        assert codes(children) == [0] * ranks, output_of(children)
        saves.append(
            [(e["step"], e["samples"], e["reason"]) for e in events(run_dir, "checkpoint")]
        )
    assert saves[0] == saves[1]
    assert [(samples, reason) for _, samples, reason in saves[0][:2]] == [
        (2 * EPOCH, "every 2 epochs"),
        (4 * EPOCH, "every 2 epochs"),
    ]


def test_the_forecast_lists_when_a_run_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    science.place(tmp_path)
    keys = ["checkpoint.every_epochs=2", "checkpoint.every_steps=1000", "checkpoint.best_of=[loss]"]
    forecast = preflight(load_config("run.yaml", keys), 1).forecast
    moments = ("every 1,000 steps", "every 2 epochs (10 steps)", "every 10 min", "at the best loss")
    assert forecast.saves == (*moments, "after growth")
    assert f"saves       {', '.join(moments)}" in " ".join(render(forecast).split("\n")).replace(
        "             ", " "
    )
    silent = [
        "checkpoint.every_minutes=null",
        "checkpoint.on_best=false",
        "checkpoint.on_growth=false",
    ]
    silent.append("test.weights=last")
    assert "saves       at the end\n" in render(
        preflight(load_config("run.yaml", silent), 1).forecast
    )


def test_what_is_saved_in_the_background_is_the_moment_it_was_asked_for(trainer: Make) -> None:
    run = trainer("optimizer.lr=1e-1")
    run.step()
    at_save = {name: p.detach().clone() for name, p in run.parts.stepper.parameters.items()}
    run.save("now")
    run.step()
    run.parts.saver.finish()
    tensors = load_checkpoint(run.parts.saver.root / "checkpoints" / "step-1").tensors("model")
    assert all(torch.equal(tensors[name], at_save[name]) for name in at_save)
    assert not all(torch.equal(tensors[n], p) for n, p in run.parts.stepper.parameters.items())


Bits = dict[str, torch.Tensor]


def weights(run: Trainer) -> Bits:
    return {name: p.detach().clone() for name, p in run.parts.stepper.parameters.items()}


def saved_bits(run: Trainer, step: int) -> Bits:
    return load_checkpoint(run.parts.saver.root / "checkpoints" / f"step-{step}").tensors("model")


def same(tensors: Mapping[str, Any], at_save: Bits) -> bool:
    return all(torch.equal(tensors[name], tensor) for name, tensor in at_save.items())


def addresses(run: Trainer) -> set[int]:
    """Where the copy is that the next background save overwrites."""
    spare = run.parts.saver.spare
    parts = spare.components.values() if spare is not None else ()
    tensors = [tensor for part in parts for tensor in part.values() if torch.is_tensor(tensor)]
    return {tensor.data_ptr() for tensor in tensors if tensor.numel()}


def saved_at_next_step(run: Trainer) -> Bits:
    run.step()
    run.save("now")
    return weights(run)


class BlockedDisk:
    """Writing a file of tensors begins only when `release` is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._release_event = threading.Event()
        self._write = tensor_file.write_tensors
        monkeypatch.setattr(tensor_file, "write_tensors", self._wait)
        self.release = self._release_event.set

    def _wait(self, *arguments: Any) -> str:
        assert self._release_event.wait(60)
        return self._write(*arguments)


def test_the_memory_of_a_copy_is_that_of_the_next(trainer: Make) -> None:
    run = trainer("optimizer.lr=1e-1")
    at_save, places = list[Bits](), list[set[int]]()
    for _ in range(3):
        at_save.append(saved_at_next_step(run))
        run.parts.saver.finish()
        places.append(addresses(run))
    assert places[0]
    assert places[0] == places[1] == places[2]
    assert all(same(saved_bits(run, step), at_save[step - 1]) for step in (1, 2, 3))
    assert not same(saved_bits(run, 1), at_save[1])


def test_a_copy_is_not_overwritten_while_it_is_being_saved(
    trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer("optimizer.lr=1e-1")
    saved_at_next_step(run)
    run.parts.saver.finish()
    copy_addresses, disk = addresses(run), BlockedDisk(monkeypatch)
    second = saved_at_next_step(run)
    assert run.parts.saver.spare is None
    threading.Timer(0.3, disk.release).start()
    third = saved_at_next_step(run)  # waits for the second save
    run.parts.saver.finish()
    assert addresses(run) == copy_addresses
    assert same(saved_bits(run, 2), second)
    assert same(saved_bits(run, 3), third)


def test_a_save_that_is_overdue_keeps_its_copy(
    trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer("optimizer.lr=1e-1")
    saved_at_next_step(run)
    run.parts.saver.finish()
    copy_addresses, disk = addresses(run), BlockedDisk(monkeypatch)
    second = saved_at_next_step(run)
    overdue = run.parts.saver.pending
    assert overdue is not None
    run.parts.saver.limit_s = 0.1
    with pytest.raises(RunFailed, match="has not ended within"):
        saved_at_next_step(run)
    third = saved_at_next_step(run)
    disk.release()
    run.parts.saver.limit_s = 60.0
    run.parts.saver.finish()
    assert not addresses(run) & copy_addresses
    # the third save has removed its folder, but what it read is of its step
    assert same(overdue.result(60).snapshot.components["model"], second)
    assert same(saved_bits(run, 4), third)


def test_after_a_save_that_failed_a_new_copy_is_made(trainer: Make) -> None:
    run = trainer("optimizer.lr=1e-1")
    saved_at_next_step(run)
    run.parts.saver.finish()
    assert addresses(run)
    folder = forbid(run)
    saved_at_next_step(run)
    run.parts.saver.finish()
    assert not addresses(run)
    folder.unlink()
    third = saved_at_next_step(run)
    run.parts.saver.finish()
    assert same(saved_bits(run, 3), third)
    assert addresses(run)


def test_a_growth_frees_the_copy(trainer: Make) -> None:
    run = trainer("optimizer.lr=1e-1")
    saved_at_next_step(run)
    run.parts.saver.finish()
    assert addresses(run)
    carry_out(run, Operation("widen_mlp", 256))
    assert not addresses(run)
    second = saved_at_next_step(run)
    run.parts.saver.finish()
    assert same(saved_bits(run, 2), second)
    third = saved_at_next_step(run)
    run.parts.saver.finish()
    assert same(saved_bits(run, 3), third)


def test_a_copy_of_another_layout_is_not_used(trainer: Make) -> None:
    run, other = trainer("optimizer.lr=1e-1"), trainer("model.n_embd=16", name="other")
    saved_at_next_step(other)
    other.parts.saver.finish()
    run.parts.saver.spare = other.parts.saver.spare
    first = saved_at_next_step(run)
    run.parts.saver.finish()
    assert same(saved_bits(run, 1), first)


def test_the_best_is_saved_and_pointed_at(trainer: Make) -> None:
    run = train_to_end(trainer("checkpoint.on_best=true", "eval.eval_interval=3"))
    best = pointer_target(run.parts.saver.root, BEST)
    assert best is not None
    manifest = load_checkpoint(best).manifest
    assert "best so far" in manifest.reason
    assert manifest.loss is not None


def test_rank_0s_clock_says_when_minutes_have_passed(trainer: Make) -> None:
    run = trainer("checkpoint.every_minutes=0.000001")
    run.step()
    save_when_due(run)
    run.parts.saver.finish()
    assert (
        load_checkpoint(run.parts.saver.root / "checkpoints" / "step-1").manifest.reason
        == "every 1e-06 min"
    )


def test_a_person_may_ask_for_it_and_has_it_when_the_request_is_gone(trainer: Make) -> None:
    run = trainer()
    assert run.parts.sync.inbox is not None
    request = send_request(run.parts.sync.inbox.folder, "save")
    run.step()
    assert not request.is_answered()
    save_when_due(run)
    assert request.is_answered()
    assert (
        load_checkpoint(run.parts.saver.root / "checkpoints" / "step-1").manifest.reason
        == "asked for"
    )


@pytest.mark.parametrize("background", ["true", "false"])
def test_a_save_that_fails_is_a_warning_and_the_next_works(
    trainer: Make, tmp_path: Path, background: str
) -> None:
    run = trainer(f"checkpoint.asynchronous={background}")
    run.step()
    folder = forbid(run)
    run.save("first")
    run.parts.saver.finish()
    folder.unlink()
    run.step()
    run.save("second")
    run.parts.saver.finish()
    assert names(run) == ["step-2"]
    events = list(read_events(tmp_path / "events.jsonl"))
    assert ["step 1 could not be saved" in e.message for e in events if isinstance(e, Warn)] == [
        True
    ]
    assert [e.step for e in events if isinstance(e, Saved)] == [2]


def test_too_many_failures_in_a_row_end_the_run(trainer: Make) -> None:
    run = trainer("checkpoint.every_steps=1", "checkpoint.asynchronous=false")
    run.step()
    forbid(run)
    with pytest.raises(RunFailed, match=f"{MAX_FAILURES} saves in a row have failed"):
        run.train()
    assert run.state.progress.step == MAX_FAILURES


def test_the_last_save_must_not_fail(trainer: Make) -> None:
    run = trainer()
    run.step()
    forbid(run)
    with pytest.raises(CheckpointError, match="cannot save step 1"):
        run.save("the end", must=True)


def test_superfluous_checkpoints_go(trainer: Make) -> None:
    run = train_to_end(trainer("checkpoint.every_steps=1", "checkpoint.keep_last=2"))
    assert names(run) == ["step-6", "step-7"]


def test_what_was_measured_and_what_is_better_stand_in_the_manifest(trainer: Make) -> None:
    run = train_to_end(trainer("checkpoint.every_steps=3", "eval.eval_interval=6"))
    third, sixth = (
        load_checkpoint(path).manifest for path in list_checkpoints(run.parts.saver.root)
    )
    assert (third.metrics, third.better) == ({}, {"loss": "min", "bits_per_byte": "min"})
    assert sixth.metrics.keys() == {"loss", "bits_per_byte", "perplexity"}
    assert sixth.metrics["loss"] == sixth.loss
    assert (run.parts.saver.keep.metric, run.parts.saver.keep.better) == ("loss", "min")
    # as it does after a resume
    continuation = trainer(name="again")
    restore(continuation, load_checkpoint(run.parts.saver.root / "checkpoints" / "step-6"))
    assert snapshot(continuation.state, continuation.parts, "").facts.metrics == sixth.metrics


def test_the_first_metric_of_best_of_decides_which_checkpoints_stay(tmp_path: Path) -> None:
    science.place(tmp_path)
    with science.trainer(
        tmp_path / "run",
        "checkpoint.best_of=[accuracy, loss]",
        "checkpoint.every_steps=5",
        "checkpoint.keep_last=1",
        "train.until=[2ep]",
    ) as run:
        keep = run.parts.saver.keep
    assert (keep.metric, keep.better) == ("accuracy", "max")


def test_a_loss_that_is_not_finite_hinders_no_save(trainer: Make) -> None:
    run = trainer("record.log_interval=100")
    run.step()
    run.step()
    assert run.parts.logger.loss_sum is not None
    run.parts.logger.loss_sum.fill_(torch.nan)  # of a step that was skipped
    run.save("after a skipped step", must=True)
    resumed = trainer("record.log_interval=100", name="resumed")
    restore(resumed, load_checkpoint(run.parts.saver.root / "checkpoints" / "step-2"))
    assert resumed.parts.logger.loss_sum is not None
    assert resumed.parts.logger.loss_sum.isnan()


def test_what_fails_after_a_save_is_logged_and_ends_no_run(
    trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise CheckpointError("cannot delete step-1")

    monkeypatch.setattr("instar.run.output.save.prune_checkpoints", refuse)
    run = trainer("checkpoint.every_steps=1", "checkpoint.asynchronous=false")
    run.train()
    run.save("the end", must=True)
    events_path = run.parts.saver.root.with_name(f"{run.parts.saver.root.name}.jsonl")
    warnings = [event.message for event in read_events(events_path) if isinstance(event, Warn)]
    assert sum("is saved, but what follows" in message for message in warnings) >= MAX_FAILURES
