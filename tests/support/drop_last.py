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
