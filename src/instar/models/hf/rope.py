"""RoPE as `rope_parameters` of transformers' configs describe it: one for all layers, or one for each kind of layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from instar.models.shape import ArchitectureError, problem

FULL = "full_attention"


def plain_rope_base(config: Mapping[str, Any]) -> float:
    """Return the base of plain RoPE; NaN if a head is rotated in parts, or by scaled frequencies."""
    rope = config.get("rope_parameters") or {}
    plain = rope.get("rope_type") == "default" and rope.get("partial_rotary_factor", 1.0) == 1.0
    return float(rope["rope_theta"]) if plain else math.nan


def pin_rope(config: Mapping[str, Any], context: int) -> dict[str, Any]:
    """Return a config whose scaled RoPE stays as it is under another `max_position_embeddings`.

    A factor that is left out is the ratio of that to the original size.
    """
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return dict(config)
    if any(isinstance(value, Mapping) for value in rope.values()):
        pinned_rope = {key: _pin_rope(value, context) for key, value in rope.items()}
    else:
        pinned_rope = _pin_rope(rope, context)
    return {**config, "rope_parameters": pinned_rope}


def _pin_rope(rope: Any, context: int) -> Any:
    original = rope.get("original_max_position_embeddings") if isinstance(rope, Mapping) else None
    if original is None or rope.get("factor") is not None:
        return rope
    return {**rope, "factor": context / original}


def scale_rope(
    config: Mapping[str, Any], kind: str, context: int, now: int, possible: tuple[str, ...]
) -> dict[str, Any]:
    """Return `rope_parameters` that are scaled from a context to a longer one, of the layers with full attention.

    Raises:
        ArchitectureError: RoPE is scaled already, or not in a possible way.
    """
    if kind not in possible:
        choices = ", ".join(possible) or "no kind of scaling here"
        raise ArchitectureError(
            problem("from", f"RoPE is not scaled by {kind!r}", f"it has {choices}")
        )
    rope = dict(config.get("rope_parameters") or {})
    full = rope.get(FULL)
    plain = full if isinstance(full, Mapping) else rope
    if plain.get("rope_type") != "default":
        raise ArchitectureError(
            problem("from", f"RoPE is scaled already, by {plain.get('rope_type')!r}")
        )
    if plain.get("partial_rotary_factor", 1.0) != 1.0:
        raise ArchitectureError(problem("from", "RoPE rotates only a part of each head"))
    new = {**plain, "rope_type": kind, "factor": context / now}
    if kind == "yarn":
        new["original_max_position_embeddings"] = now
    return {**rope, FULL: new} if plain is full else new


def rope_problems(
    config: Mapping[str, Any], head_dim: int, validated_head_dim: int
) -> Iterator[str]:
    """Yield why transformers would compute no RoPE of these heads.

    Args:
        validated_head_dim: for which transformers counts the factors of ``longrope``.
    """
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return
    if head_dim % 2:
        yield f"RoPE rotates pairs of channels, and a head has {head_dim}"
    for section in (value for value in (rope, *rope.values()) if isinstance(value, Mapping)):
        partial = section.get("partial_rotary_factor") or 1.0
        if not isinstance(partial, int | float):
            yield f"partial_rotary_factor is {partial!r}, not a number"
            continue
        for key in ("short_factor", "long_factor"):
            factors = section.get(key)
            if not isinstance(factors, list):
                continue
            for size in dict.fromkeys((head_dim, validated_head_dim)):
                if len(factors) != int(size * partial) // 2:
                    yield (
                        f"{key} of RoPE has {len(factors)} factors, and transformers asks for one for each pair of "
                        f"a head of {size} channels"
                    )


def shorten_rope_factors(config: Mapping[str, Any], head_dim: int, smaller: int) -> dict[str, Any]:
    """Return `rope_parameters` for smaller heads, with the first of the factors that each pair of channels has."""

    def shortened(value: Any, partial: float) -> Any:
        if isinstance(value, Mapping):
            partial = value.get("partial_rotary_factor") or 1.0
            return {key: shortened(entry, partial) for key, entry in value.items()}
        if isinstance(value, list) and len(value) == int(head_dim * partial) // 2:
            return value[: int(smaller * partial) // 2]
        return value

    return {"rope_parameters": shortened(config["rope_parameters"], 1.0)}
