"""A custom task for `finders.py`: an MLP that learns a sum of waves from noisy values."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from instar.custom import Batch, CustomTask


class Waves(CustomTask[Any, Any]):
    def samples(self) -> Any:
        rng = np.random.default_rng(self.seed)
        x = rng.normal(size=(4000, 8)).astype(np.float32)
        y = np.sin(x @ rng.normal(size=(8, 4))).sum(1) + rng.normal(0, 0.3, 4000)
        return {"x": x, "y": y.astype(np.float32)}

    def module(self, shape: Any) -> nn.Module:  # noqa: ARG002
        return nn.Sequential(
            nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)
        )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(batch["x"]).squeeze(1), batch["y"], reduction="none")
