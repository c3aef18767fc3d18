"""Adapters as growth: their rank, their scale, and folding them into their weights.

An adapter that grows gets new rows of A at random and new columns of B at zero, and keeps its
scale α / r: the product B A, and so the function, is the same. One that shrinks keeps the best
approximation of its product (Eckart and Young), which is another one unless the rank was not used.
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
from instar.models.architecture import Architecture
from instar.models.lora import POSSIBLE, Lora, adapter_of, covering, matches
from instar.models.shape import Parameter

Adapters = Mapping[str, Lora | None]
"""The adapter of every weight that could have one, by the weight's name without ``.weight``."""


def is_rank(value: Any) -> None:
    """Raises GrowthError, without the operation's name, for what is no rank to set."""
    if type(value) is not int or value < 0:
        raise GrowthError(f"needs a whole number, 0 to take adapters away, not {value!r}")


def set_lora_rank(
    arch: Architecture, value: Mapping[str, Any], options: Mapping[str, Any], step: int
) -> tuple[Architecture, GrowthPlan]:
    """Adapters of this rank on all of a target's weights; 0 takes them away.

    `hold` (default: true) keeps the scale of those that are there; `alpha` (default: twice the
    rank) and `rank_stabilized` (default: false) are of those that are new. Raises
    ArchitectureError where a weight cannot have that rank, GrowthError for what changes nothing.
    """
    del step
    target, rank = value["target"], value["rank"]
    old = _adapters(arch)
    if rank == 0:
        return _change(arch, target, dict.fromkeys(_adapted(old, target)))
    names = _named(old, target)
    of_new = [option for option in ("alpha", "rank_stabilized") if option in options]
    if of_new and all(old[name] for name in names):
        raise GrowthError(
            f"{of_new[0]} is for new adapters, and {target!r} has all of its own; set_lora_alpha "
            "changes their scale"
        )
    alpha = float(options.get("alpha", 2 * rank))
    new = Lora(target, rank, alpha, options.get("rank_stabilized", False))
    hold = options.get("hold", True)
    return _change(arch, target, {name: _ranked(old[name], rank, hold) or new for name in names})


def change_lora_rank(
    arch: Architecture, value: Mapping[str, Any], options: Mapping[str, Any], step: int
) -> tuple[Architecture, GrowthPlan]:
    """A target's adapters with their ranks times a factor, rounded, 1 at least. Option `hold`."""
    del step
    made = {
        name: _ranked(
            adapter,
            max(1, math.floor(adapter.rank * value["factor"] + 0.5)),
            options.get("hold", True),
        )
        for name, adapter in _adapted(_adapters(arch), value["target"]).items()
    }
    return _change(arch, value["target"], made)


def set_lora_alpha(
    arch: Architecture, value: Mapping[str, Any], options: Mapping[str, Any], step: int
) -> tuple[Architecture, GrowthPlan]:
    """A target's adapters with another α, and so at another scale."""
    del options, step
    adapted = _adapted(_adapters(arch), value["target"])
    alpha = float(value["alpha"])
    made = {name: replace(adapter, alpha=alpha) for name, adapter in adapted.items()}
    return _change(arch, value["target"], made)


def merge_lora(
    arch: Architecture, value: str | None, options: Mapping[str, Any], step: int
) -> tuple[Architecture, GrowthPlan]:
    """A target's adapters (None: all) added to their weights, and begun anew.

    The head that reads a tied table goes on reading the same: it saw the adapter too.
    """
    del options, step
    merged = _adapted(_adapters(arch), "all" if value is None else value)
    tensors: dict[str, TensorPlan] = {}
    for name, entry in arch.parameters().items():
        weight, _, part = name.rpartition(".")
        adapter = merged.get(weight)
        if adapter is None or part == "bias":
            tensors[name] = Grown(name)
        elif part == "weight":
            tensors[name] = Merged(name, f"{weight}.lora_a", f"{weight}.lora_b", adapter.scale)
        else:
            tensors[name] = _fresh(entry)
    return arch, GrowthPlan(tensors, "exact", notes=(f"{len(merged)} adapters merged",))


def relayered(arch: Architecture, blocks: Sequence[int | None]) -> tuple[Lora, ...]:
    """The entries for a model whose block j is made of block ``blocks[j]``, so that each takes its
    adapters along, whatever patterns said so; None: of no block, with the adapters all blocks share."""
    old = _adapters(arch)
    parts = [name.removeprefix("blocks.0.") for name in old if name.startswith("blocks.0.")]
    wanted = {name: adapter for name, adapter in old.items() if not name.startswith("blocks.")}
    for part in parts:
        each = [old[f"blocks.{layer}.{part}"] for layer in range(arch.n_layer)]
        shared = each[0] if all(_alike(each[0], other) for other in each) else None
        for layer, source in enumerate(blocks):
            wanted[f"blocks.{layer}.{part}"] = shared if source is None else each[source]
    return covering(wanted, [entry.target for entry in arch.lora])


def _adapters(arch: Architecture) -> Adapters:
    return {name: adapter_of(arch.lora, name) for name in arch.adaptable()}


def _named(adapters: Adapters, target: str) -> list[str]:
    """The weights that a target names."""
    if names := [name for name in adapters if matches(target, name)]:
        return names
    tied = "; the head is tied: its table is the embedding" if target == "head" else ""
    raise GrowthError(f"{target!r} names no weight of this model{tied}; possible: {POSSIBLE}")


def _adapted(adapters: Adapters, target: str) -> dict[str, Lora]:
    """The adapters of a target's weights, of which there must be one."""
    found = {name: adapters[name] for name in _named(adapters, target)}
    if adapted := {name: adapter for name, adapter in found.items() if adapter}:
        return adapted
    raise GrowthError(f"{target!r} has no adapters; set_lora_rank makes them")


def _ranked(adapter: Lora | None, rank: int, hold: bool) -> Lora | None:
    if adapter is None:
        return None
    return adapter.held(rank) if hold else replace(adapter, rank=rank)


def _alike(one: Lora | None, other: Lora | None) -> bool:
    """Whether two adapters are of one rank and scale, whoever named them."""
    if one is None or other is None:
        return one is other
    return replace(one, target="") == replace(other, target="")


def _change(arch: Architecture, target: str, made: Adapters) -> tuple[Architecture, GrowthPlan]:
    """Other adapters for some of the weights, which `target` names, and what becomes of them."""
    old = _adapters(arch)
    if all(_alike(old[name], adapter) for name, adapter in made.items()):
        raise GrowthError(f"the adapters of {target!r} are so already")
    wanted = {**old, **made}
    targets = (target, *(entry.target for entry in arch.lora))
    changed = replace(arch, lora=covering(wanted, targets))
    tensors: dict[str, TensorPlan] = {}
    for name, entry in changed.parameters().items():
        weight, _, part = name.rpartition(".")
        if part in ("lora_a", "lora_b"):
            tensors[name] = _factor(name, entry, old[weight], wanted[weight])
        else:
            tensors[name] = Grown(name)
    label: Label = "exact" if all(map(_keeps, map(old.get, made), made.values())) else "lossy"
    return changed, GrowthPlan(tensors, label, notes=tuple(_notes(old, made)))


def _factor(name: str, entry: Parameter, old: Lora | None, new: Lora | None) -> TensorPlan:
    """A or B of an adapter that was `old` and is to be `new`."""
    weight, _, part = name.rpartition(".")
    if old is None or new is None:
        return _fresh(entry)
    gradient = 1.0 if math.isclose(new.scale, old.scale) else new.scale / old.scale
    if new.rank == old.rank:
        return Grown(name, gradient=gradient)
    is_a = part == "lora_a"
    if new.rank < old.rank:
        side: Literal["a", "b"] = "a" if is_a else "b"
        return Truncated(f"{weight}.lora_a", f"{weight}.lora_b", new.rank, side)
    more = New(new.rank - old.rank, "normal" if is_a else "zero", entry.std)
    return Grown(name, (Edit(0 if is_a else 1, (Old(0, old.rank), more)),), gradient=gradient)


def _keeps(old: Lora | None, new: Lora | None) -> bool:
    """Whether the product stays as it is."""
    if old is None or new is None:
        return old is None
    return new.rank >= old.rank and math.isclose(new.scale, old.scale)


def _notes(old: Adapters, made: Adapters) -> Iterator[str]:
    """Each kind of change once."""
    counted = Counter(
        (_said(before), _said(after))
        for before, after in ((old[name], adapter) for name, adapter in made.items())
    )
    for (before, after), number in counted.items():
        yield f"{number} × {before} → {after}"
    if None in made.values():
        yield "merge_lora beforehand keeps what adapters have learnt"


def _said(adapter: Lora | None) -> str:
    return f"rank {adapter.rank}, scale {adapter.scale:g}" if adapter else "no adapter"


def _fresh(entry: Parameter) -> Fresh:
    return Fresh(entry.shape, "normal" if entry.std else "zero", entry.std)
