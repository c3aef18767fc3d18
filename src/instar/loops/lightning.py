"""Growth in Lightning's `Trainer`."""

# ruff: noqa: ARG002  the signatures are Lightning's

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.nn import Module

from instar.growth.live.build import renew
from instar.growth.plan import GrowthError
from instar.loops.schedule import GrowthSchedule, Schedule


class LightningGrowth(Callback):
    """Grow a model inside a `LightningModule` when the triggers of a schedule fire; at a loss before the next step, so
    that no gradient is lost.

    Resuming needs nothing more than ``trainer.fit(module, ckpt_path=...)``: the module is built as for a new run, and
    grown before its tensors are loaded.

    Args:
        schedule: path of a schedule file, or its entries.
        model: name of the attribute of the module that holds the model.
        monitor: metric that is the validation loss.
        seed: of new values.
        probe: see `instar.growth.grow`.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        model: str = "model",
        monitor: str = "val_loss",
        seed: int = 0,
        probe: Any = None,
    ) -> None:
        # the length of the run is known when it begins
        self.schedule = GrowthSchedule(schedule, seed=seed, steps=1)
        self._model, self._monitor, self._probe = model, monitor, probe

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.schedule.pending = None
        # the module's hook is the only one that comes before its tensors are loaded
        hook: Callable[[Any], None] = pl_module.on_load_checkpoint

        def replay_growth(checkpoint: Mapping[str, Any]) -> None:
            hook(checkpoint)
            if (saved_state := checkpoint.get("callbacks", {}).get(self.state_key)) is not None:
                self.schedule.load_state_dict(saved_state)
                self.schedule.replay(self._find_module(pl_module))

        vars(pl_module)["on_load_checkpoint"] = replay_growth

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        vars(pl_module).pop("on_load_checkpoint", None)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # -1 or infinity of data without a length
        lengths = [trainer.estimated_stepping_batches]
        if trainer.max_steps > 0:  # it counts the steps of each optimizer, as `global_step` does
            lengths.append(max(1, trainer.max_steps // _count_optimizers(trainer)))
        known = [int(steps) for steps in lengths if 0 < steps < math.inf]
        self.schedule.set_steps(min(known, default=None))
        if not trainer.global_step:
            self.schedule.begin_anew(self._find_module(pl_module))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._step(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        accumulates = batch_idx % trainer.accumulate_grad_batches
        if not accumulates and (loss := self.schedule.take_pending()) is not None:
            self._step(trainer, pl_module, loss)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        self.schedule.check_metric(self._monitor, trainer.callback_metrics)
        if (loss := trainer.callback_metrics.get(self._monitor)) is None:
            return
        # a metric that is not synchronised differs between processes; a checkpoint that is saved now is labelled with
        # it, and must be of the model that was evaluated
        self.schedule.pending = float(trainer.strategy.broadcast(loss))

    def state_dict(self) -> dict[str, Any]:
        return self.schedule.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.schedule.load_state_dict(state_dict)

    def _step(
        self, trainer: Trainer, pl_module: LightningModule, loss: float | None = None
    ) -> None:
        changes = self.schedule.step(
            self._find_module(pl_module),
            trainer.global_step // _count_optimizers(trainer),
            optimizer=trainer.optimizers,
            loss=loss,
            probe=self._probe,
            wrapped=trainer.strategy.model,
        )
        if changes and trainer.strategy.model is not None:
            renew(trainer.strategy.model)

    def _find_module(self, module: LightningModule) -> Module:
        model = getattr(module, self._model, None)
        if not isinstance(model, Module):
            raise GrowthError(
                f"{type(module).__name__} has no module {self._model!r}: name the attribute of its model (model=)"
            )
        return model


def _count_optimizers(trainer: Trainer) -> int:
    return max(1, len(trainer.optimizers))
