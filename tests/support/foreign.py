"""Tasks around modules as other people write them, in float64 and with all that torch allows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from science import Axes, Halves, Net
from torch import Tensor, nn

from instar.custom import Batch, Table

TINY = 2.0**-40
"""is lost in float32 beside 1"""


class Double(Halves):
    """Samples, model, metrics and predictions need all the digits of float64."""

    def samples(self) -> Any:
        columns = dict(super().samples())
        return {**columns, "x": np.asarray(columns["x"]).astype(np.float64)}

    def module(self, shape: Any) -> nn.Module:
        return super().module(shape).double()

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:  # noqa: ARG002
        return {"accuracy": 1 + TINY * batch["x"][:, 0], "doubt": batch["number"] + 2**52}

    def predict(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:  # noqa: ARG002
        close = 1 + TINY * batch["x"]
        return {"close": close[:, 0], "closely": close, "roughly": close[:, 0].bfloat16()}


class Mixture(nn.Module):
    """In float64; a frozen part, a part that stays in evaluation mode, two that share a matrix, a
    buffer along an axis that counts in training, one that is not saved; a dictionary as result."""

    def __init__(self, axes: Axes) -> None:
        super().__init__()
        self.scaled = nn.Linear(axes.inputs, axes.inputs).requires_grad_(False)
        self.norm = nn.BatchNorm1d(axes.inputs, affine=False)
        self.there, self.back = (nn.Linear(axes.inputs, axes.inputs, bias=False) for _ in range(2))
        self.back.weight = self.there.weight
        self.net = Net(axes)
        self.register_buffer("seen", torch.zeros(axes.hidden))
        self.register_buffer("one", torch.ones(()), persistent=False)
        self.double()
        self.norm.eval()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.norm(self.scaled(x))
        hidden = torch.relu(self.net.up(x + self.back(torch.tanh(self.there(x)))))
        if self.training:
            self.seen += (hidden > 0).sum(0)
        return {"logits": self.net.down(hidden) * self.one, "hidden": hidden}


class MixtureAxes(Axes):
    def table(self, table: Table) -> None:
        table.linear("scaled", "inputs", "inputs")
        table.linear("there", "inputs", "inputs", bias=False)
        table.linear("net.up", "hidden", "inputs")
        table.linear("net.down", "classes", "hidden")
        table.buffer("seen", "hidden")


class Mixed(Double):
    def shape(self) -> Axes:
        return MixtureAxes(hidden=self.model.hidden)

    def module(self, shape: Any) -> nn.Module:
        return Mixture(shape)

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        logits: Tensor = model(batch["x"])["logits"]
        return logits

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(self.outputs(model, batch), batch["side"], reduction="none")
