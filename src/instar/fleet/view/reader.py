"""Reads what is shown of a fleet; what has not changed is not read again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from instar.config.errors import ConfigError
from instar.fleet.folder import describe
from instar.fleet.launcher import launcher_pid
from instar.fleet.plan import Instance, instances_of
from instar.fleet.spec import Search
from instar.fleet.state import FleetStatus, fold, read_events
from instar.fleet.view.rows import FleetView, fleet_view
from instar.logs.query.progress import ProgressReader, RunProgress
from instar.record.rundir import RunDir

Stamp = tuple[tuple[str, int, int, int], ...]
"""name, size, time of the last change and inode of each file"""


@dataclass
class FleetReader:
    """Reads a fleet's folder, whosever it is: nothing that it names is run."""

    folder: Path
    with_runs: bool = True
    """read the records of the instances' runs too"""
    found: FleetStatus = field(default_factory=FleetStatus)
    """what its events add up to, as far as they were read"""
    planned: tuple[Instance, ...] = ()
    services: tuple[str, ...] = ()
    search: Search | None = None
    _stamp: Stamp = ()
    _file_stamp: Stamp = ()
    _runs: Mapping[int, ProgressReader] = field(default_factory=dict)

    def read(self) -> FleetView:
        """Return the state of now.

        Raises:
            ConfigError: there is no fleet in this folder.
        """
        pid = launcher_pid(self.folder)  # first: a launcher that has ended has written all
        self._read_file()
        if (stamp := stamp_of(self.folder, "state")) != self._stamp:
            self.found, self._stamp = fold(read_events(self.folder)), stamp
        progress = self._progress()
        return fleet_view(
            self.folder.name, self.found, pid, self.planned, self.services, progress, self.search
        )

    def _read_file(self) -> None:
        stamp = stamp_of(self.folder, "fleet.json")
        if stamp == self._file_stamp:
            return
        self._file_stamp, self.planned, self._runs = stamp, (), {}
        with suppress(ConfigError, ValueError):
            spec, cwd = describe(self.folder)
            self.planned, self.services = instances_of(spec), tuple(spec.services)
            self.search = spec.search
            if not self.with_runs:
                return
            base = Path() if cwd == Path.cwd() else cwd
            self._runs = {
                each.index: ProgressReader(RunDir(base / each.output_dir)) for each in self.planned
            }

    def _progress(self) -> dict[int, RunProgress]:
        read = {i: self._runs[i].read() for i in self.found.instances if i in self._runs}
        return {index: each for index, each in read.items() if each is not None}


def stamp_of(folder: Path, prefix: str) -> Stamp:
    """Return a stamp that changes when one of the files with this prefix does."""
    found = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(prefix):
                status = entry.stat(follow_symlinks=False)
                found.append((entry.name, status.st_size, status.st_mtime_ns, status.st_ino))
    return tuple(sorted(found))
