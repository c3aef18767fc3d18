"""Budgets as text: how much a run may spend before it ends."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

Kind = Literal["steps", "tokens", "samples", "epochs", "seconds", "loss"]

FORMS = (
    "2000it or 2kit (steps), 50Mtok or 1.5Btok (tokens), 10ksamples, 3ep (epochs), "
    "90s, 10min, 2h, loss<3.0"
)

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
_COUNTED: tuple[Kind, ...] = ("steps", "tokens", "samples")
_SPELT_OUT = {
    "it": "step steps iter iters iteration iterations update updates",
    "tok": "token tokens toks",
    "samples": "sample",
    "ep": "epoch epochs eps",
    "s": "sec secs second seconds",
    "min": "m mins minute minutes",
    "h": "hr hrs hour hours",
}
_NUMBER = r"(\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)"
_AMOUNT = re.compile(rf"{_NUMBER}\s*(?:([kKMBGT]?)(it|tok|samples)|(ep|s|min|h))", re.ASCII)
_LOSS = re.compile(rf"loss\s*<\s*(-?{_NUMBER})", re.ASCII)


@dataclass(frozen=True)
class Budget:
    """An amount of one kind: a number of steps, tokens, samples, epochs or seconds that the
    run may use, or a validation loss below which it may end.

    Raises ValueError for an amount that is not finite, not positive (except of a loss), or a
    part of a step, token or sample.
    """

    kind: Kind
    amount: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.amount):
            raise ValueError(f"a budget must be finite, got {self.amount}")
        if self.kind != "loss" and self.amount <= 0:
            raise ValueError(f"a budget must be more than nothing, got {self.amount:g}")
        if self.kind in _COUNTED and self.amount != int(self.amount):
            raise ValueError(f"{self.kind} are whole, got {self.amount:g}")

    def __str__(self) -> str:
        """The canonical text, which `parse_budget` reads back equal."""
        if self.kind == "loss":
            return f"loss<{self.amount!r}"
        whole = float(self.amount).is_integer()
        amount: float | int = int(self.amount) if whole else self.amount
        if self.kind == "epochs":
            return f"{amount}ep"
        if self.kind == "seconds":
            unit, size = next(
                (unit, size) for unit, size in _CLOCK if amount % size == 0 or unit == "s"
            )
            return f"{amount // size if size > 1 else amount}{unit}"
        if self.kind == "tokens":
            scale = next(scale for scale in ("M", "k", "") if amount % _SCALES[scale] == 0)
            return f"{amount // _SCALES[scale]}{scale}tok"
        return f"{amount}{'it' if self.kind == 'steps' else 'samples'}"


def parse_budget(text: str) -> Budget:
    """Read a budget such as "50Mtok", "10min" or "loss<3.0".

    Raises ValueError, its message listing the forms.
    """
    loss = _LOSS.fullmatch(text.strip())
    if loss:
        return Budget("loss", float(loss[1].replace("_", "")))
    match = _AMOUNT.fullmatch(text.strip())
    if not match:
        meant = _meant(text.strip())
        forms = f"write {meant}; there are {FORMS}" if meant else f"write {FORMS}"
        raise ValueError(f"not a budget: {text!r}; {forms}")
    number, scale, counted, measured = match.groups()
    kind, seconds = _UNITS[counted or measured]
    exact = Decimal(number.replace("_", "")) * _SCALES[scale or ""] * seconds
    try:
        return Budget(kind, float(exact))
    except ValueError as error:
        raise ValueError(f"not a budget: {text!r} ({error}); write {FORMS}") from None


def _meant(text: str) -> str:
    """A budget whose unit is spelt out or left out, as it is written; empty if it is none."""
    if re.fullmatch(_NUMBER, text, re.A):
        return f"{text}it for steps"
    for unit, words in _SPELT_OUT.items():
        one = "|".join(words.split())
        found = re.fullmatch(rf"{_NUMBER}\s*([kKMBGT]?)\s*(?:{one}|{unit})", text, re.I | re.A)
        if found and _AMOUNT.fullmatch(written := f"{found[1]}{found[2]}{unit}"):
            return written
    return ""
