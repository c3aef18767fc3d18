"""A task whose network has BatchNorm, which needs two samples at least."""

from __future__ import annotations

from typing import Any

from science import Halves
from torch import nn


class Norm(Halves):
    def module(self, shape: Any) -> nn.Module:  # noqa: ARG002
        width = self.model.hidden
        return nn.Sequential(
            nn.Linear(2, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2)
        )

    def shape(self) -> Any:
        return None


class Late(Halves):
    """A task whose loss of one sample fails only after some steps, which no trial finds."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        model.calls = getattr(model, "calls", 0) + 1
        if len(batch["x"]) == 1 and model.calls > 1:
            raise ValueError("Expected more than 1 value per channel")
        return super().loss(model, batch)
