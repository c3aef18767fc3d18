"""The shape of a causal language model of transformers with adapters of peft, which grow with their weights.

A matrix (o, i) has beside it A (rank, i), ``<weight>.lora_A.<adapter>.weight``, and B (o, rank): their outer axes are
those of the matrix, so that a plan for it is one for them too, and the ranks stay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from instar.models.hf.pretrained import PretrainedShape
from instar.models.shape import Kind, Parameter, axis_size, in_block, layer_of

_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Adapter:
    """One adapter of one module: its rank, and the factor of B A; of rank 0: a copy of the module that trains
    in its place (`modules_to_save`)."""

    rank: int
    scale: float = 1.0


@dataclass(frozen=True)
class AdaptedShape(PretrainedShape):
    """The shape of a `PeftModel`.

    Args:
        adapters: by the name of the adapted module in this shape, then by their own names.
    """

    adapters: Mapping[str, Mapping[str, Adapter]] = field(default_factory=dict)

    def parameters(self) -> dict[str, Parameter]:
        table: dict[str, Parameter] = {}
        for name, entry in super().parameters().items():
            module, _, part = name.rpartition(".")
            adapters = self.adapters.get(module, {})
            copies = [f"modules_to_save.{each}" for each in adapters if not adapters[each].rank]
            if copies:
                names = (f"{module}.{each}.{part}" for each in ("original_module", *copies))
                table |= dict.fromkeys(names, entry)
            else:
                table[f"{module}.base_layer.{part}" if adapters else name] = entry
            if part == "weight":
                table |= self._factors(module, entry)
        return table

    def _factors(self, module: str, weight: Parameter) -> Iterator[tuple[str, Parameter]]:
        is_table = weight.kind == "embedding"
        source, output = weight.axes if is_table else (weight.reads, weight.writes)
        for adapter, each in self.adapters.get(module, {}).items():
            if not each.rank or source is None or output is None:
                continue
            inputs, outputs = (axis_size(self.sizes(), axis) for axis in (source, output))
            # as peft draws them: Kaiming's uniform values with a = √5
            std = 1 / math.sqrt(3 * inputs)
            names = (f"{module}.lora_{side}.{adapter}.weight" for side in "AB")
            if is_table:
                names = (f"{module}.lora_embedding_{side}.{adapter}" for side in "AB")
            kind: Kind = "grouped" if is_table else "matrix"  # its columns are rows of a table
            yield next(names), Parameter(("rank", source), (each.rank, inputs), kind, std)
            yield (
                next(names),
                Parameter((output, "rank"), (outputs, each.rank), "matrix", 0.0, weight.parts),
            )

    def refusals(self) -> dict[str, str]:
        reason = "experts have no adapters of peft: merge them first (merge_and_unload)"
        return {**super().refusals(), "upcycle": reason}

    def deeper(self, sources: Sequence[int | None]) -> Self:
        """Returns a copy in which adapters move with their blocks; a drawn block has those of the one below."""
        made: list[int] = []
        for source in sources:
            made.append(source if source is not None else made[-1] if made else 0)
        moved = {
            in_block(name, at): each
            for at, source in enumerate(made)
            for name, each in self.adapters.items()
            if layer_of(name) == source
        }
        outside = {name: each for name, each in self.adapters.items() if layer_of(name) is None}
        return replace(super().deeper(sources), adapters={**outside, **moved})

    def module_name(self, name: str) -> str:
        return _PREFIX + super().module_name(name)

    def name(self, module_name: str) -> str:
        return super().name(module_name.removeprefix(_PREFIX))
