"""Growth on a schedule in others' loops: a run that is killed after it and resumed ends with the same bits."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from small_models import model_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments

from instar.config.errors import ConfigError
from instar.growth import GrowthError
from instar.loops import GrowthSchedule, TrainerGrowth, resume_across_growth

SCHEDULE = [
    {"name": "widen_mlp", "value": "x2", "how": "split", "when": {"at_step": 2}},
    {"name": "insert_layers", "value": 1, "when": {"waited": 2}},
]
STEPS = 6


class Texts(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, 64, (12,), generator=generator)
        return {"input_ids": ids, "labels": ids}


def fresh() -> PreTrainedModel:
    return copy.deepcopy(model_of("llama")).train()


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    tensors, others = one.state_dict(), other.state_dict()
    assert tensors.keys() == others.keys()
    assert [name for name in tensors if not torch.equal(tensors[name], others[name])] == []


def of_trainer(
    model: PreTrainedModel, folder: Path, growth: TrainerGrowth, **given: Any
) -> Trainer:
    arguments = TrainingArguments(
        str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        save_steps=1,
        learning_rate=1e-3,
        report_to=[],
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        **given,
    )
    return Trainer(
        model, arguments, train_dataset=Texts(), eval_dataset=Texts(), callbacks=[growth]
    )


def test_trainer_resumes_across_growth(tmp_path: Path) -> None:
    whole = of_trainer(fresh(), tmp_path / "whole", TrainerGrowth(SCHEDULE))
    whole.train()
    assert whole.model.config.num_hidden_layers == 4
    assert whole.model.config.intermediate_size == 96
    for at in (3, 4):  # between the two operations, and right after the second
        checkpoint = tmp_path / f"whole/checkpoint-{at}"
        config = json.loads((checkpoint / "config.json").read_text())
        assert (config["intermediate_size"], config["num_hidden_layers"]) == (96, at)
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        resumed = of_trainer(model, tmp_path / f"from-{at}", TrainerGrowth(SCHEDULE))
        resumed.train(resume_from_checkpoint=str(checkpoint))
        assert_equal(resumed.model, whole.model)


def test_trainer_grows_at_a_validation_loss(tmp_path: Path) -> None:
    growth = TrainerGrowth(
        [{"name": "insert_layers", "value": 1, "when": {"loss_below": 100.0}}], seed=3
    )
    trainer = of_trainer(fresh(), tmp_path, growth, eval_strategy="steps", eval_steps=4)
    trainer.train()
    (change,) = growth.schedule.history
    assert (change.step, change.reason[:4]) == (4, "val ")
    assert len(trainer.model.model.layers) == 4


def test_accelerate_resumes_across_growth(tmp_path: Path) -> None:
    def run(save: dict[int, Path], start: Path | None = None) -> nn.Module:
        accelerator = Accelerator(cpu=True)
        schedule = GrowthSchedule(SCHEDULE)
        model = fresh()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        loader = DataLoader(Texts(), batch_size=2)
        model, optimizer, loader, scheduler = accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        resume_across_growth(accelerator, schedule, optimizer)
        done = 0
        if start is not None:
            accelerator.load_state(str(start))
            done = int(start.name)
        for step, batch in enumerate(loader, 1):
            if not done < step <= STEPS:
                continue
            optimizer.zero_grad()
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            scheduler.step()
            schedule.step(model, step, optimizer=optimizer)
            if step in save:
                accelerator.save_state(str(save[step]))
        return accelerator.unwrap_model(model)

    folders = {step: tmp_path / str(step) for step in (3, 4)}
    whole = run(folders)
    assert len(whole.model.layers) == 4
    for folder in folders.values():
        assert_equal(run({}, folder), whole)


def test_a_plain_loop_resumes_across_growth(tmp_path: Path) -> None:
    def run(save: dict[int, Path], start: Path | None = None) -> nn.Module:
        model, schedule = fresh(), GrowthSchedule(SCHEDULE)
        first, state = 0, {}
        if start is not None:
            state = torch.load(start)
            first = state["step"]
            schedule.load_state_dict(state["growth"])
            schedule.replay(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if start is not None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        for step in range(first + 1, STEPS + 1):
            batch = {name: ids[None] for name, ids in Texts()[step].items()}
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
            schedule.step(model, step, optimizer=optimizer)
            if step in save:
                parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "growth": schedule}
                states = {name: each.state_dict() for name, each in parts.items()}
                torch.save({"step": step, **states}, save[step])
        return model

    files = {step: tmp_path / str(step) for step in (2, 3, 4)}
    whole = run(files)
    for file in files.values():
        assert_equal(run({}, file), whole)
    schedule = GrowthSchedule(SCHEDULE)
    schedule.load_state_dict(torch.load(files[4])["growth"])
    with pytest.raises(GrowthError, match=r"after 2 operations the model had .* parameters"):
        schedule.check(fresh())


def test_guards_of_a_schedule_hold() -> None:
    skipped = {"name": "add_heads", "value": 3, "when": {"at_step": 1}, "on_failure": "skip"}
    large = {"name": "widen_mlp", "value": "x2", "when": {"at_step": 1}, "max_params": 10}
    schedule = GrowthSchedule([skipped, large])
    model = fresh()
    with pytest.raises(GrowthError, match=r"widen_mlp: .* more than max_params 10"):
        schedule.step(model, 1)
    assert [change.skipped[:10] for change in schedule.history] == ["add_heads:"]
    assert model.config.num_attention_heads == 4


@pytest.mark.parametrize(
    ("entry", "kind", "message"),
    [
        ({"name": "change_lr", "value": 0.5, "when": {"at_step": 1}}, GrowthError, "no growth"),
        ({"name": "widen_mpl", "value": 2, "when": {"at_step": 1}}, ConfigError, "widen_mlp"),
        ({"name": "widen_mlp", "value": "x2"}, ConfigError, "could never fire"),
        (
            {"name": "widen_mlp", "value": "x2", "when": {"at_step": 1}, "lr": "reset"},
            GrowthError,
            "lr is the loop's",
        ),
        (
            {"name": "widen_mlp", "value": "x2", "when": {"at_fraction": 0.5}},
            GrowthError,
            "at_fraction needs the length",
        ),
    ],
)
def test_mistakes_of_a_schedule_are_found_at_once(
    entry: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        GrowthSchedule([entry])


@pytest.mark.parametrize(
    ("when", "fires"),
    [({"at_fraction": 0.5}, 5), ({"at_tokens": 300}, 3), ({"loss_below": 2.0}, 8)],
)
def test_triggers_of_a_schedule_fire(when: dict[str, Any], fires: int) -> None:
    entry = {"name": "extend_context", "value": 48, "when": when}
    schedule, model = GrowthSchedule([entry], steps=10, tokens_per_step=100), fresh()
    losses = {4: 3.0, 8: 1.5}
    fired = [step for step in range(1, 11) if schedule.step(model, step, loss=losses.get(step))]
    assert fired == [fires]
