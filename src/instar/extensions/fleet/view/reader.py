"""Reads what is shown of a fleet, and the logs of its processes; what has not changed is not read again."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from instar.config.budget import Budget, eta, parse_budget
from instar.config.errors import ConfigError, InstarError, visible
from instar.extensions.fleet.engines import slurm
from instar.extensions.fleet.engines.remote import HostStatus
from instar.extensions.fleet.folder import describe_fleet, seen_launcher
from instar.extensions.fleet.plan import Instance, instances_of
from instar.extensions.fleet.spec import Search
from instar.extensions.fleet.state import FleetStatus, fold_events, read_fleet_events
from instar.extensions.fleet.view.rows import FleetView, RunProgress, fleet_view, group_name
from instar.logs.query.bases import notes_on_bases, recorded_basis
from instar.logs.query.config import config_lines
from instar.logs.query.tail import LineFollower, last_lines
from instar.logs.read.reader_cache import CachedSummary, cached_summary
from instar.record.events import Failed, RunFinished, RunStarted, Stop
from instar.record.rundir import RunDir

MAX_BYTES = 1 << 30
POLL_S = 0.2
SHARE = 0.01
"""largest share of the time spent on looking for new lines"""
LIST_S = 1.0
"""time between two looks for new logs"""
MAX_LOG_BYTES = 1 << 20
"""read of one log at a time"""
MAX_TAIL_BYTES = 1 << 22
"""in which the last lines of a log are looked for"""
MAX_LINE_BYTES = 1 << 14
"""shown of the end of a line"""
Stamp = tuple[tuple[str, int, int, int], ...]
"""name, size, time of the last change and inode of each file"""
_BUDGET = re.compile(r"[^\s\[\],'\"]+")


@dataclass
class ProgressReader:
    """Reads the progress of one run."""

    run: RunDir
    _stamp: tuple[int, int, int] = (0, 0, 0)
    _segments: int = -1
    _budgets: tuple[Budget, ...] = ()
    _progress: RunProgress | None = field(default=None)

    def read(self) -> RunProgress | None:
        """Return the progress; None if there is no record."""
        try:
            status = self.run.events.stat()
        except OSError:
            return None
        stamp = (status.st_size, status.st_mtime_ns, status.st_ino)
        if stamp != self._stamp:
            summary = cached_summary(self.run)
            if summary.segments != self._segments:  # a resume may have changed them
                self._budgets, self._segments = tuple(budgets_of(self.run)), summary.segments
            self._stamp, self._progress = stamp, progress_of(summary, self._budgets)
        return self._progress


def progress_of(summary: CachedSummary, budgets: Sequence[Budget]) -> RunProgress:
    """Return the progress of a run that ends when the first of its budgets is used up."""
    return RunProgress(summary.step, summary.loss, summary.operations, _ends_at(summary, budgets))


def budgets_of(run: RunDir) -> Iterator[Budget]:
    """Yield the budgets of a run's config (`train.until`), as far as they can be read."""
    text = " ".join(line.value for line in config_lines(run) if line.key == "train.until")
    for word in _BUDGET.findall(text):
        with suppress(ValueError):
            yield parse_budget(word)


def _ends_at(summary: CachedSummary, budgets: Sequence[Budget]) -> float | None:
    start = next((event for event in summary.events if isinstance(event, RunStarted)), None)
    last = summary.last
    if start is None or last is None or last.step <= start.step:
        return None
    if any(isinstance(event, Stop | RunFinished | Failed) for event in summary.events):
        return None
    steps = eta(budgets, last.counters, last.epoch, float(last.step))
    if steps is None:
        return None
    seconds_per_step = (last.time - start.time) / (last.step - start.step)
    return last.time + steps * seconds_per_step


@dataclass
class FleetReader:
    """Reads a fleet's folder, whosever it is: nothing that it names is run."""

    folder: Path
    run_of: Callable[[Instance], RunDir | None] | None = None
    """returns an instance's run, if it may be read; None: the run in its folder, as it is written"""
    most_bytes: int = MAX_BYTES
    """of its file and of what is recorded"""
    status: FleetStatus = field(default_factory=FleetStatus)
    """what its events add up to, as far as they were read"""
    plan_instances: Mapping[int, Instance] = field(default_factory=dict)
    services: tuple[str, ...] = ()
    search: Search | None = None
    _stamp: Stamp = ()
    _file_stamp: Stamp = ()
    _base: Path = Path()
    _runs: dict[int, ProgressReader] = field(default_factory=dict)
    _arrays: slurm.SlurmArrays | None = None
    _compared: tuple[int, ...] = ()
    """the best trial and the others, when it was last seen which of them can be compared"""
    _differing: tuple[str, ...] = ()

    def read(self, *, runs: bool = True) -> FleetView:
        """Return the state of now.

        Args:
            runs: read the records of the instances' runs too.

        Raises:
            ConfigError: there is no fleet in this folder, or its record is too large.
        """
        pid = seen_launcher(self.folder)  # first: a launcher that has ended has written all
        self._read_file()
        if (stamp := stamp_of_files(self.folder, "state")) != self._stamp:
            self._check(stamp)
            self.status, self._stamp = fold_events(read_fleet_events(self.folder)), stamp
        view = fleet_view(
            self.folder.name,
            self.status,
            pid,
            self.plan_instances.values(),
            self.services,
            self._progress() if runs else {},
            self.search,
            self._hosts(),
        )
        if view.best is None:
            return view
        return replace(view, best=replace(view.best, notes=self._notes(view.best.instance)))

    def _read_file(self) -> None:
        stamp = stamp_of_files(self.folder, "fleet.json")
        if stamp == self._file_stamp:
            return
        self._file_stamp, self.plan_instances, self._runs = stamp, {}, {}
        with suppress(ConfigError, ValueError):
            self._check(stamp)
            spec, cwd = describe_fleet(self.folder)
            self.plan_instances = {instance.index: instance for instance in instances_of(spec)}
            self.services, self.search = tuple(spec.services), spec.search
            self._base = Path() if cwd == Path.cwd() else cwd

    def _check(self, stamp: Stamp) -> None:
        if sum(size for _, size, *_ in stamp) > self.most_bytes:
            raise ConfigError.of(
                f"larger than {self.most_bytes >> 20} MiB", where=str(self.folder / stamp[0][0])
            )

    def _hosts(self) -> Mapping[int, HostStatus]:
        self._arrays = self._arrays or slurm.find_job_arrays(self.folder)
        with suppress(InstarError):  # this machine has no SLURM
            return self._arrays.hosts() if self._arrays else {}
        return {}

    def _progress(self) -> dict[int, RunProgress]:
        by_index = {}
        for index in self.status.instances.keys() & self.plan_instances.keys():
            run = (self.run_of or self._as_written)(self.plan_instances[index])
            if run is not None and (index not in self._runs or self._runs[index].run != run):
                self._runs[index] = ProgressReader(run)
            if run is not None and (progress := self._runs[index].read()) is not None:
                by_index[index] = progress
        return by_index

    def _notes(self, best: int) -> tuple[str, ...]:
        """Return which trials that have succeeded were not evaluated on what the best one was."""
        states = self.status.instances.items()
        other_trials = {n for n, state in states if state.phase == "succeeded"} - {best}
        trials = (best, *sorted(other_trials))
        if self._compared != trials:
            bases = {}
            for index in trials:
                trial = self.plan_instances.get(index)
                run = trial and (self.run_of or self._as_written)(trial)
                if trial and run:
                    bases[trial.run_name] = recorded_basis(run)
            self._compared, self._differing = trials, tuple(notes_on_bases(bases))
        return self._differing

    def _as_written(self, instance: Instance) -> RunDir:
        return RunDir(self._base / instance.output_dir)


def stamp_of_files(folder: Path, prefix: str) -> Stamp:
    """Return a stamp that changes when one of the files with this prefix does."""
    stamps = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(prefix):
                status = entry.stat(follow_symlinks=False)
                stamps.append((entry.name, status.st_size, status.st_mtime_ns, status.st_ino))
    return tuple(sorted(stamps))


def fleet_runs(folder: Path) -> dict[RunDir, str]:
    """Return the runs of a fleet's instances, each with its group.

    Raises:
        ConfigError: there is no run yet, or the fleet's file is damaged.
    """
    spec, cwd = describe_fleet(folder)
    base = Path() if cwd == Path.cwd() else cwd
    statuses = fold_events(read_fleet_events(folder)).instances
    runs: dict[RunDir, str] = {}
    try:
        for instance in instances_of(spec):
            run = RunDir(base / instance.output_dir)
            if run.holds_run():
                runs[run] = group_name(spec.name, instance, statuses.get(instance.index))
    except ValueError as error:
        raise ConfigError.of(f"cannot be expanded: {error}", where=str(folder)) from None
    if not runs:
        raise ConfigError.of("no instance of this fleet has a run yet", where=str(folder))
    return runs


@dataclass(frozen=True)
class ProcessLog:
    """A log: the instance's name, the process's, and its file."""

    instance: str
    process: str
    path: Path


def process_logs(folder: Path) -> list[ProcessLog]:
    """Return the logs of a fleet, by instance and process."""
    paths = sorted((folder / "logs").glob("*/*.log"))
    return [ProcessLog(path.parent.name, path.stem, path) for path in paths]


def tail_logs(
    folder: Path, is_selected: Callable[[ProcessLog], bool], count: int, *, follow: bool
) -> Iterator[tuple[ProcessLog, str]]:
    """Yield the last `count` lines of each wanted log; with `follow`, also lines that are appended,
    until the fleet has ended.

    Raises:
        OSError: a log cannot be read.
    """
    logs: dict[ProcessLog, LineFollower] = {}
    for log in filter(is_selected, process_logs(folder)):
        lines, end = last_lines(log.path, count, MAX_TAIL_BYTES)
        logs[log] = LineFollower(log.path, end)
        yield from _visible_lines(log, lines)
    listed_at = time.monotonic()
    runs = True
    while runs:
        began = time.monotonic()
        runs = follow and seen_launcher(folder) is not None  # first: then all is written
        if began - listed_at >= LIST_S or not runs:
            listed_at = began
            for log in filter(is_selected, process_logs(folder) if follow else ()):
                logs.setdefault(log, LineFollower(log.path))
        is_announced = False
        for log, follower in logs.items():
            while lines := follower.lines(MAX_LOG_BYTES, partial=not runs):
                is_announced = True
                yield from _visible_lines(log, lines)
        taken_s = time.monotonic() - began
        if runs and not is_announced:
            time.sleep(max(POLL_S, taken_s / SHARE))


def _visible_lines(log: ProcessLog, lines: list[bytes]) -> Iterator[tuple[ProcessLog, str]]:
    for line in lines:
        # of a progress bar that returns to the beginning of its line, only its last state
        last = line.rstrip(b"\r").rpartition(b"\r")[2]
        yield log, visible(last[-MAX_LINE_BYTES:].decode("utf-8", "replace"))
