"""What is wrong with keys that do not fit each other."""

from __future__ import annotations

from typing import NamedTuple


class Clash(NamedTuple):
    """Keys that do not fit each other, the likeliest culprit first."""

    keys: tuple[str, ...]
    message: str
    hint: str = ""
