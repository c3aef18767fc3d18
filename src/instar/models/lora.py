"""Configuration of low-rank adapters: which weights have one, its rank and its scale; torch-free.

An adapted weight W (o, i), ``x.weight``, has beside it A (rank, i), ``x.lora_a``, and B (o, rank),
``x.lora_b``, and is used as W + scale · B A (LoRA, arXiv 2106.09685, equation 3).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any

TARGETS = {
    "all": "*",
    "attn": "blocks.*attn.*",
    "mlp": "blocks.*.mlp.*",
    "embedding": "token_embedding",
    "head": "head",
}
"""Patterns of the named targets."""

POSSIBLE = f"{', '.join(TARGETS)}, or a pattern of names such as blocks.*.attn.query"


@dataclass(frozen=True)
class Lora:
    """Adapters of all weights that `target` matches: a name in `TARGETS`, or an fnmatch pattern of
    weight names without ``.weight``."""

    target: str
    rank: int
    alpha: float
    rank_stabilized: bool = False

    @property
    def scale(self) -> float:
        """α / r, or α / √r where rank-stabilized (arXiv 2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    def with_rank(self, rank: int) -> Lora:
        """Return the adapter with another rank and the same scale."""
        ratio = rank / self.rank
        return replace(
            self,
            rank=rank,
            alpha=self.alpha * (math.sqrt(ratio) if self.rank_stabilized else ratio),
        )

    def matches(self, name: str) -> bool:
        """Return whether the target names a weight."""
        return matches(self.target, name)


def is_adapter(name: str) -> bool:
    """Return whether a parameter is a factor of an adapter."""
    return name.endswith((".lora_a", ".lora_b"))


def matches(target: str, name: str) -> bool:
    """Return whether `target` names the weight `name` (without ``.weight``)."""
    return fnmatchcase(name, TARGETS.get(target, target))


def adapter_of(lora: Iterable[Lora], name: str) -> Lora | None:
    """Return the entry that adapts a weight; None if there is none."""
    return next((entry for entry in lora if entry.matches(name)), None)


def problems(
    lora: tuple[Lora, ...], weights: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[int, str, str]]:
    """Yield (index, problem, hint) for invalid entries, for weights of these shapes."""
    target_of: dict[str, str] = {}
    for number, entry in enumerate(lora):
        if wrong := _field_problem(entry):
            yield number, *wrong
            continue
        names = [name for name in weights if entry.matches(name)]
        if not names:
            hint = "" if "head" in weights else "; the head is tied, so it is the embedding"
            yield number, f"{entry.target!r} names no weight of this model", POSSIBLE + hint
        for name in names:
            if name in target_of:
                yield (
                    number,
                    f"{name} is adapted by {target_of[name]!r} already",
                    "a weight has one adapter",
                )
            target_of[name] = entry.target
        if names and entry.rank > (max_rank := min(min(weights[name]) for name in names)):
            name = min(names, key=lambda name: min(weights[name]))
            yield (
                number,
                f"a rank of {entry.rank} is more than {name} of shape {weights[name]} can have",
                f"at most {max_rank}",
            )


def _field_problem(entry: Lora) -> tuple[str, str] | None:
    """Return (problem, hint) if a field has an invalid value, as a file may."""
    target, rank, alpha, use_rslora = (getattr(entry, field.name) for field in fields(entry))
    if not isinstance(target, str):
        return f"target must be text, not {target!r}", POSSIBLE
    if type(rank) is not int or rank < 1:
        return f"rank must be a whole number above 0, not {rank!r}", ""
    if type(alpha) not in (int, float) or not 0 < alpha < math.inf:
        return f"alpha must be a number above 0, not {alpha!r}", "twice the rank is usual"
    if type(use_rslora) is not bool:
        return f"rank_stabilized must be true or false, not {use_rslora!r}", ""
    return None


def cover_weights(
    adapters: Mapping[str, Lora | None], targets: Iterable[str] = ()
) -> tuple[Lora, ...]:
    """Return entries that give every weight its wanted adapter; at most one matches a weight.

    Args:
        adapters: the adapter of every adaptable weight; its target is ignored.
        targets: tried before named targets, patterns for all blocks, and single names.
    """
    groups: dict[Lora, set[str]] = {}
    for name, adapter in adapters.items():
        if adapter is not None:
            groups.setdefault(replace(adapter, target=""), set()).add(name)
    in_all_blocks = dict.fromkeys(
        f"blocks.*.{name.split('.', 2)[2]}" for name in adapters if name.startswith("blocks.")
    )
    entries = []
    for values, names in groups.items():
        for target in (*targets, *TARGETS, *in_all_blocks, *sorted(names)):
            matching = {name for name in adapters if matches(target, name)}
            if matching and matching <= names:
                entries.append(replace(values, target=target))
                names -= matching
    return tuple(entries)


def from_json(entries: Iterable[Mapping[str, Any]]) -> tuple[Lora, ...]:
    """Inverse of `dataclasses.asdict` for entries. Raises TypeError for unknown fields."""
    return tuple(Lora(**entry) for entry in entries)
