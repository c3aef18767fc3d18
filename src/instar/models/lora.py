"""Low-rank adapters as data: which weights have one, of which rank, at which scale; torch-free.

An adapted weight W (o, i), ``x.weight``, has beside it A (rank, i), ``x.lora_a``, and B (o, rank),
``x.lora_b``, and acts as W + scale · B A (LoRA, arXiv 2106.09685, equation 3).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any

TARGETS = {
    "all": "*",
    "attn": "blocks.*.attn.*",
    "mlp": "blocks.*.mlp.*",
    "embedding": "token_embedding",
    "head": "head",
}
"""Pattern of each target that has a name of its own."""

POSSIBLE = f"{', '.join(TARGETS)}, or a pattern of names such as blocks.*.attn.query"


@dataclass(frozen=True)
class Lora:
    """Adapters of all weights that `target` matches: a name of `TARGETS`, or a pattern (fnmatch)
    of weights' names without ``.weight``."""

    target: str
    rank: int
    alpha: float
    rank_stabilized: bool = False

    @property
    def scale(self) -> float:
        """α / r, or α / √r where rank-stabilized (arXiv 2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    def held(self, rank: int) -> Lora:
        """Of another rank at the same scale."""
        grown = rank / self.rank
        return replace(
            self,
            rank=rank,
            alpha=self.alpha * (math.sqrt(grown) if self.rank_stabilized else grown),
        )

    def matches(self, name: str) -> bool:
        """Whether the weight of this name is one of the target's."""
        return matches(self.target, name)


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is a factor of an adapter."""
    return name.endswith((".lora_a", ".lora_b"))


def matches(target: str, name: str) -> bool:
    """Whether `target` names the weight `name`, which has no ``.weight`` at its end."""
    return fnmatchcase(name, TARGETS.get(target, target))


def adapter_of(lora: Iterable[Lora], name: str) -> Lora | None:
    """The entry that adapts a weight."""
    return next((entry for entry in lora if entry.matches(name)), None)


def problems(
    lora: tuple[Lora, ...], weights: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[int, str, str]]:
    """What is wrong with entries, for weights of these shapes: (which, what, what instead)."""
    taken: dict[str, str] = {}
    for number, entry in enumerate(lora):
        if wrong := _malformed(entry):
            yield number, *wrong
            continue
        found = [name for name in weights if entry.matches(name)]
        if not found:
            there = "" if "head" in weights else "; the head is tied, so it is the embedding"
            yield number, f"{entry.target!r} is no weight of this model", POSSIBLE + there
        for name in found:
            if name in taken:
                yield (
                    number,
                    f"{name} is adapted by {taken[name]!r} already",
                    "a weight has one adapter",
                )
            taken[name] = entry.target
        if found and entry.rank > (most := min(min(weights[name]) for name in found)):
            name = min(found, key=lambda name: min(weights[name]))
            yield (
                number,
                f"a rank of {entry.rank} is more than {name} of shape {weights[name]} can have",
                f"at most {most}",
            )


def _malformed(entry: Lora) -> tuple[str, str] | None:
    """What a file may have put into the fields."""
    target, rank, alpha, stabilized = (getattr(entry, field.name) for field in fields(entry))
    if not isinstance(target, str):
        return f"target must be text, not {target!r}", POSSIBLE
    if type(rank) is not int or rank < 1:
        return f"rank must be a whole number above 0, not {rank!r}", ""
    if type(alpha) not in (int, float) or not 0 < alpha < math.inf:
        return f"alpha must be a number above 0, not {alpha!r}", "twice the rank is usual"
    if type(stabilized) is not bool:
        return f"rank_stabilized must be true or false, not {stabilized!r}", ""
    return None


def covering(wanted: Mapping[str, Lora | None], targets: Iterable[str] = ()) -> tuple[Lora, ...]:
    """The entries that give every weight its wanted adapter, each weight matched by one at most.

    `wanted` has all weights that could be adapted; of its values the target does not count.
    `targets` are tried before the named ones, one pattern for all blocks, and single names.
    """
    groups: dict[Lora, set[str]] = {}
    for name, adapter in wanted.items():
        if adapter is not None:
            groups.setdefault(replace(adapter, target=""), set()).add(name)
    in_all_blocks = dict.fromkeys(
        f"blocks.*.{name.split('.', 2)[2]}" for name in wanted if name.startswith("blocks.")
    )
    made = []
    for values, rest in groups.items():
        for target in (*targets, *TARGETS, *in_all_blocks, *sorted(rest)):
            found = {name for name in wanted if matches(target, name)}
            if found and found <= rest:
                made.append(replace(values, target=target))
                rest -= found
    return tuple(made)


def from_json(entries: Iterable[Mapping[str, Any]]) -> tuple[Lora, ...]:
    """Entries of what `dataclasses.asdict` made of them. Raises TypeError for other fields."""
    return tuple(Lora(**entry) for entry in entries)
