"""Tasks that log, and hooks that write down what they see."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from science import Axes, Halves, Net
from torch import nn

from instar.api import train
from instar.custom import Batch
from instar.run.step.hooks import METHODS, HookContext


class Logging(Halves):
    """Logs numbers of all kinds, images and tables, in training and in evaluations."""

    def loss(self, model: nn.Module, batch: Batch) -> Any:
        losses = super().loss(model, batch)
        number = batch["number"]
        self.log("number", number)
        self.log("size", len(number))
        self.log("seen", len(number), reduce="sum")
        self.log("lowest", number.min(), reduce="min")
        self.log("highest", number, reduce="max")
        self.log("latest", float(number[-1]), reduce="last")
        self.log_image("gray/../x", batch["x"].sigmoid())
        self.log_image("color", np.broadcast_to([1.0, 0.5, np.nan], (3, 5, 3)))
        rows = [{"number": int(n), "loss": v} for n, v in zip(number, losses, strict=True)]
        self.log_table("worst", sorted(rows, key=lambda row: -row["loss"])[:2])
        return losses


class Counting:
    """Its state is part of checkpoints: how often each method was called, and on which rank."""

    def __init__(self) -> None:
        self.calls = dict.fromkeys(METHODS, 0)
        self.rank = -1
        self.best = float("inf")

    def __getattr__(self, name: str) -> Any:
        if name not in METHODS:
            raise AttributeError(name)

        def count_call(run: HookContext) -> None:
            self.calls[name] += 1
            self.rank = run.rank
            self.best = min(self.best, run.metrics.get("loss", self.best))

        return count_call

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *METHODS]

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls, "rank": self.rank, "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls, self.rank, self.best = state["calls"], state["rank"], state["best"]


class Noting(Halves):
    """A task is a hook, too: it notes everything and changes the weights as it may."""

    def on_step_end(self, run: HookContext) -> None:
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.clamp_(-2, 2)
        run.log("largest", max(p.abs().max() for p in run.model.parameters()), reduce="max")

    def on_growth_end(self, run: HookContext) -> None:
        Path(f"grown-{run.rank}").write_text(f"{run.operation} {run.step}")


class Dropping(Net):
    def __init__(self, axes: Axes) -> None:
        super().__init__(axes)
        self.dropout = nn.Dropout(0.5)
        self.share = 1 / axes.hidden


class Setting(Halves):
    """Sets values of submodules by hand, and writes down what growth leaves of them."""

    def module(self, shape: Any) -> nn.Module:
        return Dropping(shape)

    def on_train_begin(self, run: HookContext) -> None:
        run.model.dropout.p = 0.0  # type: ignore[union-attr,assignment]
        run.model.share = 0.5  # type: ignore[assignment]

    def on_growth_end(self, run: HookContext) -> None:
        Path(f"set-{run.rank}").write_text(f"{run.model.dropout.p} {run.model.share}")  # type: ignore[union-attr]


class SavingOnOne(Halves):
    """Has a state on rank 1 only."""

    def __getattr__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict") and os.environ.get("RANK") == "1":
            return dict
        raise AttributeError(name)


class Failing(Halves):
    def on_step_end(self, run: HookContext) -> None:
        if run.rank == run.world_size - 1 and run.step == 3:
            raise KeyError("lost")


class Stopping(Halves):
    def on_evaluate_end(self, run: HookContext) -> None:
        if run.rank == run.world_size - 1 and run.metrics["loss"] < 10:
            run.stop("low enough")


class Misspelt(Halves):
    def on_step_finish(self, run: HookContext) -> None: ...


class Unwritable(Halves):
    def on_step_end(self, run: HookContext) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"weights": torch.zeros(2)}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def train_with_hooks(folder: str, overrides: list[str]) -> int:
    """The body of a rank of a script."""
    train("run.yaml", [f"record.run_dir={folder}", *overrides], hooks=[Counting(), Counting()])
    return 0


def states(run_dir: Path, step: int) -> dict[str, list[dict[str, Any]]]:
    """The states of hooks in a checkpoint, by rank."""
    text = (run_dir / "checkpoints" / f"step-{step}" / "state.json").read_text()
    return {name: [*map(json.loads, texts)] for name, texts in json.loads(text)["hooks"].items()}
