"""The fleets that the dashboard shows: those beside its runs, read as untrusted data.

Names in requests are looked up in what the folders hold, and names in the files of a fleet are
compared with it: neither ever becomes a path.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from instar.config.errors import shorten_text, visible
from instar.extensions.fleet.plan import Instance
from instar.extensions.fleet.state import ENDED, FLEETS, STATE_FILE
from instar.extensions.fleet.view.live import without_line_breaks
from instar.extensions.fleet.view.reader import FleetReader
from instar.extensions.fleet.view.rows import InstanceRow, ProcessRow, group_name
from instar.record.events import to_words
from instar.record.format import encodable
from instar.record.rundir import RunDir

FRESH_S = 0.9
"""age up to which a fleet is not read again"""
MAX_FLEETS = 200
MAX_INSTANCES = 1000
MAX_PROCESSES = 32
"""of an instance"""
MAX_LOGS = 10_000
MAX_BYTES = 1 << 25
"""of a fleet's file, and of its record"""


@dataclass
class FleetCatalog:
    """The fleets in the folder `fleets` beside a folder of runs; see `instar.extensions.board.catalog`.

    Symbolic links are not followed.
    """

    folder: Path
    """of the runs"""
    runs: Callable[[], Mapping[str, RunDir]]
    """returns the dashboard's runs by key"""
    _readers: dict[str, FleetReader] = field(default_factory=dict)
    _rows: list[dict[str, Any]] = field(default_factory=list)
    _views: dict[str, tuple[float, dict[str, Any]]] = field(default_factory=dict)
    _listed_at: float = float("-inf")
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def rows(self) -> list[dict[str, Any]]:
        """Return name, state and number of instances in each state of each fleet."""
        with self._lock:
            if time.monotonic() - self._listed_at >= FRESH_S:
                self._list()
                self._rows = [_row(name, reader) for name, reader in self._readers.items()]
                self._listed_at = time.monotonic()
            return self._rows

    def view(self, name: str) -> dict[str, Any] | None:
        """Return a fleet's instances; None if there is no fleet of this name."""
        self.rows()
        with self._lock:
            if (reader := self._readers.get(name)) is None:
                return None
            read_at, view = self._views.get(name, (float("-inf"), {}))
            if time.monotonic() - read_at >= FRESH_S:
                view = self._page(name, reader)
                self._views = {name: (time.monotonic(), view)}
            return view

    def groups(self, keys: Collection[str]) -> dict[str, str]:
        """Return the groups of those runs that belong to a fleet; to several: to the latest."""
        self.rows()
        groups: dict[str, str] = {}
        with self._lock:
            for name, reader in self._readers.items():
                for index, instance in reader.plan_instances.items():
                    if (key := self._key(str(instance.output_dir))) in keys:
                        status = reader.status.instances.get(index)
                        groups.setdefault(key, _text(group_name(name, instance, status)))
        return groups

    def log(self, name: str, log: str) -> Path | None:
        """Return the file of one of a fleet's logs, "INSTANCE/PROCESS"; None if there is none."""
        self.rows()
        with self._lock:
            reader = self._readers.get(name)
        return None if reader is None else logs_in(reader.folder).get(log)

    def _list(self) -> None:
        root = Path(os.path.abspath(self.folder)).parent / FLEETS  # noqa: PTH100 (links are not followed)
        folders = {} if RunDir(self.folder).holds_run() else _folders(root)
        folders = {name: path for name, path in folders.items() if (path / STATE_FILE).exists()}
        names = sorted(folders, key=lambda name: -_written_at(folders[name]))[:MAX_FLEETS]
        self._readers = {
            name: self._readers.get(name)
            or FleetReader(folders[name], self._run_of, most_bytes=MAX_BYTES)
            for name in names
        }

    def _run_of(self, instance: Instance) -> RunDir | None:
        return self.runs().get(self._key(str(instance.output_dir)))

    def _key(self, output_dir: str) -> str:
        """Return the key of the run that an instance writes, if it is in the dashboard's folder."""
        folder = os.path.abspath(self.folder)  # noqa: PTH100
        parent, name = os.path.split(os.path.normpath(os.path.join(folder, "..", output_dir)))  # noqa: PTH118
        return name if parent == folder else ""

    def _page(self, name: str, reader: FleetReader) -> dict[str, Any]:
        try:
            view = reader.read()
        except Exception as error:  # whatever its files contain, the others are shown
            return _unread(name, error)
        logs, runs = logs_in(reader.folder), self.runs()
        rows = sorted(view.instances, key=_rank)[:MAX_INSTANCES]
        rows.sort(key=lambda row: row.index)
        keys = {row.index: self._key(row.output_dir) for row in view.instances}
        keys = {index: key for index, key in keys.items() if key in runs}
        best = view.best and {
            "text": _text("; ".join(view.best_lines)),
            "run": keys.get(view.best.instance, ""),
        }
        data: dict[str, Any] = to_words(
            {
                "name": name,
                "state": view.state,
                "counts": dict(view.counts),
                "left_out": len(view.instances) - len(rows),
                "best": best,
                "means": [_text(mean.text) for mean in view.means],
                "instances": [_instance(row, logs, keys.get(row.index, "")) for row in rows],
            }
        )
        return data


def logs_in(folder: Path) -> dict[str, Path]:
    """Return the files of a fleet's logs by "INSTANCE/PROCESS"."""
    paths: dict[str, Path] = {}
    for name, inside in _folders(folder / "logs").items():
        for entry in _entries(inside):
            if entry.name.endswith(".log") and entry.is_file(follow_symlinks=False):
                paths[f"{name}/{encodable(entry.name[:-4])}"] = inside / entry.name
            if len(paths) >= MAX_LOGS:
                return paths
    return paths


def _row(name: str, reader: FleetReader) -> dict[str, Any]:
    try:
        view = reader.read(runs=False)
    except Exception as error:
        return _unread(name, error)
    return {"name": name, "state": view.state, "counts": dict(view.counts)}


def _unread(name: str, error: Exception) -> dict[str, Any]:
    reason = shorten_text(encodable(f"cannot be read: {error}"))
    return {"name": name, "state": "unread", "reason": reason, "counts": {}, "instances": []}


def _instance(row: InstanceRow, logs: Mapping[str, Path], run: str) -> dict[str, Any]:
    progress = row.progress
    return {
        "index": row.index,
        "name": _text(row.run_name or str(row.index)),
        "run": run,
        "state": row.state,
        "since": row.since,
        "reason": _text(", ".join(filter(None, [row.host, row.reason, row.trial]))),
        "restarts": row.restarts,
        "step": progress and progress.step,
        "loss": progress and progress.loss,
        "operations": progress.operations if progress else 0,
        "ends_at": progress and progress.ends_at if row.state == "running" else None,
        "processes": [
            _process(
                process, log if (log := f"{encodable(row.run_name)}/{process.name}") in logs else ""
            )
            for process in row.processes[:MAX_PROCESSES]
        ],
    }


def _process(row: ProcessRow, log: str) -> dict[str, Any]:
    status = row.status
    return {
        "name": _text(row.name),
        "kind": "service" if row.is_service else "job",
        "state": row.state,
        "since": status.since,
        "attempt": status.attempt,
        "gpus": _text(", ".join(map(str, status.gpus))),
        "ports": _text(", ".join(f"{name} {number}" for name, number in status.ports.items())),
        "reason": _text(status.reason),
        "log": log,
    }


def _text(text: str) -> str:
    return shorten_text(without_line_breaks(visible(encodable(text))))


def _rank(row: InstanceRow) -> tuple[bool, bool, int]:
    """Sort key: what runs first, what waits last."""
    return row.state in ENDED, row.state == "waiting", row.index


def _folders(root: Path) -> dict[str, Path]:
    """Return the folders in a folder by name; none if that is a link."""
    if root.is_symlink():
        return {}
    names = [entry.name for entry in _entries(root) if entry.is_dir(follow_symlinks=False)]
    return {encodable(name): root / name for name in names}


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _written_at(folder: Path) -> float:
    try:
        return (folder / STATE_FILE).lstat().st_mtime
    except OSError:
        return 0.0
