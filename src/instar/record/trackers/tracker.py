"""What a tracker is, and events as it needs them: measurements, totals and notes; the trackers of a config, and
checks whether what they and alerts need is installed."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

from instar.config.errors import ConfigProblem
from instar.config.files import of_bounded_depth, read_regular
from instar.config.origins import redacted_value
from instar.config.sections import AlertsConfig, RecordConfig, TrackersConfig
from instar.extensions import load_target
from instar.record.atomic import replace_file
from instar.record.events import (
    AXES,
    Alert,
    AnalysisEvent,
    Asked,
    Event,
    Failed,
    ImageEvent,
    OperationEvent,
    Placed,
    RunFinished,
    RunStarted,
    SampleText,
    Saved,
    Skip,
    Stop,
    TableEvent,
    Warn,
    metrics,
)
from instar.record.format import asked_text, operation_lines, saved_line
from instar.record.trackers import TRACKERS

Outcome = Literal["finished", "stopped", "crashed"]
"""How a run ended: by itself, resumable by a signal, or otherwise."""
Scalar = str | int | float | bool | None
WITHHELD = "record."
"""Config keys that no tracker receives, such as addresses that may contain secrets."""
_TOTALS = ("loss", "best_loss", "best_step", "tokens_per_s", "step", *AXES)
Level = Literal["info", "warn", "error"]


def outcome(before: Outcome, event: Event) -> Outcome:
    """Return the outcome of a run whose last event is `event`."""
    if isinstance(event, RunStarted):
        return "crashed"
    if isinstance(event, Stop) and event.resumable:
        return "stopped"
    if isinstance(event, Stop | RunFinished) and before != "stopped":
        return "finished"
    return before


class Tracker(Protocol):
    """One tool. A single thread, not that of training, calls all methods; any may raise."""

    name: str
    where: str = ""
    """where the tool stores the run, once it has started"""
    secrets: tuple[str, ...] = ()
    """addresses that its errors may repeat"""

    def start(self, run: TrackedRun) -> None:
        """Open a new run of the tool, or the one of this run before it was resumed."""
        ...

    def take(self, event: Event) -> None:
        """Take one event, with its time."""
        ...

    def flush(self) -> None:
        """Write the events taken so far, so that they survive this process."""
        ...

    def finish(self, outcome: Outcome) -> None: ...


class Ids:
    """Ids of a run in other tools, stored in its folder so that a resumed run continues there.

    Without a path nothing is stored: every replay is a new run.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()

    def get(self, tool: str, where: str) -> str | None:
        """Return the id in the tool's project or store `where`; None if it is unknown."""
        entry = self._read().get(tool)
        if isinstance(entry, dict) and entry.get("where") == where:
            return str(entry["id"]) if entry.get("id") else None
        return None

    def keep(self, tool: str, where: str, value: str) -> None:
        if self._path is None:
            return
        with self._lock:
            ids = self._read() | {tool: {"id": value, "where": where}}
            replace_file(self._path, json.dumps(ids, indent=2).encode())

    def _read(self) -> dict[str, Any]:
        try:
            ids = json.loads(of_bounded_depth(read_regular(self._path))) if self._path else {}
        except (OSError, ValueError):
            return {}
        return ids if isinstance(ids, dict) else {}


@dataclass(frozen=True)
class TrackedRun:
    """A run as trackers receive it."""

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
        """Return a run that is training; `config` is nested."""
        return cls(folder, flat_config(config), Ids(folder / "trackers.json"))

    @classmethod
    def from_record(cls, folder: Path, config: Mapping[str, Any]) -> TrackedRun:
        """Return a run that is read from its record."""
        return cls(folder, flat_config(config), Ids(None))


def flat_config(config: Mapping[str, Any]) -> dict[str, Scalar]:
    """Return a nested config with dotted keys, lists as JSON, without `WITHHELD` and secrets."""
    return {
        key: redacted_value(key, value)
        for key, value in _flat(config, "")
        if not key.startswith(WITHHELD)
    }


def _flat(value: Mapping[str, Any], above: str) -> Iterator[tuple[str, Scalar]]:
    for name, inner in value.items():
        key = f"{above}{name}"
        if isinstance(inner, Mapping) and inner:
            yield from _flat(inner, f"{key}.")
        elif isinstance(inner, str | int | float | bool | None):
            yield key, inner
        else:
            yield key, json.dumps(inner, default=str)


@dataclass(frozen=True)
class Note:
    """An event other than a measurement, as text."""

    kind: str
    """operation, checkpoint, alert, …"""
    step: int
    title: str
    text: str
    level: Level = "info"


def metrics_of_event(event: Event) -> dict[str, float]:
    """Return the metrics of an event and its axes other than the step (`at/tokens`, …), for tools
    whose only axis is the step; empty if it has no metrics."""
    if not (isinstance(event, Placed) and (values := metrics(event))):
        return {}
    return values | {f"at/{axis}": getattr(event, axis) for axis in AXES}


def totals(event: RunFinished) -> dict[str, float]:
    """Return the final values of a run."""
    values = ((name, getattr(event, name)) for name in _TOTALS)
    return {name: value for name, value in values if value is not None}


def media_key(event: ImageEvent | TableEvent) -> str:
    """Return the name of an image or a table; tools make paths of it, so it has no dots."""
    return re.sub(r"[^\w/-]", "_", f"{event.split}/{event.name}").strip("/")


def event_note(event: Event) -> Note | None:
    """Return the note of an event; None if it has none."""
    match event:
        case RunStarted(resumed_from=str(name), step=step):
            return Note("resume", step, "resume", f"resumed from {name}, step {step:,}")
        case OperationEvent(step=step, verb=verb, name=name):
            text = "\n".join(line.strip() for line in operation_lines(event))
            return Note("operation", step, f"{verb} {name}", text)
        case Asked(step=step, operation=operation):
            return Note("asked", step, operation, asked_text(event).strip())
        case Saved(step=step):
            return Note("checkpoint", step, "checkpoint", saved_line(event).strip())
        case Alert(step=step, name=name, message=message):
            return Note("alert", step, name, message, "warn")
        case AnalysisEvent(step=step, suggestions=suggestions) if suggestions:
            return Note("analysis", step, "analysis", "\n".join(suggestions))
        case SampleText(step=step, prompt=prompt, text=text):
            return Note("sample", step, "sample", f"{prompt}{text}")
        case Skip(step=step, reason=reason):
            return Note("skip", step, "update skipped", reason, "warn")
        case Warn(step=step, message=message):
            return Note("warning", step or 0, "warning", message, "warn")
        case Failed(step=step, rank=rank, message=message):
            return Note("failed", step or 0, f"rank {rank} failed", message, "error")
        case Stop(step=step, reason=reason):
            return Note("stop", step, "stop", reason)
    return None


def configured_trackers(config: TrackersConfig) -> list[Tracker]:
    """Return the configured trackers; their packages are imported when they start."""
    sections = {name: getattr(config, name) for name in TRACKERS}
    return [
        load_target(TRACKERS[name].target)(section)
        for name, section in sections.items()
        if section is not None
    ]


def missing_libraries(config: RecordConfig) -> list[ConfigProblem]:
    """Return problems of `record.trackers` and `record.alerts`: missing packages and programs."""
    return [*_missing_trackers(config.trackers), *_missing_alerts(config.alerts)]


def _missing_trackers(config: TrackersConfig) -> Iterator[ConfigProblem]:
    for name, (_, package) in TRACKERS.items():
        if package and getattr(config, name) is not None and find_spec(package) is None:
            yield ConfigProblem(
                (f"record.trackers.{name}",),
                f"record.trackers.{name} needs the library `{package}`, which is not installed",
                f"install the extra: pip install 'instar[{package}]', or leave it out",
            )
    uri = config.mlflow.uri if config.mlflow else None
    if uri and _is_database(uri) and find_spec("sqlalchemy") is None:
        yield ConfigProblem(
            ("record.trackers.mlflow",),
            f"record.trackers.mlflow.uri: {uri.partition(':')[0]} needs the library `sqlalchemy`, "
            "which mlflow-skinny does not bring",
            "pip install sqlalchemy alembic, or give a folder or the address of a server",
        )


def _is_database(uri: str) -> bool:
    return uri.partition(":")[0].partition("+")[0] in ("sqlite", "postgresql", "mysql", "mssql")


def _missing_alerts(config: AlertsConfig) -> Iterator[ConfigProblem]:
    try:
        argv = config.argv
    except ValueError as error:
        yield ConfigProblem(
            ("record.alerts.command",),
            f"record.alerts.command cannot be taken apart into words: {str(error).lower()}",
            "give it as a list",
        )
    else:
        if argv and shutil.which(argv[0]) is None:
            yield ConfigProblem(
                ("record.alerts.command",),
                f"record.alerts.command: there is no program '{argv[0]}' here",
                "give its path; a shell's own words need: [sh, -c, …]",
            )
