"""The shape of a model of transformers that `instar train` trains: with low-rank adapters, as a GPT has them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from instar.models import lora as adapters
from instar.models.hf.pretrained import PretrainedShape
from instar.models.lora import Lora
from instar.models.shape import ArchitectureError, Parameter, axis_size, problem

LORA = "lora"
"""key of the adapters among the values of the config"""


@dataclass(frozen=True)
class LoraShape(PretrainedShape):
    """The shape of a model of transformers, and its adapters.

    The matrices of blocks can have one, but for those of experts and routers, and for GPT-2's transposed ones.
    """

    lora: tuple[Lora, ...] = ()
    """at most one entry matches a weight"""

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = list(adapters.problems(self.lora, self.adaptable())) if self.lora else []
        if problems:
            raise ArchitectureError(
                *(problem(f"lora[{number}]", text, hint) for number, text, hint in problems)
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`.

        Raises:
            ArchitectureError: lists what keeps the model from being known.
        """
        entries = values.get(LORA, ())
        try:
            lora = adapters.from_json(entries)
        except TypeError as error:
            raise ArchitectureError(problem(LORA, f"not adapters: {error}")) from None
        return cls({key: value for key, value in values.items() if key != LORA}, lora)

    def to_dict(self) -> dict[str, Any]:
        config = super().to_dict()
        return {**config, LORA: [asdict(adapter) for adapter in self.lora]} if self.lora else config

    def adaptable(self) -> dict[str, tuple[int, ...]]:
        """Return shapes of the weights that may have an adapter, by name without ``.weight``."""
        return {
            name.removesuffix(".weight"): entry.shape
            for name, entry in super().parameters().items()
            if name.startswith("blocks.") and entry.kind == "matrix" and "experts" not in entry.axes
        }

    def parameters(self) -> dict[str, Parameter]:
        table: dict[str, Parameter] = {}
        adaptable = self.adaptable() if self.lora else {}
        for name, entry in super().parameters().items():
            table[name] = entry
            weight, _, part = name.rpartition(".")
            if part == "weight" and weight in adaptable:
                table |= self._factors(weight, entry)
        return table

    def _factors(self, name: str, weight: Parameter) -> Iterator[tuple[str, Parameter]]:
        adapter = adapters.adapter_of(self.lora, name)
        if adapter is not None:
            output, source = weight.axes
            rank, size = f"{name}.rank", axis_size(self.sizes(), source)
            std = 1 / math.sqrt(3 * size)
            yield f"{name}.lora_a", Parameter((rank, source), (adapter.rank, size), "matrix", std)
            shape = (weight.shape[0], adapter.rank)
            yield (
                f"{name}.lora_b",
                Parameter((output, rank), shape, "matrix", parts=weight.parts),
            )

    def without_adapters(self) -> Self:
        return replace(self, lora=())

    def deeper(self, sources: Sequence[int | None]) -> Self:
        """See `PretrainedShape`; without adapters, which the caller moves with their blocks."""
        shape: Self = PretrainedShape.deeper(self.without_adapters(), sources)
        return shape

    def with_experts(self, number: int, per_token: int, balance: float) -> LoraShape:
        """See `PretrainedShape`; adapters of attention stay.

        Raises:
            ArchitectureError: no family is the same with experts, or an MLP has an adapter.
        """
        for name in self.adaptable():
            if ".mlp." in name and adapters.adapter_of(self.lora, name):
                message = f"{name} has an adapter, and experts have none"
                hint = "merge_lora mlp and set_lora_rank {target: mlp, rank: 0} first"
                raise ArchitectureError(problem(LORA, message, hint))
        dense = PretrainedShape(self.config)
        return LoraShape(dense.with_experts(number, per_token, balance).config, self.lora)
