"""Growth in Lightning: a run that is killed after it and resumed ends with the same bits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from small_models import model_of
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from instar.growth import GrowthError
from instar.loops import LightningGrowth

SCHEDULE = [
    {"name": "widen_mlp", "value": "x2", "how": "split", "when": {"at_step": 2}},
    {"name": "insert_layers", "value": 1, "when": {"waited": 2}},
]
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:.*checkpoint directory.*exists and is not empty"),
]


class Texts(Dataset[Tensor]):
    def __len__(self) -> int:
        return 2  # Lightning resumes exactly at the end of an epoch only

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(index))


class Language(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = copy.deepcopy(model_of("llama")).train()

    def training_step(self, ids: Tensor, _: int) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss

    def validation_step(self, ids: Tensor, _: int) -> None:
        self.log("val_loss", self.model(input_ids=ids, labels=ids).loss)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def fit(folder: Path, growth: LightningGrowth, start: Path | None = None, **given: Any) -> Language:
    module = Language()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=6,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            growth,
            ModelCheckpoint(folder, "{step}", every_n_epochs=1, save_top_k=-1),
        ],
        **{"limit_val_batches": 0, **given},
    )
    loader = DataLoader(Texts(), batch_size=2)
    trainer.fit(module, loader, DataLoader(Texts(), batch_size=8), ckpt_path=start)
    return module


def test_lightning_resumes_across_growth(tmp_path: Path) -> None:
    whole = fit(tmp_path, LightningGrowth(SCHEDULE)).model
    assert len(whole.model.layers) == 4
    for step in (3, 4):
        start = tmp_path / f"step={step}.ckpt"
        resumed = fit(tmp_path / "resumed", LightningGrowth(SCHEDULE), start).model
        tensors, others = whole.state_dict(), resumed.state_dict()
        assert tensors.keys() == others.keys()
        assert [name for name in tensors if not torch.equal(tensors[name], others[name])] == []


def test_lightning_grows_at_a_validation_loss(tmp_path: Path) -> None:
    entry = {"name": "insert_layers", "value": 1, "when": {"loss_below": 100.0}}
    growth = LightningGrowth([entry])
    module = fit(tmp_path, growth, limit_val_batches=1, check_val_every_n_epoch=4)
    (change,) = growth.schedule.history
    assert (change.step, change.reason[:4]) == (4, "val ")
    assert len(module.model.model.layers) == 4


def test_a_module_without_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GrowthError, match="Language has no module 'net'"):
        fit(tmp_path, LightningGrowth(SCHEDULE, model="net"))
