"""Where a run first comes to a loss, and what another one saves on the way there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from instar.logs.comparing.places import PLACED_BY
from instar.logs.telling.direction import direction

if TYPE_CHECKING:
    from instar.logs.reading.record import Series


@dataclass(frozen=True)
class Reached:
    """The place at which a metric first has the value that was asked for."""

    at: dict[str, float]
    """by axis, linear between the two neighbouring measurements"""
    from_the_start: bool
    """the first measurement has it already: it may have been reached before"""
    left_at_step: int | None
    """the last step at which the value was worse again; None: it never was"""


@dataclass(frozen=True)
class Saving:
    """How much less of something one arm needs than another, as a share of what that needs."""

    share: float
    """0.31: 31 % less; below 0: more"""
    spread: float | None
    """standard deviation of the ratio over pairs, as a share; None for a single pair"""
    pairs: int
    """0: the arms have no seed in common, and their means are compared"""
    left_out: int
    """pairs, else runs, that do not reach the value: the share says nothing of them"""


def reach(series: Series, target: float) -> Reached | None:
    """Where `series` first is at `target` or better; None: nowhere. What was superseded is none.

    Losses come down to it, accuracies and the like rise to it.
    """
    curve = series.current()
    curve = curve.take(np.isfinite(curve.value))
    good = curve.value >= target if direction(curve.name) == "max" else curve.value <= target
    there = np.flatnonzero(good)
    if not len(there):
        return None
    first = int(there[0])
    after = np.flatnonzero(~good[first:])
    share = 1.0
    if first > 0:
        before, value = curve.value[first - 1], curve.value[first]
        share = float((before - target) / (before - value))
    axes = {name: curve.axis(name) for name in PLACED_BY}
    return Reached(
        at={
            name: float(x[first - 1] + share * (x[first] - x[first - 1]) if first else x[0])
            for name, x in axes.items()
        },
        from_the_start=first == 0,
        left_at_step=int(curve.step[first + int(after[-1])]) if len(after) else None,
    )


def saving(
    base: Mapping[object, Reached | None], other: Mapping[object, Reached | None], axis: str
) -> Saving | None:
    """What `other` saves against `base` along `axis`, over the keys (seeds) that both have.

    The share is 1 less the geometric mean of the ratios; None: nothing to be compared reaches
    the value.
    """
    ours, theirs = _logs(other, axis), _logs(base, axis)
    both = [key for key in base if key in other]
    if not both:
        return _unpaired(ours, theirs, len(base) + len(other))
    logs = [ours[key] - theirs[key] for key in both if key in ours and key in theirs]
    if not logs:
        return None
    spread = float(np.std(np.exp(logs), ddof=1)) if len(logs) > 1 else None
    return Saving(1 - math.exp(sum(logs) / len(logs)), spread, len(logs), len(both) - len(logs))


def _logs(arm: Mapping[object, Reached | None], axis: str) -> dict[object, float]:
    return {
        key: math.log(found.at[axis])
        for key, found in arm.items()
        if found is not None and found.at[axis] > 0
    }


def _unpaired(
    ours: Mapping[object, float], theirs: Mapping[object, float], runs: int
) -> Saving | None:
    """Of geometric means; the spread is that of a ratio of independent runs, to first order."""
    sides = [np.array(list(side.values())) for side in (ours, theirs)]
    if not all(map(len, sides)):
        return None
    ratio = math.exp(sides[0].mean() - sides[1].mean())
    several = [side for side in sides if len(side) > 1]
    spread = ratio * math.sqrt(sum(side.var(ddof=1) for side in several)) if several else None
    return Saving(1 - ratio, spread, 0, runs - sum(map(len, sides)))


def saving_text(found: Saving, what: str) -> str:
    """`31% fewer FLOPs`, `5% ±3% more tokens`, `equally many steps`."""
    share = found.share
    spread = "" if found.spread is None else f" ±{found.spread:.0%}"
    seconds = "time" in what
    if round(abs(share), 2) == 0 and found.spread is None:
        return f"as {'much' if seconds else 'many'} {what}"
    less = "less" if seconds else "fewer"
    return f"{abs(share):.0%}{spread} {less if share >= 0 else 'more'} {what}"
