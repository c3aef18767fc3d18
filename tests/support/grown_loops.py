"""A model that grows twice in each of others' loops: as a function that trains to the end, from a checkpoint or from the
beginning, and saves every step."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from accelerate import Accelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import save_file
from small_models import model_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from instar.loops import GrowthSchedule, LightningGrowth, TrainerGrowth, resume_across_growth

SCHEDULE = [
    {"name": "widen_mlp", "value": "x2", "how": "split", "when": {"at_step": 2}},
    {"name": "insert_layers", "value": 1, "when": {"waited": 2}},
]
STEPS = 6
LAST = "last-0.safetensors"

Saved = Callable[[int], None]
"""Called with each step whose checkpoint is whole."""


class Texts(Dataset[dict[str, Tensor]]):
    def __init__(self, size: int = 32) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, 64, (12,), generator=generator)
        return {"input_ids": ids, "labels": ids}


def place() -> tuple[int, int]:
    """This process's rank, and how many there are."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def fresh() -> PreTrainedModel:
    return copy.deepcopy(model_of("llama")).train()


def plain(folder: Path, start: int, on_save: Saved) -> nn.Module:
    model, schedule = fresh(), GrowthSchedule(SCHEDULE)
    state = torch.load(folder / f"{start}.pt") if start else {}
    if state:
        schedule.load_state_dict(state["growth"])
        schedule.replay(model)
        model.load_state_dict(state["model"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if state:
        optimizer.load_state_dict(state["optimizer"])
    module: nn.Module = model
    rank, ranks = place()
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
        module = DistributedDataParallel(model)
    for step in range(start + 1, STEPS + 1):
        text = Texts()[step * ranks + rank]
        optimizer.zero_grad()
        module(**{name: ids[None] for name, ids in text.items()}).loss.backward()
        optimizer.step()
        schedule.step(module, step, optimizer=optimizer)
        parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "growth": schedule}
        if rank == 0:
            torch.save({n: part.state_dict() for n, part in parts.items()}, folder / f"{step}.pt")
        on_save(step)
    return model


def accelerate(folder: Path, start: int, on_save: Saved) -> nn.Module:
    accelerator = Accelerator(cpu=True)
    schedule, model = GrowthSchedule(SCHEDULE), fresh()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    loader = DataLoader(Texts(), batch_size=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    resume_across_growth(accelerator, schedule, optimizer)
    if start:
        accelerator.load_state(str(folder / str(start)))
    for step, batch in enumerate(loader, 1):
        if not start < step <= STEPS:
            continue
        optimizer.zero_grad()
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        scheduler.step()
        schedule.step(model, step, optimizer=optimizer)
        accelerator.save_state(str(folder / str(step)))
        on_save(step)
    module: nn.Module = accelerator.unwrap_model(model)
    return module


class _OnSave(TrainerCallback):
    def __init__(self, on_save: Saved) -> None:
        self._on_save = on_save

    def on_save(self, args: Any, state: Any, control: Any, **live: Any) -> None:
        del args, control, live
        self._on_save(state.global_step)


def of_trainer(
    model: PreTrainedModel, folder: Path, *callbacks: TrainerCallback, **options: Any
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
        ddp_backend="gloo" if place()[1] > 1 else None,
        **options,
    )
    return Trainer(
        model, arguments, train_dataset=Texts(), eval_dataset=Texts(), callbacks=[*callbacks]
    )


def trainer(folder: Path, start: int, on_save: Saved, *, lora: bool = False) -> nn.Module:
    checkpoint = str(folder / f"checkpoint-{start}") if start else None
    growth = TrainerGrowth(SCHEDULE, wrapped=lambda: running.model_wrapped)
    if lora:
        model: Any = lora_model()
        if checkpoint:
            growth.replay(model, checkpoint)
    else:
        model = AutoModelForCausalLM.from_pretrained(checkpoint) if checkpoint else fresh()
    running = of_trainer(model, folder, growth, _OnSave(on_save))
    running.train(resume_from_checkpoint=checkpoint)
    module: nn.Module = running.model
    return module


def lora_model() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model: nn.Module = get_peft_model(fresh(), LoraConfig(target_modules=["q_proj", "down_proj"]))
    return model


class Language(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = fresh()

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
        self.log("val_loss", self.model(**batch).loss)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def fit(
    folder: Path, *callbacks: pl.Callback, start: Path | None = None, **options: Any
) -> pl.LightningModule:
    module = Language()
    running = pl.Trainer(
        accelerator="cpu",
        devices=place()[1],
        max_steps=STEPS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, ModelCheckpoint(folder, "{step}", save_top_k=-1)],
        **{"limit_val_batches": 0, **options},
    )
    # Lightning resumes exactly at the end of an epoch only: each is one step
    loader = DataLoader(Texts(2 * place()[1]), batch_size=2)
    running.fit(module, loader, DataLoader(Texts(2), batch_size=8), ckpt_path=start)
    return module


class _OnEpoch(pl.Callback):
    def __init__(self, on_save: Saved) -> None:
        self._on_save = on_save

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        del pl_module
        self._on_save(trainer.global_step)


def lightning(folder: Path, start: int, on_save: Saved) -> nn.Module:
    checkpoint = folder / f"step={start}.ckpt" if start else None
    module = fit(folder, LightningGrowth(SCHEDULE), _OnEpoch(on_save), start=checkpoint)
    model: nn.Module = module.model
    return model


LOOPS: Mapping[str, Callable[[Path, int, Saved], nn.Module]] = {
    "plain": plain,
    "accelerate": accelerate,
    "trainer": trainer,
    "lora": partial(trainer, lora=True),
    "lightning": lightning,
}


def run(loop: str, start: int = 0, hold: int = -1) -> None:
    """Train in the working folder, from the checkpoint of a step, and leave the last weights there; or stand still
    once a step is saved."""

    def on_save(step: int) -> None:
        print(f"saved {step}", flush=True)
        if step == hold:
            signal.pause()

    model = LOOPS[loop](Path.cwd(), start, on_save)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(tensors, f"last-{place()[0]}.safetensors")
