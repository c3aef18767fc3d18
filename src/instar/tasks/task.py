"""What the trainer asks of the thing it trains. It knows nothing else about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self

import torch

from instar.data.columns import Columns
from instar.data.order import Order
from instar.data.source import Source

Batch = Mapping[str, torch.Tensor]
"""Columns of samples as tensors on the device. A ragged column is its values end to end, with
`<name>.offsets` beside it, int64 [samples + 1], beginning at 0."""


class Tally(NamedTuple):
    """A metric of n units that are independent of each other: its mean is Σ values / Σ weights.

    Both are [n], on any device; a unit of weight 0 does not count. Units are samples where a task
    can tell them apart; standard errors come from how far they lie apart.
    """

    values: torch.Tensor
    weights: torch.Tensor


class Task(Protocol):
    """A model of one architecture, its samples, and how wrong it is on them."""

    @property
    def architecture(self) -> Any:
        """The shape of the model that it builds, for growth to change."""
        ...

    @property
    def metrics(self) -> Sequence[str]:
        """The names of all that `measure` gives, `loss` among them."""
        ...

    @property
    def random(self) -> bool:
        """Whether the model draws random numbers in training, as dropout does."""
        ...

    def at(self, architecture: Any, context: int) -> Self:
        """The same task with a model of another shape, or samples of another length."""
        ...

    def build(self) -> torch.nn.Module:
        """The model at step 0, initialised from the run's seed alone, on the CPU."""
        ...

    def shell(self) -> torch.nn.Module:
        """A model whose parameters have any values yet, on the CPU."""
        ...

    def train_samples(self, course: int = 0) -> tuple[Source, Order]:
        """Where training samples are and in which order they come.

        Args:
            course: counts how often a run began with samples of another length; each has an order
                of its own.
        """
        ...

    def held_out(self, split: str) -> Source:
        """A split that is never trained on; its samples are read in their own order."""
        ...

    def loss_sum(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Loss summed over the batch, a float32 scalar; divide by `Source.weights` for the mean."""
        ...

    def measure(self, model: torch.nn.Module, batch: Batch) -> Mapping[str, Tally]:
        """Every metric of the batch by name, `loss` among them; called without gradients."""
        ...

    def predict(self, model: torch.nn.Module, batch: Batch) -> Columns:
        """What a test writes down of each sample, targets beside predictions; perhaps nothing."""
        ...

    def outputs(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """What the model says of the batch, before any loss: the function that growth preserves."""
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
