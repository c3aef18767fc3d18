"""Wider: more units inside blocks, more channels of the stream, more of any axis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from instar.growth.axes import Layout, Use, born, laid_out, relaid, uses, zero_read
from instar.growth.masks import enter
from instar.growth.plan import Fill, GrowthError, GrowthPlan, New, Old, Piece
from instar.growth.values import grown_size, listed
from instar.models.architecture import Architecture, Norm
from instar.models.mask import MaskedAxis
from instar.models.shape import Growable

G = TypeVar("G", bound=Growable)


def widen(
    arch: G, value: Mapping[str, Any], options: Mapping[str, Any], step: int
) -> tuple[G, GrowthPlan]:
    """More of an axis that the model both writes and reads; exact."""
    del step
    axis, now = value["axis"], arch.sizes().get(value["axis"])
    if "mask" in options:
        raise GrowthError("only a GPT has masks; new structure of this model begins at zero")
    along = uses(arch, axis)
    inner = [name for name in arch.sizes() if _is_inner(arch, name)]
    if now is None or not along:
        raise GrowthError(f"no tensor has an axis {axis!r}; what can be widened is {listed(inner)}")
    if axis not in inner:
        raise GrowthError(
            f"{axis} is where something enters or leaves the model: only what its own tensors both "
            f"write and read can be widened, which is {listed(inner)}"
        )
    relations = {use.relation for use in along}
    size = grown_size(value["size"], now, axis)
    how = options.get("how", "split" if "scales" in relations else "zero")
    if how not in ("zero", "split"):
        raise GrowthError(f"how must be zero or split, not {how!r}")
    if "scales" in relations and (how == "zero" or size % now):
        raise GrowthError(
            f"a norm takes its statistics over {axis}, and only whole copies leave them as they "
            f"are: choose a multiple of {now}, with how: split"
        )
    if how == "zero" and not any(use.entry.std for use in along if use.relation == "writes"):
        raise GrowthError(
            f"the table gives no standard deviation for what writes {axis}: from zeros on both "
            "sides nothing would ever grow; give these entries a std, or choose how: split"
        )
    grown = arch.resized(**{axis: size})
    layout, note = _units(now, size, how, options)
    return grown, GrowthPlan(relaid(arch, grown, {axis: layout}), "exact", notes=(note,))


def widen_mlp(
    arch: Architecture, value: Any, options: Mapping[str, Any], step: int
) -> tuple[Architecture, GrowthPlan]:
    """More units between the two matrices of every MLP; exact.

    Zero: the new units are drawn and nobody reads them yet. Split: they are copies of the first
    ones, and what reads a unit shares out its weight over the copies (Net2Net, arXiv
    1511.05641).
    """
    now = arch.n_mlp
    size = grown_size(value, now, "mlp")
    grown = arch.resized(mlp=size)
    if steps := options.get("mask"):
        return _entering(arch, enter(grown, "mlp", [(now, size)], step, steps), "mlp", options)
    layout, note = _units(now, size, options.get("how", "zero"), options)
    return grown, GrowthPlan(relaid(arch, grown, {"mlp": layout}), "exact", notes=(note,))


def widen_hidden(
    arch: Architecture, value: Any, options: Mapping[str, Any], step: int
) -> tuple[Architecture, GrowthPlan]:
    """More channels of the residual stream; exact. Every norm over it keeps its statistics.

    Zero (RMSNorm): nothing is written to the new channels, so the mean square falls by d / d′.
    Average (LayerNorm): they carry the mean of the old ones, which leaves the mean as it is and
    lets the variance fall by d / d′ (LEMON, arXiv 2310.07999). In both, gains times
    √(d / d′) and eps times d / d′ make up for it. Duplicate: whole copies leave mean and variance
    as they are, and readers share them out.
    """
    now = arch.n_embd
    size = grown_size(value, now, "embed")
    grown = arch.resized(embed=size)
    if steps := options.get("mask"):
        return _entering(arch, enter(grown, "embed", [(now, size)], step, steps), "embed", options)
    fitting = "zero" if arch.norm == "rmsnorm" else "average"
    how = options.get("how", fitting)
    if how == "duplicate":
        if size % now:
            raise GrowthError(f"only whole copies can be made: choose a multiple of {now:,}")
        layout, note = _copied_stream(arch, size // now), f"{size // now} copies"
    elif how == fitting:
        layout, note = _padded_stream(arch, size), f"padded with {_PADDING[arch.norm]}s"
        grown = replace(grown, norm_eps=arch.norm_eps * now / size)
    else:
        raise GrowthError(
            f"how: {how} would change the statistics of {arch.norm}; for it there is {fitting}, "
            f"or duplicate with a multiple of {now:,}"
        )
    return grown, GrowthPlan(relaid(arch, grown, {"embed": layout}), "exact", notes=(note,))


def _is_inner(arch: Growable, axis: str) -> bool:
    relations = {use.relation for use in uses(arch, axis)}
    return {"writes", "reads"} <= relations and "lists" not in relations


_PADDING: Mapping[Norm, Fill] = {"rmsnorm": "zero", "layernorm": "mean"}
"""What new channels of the stream carry, for the norms to forgive it."""


def _entering(
    arch: Architecture, grown: Architecture, axis: MaskedAxis, options: Mapping[str, Any]
) -> tuple[Architecture, GrowthPlan]:
    """What is under a mask is filled as in a model that began at this size."""
    if beside := options.keys() & {"how", "share"}:
        raise GrowthError(
            f"{listed(sorted(beside))} and mask cannot go together: what is under a mask needs no zeros"
        )
    now, size = arch.sizes()[axis], grown.sizes()[axis]
    layout = laid_out((Old(0, now), size - now), born)
    note = f"entering over {options['mask']:,} steps"
    return grown, GrowthPlan(relaid(arch, grown, {axis: layout}), "exact", notes=(note,))


def _padded_stream(arch: Architecture, size: int) -> Layout:
    now, count = arch.n_embd, size - arch.n_embd
    s = math.sqrt(now / size)

    def pieces(use: Use) -> tuple[Piece, ...]:
        if use.relation == "writes":
            return Old(0, now), New(count, _PADDING[arch.norm])
        if use.is_gain:
            # the new ones stand before channels that are zero so far
            return Old(0, now, s, 1 / s), New(count, "mean")
        return Old(0, now), born(use, count)

    return pieces


def _copied_stream(arch: Architecture, times: int) -> Layout:
    copies = _split(arch.n_embd, times * arch.n_embd, 1 / times)

    def pieces(use: Use) -> tuple[Piece, ...]:
        if arch.tied and use.name.startswith("final_norm."):
            # the table reads all copies once more and, as a writer, cannot share them out
            return tuple(Old(0, arch.n_embd, 1 / times, 1.0, copy > 0) for copy in range(times))
        return copies(use)

    return pieces


def _units(now: int, size: int, how: str, options: Mapping[str, Any]) -> tuple[Layout, str]:
    """The layout of an axis inside blocks, and what to say of it."""
    if how == "split":
        whole = size % now == 0
        share = options.get("share", now / size if whole else 0.5)
        return _split(now, size, share), f"split, {share:g} stays with the source"
    if "share" in options:
        raise GrowthError("share is of how: split")
    return laid_out((Old(0, now), size - now), zero_read), "not read yet"


def _split(now: int, size: int, share: float) -> Layout:
    """Copies, with of each reader's weight this share for the unit that is copied. A channel's
    gradient follows its reader's weight; a reader's gradient follows the channel, which is a copy."""
    ranges = list(_copies(now, size - now, share))

    def pieces(use: Use) -> tuple[Piece, ...]:
        if use.relation == "reads":
            return tuple(Old(r.start, r.stop, r.share, 1.0, r.copied) for r in ranges)
        return tuple(Old(r.start, r.stop, 1.0, r.share, r.copied) for r in ranges)

    return pieces


@dataclass(frozen=True)
class _Range:
    """Old units, or a copy of them; a reader of all copies gives this one its `share`."""

    start: int
    stop: int
    share: float
    copied: bool


def _copies(now: int, extra: int, share: float) -> Iterator[_Range]:
    """All old units, then so many copies, taken from the first on as often as it needs."""
    rounds, rest = divmod(extra, now)
    parts = [(0, rest, rounds + 1), (rest, now, rounds)]
    for start, stop, copies in parts:
        if start < stop:
            yield _Range(start, stop, share if copies else 1.0, False)
    for number in range(rounds + 1):
        for start, stop, copies in parts:
            if start < stop and number < copies:
                yield _Range(start, stop, (1.0 - share) / copies, True)
