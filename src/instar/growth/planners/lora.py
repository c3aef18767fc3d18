"""Operations on low-rank adapters: their rank, their scale, and merging them into their weights.

Growing an adapter adds random rows to A and zero columns to B and keeps the scale α / r, so the
product B A and the function stay the same. Shrinking keeps the best approximation of the product
(Eckart and Young), which changes the function unless the rank was not used. Ranks that do not
contribute to that product get random rows of A and zero columns of B. With `merge` adapters are added to their
weights first, and begin anew at the other rank, which is exact (ReLoRA, arXiv 2307.05695).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from instar.growth.plan import (
    Edit,
    Fresh,
    Grown,
    GrowthError,
    GrowthPlan,
    Label,
    Merged,
    New,
    Old,
    TensorPlan,
    Truncated,
)
from instar.growth.values import without_x
from instar.models.architecture import Architecture
from instar.models.hf.pretrained import LoraShape
from instar.models.lora import POSSIBLE, Lora, adapter_of, cover_weights, matches
from instar.models.shape import Parameter

Adaptable = Architecture | LoraShape
Adapters = Mapping[str, Lora | None]
"""The adapter, or None, of every adaptable weight, by the weight's name without ``.weight``."""


def set_lora_rank(
    arch: Adaptable, value: Mapping[str, Any], options: Mapping[str, Any], _step: int
) -> tuple[Adaptable, GrowthPlan]:
    """Give all weights of a target adapters of this rank; 0 removes them.

    `hold` (default: true) keeps the scale of existing adapters; `alpha` (default: twice the rank)
    and `rank_stabilized` (default: false) apply to new ones, which with `merge` all are.

    Raises:
        ArchitectureError: a weight cannot have that rank.
        GrowthError: nothing would change.
    """
    target, rank = value["target"], value["rank"]
    old, merges = adapters_in(arch), options.get("merge", False)
    if rank == 0:
        return _change(arch, target, dict.fromkeys(_target_adapters(old, target)), merges=merges)
    names = _target_weights(old, target)
    of_new = [option for option in ("alpha", "rank_stabilized") if option in options]
    if of_new and not merges and all(old[name] for name in names):
        raise GrowthError(
            f"{of_new[0]} applies to new adapters, and all weights of {target!r} have one already; "
            "set_lora_alpha changes their scale"
        )
    alpha = float(options.get("alpha", 2 * rank))
    new = Lora(target, rank, alpha, options.get("rank_stabilized", False))
    hold = options.get("hold", True)
    new_adapters = {
        name: new if merges and of_new else _with_rank(old[name], rank, hold) or new
        for name in names
    }
    return _change(arch, target, new_adapters, merges=merges)


def change_lora_rank(
    arch: Adaptable, value: Mapping[str, Any], options: Mapping[str, Any], _step: int
) -> tuple[Adaptable, GrowthPlan]:
    """Multiply the ranks of a target's adapters by a factor; rounded, at least 1."""
    factor = without_x(value["factor"])
    new_adapters = {
        name: _with_rank(
            adapter, max(1, math.floor(adapter.rank * factor + 0.5)), options.get("hold", True)
        )
        for name, adapter in _target_adapters(adapters_in(arch), value["target"]).items()
    }
    return _change(arch, value["target"], new_adapters, merges=options.get("merge", False))


def set_lora_alpha(
    arch: Adaptable, value: Mapping[str, Any], _options: Mapping[str, Any], _step: int
) -> tuple[Adaptable, GrowthPlan]:
    """Set α of a target's adapters, which changes their scale."""
    present = _target_adapters(adapters_in(arch), value["target"])
    alpha = float(value["alpha"])
    new_adapters = {name: replace(adapter, alpha=alpha) for name, adapter in present.items()}
    return _change(arch, value["target"], new_adapters)


def change_lora_alpha(
    arch: Adaptable, value: Mapping[str, Any] | float, _options: Mapping[str, Any], _step: int
) -> tuple[Adaptable, GrowthPlan]:
    """Multiply α of a target's adapters, or with a number alone of all, by a factor."""
    target, factor = (
        (value["target"], value["factor"]) if isinstance(value, Mapping) else ("all", value)
    )
    new_adapters = {
        name: replace(adapter, alpha=adapter.alpha * without_x(factor))
        for name, adapter in _target_adapters(adapters_in(arch), target).items()
    }
    return _change(arch, target, new_adapters)


def merge_lora(
    arch: Adaptable, value: str | None, _options: Mapping[str, Any], _step: int
) -> tuple[Adaptable, GrowthPlan]:
    """Add a target's adapters (None: all) to their weights, and reset the adapters.

    A tied head stays the same, because it reads the adapted table.
    """
    adapters = _target_adapters(adapters_in(arch), "all" if value is None else value)
    tensors: dict[str, TensorPlan] = {}
    for name, entry in arch.parameters().items():
        weight, _, part = name.rpartition(".")
        adapter = adapters.get(weight)
        if adapter is None or part == "bias":
            tensors[name] = Grown(name)
        elif part == "weight":
            tensors[name] = _merged(weight, adapter)
        else:
            tensors[name] = _fresh_factor(entry)
    return arch, GrowthPlan(tensors, "exact", notes=(f"{len(adapters)} adapters merged",))


def adapters_of_blocks(arch: Adaptable, blocks: Sequence[int | None]) -> tuple[Lora, ...]:
    """Return the adapter entries of a model whose block j is made from block ``blocks[j]``, so
    that adapters move with their blocks; a new block (None) has the adapters that all blocks
    share."""
    old = adapters_in(arch)
    parts = [name.removeprefix("blocks.0.") for name in old if name.startswith("blocks.0.")]
    outside = {name: adapter for name, adapter in old.items() if not name.startswith("blocks.")}
    for part in parts:
        stack = [old[f"blocks.{layer}.{part}"] for layer in range(arch.sizes()["layers"])]
        shared = stack[0] if all(_same_adapter(stack[0], other) for other in stack) else None
        for layer, source in enumerate(blocks):
            outside[f"blocks.{layer}.{part}"] = shared if source is None else stack[source]
    return cover_weights(outside, [entry.target for entry in arch.lora])


def adapters_in(arch: Adaptable) -> Adapters:
    """Return the adapter of every adaptable weight."""
    return {name: adapter_of(arch.lora, name) for name in arch.adaptable()}


def _target_weights(adapters: Adapters, target: str) -> list[str]:
    """Return the weights that a target names."""
    if names := [name for name in adapters if matches(target, name)]:
        return names
    if not adapters:
        raise GrowthError("no weight of this model can have an adapter")
    tied = "; the head is tied: its table is the embedding" if target == "head" else ""
    raise GrowthError(f"{target!r} names no weight of this model{tied}; possible: {POSSIBLE}")


def _target_adapters(adapters: Adapters, target: str) -> dict[str, Lora]:
    """Return the adapters of a target's weights; at least one."""
    targets = {name: adapters[name] for name in _target_weights(adapters, target)}
    if present := {name: adapter for name, adapter in targets.items() if adapter}:
        return present
    raise GrowthError(f"{target!r} has no adapters; set_lora_rank adds them")


def _with_rank(adapter: Lora | None, rank: int, hold: bool) -> Lora | None:
    if adapter is None:
        return None
    return adapter.with_rank(rank) if hold else replace(adapter, rank=rank)


def _same_adapter(adapter: Lora | None, other: Lora | None) -> bool:
    """Return whether two adapters have the same rank and scale, regardless of their targets."""
    if adapter is None or other is None:
        return adapter is other
    return replace(adapter, target="") == replace(other, target="")


def _change(
    arch: Adaptable, target: str, new_adapters: Adapters, *, merges: bool = False
) -> tuple[Adaptable, GrowthPlan]:
    """Return the architecture and plan for new adapters of some of the weights of `target`.

    Args:
        merges: whether present ones are added to their weights, and begin anew.
    """
    old = adapters_in(arch)
    merged = {name: old[name] for name in new_adapters if merges and old[name]}
    if not merged and all(_same_adapter(old[name], a) for name, a in new_adapters.items()):
        raise GrowthError(f"the adapters of {target!r} already are as requested")
    all_adapters = {**old, **new_adapters}
    targets = (target, *(entry.target for entry in arch.lora))
    new_arch = replace(arch, lora=cover_weights(all_adapters, targets))
    tensors: dict[str, TensorPlan] = {}
    for name, entry in new_arch.parameters().items():
        weight, _, part = name.rpartition(".")
        before = merged.get(weight)
        if part in ("lora_a", "lora_b"):
            tensors[name] = _factor_plan(
                name, entry, None if before else old[weight], all_adapters[weight]
            )
        elif before and part == "weight":
            tensors[name] = _merged(weight, before)
        else:
            tensors[name] = Grown(name)
    kept = {name: a for name, a in new_adapters.items() if name not in merged}
    label: Label = (
        "exact" if all(map(_keeps_product, map(old.get, kept), kept.values())) else "lossy"
    )
    return new_arch, GrowthPlan(tensors, label, notes=tuple(_notes(old, new_adapters, merged)))


def _merged(weight: str, adapter: Lora) -> Merged:
    return Merged(f"{weight}.weight", f"{weight}.lora_a", f"{weight}.lora_b", adapter.scale)


def _factor_plan(name: str, entry: Parameter, old: Lora | None, new: Lora | None) -> TensorPlan:
    """Return the plan of A or B of an adapter that changes from `old` to `new`."""
    weight, _, part = name.rpartition(".")
    if old is None or new is None:
        return _fresh_factor(entry)
    gradient = 1.0 if math.isclose(new.scale, old.scale) else new.scale / old.scale
    if new.rank == old.rank:
        return Grown(name, gradient=gradient)
    is_a = part == "lora_a"
    if new.rank < old.rank:
        side: Literal["a", "b"] = "a" if is_a else "b"
        return Truncated(f"{weight}.lora_a", f"{weight}.lora_b", new.rank, side, entry.std)
    more = New(new.rank - old.rank, "normal" if is_a else "zero", entry.std)
    return Grown(name, (Edit(0 if is_a else 1, (Old(0, old.rank), more)),), gradient=gradient)


def _keeps_product(old: Lora | None, new: Lora | None) -> bool:
    """Return whether the product B A stays the same."""
    if old is None or new is None:
        return old is None
    return new.rank >= old.rank and math.isclose(new.scale, old.scale)


def _notes(old: Adapters, new_adapters: Adapters, merged: Adapters) -> Iterator[str]:
    """Yield a note for each kind of change."""
    if merged:
        yield f"{len(merged)} adapters merged"
    counts = Counter(
        (_adapter_text(before), _adapter_text(after))
        for before, after in ((old[name], adapter) for name, adapter in new_adapters.items())
    )
    for (before, after), number in counts.items():
        yield f"{number} × {before} → {after}"
    if None in new_adapters.values() and not merged:
        yield "to keep what the adapters have learned, use merge_lora first"


def _adapter_text(adapter: Lora | None) -> str:
    return f"rank {adapter.rank}, scale {adapter.scale:g}" if adapter else "no adapter"


def _fresh_factor(entry: Parameter) -> Fresh:
    return Fresh(entry.shape, "normal" if entry.std else "zero", entry.std)
