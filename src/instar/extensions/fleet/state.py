"""The state of a fleet on disk: an append-only file of events, and what they add up to."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from instar.config.errors import ConfigError
from instar.config.files import of_bounded_depth, own_regular, read_regular
from instar.distributed.appender import Appender
from instar.extensions.fleet.engines.spawner import Exit
from instar.extensions.fleet.spec import Scalar

FLEETS = Path("fleets")
STATE_FILE = "state.jsonl"
CONTROL = "control"
SLURM = "slurm"
"""batch scripts, what hosts print, and the file of jobs"""
JOBS = "jobs.jsonl"
HOSTS = "hosts"
"""what hosts in a Ray cluster print, one file per instance, and Ray's own messages"""
FOLDERS = ("configs", CONTROL, "logs", "results", SLURM, HOSTS)
"""the folders in a fleet's, which hold nothing of anything else"""
_LARGEST_BYTES = 1 << 30

Phase = Literal["waiting", "starting", "running", "succeeded", "failed", "stopped", "pruned"]
ProcessPhase = Literal["starting", "healthy", "running", "unhealthy", "stopping", "exited"]
ENDED: tuple[Phase, ...] = ("succeeded", "failed", "stopped", "pruned")
DONE: tuple[Phase, ...] = ("succeeded", "pruned")
"""what `resume` does not run again"""


class Started(msgspec.Struct, frozen=True, tag="started", tag_field="kind"):
    """A launcher begins, or resumes."""

    time: float
    pid: int
    host: str
    boot: str
    instances: tuple[int, ...]
    """those that it runs"""


class InstanceChanged(msgspec.Struct, frozen=True, tag="instance", tag_field="kind"):
    time: float
    instance: int
    phase: Phase
    reason: str = ""
    process: str = ""
    """the one that failed"""
    host: str = ""
    """where it runs, if that is not the launcher's"""


class ProcessChanged(msgspec.Struct, frozen=True, tag="process", tag_field="kind"):
    time: float
    instance: int
    process: str
    phase: ProcessPhase
    attempt: int
    pid: int = 0
    gpus: tuple[int, ...] = ()
    ports: dict[str, int] = msgspec.field(default_factory=dict)
    status: int | None = None
    cpu_s: float = 0.0
    peak_bytes: int = 0
    reason: str = ""


class TrialDrawn(msgspec.Struct, frozen=True, tag="trial", tag_field="kind"):
    """A search has drawn the values of an instance."""

    time: float
    instance: int
    values: dict[str, Scalar]


class TrialEvaluated(msgspec.Struct, frozen=True, tag="evaluation", tag_field="kind"):
    """The run of a trial has recorded the metric of the search."""

    time: float
    instance: int
    step: int
    value: float | None
    """None: NaN or infinite"""


class Ended(msgspec.Struct, frozen=True, tag="ended", tag_field="kind"):
    """The launcher has ended, and everything that it started."""

    time: float
    code: int


FleetEvent = Started | InstanceChanged | ProcessChanged | TrialDrawn | TrialEvaluated | Ended
_decode = msgspec.json.Decoder(FleetEvent).decode


@dataclass(frozen=True)
class ProcessStatus:
    """What is known of a process of an instance."""

    phase: ProcessPhase
    attempt: int
    since: float
    pid: int = 0
    gpus: tuple[int, ...] = ()
    ports: Mapping[str, int] = field(default_factory=dict)
    status: int | None = None
    cpu_s: float = 0.0
    peak_bytes: int = 0
    reason: str = ""


@dataclass(frozen=True)
class InstanceStatus:
    """What is known of an instance."""

    phase: Phase = "waiting"
    since: float = 0.0
    began: float = 0.0
    reason: str = ""
    process: str = ""
    """the one that failed"""
    host: str = ""
    """where it runs, if that is not the launcher's"""
    processes: Mapping[str, ProcessStatus] = field(default_factory=dict)
    values: Mapping[str, Scalar] = field(default_factory=dict)
    """of a trial of a search"""
    metric: float | None = None
    """of a trial of a search: its last evaluation"""


@dataclass(frozen=True)
class FleetStatus:
    """What the events of a fleet add up to."""

    instances: Mapping[int, InstanceStatus] = field(default_factory=dict)
    start: Started | None = None
    end: Ended | None = None


def fold_events(events: Iterable[FleetEvent]) -> FleetStatus:
    """Return what the events add up to."""
    instances: dict[int, InstanceStatus] = {}
    start: Started | None = None
    end: Ended | None = None
    for event in events:
        match event:
            case Started():
                start, end = event, None
            case Ended():
                end = event
            case _:
                before = instances.get(event.instance, InstanceStatus())
                instances[event.instance] = _changed(before, event)
    return FleetStatus(instances, start, end)


def _changed(
    before: InstanceStatus, event: InstanceChanged | ProcessChanged | TrialDrawn | TrialEvaluated
) -> InstanceStatus:
    match event:
        case TrialDrawn():
            return replace(before, values=event.values)
        case TrialEvaluated():
            return replace(before, metric=event.value)
        case InstanceChanged():
            return replace(
                before,
                phase=event.phase,
                since=event.time,
                began=event.time if event.phase == "starting" else before.began,
                reason=event.reason,
                process=event.process,
                host=event.host or before.host,
            )
    was = before.processes.get(event.process)
    # what only the first event of an attempt says
    first = was if was is not None and was.attempt == event.attempt else None
    status = ProcessStatus(
        event.phase,
        event.attempt,
        event.time,
        event.pid or (first.pid if first else 0),
        event.gpus or (first.gpus if first else ()),
        event.ports or (first.ports if first else {}),
        event.status,
        event.cpu_s,
        event.peak_bytes,
        event.reason,
    )
    return replace(before, processes={**before.processes, event.process: status})


def part_name(name: str, part: int | None) -> str:
    """Return the name of a part's file: "state.3.jsonl" is that of instance 3, which another host
    runs; None: the fleet's own."""
    stem, dot, suffix = name.partition(".")
    return name if part is None else f"{stem}.{part}{dot}{suffix}"


def read_fleet_events(folder: Path) -> list[FleetEvent]:
    """Read a fleet's events and those of its parts by time; an incomplete or damaged line is skipped.

    Raises:
        ConfigError: there is no fleet in this folder.
    """
    try:
        events = read_file(folder / STATE_FILE)
    except OSError as error:
        hint = f"fleets are in {FLEETS}" if error.filename else ""
        raise ConfigError.of("no fleet was started here", where=str(folder), hint=hint) from None
    parts = sorted(folder.glob(STATE_FILE.replace(".", ".[0-9]*.")))
    for path in parts:
        with suppress(OSError):
            events += read_file(path)
    return sorted(events, key=lambda event: event.time) if parts else events


def read_file(path: Path, offset: int = 0) -> list[FleetEvent]:
    """Read the events of one file, from a byte on; raises OSError."""
    events = []
    for line in read_regular(path, _LARGEST_BYTES)[offset:].splitlines():
        try:
            events.append(_decode(of_bounded_depth(line)))
        except (msgspec.DecodeError, ValueError):
            continue
    return events


class StateLog:
    """Appends events; lines that a full disk refuses are held in memory until it accepts them."""

    def __init__(self, folder: Path, part: int | None = None) -> None:
        """`part`: the instance, if this is its host's file."""
        descriptor = own_regular(folder / part_name(STATE_FILE, part), append=True)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            size += os.write(descriptor, b"\n")  # a line that a crash has cut
        self._file = Appender(descriptor, size)

    def write(self, event: FleetEvent, *, durable: bool = False) -> None:
        """Append an event; `durable`: and wait until it is on disk."""
        self._file.append(msgspec.json.encode(event) + b"\n")
        if durable:
            self._file.sync()

    @property
    def refused(self) -> str:
        """Why lines are held in memory; empty if none are."""
        error = self._file.error
        return "" if self._file.refused_since is None or error is None else str(error.strerror)

    def close(self) -> None:
        self._file.close(5.0)


def boot_id() -> str:
    """Return the id of this start of the kernel; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def now() -> float:
    return time.time()


def result_path(folder: Path, instance: str, process: str, attempt: int) -> Path:
    """Return the file that receives a command's exit status."""
    return folder / "results" / instance / f"{process}.{attempt}.json"


def process_log_path(folder: Path, instance: str, process: str) -> Path:
    """Return the file that receives a process's output."""
    return folder / "logs" / instance / f"{process}.log"


def read_result(path: Path) -> Exit | None:
    """Read how a command ended; None if that is unknown."""
    try:
        return Exit.from_json(json.loads(of_bounded_depth(read_regular(path))))
    except (OSError, ValueError):
        return None


def as_json(status: FleetStatus) -> dict[str, Any]:
    """Return the status as plain data."""
    return {
        "instances": {str(index): asdict(instance) for index, instance in status.instances.items()},
        "started": None if status.start is None else msgspec.to_builtins(status.start),
        "ended": None if status.end is None else msgspec.to_builtins(status.end),
    }
