"""The linear map and the token table, each with or without a low-rank adapter (see `lora`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from instar.models.lora import Lora
from instar.models.shape import Parameter


class _Adapted(nn.Module):
    """A weight, and A and B where it has an adapter."""

    weight: Tensor
    lora_a: nn.Parameter | None
    lora_b: nn.Parameter | None
    scale: float

    def reset_parameters(self) -> None:
        """`GPT.init_weights` sets the values; torch's own would be drawn for nothing."""

    def adapt(self, table: Mapping[str, Parameter], name: str, adapter: Lora | None) -> None:
        """Take the factors that the table has beside the weight of this name, if it has some."""
        self.lora_a = self.lora_b = None
        if adapter is not None:
            self.lora_a = nn.Parameter(torch.empty(table[f"{name}.lora_a"].shape))
            self.lora_b = nn.Parameter(torch.empty(table[f"{name}.lora_b"].shape))
            self.scale = adapter.scale

    def effective(self) -> Tensor:
        """W + scale · B A, in the type of W."""
        if self.lora_a is None or self.lora_b is None:
            return self.weight
        return self.weight + self.lora_b @ (self.scale * self.lora_a)


class Linear(_Adapted, nn.Linear):
    """x Wᵀ + bias + scale · (x Aᵀ) Bᵀ."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        if self.lora_a is None or self.lora_b is None:
            return y
        return y + F.linear(self.scale * F.linear(x, self.lora_a), self.lora_b)


class Table(_Adapted, nn.Embedding):
    """Rows of W + scale · B A."""

    def forward(self, rows: Tensor) -> Tensor:
        x = F.embedding(rows, self.weight)
        if self.lora_a is None or self.lora_b is None:
            return x
        return x + F.embedding(rows, self.lora_b) @ (self.scale * self.lora_a)
