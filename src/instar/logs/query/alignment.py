"""Places at which runs are compared: a number of steps, tokens, FLOPs or seconds, or a loss."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

import numpy as np

from instar.config.budget import parse_budget
from instar.config.errors import ConfigError, nearest
from instar.logs.read.columns import Floats
from instar.logs.read.record import Series
from instar.record.format import duration, scientific, si, unit_text

PLACED_BY = ("step", "samples", "tokens", "epoch", "flops", "wall_s", "active_s")
"""axes that start at 0 in every run"""

_NAMES = {
    "steps": "step",
    "it": "step",
    "iteration": "step",
    "iterations": "step",
    "sample": "samples",
    "token": "tokens",
    "epochs": "epoch",
    "flop": "flops",
    "compute": "flops",
    "wall": "wall_s",
    "seconds": "wall_s",
    "active": "active_s",
    "date": "time",
}
_SCALES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12, "P": 1e15}
_CLOCK = {"": 1.0, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SECONDS = ("wall_s", "active_s")
_AMOUNT = re.compile(r"(-?\d[\d_,]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)")
_BUDGETS = {"steps": "step", "epochs": "epoch", "seconds": "wall_s"}
FORMS = "step=1000, tokens=1.5B, flops=1e15, wall=10min, active=90s, epoch=2, 50Mtok"
_DECAYING = 0.98
"""A learning rate below this share of its highest is falling."""
_AT_THE_END = 0.02
"""A share of a run's steps that is as good as its end."""


@dataclass(frozen=True)
class AxisValue:
    """A place in a run."""

    axis: str
    """one of `PLACED_BY`"""
    amount: float

    def text(self, unit: str = "token") -> str:
        """Return the place as text: `step 1,000`, `1.50B tok`, `1.0e15 FLOPs`, `10m00 active`."""
        match self.axis:
            case "step":
                return f"step {self.amount:,.0f}"
            case "samples":
                return f"{self.amount:,.0f} samples"
            case "tokens":
                return f"{si(self.amount)} {unit_text(unit)}"
            case "epoch":
                return f"epoch {self.amount:.3g}"
            case "flops":
                return f"{scientific(self.amount)} FLOPs"
        return f"{duration(self.amount)} {'active' if self.axis == 'active_s' else 'wall'}"


def axis_named(text: str, axes: Sequence[str] = PLACED_BY, where: str = "") -> str:
    """Return one of `axes` by its name or an alias; `where`: the option, for the error.

    Raises:
        ConfigError: the axis is unknown; suggests one.
    """
    axis_names = _NAMES if "time" in axes else _NAMES | {"time": "wall_s"}
    name = axis_names.get(text.lower(), text.lower())
    if name in axes:
        return name
    near = nearest(name, [*axes, *axis_names])
    suggestion = axis_names.get(near, near) if near else ""
    hint = f"did you mean {suggestion!r}?" if suggestion else f"expected one of {', '.join(axes)}"
    raise ConfigError.of(f"unknown axis {text!r}", where, hint)


def place_on(axis: str, text: str, option: str) -> float:
    """Parse a place such as `2000`, `20M`, `1.5e18`, `10min` or `2026-01-31T12:00` on an axis.

    Raises:
        ConfigError: the text is not a place on that axis; shows valid forms.
    """
    if (amount := _amount(axis, text)) is not None:
        return amount
    if axis == "time":
        with suppress(ValueError):
            return datetime.fromisoformat(text).timestamp()
    forms = {"time": "2026-01-31T12:00", **dict.fromkeys(_SECONDS, "90s, 10min or 1.5h")}
    raise ConfigError.of(
        f"{text!r} is not a place on the axis {axis}",
        where=option,
        hint=f"write it like {forms.get(axis, '2000, 20M or 1.5e9')}",
    )


def _amount(axis: str, text: str) -> float | None:
    match = _AMOUNT.fullmatch(text.strip())
    scales = _CLOCK if axis in _SECONDS else _SCALES
    if match is None or match[2] not in scales:
        return None
    return float(match[1].replace("_", "").replace(",", "")) * scales[match[2]]


def parse_place(text: str) -> AxisValue:
    """Parse a place such as `step=1000`, `tokens=1.5B`, `wall=10min`, or a budget (`50Mtok`).

    Raises:
        ConfigError: the text is not a place; shows valid forms.
    """
    name, equals, amount = text.partition("=")
    if not equals:
        try:
            budget = parse_budget(text)
        except ValueError:
            raise _not_a_place(text) from None
        if budget.kind == "loss":
            raise ConfigError.of(f"{text!r} is not a place", hint="use --at-loss")
        return AxisValue(_BUDGETS.get(budget.kind, budget.kind), budget.amount)
    axis = axis_named(name.strip())
    value = _amount(axis, amount)
    if value is None or value < 0:
        raise _not_a_place(text)
    return AxisValue(axis, value)


def even_places(axis: str, furthest: float) -> list[AxisValue]:
    """Return five evenly spaced places up to `furthest`; steps, samples and tokens are whole."""
    amounts = [*(furthest * number / 5 for number in range(1, 5)), furthest]
    if axis in ("step", "samples", "tokens"):
        amounts = [float(math.floor(amount)) for amount in amounts]
    return [AxisValue(axis, amount) for amount in dict.fromkeys(amounts) if amount > 0]


def values_at(x: Floats, values: Floats, places: Floats) -> Floats:
    """Interpolate a curve linearly at the places `places`.

    NaN outside the curve, or next to a NaN. Of several points at one place the last counts. Shapes:
    x and values [n], places [m], result [m].
    """
    x, values = unique(x, values)
    if not len(x):
        return np.full(len(places), np.nan)
    return np.interp(places, x, values, left=np.nan, right=np.nan)


def unique(x: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Sort the curve by `x`; of several points at one place keeps the last."""
    if len(x) > 1 and not (np.diff(x) > 0).all():
        order = np.argsort(x, kind="stable")
        x, values = x[order], values[order]
        last = np.append(np.diff(x) > 0, True)
        x, values = x[last], values[last]
    return x, values


def _not_a_place(text: str) -> ConfigError:
    return ConfigError.of(f"{text!r} is not a place in a run", hint=f"write one like {FORMS}")


@dataclass(frozen=True)
class LossReached:
    """The place at which a metric first reaches the target."""

    at: dict[str, float]
    """by axis, interpolated linearly between the two neighbouring measurements"""
    from_the_start: bool
    """the first measurement reaches it already, so it may have been reached earlier"""
    left_at_step: int | None
    """the last later step with a worse value; None: none"""
    decays_for: float = 0.0
    """the share of the run's steps that came after it, if its learning rate was falling there; 0: it was
    not, or the run ended. A run that ended there, with its decay, would have a better value."""


@dataclass(frozen=True)
class Saving:
    """How much less one group needs than another, as a share of the other's amount."""

    share: float
    """0.31: 31 % less; below 0: more"""
    spread: float | None
    """standard deviation of the ratio over pairs, as a share; None for a single pair"""
    pairs: int
    """0: the groups have no seed in common, and their means are compared"""
    left_out: int
    """pairs, or unpaired runs, that do not reach the value and do not count in the share"""


def at_loss(series: Series, target: float) -> LossReached | None:
    """Return where `series` first reaches `target`, or None; superseded points are ignored.

    A loss falls to the target, an accuracy rises to it.
    """
    curve = series.current()
    curve = curve.take(np.isfinite(curve.value))
    good = curve.value >= target if curve.better == "max" else curve.value <= target
    good_rows = np.flatnonzero(good)
    if not len(good_rows):
        return None
    first = int(good_rows[0])
    after = np.flatnonzero(~good[first:])
    share = 1.0
    if first > 0:
        before, value = curve.value[first - 1], curve.value[first]
        share = float((before - target) / (before - value))
    axes = {name: curve.axis(name) for name in PLACED_BY}
    return LossReached(
        at={
            name: float(x[first - 1] + share * (x[first] - x[first - 1]) if first else x[0])
            for name, x in axes.items()
        },
        from_the_start=first == 0,
        left_at_step=int(curve.step[first + int(after[-1])]) if len(after) else None,
    )


def decays_after(lr: Series, step: float) -> float:
    """Return the share of a run's steps after `step`, if its learning rate is falling there; else 0."""
    curve = lr.current()
    before = curve.value[curve.step <= step]
    if (
        not len(before)
        or before[-1] >= _DECAYING * before.max()
        or before.argmax() == len(before) - 1
    ):
        return 0.0
    share = 1.0 - step / float(curve.step[-1])
    return share if share > _AT_THE_END else 0.0


def saving(
    base: Mapping[object, LossReached | None], other: Mapping[object, LossReached | None], axis: str
) -> Saving | None:
    """Return what `other` saves relative to `base` along `axis`, over the keys (seeds) of both.

    The share is 1 minus the geometric mean of the ratios; None: no pair reaches the value.
    """
    other_logs, base_logs = _logs(other, axis), _logs(base, axis)
    shared_keys = [key for key in base if key in other]
    if not shared_keys:
        return _unpaired_saving(other_logs, base_logs, len(base) + len(other))
    logs = [
        other_logs[key] - base_logs[key]
        for key in shared_keys
        if key in other_logs and key in base_logs
    ]
    if not logs:
        return None
    spread = float(np.std(np.exp(logs), ddof=1)) if len(logs) > 1 else None
    return Saving(
        1 - math.exp(sum(logs) / len(logs)), spread, len(logs), len(shared_keys) - len(logs)
    )


def _logs(group: Mapping[object, LossReached | None], axis: str) -> dict[object, float]:
    return {
        key: math.log(loss_reached.at[axis])
        for key, loss_reached in group.items()
        if loss_reached is not None and loss_reached.at[axis] > 0
    }


def _unpaired_saving(
    other: Mapping[object, float], base: Mapping[object, float], runs: int
) -> Saving | None:
    """Compare geometric means; the spread is that of a ratio of independent runs, to first order."""
    sides = [np.array(list(side.values())) for side in (other, base)]
    if not all(map(len, sides)):
        return None
    ratio = math.exp(sides[0].mean() - sides[1].mean())
    repeated_sides = [side for side in sides if len(side) > 1]
    spread = (
        ratio * math.sqrt(sum(side.var(ddof=1) for side in repeated_sides))
        if repeated_sides
        else None
    )
    return Saving(1 - ratio, spread, 0, runs - sum(map(len, sides)))


def saving_text(savings_share: Saving, what: str) -> str:
    """Return a saving as text: `31% fewer FLOPs`, `5% ±3% more tokens`, `as many steps`."""
    share = savings_share.share
    spread = "" if savings_share.spread is None else f" ±{savings_share.spread:.0%}"
    seconds = "time" in what
    if round(abs(share), 2) == 0 and savings_share.spread is None:
        return f"as {'much' if seconds else 'many'} {what}"
    less = "less" if seconds else "fewer"
    return f"{abs(share):.0%}{spread} {less if share >= 0 else 'more'} {what}"
