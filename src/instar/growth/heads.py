"""Operations that grow attention: query heads, key and value heads, channels of a head.

Query head h reads key and value head ``h // (n_head / n_kv_head)``, so the position of new heads
decides what they read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from instar.growth.axes import Use, initial_slices, layout_of, plan_tensors, zero_in_readers
from instar.growth.masks import with_mask
from instar.growth.plan import GrowthError, GrowthPlan, New, Old, Piece
from instar.growth.values import format_list, grown_size
from instar.models.shape import TransformerShape

T = TypeVar("T", bound=TransformerShape)


def add_heads(arch: T, value: Any, options: Mapping[str, Any], step: int) -> tuple[T, GrowthPlan]:
    """Add `value` query heads, whose columns of `attn.output` are 0; exact.

    `where: groups` appends whole groups with their own key and value heads; `inside` adds the same
    number of query heads at the end of every group.
    """
    now, kv_now = (arch.sizes()[axis] for axis in ("heads", "kv_heads"))
    per_group = now // kv_now
    grown_size(now + value, now, "heads")
    by_groups, even = value % per_group == 0, value % kv_now == 0
    where = options.get("where", "groups" if by_groups else "inside")
    if not (by_groups if where == "groups" else even):
        raise GrowthError(
            f"{value} query heads cannot be added to {kv_now} groups of {per_group}: "
            f"whole groups need a multiple of {per_group}, heads inside every group a multiple of "
            f"{kv_now}"
        )
    heads: list[Old | int]
    kv_heads: list[Old | int] = [Old(0, kv_now)]
    if where == "groups":
        heads = [Old(0, now), value]
        kv_heads.append(value // per_group)
        note = f"{value // per_group} more groups of {per_group}"
    else:
        more, starts = value // kv_now, range(0, now, per_group)
        heads = [part for start in starts for part in (Old(start, start + per_group), more)]
        note = f"{more} more in each of {kv_now} groups"
    larger: Any = arch.resized(heads=_length(heads), kv_heads=_length(kv_heads))
    fill = zero_in_readers
    if steps := options.get("mask"):
        fill = initial_slices
        larger = with_mask(larger, "heads", _new_ranges(heads), step, steps)
    layouts = {"heads": layout_of(heads, fill), "kv_heads": layout_of(kv_heads, fill)}
    return larger, GrowthPlan(
        plan_tensors(arch, larger.parameters(), layouts), "exact", notes=(note,)
    )


def split_kv_heads(
    arch: T, value: Any, options: Mapping[str, Any], step: int
) -> tuple[T, GrowthPlan]:
    """Make `value` copies of every key and value head, each for its part of the group; exact.

    The gradients of the copies add up to the old one, so each is given an equal share of it. This
    underestimates their mean square by a factor of about 2 (measured with four copies in a GPT of
    3 layers of width 64).
    """
    del options, step
    now = arch.sizes()["kv_heads"]
    per_group = arch.sizes()["heads"] // now
    if per_group % value:
        possible = [factor for factor in range(2, per_group + 1) if per_group % factor == 0]
        raise GrowthError(
            f"{per_group} query heads for each key and value head cannot be split by {value}; "
            + (f"choose {format_list(possible)}" if possible else "each one already has its own")
        )
    larger = arch.resized(kv_heads=now * value)
    copies = tuple(
        Old(head, head + 1, gradient=1 / value, is_copy=copy > 0)
        for head in range(now)
        for copy in range(value)
    )
    return larger, GrowthPlan(
        plan_tensors(arch, larger.parameters(), {"kv_heads": lambda _: copies}), "exact"
    )


def grow_head_dim(
    arch: T, value: Any, options: Mapping[str, Any], step: int
) -> tuple[T, GrowthPlan]:
    """Add channels to every head; exact.

    New channels of keys are 0, and those of values are not read; queries are multiplied by √(d′ /
    d), because scores are divided by √d′. RoPE pairs channel i with i + d / 2, so new pairs are
    added at the end of each half, and ``rope_base ** (d′ / d)`` keeps the frequencies of the old
    pairs.
    """
    del options, step
    now = arch.sizes()["head_dim"]
    size = grown_size(value, now, "head_dim")
    if arch.qk_norm:
        raise GrowthError(
            "qk_norm divides queries and keys by their norm, so a new channel is either zero in both, "
            "and stays so, or changes the old ones; add_heads is possible"
        )
    larger = arch.resized(head_dim=size)
    parts: list[Old | int] = [Old(0, now), size - now]
    if arch.positions == "rope":
        larger = larger.changed(rope_base=arch.rope_base ** (size / now))
        half, more = now // 2, (size - now) // 2
        parts = [Old(0, half), more, Old(half, now), more]
    scale = math.sqrt(size / now) if arch.scales_by_head_dim else 1.0
    scaled_rows = [
        replace(p, value=scale, gradient=1 / scale) if isinstance(p, Old) else p for p in parts
    ]

    def pieces(use: Use) -> tuple[Piece, ...]:
        if use.part == "query":
            return layout_of(scaled_rows, initial_slices)(use)
        if use.part == "key":
            return layout_of(parts, lambda _, count: New(count, "zero"))(use)
        return layout_of(parts, zero_in_readers)(use)

    return larger, GrowthPlan(
        plan_tensors(arch, larger.parameters(), {"head_dim": pieces}), "exact"
    )


def _length(parts: list[Old | int]) -> int:
    return sum(len(part) if isinstance(part, Old) else part for part in parts)


def _new_ranges(parts: list[Old | int]) -> list[tuple[int, int]]:
    ranges, at = [], 0
    for part in parts:
        size = _length([part])
        if not isinstance(part, Old):
            ranges.append((at, at + size))
        at += size
    return ranges
