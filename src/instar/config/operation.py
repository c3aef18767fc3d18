"""An operation: one change of a run, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Operation:
    """What is done, with which value, and how; all of it JSON values.

    Whoever makes the same operation of the same thing gets the same: nothing that only decides
    *when* it is made belongs here.
    """

    name: str
    value: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
