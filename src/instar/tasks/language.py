"""Language modelling: predict each next token of windows cut from a token sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from instar.config.schema import RunConfig
from instar.data.order import Order, make_order
from instar.data.source import Source, TokenWindows
from instar.data.tokens import TokenDataset
from instar.models.architecture import Architecture, flops_per_token
from instar.models.gpt import GPT
from instar.tasks.task import Batch


class LanguageTask:
    """A GPT on a prepared token data set. A sample is one window, its weight its target tokens."""

    def __init__(
        self, config: RunConfig, architecture: Architecture, dataset: TokenDataset
    ) -> None:
        self.config = config
        self.architecture = architecture
        self.dataset = dataset

    def build(self) -> GPT:
        model = GPT(
            self.architecture,
            gradient_checkpointing=self.config.train.gradient_checkpointing,
        )
        model.init_weights(self.config.seed)
        return model

    def train_samples(self) -> tuple[Source, Order]:
        split, context = self.dataset.split("train"), self.architecture.context
        windows = TokenWindows(split, context)
        if self.config.data.order != "random":
            return windows, make_order(self.config.data.order, len(windows), self.config.seed)
        starts = TokenWindows(split, context, stride=1)
        order = make_order("random", len(starts), self.config.seed, samples_per_epoch=len(windows))
        return starts, order

    def held_out(self, split: str) -> Source:
        return TokenWindows(self.dataset.split(split), self.architecture.context)

    def loss_sum(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = model(batch["inputs"], batch["targets"])
        return loss

    def flops(self, weight: float) -> float:
        return weight * flops_per_token(self.architecture, self.architecture.context)

    def describe(self) -> Mapping[str, Any]:
        return self.architecture.to_dict()

    def fingerprints(self) -> Mapping[str, str]:
        return {
            "data": self.dataset.fingerprint,
            "tokenizer": self.dataset.tokenizer_fingerprint,
        }
