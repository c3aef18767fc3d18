"""Growth in Lightning."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from grown_loops import SCHEDULE, Language, Texts, fit
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from instar.growth import GrowthError
from instar.loops import LightningGrowth

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]


AT_A_LOSS = [{"name": "insert_layers", "value": 1, "when": {"loss_below": 100.0}}]


@pytest.mark.filterwarnings("ignore:The dirpath has changed")  # of the run that goes on elsewhere
def test_lightning_grows_at_a_validation_loss_before_the_next_step(tmp_path: Path) -> None:
    """The checkpoint of the step is of the model that was evaluated, and a run that ends there grows when it goes on."""
    growth = LightningGrowth(AT_A_LOSS)
    module = fit(tmp_path, growth, limit_val_batches=1, check_val_every_n_epoch=4)
    (change,) = growth.schedule.history
    assert (change.step, change.reason[:4]) == (4, "val ")
    assert len(module.model.model.layers) == 4
    resume_growth = LightningGrowth(AT_A_LOSS)
    fit(tmp_path / "resumed", resume_growth, start=tmp_path / "step=4.ckpt")
    assert resume_growth.schedule.history == growth.schedule.history
    trainer = Trainer(
        accelerator="cpu", logger=False, callbacks=[idle_growth := LightningGrowth(AT_A_LOSS)]
    )
    trainer.validate(Language(), DataLoader(Texts(2), batch_size=2), verbose=False)
    assert idle_growth.schedule.pending is None


def test_a_second_fit_with_another_module_grows_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    growth = LightningGrowth(SCHEDULE)
    for number in range(2):
        module = fit(tmp_path / str(number), growth)
        assert len(module.model.model.layers) == 4
        assert len(growth.schedule.history) == 2
        assert ("its schedule anew" in caplog.text) is bool(number)


def test_what_was_set_by_hand_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Sets(Callback):
        def on_fit_start(self, _: Any, module: Any) -> None:
            for layer in module.model.model.layers:
                layer.self_attn.attention_dropout = 0.25

    module = fit(tmp_path, Sets(), LightningGrowth(SCHEDULE))
    layers = module.model.model.layers
    assert [layer.self_attn.attention_dropout for layer in layers] == [0.25] * 4
    assert "by hand" not in caplog.text


def test_a_monitor_that_no_validation_has_is_refused(tmp_path: Path) -> None:
    growth = LightningGrowth(AT_A_LOSS, monitor="valloss")
    with pytest.raises(GrowthError, match=r"insert_layers waits for valloss, and .* val_loss"):
        fit(tmp_path, growth, limit_val_batches=1, check_val_every_n_epoch=4)


def test_growth_waits_for_the_gradients_that_accumulate() -> None:
    """Validations come after 2 of 4 batches: the gradients of an update are those of a run that does not grow."""
    norms: list[list[float]] = []

    class Norms(Callback):
        def on_before_optimizer_step(self, _: Any, module: Any, __: Any) -> None:
            gradients = [p.grad for p in module.parameters() if p.grad is not None]
            norms[-1].append(float(torch.nn.utils.get_total_norm(gradients)))

    for when in ({"loss_below": 100.0}, {"at_step": 99}):
        norms.append([])
        growth = LightningGrowth([{"name": "widen_mlp", "value": "x2", "when": when}])
        settings = {"accumulate_grad_batches": 4, "val_check_interval": 2, "limit_val_batches": 1}
        torch.manual_seed(0)
        loader = DataLoader(Texts(8))
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=1,
            logger=False,
            callbacks=[growth, Norms()],
            enable_checkpointing=False,
            **settings,
        )
        trainer.fit(Language(), loader, loader)
    assert norms[0][0] == norms[1][0]


class TwoOptimizers(Language):
    """A model and a head, each with an optimizer of its own; both step at each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.head = torch.nn.Linear(64, 1)

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        output = self.model(**batch)
        loss: torch.Tensor = output.loss + self.head(output.logits).square().mean()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=1e-3) for part in (self.model, self.head)]


def test_a_fraction_is_of_the_updates_where_several_optimizers_step() -> None:
    """Lightning counts the steps of each optimizer: 8 are 4 updates."""
    growth = LightningGrowth([{"name": "insert_layers", "value": 1, "when": {"at_fraction": 0.5}}])
    trainer = Trainer(
        accelerator="cpu",
        max_steps=8,
        logger=False,
        callbacks=[growth],
        enable_checkpointing=False,
    )
    loader = DataLoader(Texts(8), batch_size=2)
    trainer.fit(TwoOptimizers(), loader, loader)
    (change,) = growth.schedule.history
    assert (change.step, trainer.global_step) == (2, 8)


class Endless(IterableDataset[Tensor]):
    """Data without a length."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(Texts(8))  # type: ignore[call-overload]


def test_a_fraction_of_data_without_a_length_is_refused() -> None:
    growth = LightningGrowth([{"name": "insert_layers", "value": 1, "when": {"at_fraction": 0.5}}])
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    loader = DataLoader(Endless(), batch_size=2)
    trainer = Trainer(max_epochs=1, limit_val_batches=0, callbacks=[growth], **options)
    with pytest.raises(GrowthError, match=r"at_fraction needs the length .*max_steps"):
        trainer.fit(Language(), loader, loader)
    trainer = Trainer(max_steps=4, limit_val_batches=0, callbacks=[growth], **options)
    trainer.fit(Language(), loader, loader)
    assert [change.step for change in growth.schedule.history] == [2]


def test_a_module_without_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GrowthError, match="Language has no module 'net'"):
        fit(tmp_path, LightningGrowth(SCHEDULE, model="net"))
