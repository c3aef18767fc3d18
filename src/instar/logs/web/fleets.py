"""What the dashboard asks of fleets, which are a layer above it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from instar.record.rundir import RunDir


class Fleets(Protocol):
    """The fleets of a dashboard, as JSON-ready data."""

    def rows(self) -> list[dict[str, Any]]:
        """Return name, state and number of instances of each fleet."""

    def view(self, name: str) -> dict[str, Any] | None:
        """Return a fleet's instances; None if there is no fleet of this name."""

    def groups(self, keys: Collection[str]) -> Mapping[str, str]:
        """Return the names of the groups of those runs that belong to a fleet."""

    def log(self, name: str, log: str) -> Path | None:
        """Return the file of one of a fleet's logs, "INSTANCE/PROCESS"; None if there is none."""


MakeFleets = Callable[[Path, Callable[[], Mapping[str, RunDir]]], Fleets]
"""given the dashboard's folder, and a function that returns its runs by key"""
