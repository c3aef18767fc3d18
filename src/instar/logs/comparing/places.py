"""Places at which runs are compared: so many steps, tokens, FLOPs or seconds into a run."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

import numpy as np

from instar.config.budget import parse_budget
from instar.config.errors import ConfigError
from instar.record.amounts import flops_text
from instar.record.lines import duration, si, unit_text

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

PLACED_BY = ("step", "samples", "tokens", "epoch", "flops", "wall_s", "active_s")
"""The axes that start at 0 with every run."""

_NAMES = {
    "steps": "step",
    "it": "step",
    "iteration": "step",
    "sample": "samples",
    "token": "tokens",
    "epochs": "epoch",
    "wall": "wall_s",
    "active": "active_s",
    "time": "wall_s",
    "seconds": "wall_s",
}
_SCALES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12, "P": 1e15}
_CLOCK = {"": 1.0, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_AMOUNT = re.compile(r"(\d[\d_,]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)")
_BUDGETS = {"steps": "step", "epochs": "epoch", "seconds": "wall_s"}
FORMS = "step=1000, tokens=1.5B, flops=1e15, wall=10min, active=90s, epoch=2, 50Mtok"


@dataclass(frozen=True)
class Place:
    """So far into a run."""

    axis: str
    """one of `PLACED_BY`"""
    amount: float

    def text(self, unit: str = "token") -> str:
        """`step 1,000`, `1.50B tok`, `1.0e15 FLOPs`, `10m00 active`."""
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
                return f"{flops_text(self.amount)} FLOPs"
        return f"{duration(self.amount)} {'active' if self.axis == 'active_s' else 'wall'}"


def axis_named(text: str) -> str:
    """One of `PLACED_BY`, also by other names for it.

    Raises:
        ConfigError: it is none; suggests one.
    """
    name = _NAMES.get(text.lower(), text.lower())
    if name in PLACED_BY:
        return name
    near = get_close_matches(name, [*PLACED_BY, *_NAMES], n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(PLACED_BY)}"
    raise ConfigError.one(f"there is no axis {text!r}", hint=hint)


def parse_place(text: str) -> Place:
    """Read a place such as `step=1000`, `tokens=1.5B`, `wall=10min`, or a budget (`50Mtok`).

    Raises:
        ConfigError: it is none; names the forms.
    """
    name, equals, amount = text.partition("=")
    if not equals:
        try:
            budget = parse_budget(text)
        except ValueError:
            raise _no_place(text) from None
        if budget.kind == "loss":
            raise ConfigError.one(f"{text!r} is no place", hint="say it with --at-loss")
        return Place(_BUDGETS.get(budget.kind, budget.kind), budget.amount)
    axis = axis_named(name.strip())
    match = _AMOUNT.fullmatch(amount.strip())
    scales = _CLOCK if axis in ("wall_s", "active_s") else _SCALES
    if match is None or match[2] not in scales:
        raise _no_place(text)
    return Place(axis, float(match[1].replace("_", "").replace(",", "")) * scales[match[2]])


def even_places(axis: str, furthest: float, count: int = 5) -> list[Place]:
    """A handful of places up to the furthest one, evenly apart; steps and samples are whole."""
    amounts = [*(furthest * number / count for number in range(1, count)), furthest]
    if axis in ("step", "samples", "tokens"):
        amounts = [float(math.floor(amount)) for amount in amounts]
    return [Place(axis, amount) for amount in dict.fromkeys(amounts) if amount > 0]


def values_at(x: Floats, values: Floats, wanted: Floats) -> Floats:
    """A curve's values at the places `wanted`, linear between its neighbouring points.

    NaN where the curve has no point on one side, or none that is a number. Of several points at
    one place the last counts. Shapes: x and values [n], wanted [m], result [m].
    """
    x, values = unique(x, values)
    found = np.full(len(wanted), np.nan)
    if not len(x):
        return found
    right = np.searchsorted(x, wanted, side="left")
    inside = right < len(x)
    exact = inside.copy()
    exact[inside] = x[right[inside]] == wanted[inside]
    found[exact] = values[right[exact]]
    between = inside & ~exact & (right > 0)
    after = right[between]
    share = (wanted[between] - x[after - 1]) / (x[after] - x[after - 1])
    with np.errstate(invalid="ignore"):
        found[between] = values[after - 1] + share * (values[after] - values[after - 1])
    return found


def unique(x: Floats, values: Floats) -> tuple[Floats, Floats]:
    """The curve by rising `x`, of several points at one place the last."""
    if len(x) > 1 and not (np.diff(x) > 0).all():
        order = np.argsort(x, kind="stable")
        x, values = x[order], values[order]
        last = np.append(np.diff(x) > 0, True)
        x, values = x[last], values[last]
    return x, values


def _no_place(text: str) -> ConfigError:
    return ConfigError.one(f"{text!r} is no place in a run", hint=f"write one like {FORMS}")
