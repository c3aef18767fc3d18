"""Which number was meant by text that is none in YAML."""

from __future__ import annotations

import re

from instar.config.budget import parse_budget

_PLAIN = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
_SCALES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}
_OF_TIME = {"_s": 1, "_minutes": 60}


def meant_number(text: str, key: str) -> int | float | None:
    """The number in "0,1", "10,000", "10%", "5k", "2**5", "1024*4", "1e-3x", or in "10min" where the
    key ends in _minutes; None where it is not clear."""
    text = text.strip()
    if found := re.fullmatch(r"(\d{1,3}(?:,\d{3})+)", text):
        return int(found[1].replace(",", ""))
    if found := re.fullmatch(r"([+-]?\d+),(\d+)", text):
        return float(f"{found[1]}.{found[2]}")
    if found := re.fullmatch(rf"({_PLAIN})\s*%", text):
        return _tidy(float(found[1]) / 100)
    if found := re.fullmatch(r"(\d{1,6})\s*(\*\*|\^|\*)\s*(\d{1,6})", text):
        a, sign, b = int(found[1]), found[2], int(found[3])
        return a * b if sign == "*" else a**b if b <= 63 else None
    if found := re.fullmatch(rf"({_PLAIN})\s*([kKmMbBgG]?)", text):
        return _tidy(float(found[1]) * _SCALES[found[2].lower()])
    try:
        budget = parse_budget(text)
    except ValueError:
        found = re.fullmatch(rf"({_PLAIN})\s*[a-zA-Z]", text)
        return _tidy(float(found[1])) if found else None
    if budget.kind != "seconds":
        return _tidy(budget.amount)
    units = [size for ending, size in _OF_TIME.items() if key.endswith(ending)]
    return _tidy(budget.amount / units[0]) if units else None


def _tidy(number: float) -> int | float:
    return int(number) if abs(number) < 2**63 and number == int(number) else float(f"{number:.12g}")
