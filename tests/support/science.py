"""Tasks that are not language, whose runs take a second, and commands that run them.

`Halves`: points in the plane, on which side of a line they are, with labels that are partly wrong, so
that a network soon learns them by heart and its held-out loss turns. `graphs`: small ones, for the
task of Instar's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from instar.config.samples import SamplesConfig
from instar.config.section import Section
from instar.data.columns import Columns, stack
from instar.models.shape import Shape, Table
from instar.own import Batch, Field, OwnTask

CONFIG = """\
name: halves
task: science:Halves
data: {val: 21, test: 23}
train: {until: 60it, batch_size: 8}
optimizer: {lr: 0.03, weight_decay: 0.0}
learning_rate: {shape: constant, warmup_iters: 2}
eval: {eval_epochs: 1, batch_size: 4}
early_stopping: {rules: [{metric: loss, patience: 3}]}
checkpoint: {on_best: true, best_of: [loss, accuracy]}
test: {at_end: true}
record: {log_interval: 1}
"""
"""A run that learns its samples by heart and gives up; each epoch ends with a partial batch."""

GRAPHS = """\
name: tiny-graphs
task: graph
model:
  width: 8
  n_layer: 1
  heads:
    - {name: side, kind: classification, classes: 2}
    - {name: size, kind: regression}
data: {source: "science:graphs", val: 13, test: 11}
train: {until: 3ep, batch_size: 8}
learning_rate: {warmup_iters: 2}
eval: {batch_size: 4}
record: {log_interval: 1}
"""


class Data(SamplesConfig):
    samples: int = Field(80, ge=1, description="points")


class Model(Section):
    hidden: int = Field(24, ge=1, description="hidden units")


@dataclass(frozen=True)
class Axes(Shape):
    inputs: int = 2
    hidden: int = 24
    classes: int = 2

    def table(self, table: Table) -> None:
        table.linear("up", "hidden", "inputs")
        table.linear("down", "classes", "hidden")


class Net(nn.Module):
    def __init__(self, axes: Axes) -> None:
        super().__init__()
        self.up = nn.Linear(axes.inputs, axes.hidden)
        self.down = nn.Linear(axes.hidden, axes.classes)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(torch.relu(self.up(x)))
        return found


class Halves(OwnTask[Model, Data]):
    Model, Data = Model, Data
    better = {"accuracy": "max", "doubt": "min"}  # noqa: RUF012
    unit = "point"

    def samples(self) -> Columns:
        drawn = np.random.default_rng(self.seed)
        x = drawn.normal(size=(self.data.samples, 2)).astype(np.float32)
        wrong = drawn.random(self.data.samples) < 0.25
        number = np.arange(self.data.samples)
        return {"x": 3 * x, "side": ((x.sum(1) > 0) ^ wrong).astype(np.int64), "number": number}

    def shape(self) -> Axes:
        return Axes(hidden=self.model.hidden)

    def module(self, shape: Any) -> nn.Module:
        return Net(shape)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["side"], reduction="none")

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        chances = model(batch["x"]).softmax(1)
        right = chances.argmax(1) == batch["side"]
        return {"accuracy": right, "doubt": 1 - chances.max(1).values}

    def predict(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        said = model(batch["x"])
        return {
            "number": batch["number"],
            "side": batch["side"],
            "side.predicted": said.argmax(1),
            "chances": said.softmax(1),
        }


def graphs() -> Columns:
    """Chains: on which side their nodes are, and how many there are."""
    drawn = np.random.default_rng(0)
    samples = []
    for number in range(64):
        nodes, side = int(drawn.integers(3, 7)), number % 2
        links = np.stack([np.arange(nodes - 1), np.arange(1, nodes)], 1)
        samples.append(
            {
                "x": drawn.normal(2 * side - 1, 1, (nodes, 1)).astype(np.float32),
                "edges": links.astype(np.int64),
                "side": np.int64(side),
                "size": np.float32(nodes / 4),
            }
        )
    return stack(samples)
