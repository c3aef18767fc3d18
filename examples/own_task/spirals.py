"""Points on three spirals, and a residual network that tells which: a task of one's own."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from instar.own import Field, OwnTask, Section, Shape, Table


class Model(Section):
    width: int = Field(16, ge=1, description="channels that blocks add to")
    hidden: int = Field(32, ge=1, description="channels inside a block")
    layers: int = Field(1, ge=1, description="blocks")


@dataclass(frozen=True)
class Axes(Shape):
    inputs: int = 2
    width: int = 16
    hidden: int = 32
    layers: int = 1
    classes: int = 3
    streams = ("width",)

    def table(self, table: Table) -> None:
        table.linear("encoder", "width", "inputs")
        for layer in range(self.layers):
            table.linear(f"blocks.{layer}.up", "hidden", "width")
            table.linear(f"blocks.{layer}.down", "width", "hidden")
        table.linear("decoder", "classes", "width")


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(x)))


class Net(nn.Module):
    def __init__(self, axes: Axes) -> None:
        super().__init__()
        self.encoder = nn.Linear(axes.inputs, axes.width)
        self.blocks = nn.ModuleList(Block(axes.width, axes.hidden) for _ in range(axes.layers))
        self.decoder = nn.Linear(axes.width, axes.classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x)
        for block in self.blocks:
            x = block(x)
        return self.decoder(x)


class Spirals(OwnTask[Model, OwnTask.Data]):
    Model = Model
    better = {"accuracy": "max"}  # noqa: RUF012
    unit = "point"

    def samples(self):
        drawn = np.random.default_rng(self.seed)
        label = np.arange(6000) % 3
        radius = np.sqrt(drawn.uniform(0.02, 1, label.size))
        angle = 9 * radius + label * 2 * np.pi / 3 + drawn.normal(0, 0.12, label.size)
        x = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
        return {"x": x.astype(np.float32), "label": label}

    def shape(self):
        return Axes(width=self.model.width, hidden=self.model.hidden, layers=self.model.layers)

    def module(self, shape):
        return Net(shape)

    def loss(self, model, batch):
        return F.cross_entropy(model(batch["x"]), batch["label"], reduction="none")

    def measure(self, model, batch):
        return {"accuracy": model(batch["x"]).argmax(1) == batch["label"]}

    def predict(self, model, batch):
        return {"label": batch["label"], "label.predicted": model(batch["x"]).argmax(1)}
