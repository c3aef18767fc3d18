"""The shape of a causal language model of transformers, which can grow like that of Instar's own GPT, and the same
with low-rank adapters, as `instar train` trains it.

Its parameters have the names of the module, with the prefix of blocks replaced:
``blocks.3.self_attn.q_proj.weight`` is ``model.layers.3.self_attn.q_proj.weight`` of a Llama.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self

from instar.models import lora as adapters
from instar.models.hf.families import BUILT_IN, FAMILIES, JOINED, Family, TableEntry
from instar.models.hf.rope import pin_rope, plain_rope_base, rope_problems, scale_rope
from instar.models.lora import Lora
from instar.models.shape import ArchitectureError, Kind, Parameter, axis_size, problem, size_text

LORA = "lora"
"""key of the adapters among the values of the config"""
_SHARED_EPS = (
    "norms of queries and keys share rms_norm_eps with those of the residual stream, and only whole copies "
    "leave that as it is"
)


@dataclass(frozen=True)
class PretrainedShape:
    """The shape of a causal language model of transformers.

    Args:
        config: values of `config.json`, completed with transformers' defaults (`config.to_dict()`).

    Raises:
        ArchitectureError: lists what keeps the model from being known.
    """

    config: Mapping[str, Any]

    def __post_init__(self) -> None:
        kind = self.config.get("model_type")
        if not isinstance(kind, str) or kind not in FAMILIES:
            families = ", ".join(FAMILIES)
            raise ArchitectureError(
                problem(
                    "from", f"model_type {kind!r} is not a known family", f"there are {families}"
                )
            )
        problems = [
            problem("from", f"{key} is {self.config[key]!r}; only {values[0]!r} is supported")
            for key, values in self.family.must.items()
            if key in self.config and self.config[key] not in values
        ]
        if kind not in BUILT_IN and self.family.eps not in self.config:
            message = f"its config has no {self.family.eps}, the key that its family names for eps"
            problems.append(problem("from", message))
        for axis, size in self._sizes():
            if type(size) is not int or size < 1:
                key = self.family.axes.get(axis, axis)
                problems.append(
                    problem("from", f"{key} must be a whole number above 0, not {size!r}")
                )
        sizes = self.sizes() if not problems else {}
        if sizes and self.family.heads_divide_width and sizes["embed"] % sizes["heads"]:
            message = f"{sizes['heads']} heads do not divide a width of {sizes['embed']}, as transformers asks"
            problems.append(problem("from", message))
        if sizes and self.positions == "rope":
            head_dim, width = sizes["head_dim"], sizes["embed"] // sizes["heads"]
            rope_width = width if self.family.longrope_by_width else head_dim
            texts = rope_problems(self.config, head_dim, rope_width)
            problems += (problem("from", text) for text in texts)
        if problems:
            raise ArchitectureError(*problems)

    @property
    def family(self) -> Family:
        return FAMILIES[self.config["model_type"]]

    def sizes(self) -> dict[str, int]:
        return dict(self._sizes())

    def _sizes(self) -> Iterator[tuple[str, Any]]:
        values: dict[str, Any] = {
            axis: self.config.get(key) for axis, key in self.family.axes.items()
        }
        embed, heads = values["embed"], values["heads"]
        if _are_sizes(embed, heads):
            defaults = {"mlp": 4 * embed, "kv_heads": heads, "head_dim": embed // heads}
            values |= {axis: size for axis, size in defaults.items() if values.get(axis) is None}
        yield from values.items()

    @property
    def context(self) -> int:
        return self.sizes()["context"]

    @property
    def vocab_size(self) -> int:
        return self.sizes()["vocab"]

    @property
    def num_experts_per_tok(self) -> int | None:
        number: int | None = self.config.get("num_experts_per_tok")
        return number

    @property
    def streams(self) -> tuple[str, ...]:
        return ("embed",)

    @property
    def norm(self) -> Literal["layernorm", "rmsnorm"]:
        return self.family.norm

    @property
    def norm_eps(self) -> float:
        return float(self.config[self.family.eps])

    @property
    def qk_norm(self) -> bool:
        return self.family.qk_norm

    @property
    def tied(self) -> bool:
        return bool(self.config.get("tie_word_embeddings", False))

    @property
    def final_norm(self) -> str:
        return self.family.final_norm

    @property
    def positions(self) -> Literal["learned", "rope"]:
        return self.family.positions

    @property
    def rope_base(self) -> float:
        """Base of plain RoPE; NaN if a head is rotated in parts, or by scaled frequencies."""
        return plain_rope_base(self.config)

    @property
    def scales_by_head_dim(self) -> bool:
        return self.family.scales_by_head_dim

    def refusals(self) -> dict[str, str]:
        refusals = dict(self.family.refusals)
        if self.positions == "rope" and math.isnan(self.rope_base):
            refusals["grow_head_dim"] = (
                "RoPE of this model is scaled or partial, or differs by layer"
            )
        return refusals

    def resized(self, **sizes: int) -> Self:
        """Return a copy with other sizes of some axes.

        Raises:
            ArchitectureError: the config has no key for one, or for one that would change with it.
        """
        axes = self.family.axes
        if unknown := [axis for axis in sizes if axis not in axes]:
            raise ArchitectureError(
                problem("from", f"the config of {self.family.name} has no size of {unknown[0]}")
            )
        # sizes that followed from others are written down, so that they stay as they are
        old_sizes = {axis: size for axis, size in self._sizes() if axis in axes}
        changes = {axes[axis]: size for axis, size in {**old_sizes, **sizes}.items()}
        config = pin_rope(self.config, self.context) if "context" in sizes else self.config
        shape = replace(self, config={**config, **changes})
        after = shape.sizes()
        for axis, size in self._sizes():
            if axis not in sizes and after[axis] != size:
                message = f"{axis} would become {after[axis]}, not stay {size}: the config of {self.family.name} has no key for it"
                raise ArchitectureError(problem("from", message))
        return shape

    def changed(self, *, norm_eps: float | None = None, rope_base: float | None = None) -> Self:
        config = dict(self.config)
        if norm_eps is not None:
            if self.qk_norm:
                raise ArchitectureError(problem("from", _SHARED_EPS, "choose how: duplicate"))
            config[self.family.eps] = norm_eps
        if rope_base is not None:
            config["rope_parameters"] = {**config["rope_parameters"], "rope_theta": rope_base}
        return replace(self, config=config)

    def with_scaled_rope(self, kind: str, context: int) -> Self:
        """Return a copy whose RoPE is scaled from its context to a longer one, of the layers with full attention.

        Args:
            kind: ``linear``, ``dynamic`` or ``yarn``, as transformers names them.

        Raises:
            ArchitectureError: RoPE is scaled already, or the family has other kinds.
        """
        now = self.sizes()["context"]
        rope = scale_rope(self.config, kind, context, now, self.family.rope_scalings)
        # beyond this size transformers changes the frequencies of `dynamic`
        shape = self.resized(context=now if kind == "dynamic" else context)
        return replace(shape, config={**shape.config, "rope_parameters": rope})

    def deeper(self, sources: Sequence[int | None]) -> Self:
        """Return a copy whose block j has the kind of the old block ``sources[j]``, or of the one below."""
        shape = self.resized(layers=len(sources))
        lists = {
            key: value
            for key, value in self.config.items()
            if "layer" in key and isinstance(value, list) and len(value) == self.sizes()["layers"]
        }
        blocks = _kept_sources(sources)
        return replace(
            shape,
            config={
                **shape.config,
                **{key: [value[at] for at in blocks] for key, value in lists.items()},
            },
        )

    def with_experts(self, number: int, per_token: int, balance: float) -> PretrainedShape:
        """Return the shape of the same model with `number` experts in place of each MLP.

        Raises:
            ArchitectureError: no family is the same with experts.
        """
        expert_family = self.family.with_experts
        if expert_family is None or self.config.get("use_sliding_window"):
            possible = ", ".join(f.name for f in FAMILIES.values() if f.with_experts is not None)
            message = f"no family is {self.family.name} of this config with experts"
            raise ArchitectureError(problem("from", message, f"{possible} have one"))
        axes, sizes = FAMILIES[expert_family.model_type].axes, {**self.sizes(), "experts": number}
        same = {key: value for key, value in self.config.items() if key != "layer_types"}
        shape = PretrainedShape(
            {
                **same,
                **expert_family.config,
                **{key: sizes[axis] for axis, key in axes.items()},
                "model_type": expert_family.model_type,
                "architectures": [expert_family.model_class],
                "num_experts_per_tok": per_token,
                "router_aux_loss_coef": balance,
            }
        )
        old, new = self.parameters(), shape.parameters()
        if missing := [name for name in old if not _is_mlp_weight(name) and name not in new]:
            message = f"{shape.family.name} has no {missing[0].removeprefix('blocks.0.')}"
            raise ArchitectureError(problem("from", message))
        return shape

    def parameters(self) -> dict[str, Parameter]:
        """Return every parameter by its name with the prefix ``blocks.``, in the module's order."""
        family, sizes = self.family, self.sizes()
        head = () if self.tied else (TableEntry("lm_head", "head", ("vocab", "embed")),)
        first = [entry for entry in family.outside if entry.kind == "embedding"]
        last = [entry for entry in family.outside if entry.kind != "embedding"]
        table: dict[str, Parameter] = {}
        for entry in first:
            table |= self._entries("", entry, sizes)
        for layer in range(sizes["layers"]):
            for entry in family.block:
                table |= self._entries(f"blocks.{layer}.", entry, sizes)
        for entry in (*last, *head):
            table |= self._entries("", entry, sizes)
        return table

    def _entries(
        self, prefix: str, entry: TableEntry, sizes: Mapping[str, int]
    ) -> Iterator[tuple[str, Parameter]]:
        is_weight = entry.kind not in ("norm", "post_norm")
        std = float(self.config.get("initializer_range", 0.02)) if is_weight else 0.0
        offset = 0.0 if is_weight else self.family.gain_offset
        shape = tuple(axis_size(sizes, axis) for axis in entry.axes)
        name = prefix + entry.name
        weight = Parameter(entry.axes, shape, entry.kind, std, entry.parts, offset)
        yield (name if entry.bare else f"{name}.weight"), weight
        has_bias = self.config.get(entry.bias) if isinstance(entry.bias, str) else entry.bias
        if has_bias:
            output = entry.axes[1 if entry.kind == "transposed" else 0]
            kind: Kind = "bias" if is_weight else "norm"
            yield (
                f"{name}.bias",
                Parameter((output,), (axis_size(sizes, output),), kind, 0.0, entry.parts),
            )

    def module_name(self, name: str) -> str:
        """Return the module's name of a parameter or buffer of this shape."""
        return (
            name if not name.startswith("blocks.") else self.family.blocks + name[len("blocks.") :]
        )

    def name(self, module_name: str) -> str:
        """Return the name in this shape of a parameter or buffer of the module."""
        prefix = self.family.blocks
        return (
            f"blocks.{module_name[len(prefix) :]}"
            if module_name.startswith(prefix)
            else module_name
        )

    def mismatches(self, module: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Return how the parameters of a module, by its names, differ from the table; empty: they do not."""
        expected = {
            self.module_name(name): entry.shape for name, entry in self.parameters().items()
        }
        return [
            f"{name}: {size_text(module.get(name))} in the model, {size_text(expected.get(name))} for {self.family.name} "
            "with this config"
            for name in {**module, **expected}
            if module.get(name) != expected.get(name)
        ]

    def to_dict(self) -> dict[str, Any]:
        return dict(self.config)


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
            yield (f"{name}.lora_b", Parameter((output, rank), shape, "matrix", parts=weight.parts))

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


def _kept_sources(sources: Sequence[int | None]) -> list[int]:
    """Return the block that each new one is like: its source, or that of the block below."""
    blocks: list[int] = []
    for source in sources:
        blocks.append(source if source is not None else blocks[-1] if blocks else 0)
    return blocks


def _is_mlp_weight(name: str) -> bool:
    return any(name.endswith(source) for sources in JOINED.values() for source in sources)


def _are_sizes(*values: Any) -> bool:
    return all(type(value) is int and value > 0 for value in values)
