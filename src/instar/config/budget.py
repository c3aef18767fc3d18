"""What a run has done, and the budgets that end it: parsed ("2000it", "50Mtok", "10min"), and how far they are used
up. Also number notations ("10k", "5%")."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from typing import Literal, Self, TypeVar

Kind = Literal["steps", "tokens", "samples", "epochs", "seconds", "loss"]

FORMS = "2000it or 2kit (steps), 50Mtok or 1.5Btok (tokens), 10ksamples, 3ep (epochs), 90s, 10min, 2h, loss<3.0"

MOST = 1e18

_UNITS: dict[str, tuple[Kind, int]] = {
    "it": ("steps", 1),
    "tok": ("tokens", 1),
    "samples": ("samples", 1),
    "ep": ("epochs", 1),
    "s": ("seconds", 1),
    "min": ("seconds", 60),
    "h": ("seconds", 3600),
}
_CLOCK = (("h", 3600), ("min", 60), ("s", 1))
_SCALES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_WHOLE: tuple[Kind, ...] = ("steps", "tokens", "samples")
_SPELT_OUT = {
    "it": "step steps iter iters iteration iterations update updates",
    "tok": "token tokens toks",
    "samples": "sample",
    "ep": "epoch epochs eps",
    "s": "sec secs second seconds",
    "min": "m mins minute minutes",
    "h": "hr hrs hour hours",
}
COUNTED: tuple[Kind, ...] = (*_WHOLE, "epochs")
"""Kinds that depend on counts only, which are the same on every rank."""
_NUMBER = r"(\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)"
_AMOUNT = re.compile(rf"{_NUMBER}\s*(?:([kKMBGT]?)(it|tok|samples)|(ep|s|min|h))", re.ASCII)
_LOSS = re.compile(rf"loss\s*<\s*(-?{_NUMBER})", re.ASCII)


Epochs = TypeVar("Epochs", float, Fraction)


@dataclass(frozen=True)
class Counters:
    """What a run has done since step 0."""

    step: int = 0
    """optimizer steps, including skipped ones"""
    samples: int = 0
    """the cursor: samples consumed over all ranks"""
    tokens: int = 0
    """loss weight consumed: for language, target tokens"""
    flops: float = 0.0
    """forward and backward FLOPs, counted from the architecture"""
    active_s: float = 0.0
    """seconds spent in training steps"""

    def __post_init__(self) -> None:
        if min(self.step, self.samples, self.tokens, self.flops, self.active_s) < 0:
            raise ValueError(f"totals are never negative: {self}")

    def after_step(self, samples: int, tokens: int, flops: float, seconds: float) -> Self:
        """Return the counters after one more step."""
        return replace(
            self,
            step=self.step + 1,
            samples=self.samples + samples,
            tokens=self.tokens + tokens,
            flops=self.flops + flops,
            active_s=self.active_s + seconds,
        )

    def amounts(self, epochs: Epochs) -> dict[Kind, float | Epochs]:
        """Return what is used of each kind of budget; `epochs`: passes over the data so far."""
        return {
            "steps": self.step,
            "tokens": self.tokens,
            "samples": self.samples,
            "epochs": epochs,
            "seconds": self.active_s,
        }


@dataclass(frozen=True)
class Budget:
    """An amount of one kind: steps, tokens, samples, epochs or seconds that the run may use, or a
    validation loss below which it may end.

    Raises ValueError if the amount is not finite, not positive (except a loss), or a fraction of a
    step, token or sample.
    """

    kind: Kind
    amount: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.amount):
            raise ValueError(f"a budget must be finite, got {self.amount}")
        if abs(self.amount) > MOST:
            raise ValueError(f"a budget must be at most {MOST:g}, got {self.amount:g}")
        if self.kind != "loss" and self.amount <= 0:
            raise ValueError(f"a budget must be more than nothing, got {self.amount:g}")
        if self.kind in _WHOLE and self.amount != int(self.amount):
            raise ValueError(f"{self.kind} are whole, got {self.amount:g}")

    def __str__(self) -> str:
        """Return the canonical text; `parse_budget` is its inverse."""
        if self.kind == "loss":
            return f"loss<{self.amount!r}"
        is_whole = float(self.amount).is_integer()
        amount: float | int = int(self.amount) if is_whole else self.amount
        if self.kind == "epochs":
            return f"{amount}ep"
        if self.kind == "seconds":
            unit, size = next((u, size) for u, size in _CLOCK if amount % size == 0 or u == "s")
            return f"{amount // size if size > 1 else amount}{unit}"
        if self.kind == "tokens":
            scale = next(scale for scale in ("M", "k", "") if amount % _SCALES[scale] == 0)
            return f"{amount // _SCALES[scale]}{scale}tok"
        return f"{amount}{'it' if self.kind == 'steps' else 'samples'}"


def budget_met(
    budgets: Sequence[Budget],
    counters: Counters,
    *,
    epochs: float,
    validation_loss: float | None,
    resumed_s: float = 0.0,
) -> Budget | None:
    """Return the first budget that is used up, or None; the same on every rank.

    Budgets in seconds depend on rank 0's clock, which requests the end (`run/state/sync_point.py`).
    Here only the seconds before a resume count, which all ranks know.

    Args:
        epochs: passes over the data so far.
        validation_loss: of an evaluation at this step, else None.
        resumed_s: seconds of training before this start of the run.
    """
    amounts = counters.amounts(epochs) | {"seconds": resumed_s}
    for budget in budgets:
        if budget.kind == "loss":
            if validation_loss is not None and validation_loss < budget.amount:
                return budget
        elif amounts[budget.kind] >= budget.amount:
            return budget
    return None


def fraction_used(budgets: Sequence[Budget], counters: Counters, epochs: Epochs) -> Epochs | None:
    """Return the used fraction of the counted budget nearest to its end; None without one. It is exact if
    `epochs` is: 0.1 epochs of 30 samples are 3, not 3.0000000000000004."""
    number: type[Epochs] = Fraction if isinstance(epochs, Fraction) else float
    amounts = counters.amounts(epochs)
    counted = [budget for budget in budgets if budget.kind in COUNTED]
    fractions = [number(amounts[b.kind]) / number(str(b.amount)) for b in counted]
    return max(fractions, default=None)


def eta(
    budgets: Sequence[Budget],
    counters: Counters,
    epochs: float,
    elapsed_s: float,
    foreign_amounts: Mapping[Kind, float] | None = None,
) -> float | None:
    """Return how much longer a run lasts, in the unit of `elapsed_s`, at the pace so far; None without a budget
    that allows an estimate.

    Args:
        foreign_amounts: amounts that `elapsed_s` does not include, such as steps of another tool; None: there are none.
    """
    amounts = counters.amounts(epochs)
    timed = {
        kind: amount - (foreign_amounts or {}).get(kind, 0) for kind, amount in amounts.items()
    }
    remaining = [
        elapsed_s * (budget.amount - amounts[budget.kind]) / timed[budget.kind]
        for budget in budgets
        if budget.kind != "loss" and timed[budget.kind] > 0
    ]
    return max(0.0, min(remaining)) if remaining else None


def parse_budget(text: str) -> Budget:
    """Parse a budget such as "50Mtok", "10min" or "loss<3.0".

    Raises ValueError whose message lists the forms.
    """
    loss = _LOSS.fullmatch(text.strip())
    if loss:
        return Budget("loss", float(loss[1].replace("_", "")))
    match = _AMOUNT.fullmatch(text.strip())
    if not match:
        amount = _meant(text.strip())
        forms = f"write {amount}; there are {FORMS}" if amount else f"write {FORMS}"
        raise ValueError(f"not a budget: {text[:60]!r}; {forms}")
    number, scale, unit, time_unit = match.groups()
    kind, seconds = _UNITS[unit or time_unit]
    try:
        exact = Decimal(number.replace("_", "")) * _SCALES[scale or ""] * seconds
        return Budget(kind, float(exact))
    except ArithmeticError:
        raise ValueError(f"not a budget: {text[:60]!r} is out of range") from None
    except ValueError as error:
        raise ValueError(f"not a budget: {text[:60]!r} ({error}); write {FORMS}") from None


def _meant(text: str) -> str:
    """Return the correct text of a budget with its unit spelt out or missing; else ""."""
    if re.fullmatch(_NUMBER, text, re.A):
        return f"{text}it for steps"
    for unit, names in _SPELT_OUT.items():
        words = names.replace(" ", "|")
        match = re.fullmatch(rf"{_NUMBER}\s*([kKMBGT]?)\s*(?:{words}|{unit})", text, re.I | re.A)
        if match and _AMOUNT.fullmatch(amount := f"{match[1]}{match[2]}{unit}"):
            return amount
    return ""


_PLAIN = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}
_OF_TIME = {"_s": 1, "_minutes": 60}


def meant_number(text: str, key: str) -> int | float | None:
    """Parse "0,1", "10,000", "10%", "5k", "2**5", "1024*4" or "1e-3x", and "10min" if the key ends
    in _minutes; None if the number is ambiguous."""
    text = text.strip()
    if match := re.fullmatch(r"(\d{1,3}(?:,\d{3})+)", text):
        return int(match[1].replace(",", ""))
    if match := re.fullmatch(r"([+-]?\d+),(\d+)", text):
        return float(f"{match[1]}.{match[2]}")
    if match := re.fullmatch(rf"({_PLAIN})\s*%", text):
        return _shortest(float(match[1]) / 100)
    if match := re.fullmatch(r"(\d{1,6})\s*(\*\*|\^|\*)\s*(\d{1,6})", text):
        a, sign, b = int(match[1]), match[2], int(match[3])
        return a * b if sign == "*" else a**b if b <= 63 else None
    if match := re.fullmatch(rf"({_PLAIN})\s*([kKmMbBgG]?)", text):
        return _shortest(float(match[1]) * _SUFFIXES[match[2].lower()])
    try:
        budget = parse_budget(text)
    except ValueError:
        match = re.fullmatch(rf"({_PLAIN})\s*[a-zA-Z]", text)
        return _shortest(float(match[1])) if match else None
    if budget.kind != "seconds":
        return _shortest(budget.amount)
    units = [size for ending, size in _OF_TIME.items() if key.endswith(ending)]
    return _shortest(budget.amount / units[0]) if units else None


def _shortest(number: float) -> int | float:
    return int(number) if abs(number) < 2**63 and number == int(number) else float(f"{number:.12g}")
