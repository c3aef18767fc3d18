"""Operations that widen axes: MLP units, channels of the residual stream, heads and their channels, vocabulary, context.

Query head h reads key and value head ``h // (n_head / n_kv_head)``, so the position of new heads
decides what they read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from instar.growth.axes import (
    Layout,
    Use,
    initial_slices,
    layout_of,
    plan_tensors,
    uses,
    with_mask,
    zero_in_readers,
)
from instar.growth.plan import (
    Fill,
    Grown,
    GrowthError,
    GrowthPlan,
    New,
    Old,
    Piece,
    Reindexed,
    VocabularyMap,
)
from instar.growth.values import format_list, grown_size, without_x
from instar.models.architecture import Norm
from instar.models.hf.pretrained import PretrainedShape
from instar.models.shape import Growable, MaskedAxis, TransformerShape, buffers_of

G = TypeVar("G", bound=Growable)
T = TypeVar("T", bound=TransformerShape)

_PADDING: Mapping[Norm, Fill] = {"rmsnorm": "zero", "layernorm": "mean"}
"""Values of new channels of the stream with which the norms can be compensated."""


def widen(
    arch: G, value: Mapping[str, Any], options: Mapping[str, Any], _step: int
) -> tuple[G, GrowthPlan]:
    """Widen an axis that the model both writes and reads; exact."""
    axis, now = value["axis"], arch.sizes().get(value["axis"])
    axis_uses = uses(arch, axis)
    inner = [name for name in arch.sizes() if _is_inner(arch, name)]
    if now is None or not axis_uses:
        raise GrowthError(f"no tensor has an axis {axis!r}; axes to widen: {format_list(inner)}")
    if axis not in inner:
        raise GrowthError(
            f"{axis} is an input or output axis: only axes that the model both writes and reads can be "
            f"widened: {format_list(inner)}"
        )
    has_norm = any(use.entry.kind == "norm" for use in axis_uses)
    size = grown_size(value["size"], now, axis)
    how = options.get("how", "split" if has_norm else "zero")
    if how not in ("zero", "split"):
        raise GrowthError(f"how must be zero or split, not {how!r}")
    if has_norm and (how == "zero" or size % now):
        raise GrowthError(
            f"a norm takes its statistics over {axis}, and only whole copies preserve them: choose a "
            f"multiple of {now}, with how: split"
        )
    if how == "zero" and not any(use.entry.std for use in axis_uses if use.relation == "writes"):
        raise GrowthError(
            f"the table gives no standard deviation for tensors that write {axis}: with zeros on both "
            "sides no gradient would reach them; give these entries a std, or choose how: split"
        )
    wider = arch.resized(**{axis: size})
    layout, note = _units(now, size, how, options)
    layouts = {axis: layout}
    tensors, buffers = (
        plan_tensors(arch, table, layouts) for table in (wider.parameters(), buffers_of(wider))
    )
    return wider, GrowthPlan(tensors, "exact", notes=(note,), buffers=buffers)


def widen_mlp(arch: T, value: Any, options: Mapping[str, Any], step: int) -> tuple[T, GrowthPlan]:
    """Add units to every MLP; exact.

    `zero`: new units have initial values, and the weights that read them are 0. `split`: new units
    are copies of the first ones, and the weight that reads a unit is divided among its copies
    (Net2Net, arXiv 1511.05641).
    """
    now = arch.sizes()["mlp"]
    size = grown_size(value, now, "mlp")
    wider = arch.resized(mlp=size)
    if "mask" in options:
        return _with_masked_growth(arch, wider, "mlp", options, step)
    layout, note = _units(now, size, options.get("how", "zero"), options)
    return wider, GrowthPlan(
        plan_tensors(arch, wider.parameters(), {"mlp": layout}), "exact", notes=(note,)
    )


def widen_hidden(
    arch: T, value: Any, options: Mapping[str, Any], step: int
) -> tuple[T, GrowthPlan]:
    """Add channels to the residual stream; exact. The output of every norm over it stays the same.

    `zero` (RMSNorm): new channels are 0, so the mean square falls by d / d′. `average` (LayerNorm):
    new channels are the mean of the old ones, so the mean stays and the variance falls by d / d′
    (LEMON, arXiv 2310.07999). Both are compensated by gains times √(d / d′) and eps times d / d′.
    `duplicate`: whole copies keep mean and variance, and readers divide their weights among them.
    """
    now = arch.sizes()["embed"]
    size = grown_size(value, now, "embed")
    wider = arch.resized(embed=size)
    if "mask" in options:
        return _with_masked_growth(arch, wider, "embed", options, step)
    fitting = "zero" if arch.norm == "rmsnorm" else "average"
    how = options.get("how", fitting)
    if how == "duplicate":
        if size % now:
            raise GrowthError(f"only whole copies can be made: choose a multiple of {now:,}")
        layout, note = _copied_stream(arch, size // now), f"{size // now} copies"
    elif how == fitting:
        layout, note = _padded_stream(arch, size), f"padded with {_PADDING[arch.norm]}s"
        wider = wider.changed(norm_eps=arch.norm_eps * now / size)
    else:
        raise GrowthError(
            f"how: {how} would change the statistics of {arch.norm}; for it there is {fitting}, "
            f"or duplicate with a multiple of {now:,}"
        )
    return wider, GrowthPlan(
        plan_tensors(arch, wider.parameters(), {"embed": layout}), "exact", notes=(note,)
    )


def resize_vocab(
    arch: T, value: Any, _options: Mapping[str, Any], _step: int
) -> tuple[T, GrowthPlan]:
    """Add rows to the token table and the head; each is the mean of the old rows. Bounded.

    A new logit is the mean of the V old logits, and its exponential at most the mean of theirs: n
    new rows raise the loss by at most log(1 + n / V) nats.

    With the map of a new tokenizer, rows of tokens that both have are kept, and others are means of old rows; lossy.
    """
    now = arch.sizes()["vocab"]
    if isinstance(value, VocabularyMap):
        return _with_vocabulary(arch, value)
    if isinstance(value, Mapping):
        raise GrowthError(
            "a tokenizer is read by instar grow of a folder and by instar.growth.grow; here, give the number of rows"
        )
    size = grown_size(value, now, "vocab")
    larger = arch.resized(vocab=size)
    layout = layout_of([Old(0, now), size - now], lambda _, count: New(count, "mean"))
    tensors = plan_tensors(arch, larger.parameters(), {"vocab": layout})
    return larger, GrowthPlan(tensors, "bounded", bound_nats=math.log1p((size - now) / now))


def extend_context(
    arch: T, value: Any, options: Mapping[str, Any], _step: int
) -> tuple[T, GrowthPlan]:
    """Make the context longer; exact for up to the old number of tokens. RoPE has no table of
    positions; a learned table gets rows with initial values.

    `rope` scales the frequencies of a model of transformers: ``linear`` and ``yarn`` (arXiv 2309.00071) change what it
    computes at every length, ``dynamic`` only beyond the old one, which stays in the config.
    """
    now = arch.sizes()["context"]
    size = grown_size(value, now, "context")
    if (rope := options.get("rope")) is not None:
        return _with_scaled_rope(arch, rope, size)
    longer = arch.resized(context=size)
    layout = layout_of([Old(0, now), size - now], initial_slices)
    tensors = plan_tensors(arch, longer.parameters(), {"context": layout})
    # samples have the old length until set_context
    return longer, GrowthPlan(tensors, "exact", waits=True)


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
    arch: T, value: Any, _options: Mapping[str, Any], _step: int
) -> tuple[T, GrowthPlan]:
    """Make `value` copies of every key and value head, each for its part of the group; exact.

    The gradients of the copies add up to the old one, so each is given an equal share of it. This
    underestimates their mean square by a factor of about 2 (measured with four copies in a GPT of
    3 layers of width 64).
    """
    now, value = arch.sizes()["kv_heads"], without_x(value)
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
    arch: T, value: Any, _options: Mapping[str, Any], _step: int
) -> tuple[T, GrowthPlan]:
    """Add channels to every head; exact.

    New channels of keys are 0, and those of values are not read; queries are multiplied by √(d′ /
    d), because scores are divided by √d′. RoPE pairs channel i with i + d / 2, so new pairs are
    added at the end of each half, and ``rope_base ** (d′ / d)`` keeps the frequencies of the old
    pairs.
    """
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


def _with_vocabulary(arch: Any, value: VocabularyMap) -> tuple[Any, GrowthPlan]:
    now, rows = arch.sizes()["vocab"], value.rows
    if not isinstance(arch, PretrainedShape):
        raise GrowthError("only models of transformers take a new tokenizer; a run has its own")
    largest = max((source for row in rows for source in row), default=0)
    if largest >= now:
        raise GrowthError(f"the old tokenizer has a token {largest:,}, and the table {now:,} rows")
    larger = arch.resized(vocab=len(rows))
    larger = replace(larger, config={**larger.config, **value.special_ids(arch.config)})
    if odd := [use.name for use in uses(larger, "vocab") if use.dim]:
        raise GrowthError(f"{odd[0]} has columns of tokens: merge the adapter of the table first")
    tensors = {
        name: Reindexed(name, rows, value.kept_tokens) if "vocab" in entry.axes else Grown(name)
        for name, entry in larger.parameters().items()
    }
    pieces = sum(bool(row) for row in rows) - len(value.kept_tokens)
    n_unmapped = len(rows) - len(value.kept_tokens) - pieces
    note = f"{len(value.kept_tokens):,} tokens kept, {pieces:,} from pieces, {n_unmapped:,} from the mean of all"
    return larger, GrowthPlan(tensors, "lossy", notes=(note,))


def _with_scaled_rope(arch: Any, rope: str, size: int) -> tuple[Any, GrowthPlan]:
    if not isinstance(arch, PretrainedShape) or arch.positions != "rope":
        raise GrowthError("rope scales frequencies of models of transformers with RoPE only")
    longer = arch.with_scaled_rope(rope, size)
    tensors = plan_tensors(arch, longer.parameters(), {})
    note = f"{rope}, factor {size / arch.sizes()['context']:g}"
    return longer, GrowthPlan(tensors, "exact" if rope == "dynamic" else "lossy", notes=(note,))


def _is_inner(arch: Growable, axis: str) -> bool:
    relations = {use.relation for use in uses(arch, axis)}
    return {"writes", "reads"} <= relations and "lists" not in relations


def _with_masked_growth(
    arch: Any, wider: Any, axis: MaskedAxis, options: Mapping[str, Any], step: int
) -> tuple[Any, GrowthPlan]:
    """Fill new elements under a mask with initial values."""
    if conflicting := options.keys() & {"how", "share"}:
        raise GrowthError(
            f"{format_list(sorted(conflicting))} and mask cannot be combined: a mask needs no zeros"
        )
    now, size = arch.sizes()[axis], wider.sizes()[axis]
    wider = with_mask(wider, axis, [(now, size)], step, options["mask"])
    layout = layout_of((Old(0, now), size - now), initial_slices)
    note = f"entering over {options['mask']:,} steps"
    return wider, GrowthPlan(
        plan_tensors(arch, wider.parameters(), {axis: layout}), "exact", notes=(note,)
    )


def _padded_stream(arch: TransformerShape, size: int) -> Layout:
    now = arch.sizes()["embed"]
    s, count = math.sqrt(now / size), size - now

    def pieces(use: Use) -> tuple[Piece, ...]:
        if use.relation == "writes":
            return Old(0, now), New(count, _PADDING[arch.norm])
        if use.is_gain:
            # new gains multiply channels that are still 0
            return Old(0, now, s, 1 / s), New(count, "mean")
        return Old(0, now), initial_slices(use, count)

    return pieces


def _copied_stream(arch: TransformerShape, times: int) -> Layout:
    now = arch.sizes()["embed"]
    copies = _split(now, times * now, 1 / times)

    def pieces(use: Use) -> tuple[Piece, ...]:
        if arch.tied and use.name.startswith(f"{arch.final_norm}."):
            # the tied table reads all copies too; as a writer it cannot divide its weights
            return tuple(Old(0, now, 1 / times, 1.0, copy > 0) for copy in range(times))
        return copies(use)

    return pieces


def _units(now: int, size: int, how: str, options: Mapping[str, Any]) -> tuple[Layout, str]:
    """Return the layout of an axis inside blocks, and a note for the plan."""
    if how == "split":
        divides = size % now == 0
        share = options.get("share", now / size if divides else 0.5)
        return _split(now, size, share), f"split, {share:g} stays with the source"
    if "share" in options:
        raise GrowthError("share requires how: split")
    return layout_of((Old(0, now), size - now), zero_in_readers), "not read yet"


def _split(now: int, size: int, share: float) -> Layout:
    """Return a layout of copies, where the copied unit keeps this share of each reader's weight.

    A unit's gradient is proportional to its reader's weight, a reader's to the value of its unit.
    """
    read = list(_copies(now, size - now, share))
    writers = [replace(piece, value=1.0, gradient=piece.value) for piece in read]
    return lambda use: tuple(read if use.relation == "reads" else writers)


def _copies(now: int, extra: int, share: float) -> Iterator[Old]:
    """Yield all old units, then `extra` copies of them, cyclically from the first, as a tensor
    reads them: the copies of a unit divide the rest of its weight."""
    rounds, remainder = divmod(extra, now)
    parts = [(0, remainder, rounds + 1), (remainder, now, rounds)]
    for start, stop, copies in parts:
        if start < stop:
            yield Old(start, stop, share if copies else 1.0)
    for number in range(rounds + 1):
        for start, stop, copies in parts:
            if start < stop and number < copies:
                yield Old(start, stop, (1.0 - share) / copies, is_copy=True)


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
