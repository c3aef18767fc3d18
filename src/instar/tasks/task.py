"""What the trainer asks of the thing it trains. It knows nothing else about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from instar.data.order import Order
from instar.data.source import Source

Batch = Mapping[str, torch.Tensor]


class Task(Protocol):
    """A model, its samples, and how wrong it is on them."""

    def build(self) -> torch.nn.Module:
        """The model at step 0, initialised from the run's seed alone, on the CPU."""
        ...

    def train_samples(self) -> tuple[Source, Order]:
        """Where training samples are and in which order they come."""
        ...

    def held_out(self, split: str) -> Source:
        """A split that is never trained on; its samples are read in their own order."""
        ...

    def loss_sum(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Loss summed over the batch, a float32 scalar; divide by `Source.weights` for the mean."""
        ...

    def flops(self, weight: float) -> float:
        """Forward and backward FLOPs spent on samples of this total weight."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """The architecture in force, as JSON."""
        ...

    def fingerprints(self) -> Mapping[str, str]:
        """What its samples are made of, by name; a run goes on with the same only."""
        ...
