"""What every tracker is: something that takes a run's events into another tool."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from instar.checkpoint.disk import replace_file
from instar.record.events import Event, RunFinished, RunStarted, Stop

Outcome = Literal["finished", "stopped", "crashed"]
"""How a run ended: by itself, by a signal so that it can go on, or otherwise."""


def outcome(before: Outcome, event: Event) -> Outcome:
    """How a run ends if it ends with this event; a start has not ended well until it says so."""
    if isinstance(event, RunStarted):
        return "crashed"
    if isinstance(event, Stop) and event.resumable:
        return "stopped"
    if isinstance(event, Stop | RunFinished) and before != "stopped":
        return "finished"
    return before


Scalar = str | int | float | bool | None

KEPT_BACK = "record."
"""Keys that no other tool is told: folders, trackers, and addresses that may hold a secret."""


class Tracker(Protocol):
    """One tool. All of it is called in one thread, which is not training's; any of it may raise."""

    name: str
    where: str
    """where its run can be found, once it has started"""

    def start(self, run: TrackedRun) -> None:
        """Open the tool's run: a new one, or the one that this run had before it was resumed."""
        ...

    def take(self, event: Event) -> None:
        """Take one event; it has its time."""
        ...

    def flush(self) -> None:
        """What was taken can be read from here on, though this process be killed."""
        ...

    def finish(self, outcome: Outcome) -> None: ...


class Ids:
    """By which ids other tools know a run; kept in its folder, so that it goes on there.

    Without a file nothing is remembered: every replay is a run of its own.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()

    def get(self, tool: str, where: str) -> str | None:
        """The id in the tool's project or store `where`; None: it is not known there."""
        known = self._read().get(tool)
        if isinstance(known, dict) and known.get("where") == where:
            return str(known["id"]) if known.get("id") else None
        return None

    def keep(self, tool: str, where: str, value: str) -> None:
        if self._path is None:
            return
        with self._lock:
            known = self._read() | {tool: {"id": value, "where": where}}
            replace_file(self._path, json.dumps(known, indent=2).encode())

    def _read(self) -> dict[str, Any]:
        try:
            known = json.loads(self._path.read_bytes()) if self._path else {}
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker meets it."""

    folder: Path
    config: Mapping[str, Scalar]
    """by dotted keys"""
    ids: Ids

    @property
    def name(self) -> str:
        """`grow-r7f3a`"""
        return self.folder.absolute().name

    @classmethod
    def live(cls, folder: Path, config: Mapping[str, Any]) -> TrackedRun:
        """One that is training; `config` is nested."""
        return cls(folder, flat(config), Ids(folder / "trackers.json"))

    @classmethod
    def replayed(cls, folder: Path, config: Mapping[str, Any]) -> TrackedRun:
        """One that is read from its record."""
        return cls(folder, flat(config), Ids(None))


def flat(config: Mapping[str, Any]) -> dict[str, Scalar]:
    """A nested config under dotted keys, lists as JSON, without what is kept back."""
    return {key: value for key, value in _flat(config, "") if not key.startswith(KEPT_BACK)}


def _flat(value: Mapping[str, Any], above: str) -> Iterator[tuple[str, Scalar]]:
    for name, inner in value.items():
        key = f"{above}{name}"
        if isinstance(inner, Mapping) and inner:
            yield from _flat(inner, f"{key}.")
        elif isinstance(inner, str | int | float | bool | None):
            yield key, inner
        else:
            yield key, json.dumps(inner, default=str)
