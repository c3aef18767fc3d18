"""Language modelling: predict each next token of a sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from instar.config.language import LanguageConfig
from instar.data.columns import Columns
from instar.data.dataset import DataSet
from instar.data.order import Order
from instar.data.source import IGNORED, Source
from instar.models.architecture import Architecture, flops_per_token
from instar.models.gpt import GPT
from instar.tasks.task import Batch, Tally


class LanguageTask:
    """A GPT on text. A sample is one window or document, its weight its target tokens."""

    def __init__(
        self,
        config: LanguageConfig,
        architecture: Architecture,
        dataset: DataSet,
        context: int | None = None,
    ) -> None:
        """`context`: tokens of a sample, at most what the model looks back on; None: that."""
        self.config = config
        self.architecture = architecture
        self.dataset = dataset
        self.context = context or architecture.context

    @property
    def metrics(self) -> Sequence[str]:
        return ("loss",)

    @property
    def random(self) -> bool:
        return self.architecture.dropout > 0

    def at(self, architecture: Architecture, context: int) -> LanguageTask:
        return LanguageTask(self.config, architecture, self.dataset, context)

    def build(self) -> GPT:
        model = self.shell()
        model.init_weights(self.config.seed)
        return model

    def shell(self) -> GPT:
        return GPT(
            self.architecture,
            gradient_checkpointing=self.config.train.gradient_checkpointing,
        )

    def train_samples(self, course: int = 0) -> tuple[Source, Order]:
        # seeds are below 2^63, so that no two courses of any two runs share an order
        return self.dataset.train(self.context, self.config.seed + (course << 63))

    def held_out(self, split: str) -> Source:
        return self.dataset.held_out(split, self.context)

    def loss_sum(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = model(batch["inputs"], batch["targets"])
        return loss

    def measure(self, model: torch.nn.Module, batch: Batch) -> Mapping[str, Tally]:
        """The loss in nats per token; windows of a batch count as one unit."""
        targets = (batch["targets"] != IGNORED).sum()
        return {"loss": Tally(self.loss_sum(model, batch)[None], targets[None])}

    def predict(self, model: torch.nn.Module, batch: Batch) -> Columns:  # noqa: ARG002
        """Nothing: a sample's prediction is a distribution for each of its tokens."""
        return {}

    def outputs(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        logits: torch.Tensor = model(batch["inputs"])
        return logits

    def flops(self, weight: float) -> float:
        return weight * flops_per_token(self.architecture, self.context)

    def describe(self) -> Mapping[str, Any]:
        return self.architecture.to_dict()

    def fingerprints(self) -> Mapping[str, str]:
        return {
            "data": self.dataset.fingerprint,
            "tokenizer": self.dataset.tokenizer_fingerprint,
        }
