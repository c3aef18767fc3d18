"""Lists the runs of a folder and their states, updated from the sizes and times of files; and what
the dashboard asks of fleets, which are a layer above it."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from instar.logs.query.labels import MAX_NOTE, NONE, RunLabels, labels_file, read_labels
from instar.record.lock import lock_owner
from instar.record.rundir import RunDir

logger = logging.getLogger(__name__)


FRESH_S = 0.9
"""age up to which the list is not refreshed"""
REFRESH_S = 0.3
"""time limit of one refresh; the remaining runs are updated by the next"""

_Mark = tuple[int, int, int]
"""time of the last change in ns, size in bytes, inode"""
_NEVER: _Mark = (0, 0, 0)


@dataclass
class CatalogEntry:
    """A run's row, and the version of the list that added it."""

    run: RunDir
    row: dict[str, Any]
    mark: _Mark
    version: int = 0
    read_at: float = 0.0


@dataclass
class Catalog:
    """The runs in `root` by folder name, or `root` itself if it is a run.

    A row is computed again only when the run's record has changed or its process has ended. Tags, notes
    and what is archived are added to it. Symbolic links out of `root` are ignored.
    """

    root: Path
    summarize_run: Callable[[RunDir], dict[str, Any]]
    """returns the row of a run"""
    unread_row: Callable[[RunDir, float], dict[str, Any]]
    """returns the row of a run that has not been read, given when it was last written to"""
    boot: str = field(default_factory=lambda: secrets.token_hex(4))
    """id of this list; versions of another process's list are not comparable"""
    version: int = 0
    _entries: dict[str, CatalogEntry] = field(default_factory=dict)
    _removed: dict[str, int] = field(default_factory=dict)
    _labels: dict[str, RunLabels] = field(default_factory=dict)
    _labels_mark: _Mark | None = None
    _refreshed_at: float = float("-inf")
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def refresh(self) -> None:
        """Update the list, unless it is fresh."""
        if time.monotonic() - self._refreshed_at >= FRESH_S:
            self._refresh()

    def _refresh(self) -> None:
        with self._lock:
            folders = self._folders()
            for key in [key for key in self._entries if key not in folders]:
                self._forget(key)
            begin = time.monotonic()
            marks = {key: _mark(run) for key, run in folders.items()}
            is_late = False
            for key in sorted(folders, key=lambda key: self._priority(key, marks[key])):
                was_read = self._update(key, folders[key], marks[key], is_late)
                is_late = is_late or (was_read and time.monotonic() - begin > REFRESH_S)
            self._label()
            self._refreshed_at = time.monotonic()

    def _label(self) -> None:
        """Add labels to the rows that lack them or have others."""
        folder = self.root.absolute()
        folder = folder.parent if RunDir(folder).holds_run() else folder
        mark = _mark_of(labels_file(folder))
        if mark != self._labels_mark:
            self._labels_mark, self._labels = mark, read_labels(folder)
        for key, entry in self._entries.items():
            labels = _label_fields(self._labels.get(entry.run.path.absolute().name, NONE))
            plain_row = {k: v for k, v in entry.row.items() if k not in _LABELS}
            if (row := plain_row | labels) != entry.row:
                self._put(key, CatalogEntry(entry.run, row, entry.mark, read_at=entry.read_at))

    def _priority(self, key: str, mark: _Mark | None) -> tuple[float, int]:
        """Sort key: least recently read runs first; among unread runs, the latest written first."""
        entry = self._entries.get(key)
        return entry.read_at if entry else 0.0, -mark[0] if mark else 0

    def since(self, version: int) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the rows that changed after a version, and the names of runs removed since."""
        with self._lock:
            rows = [entry.row for entry in self._entries.values() if entry.version > version]
            return rows, [key for key, at in self._removed.items() if at > version]

    def runs(self) -> dict[str, RunDir]:
        """Return the runs that were found by the last refresh."""
        with self._lock:
            return {key: entry.run for key, entry in self._entries.items()}

    def find(self, key: str) -> RunDir | None:
        """Return the run of that name, or None."""
        self.refresh()
        if key not in self._entries:
            folder = self._folders().get(key)
            if folder is not None and folder.holds_run():
                self._refresh()
        with self._lock:
            entry = self._entries.get(key)
        return entry.run if entry else None

    def file(self, run: RunDir, path: Path) -> Path | None:
        """Return `path` if it is a file inside the folder of `run`, else None."""
        try:
            real = path.resolve(strict=True)
            return path if real.is_file() and real.is_relative_to(run.path.resolve()) else None
        except (OSError, RuntimeError):
            return None

    def _folders(self) -> dict[str, RunDir]:
        """Return folders that may be runs, without looking inside."""
        if RunDir(self.root).holds_run():
            root = self.root.resolve()
            return {_key(root.name): RunDir(root)}
        try:
            with os.scandir(self.root) as folder_entries:
                names = [
                    entry.name for entry in folder_entries if entry.is_dir(follow_symlinks=False)
                ]
        except OSError:
            return {}
        return {_key(name): RunDir(self.root / name) for name in names}

    def _update(self, key: str, run: RunDir, mark: _Mark | None, is_late: bool) -> bool:
        """Update a run's entry; return whether the run was read."""
        entry = self._entries.get(key)
        running = entry is not None and entry.row.get("state") == "running"
        if entry and entry.mark == mark and not (running and lock_owner(run.lock) is None):
            return False
        if mark is None or not _has_no_symlinks(run):
            self._forget(key)
            return False
        if is_late:
            if entry is None:
                self._put(
                    key,
                    CatalogEntry(run, {"key": key, **self.unread_row(run, mark[0] / 1e9)}, _NEVER),
                )
            return False
        row = {"key": key, **self._row(run)}
        if entry:
            row |= {name: entry.row[name] for name in _LABELS if name in entry.row}
        if entry and entry.row == row:
            entry.mark = mark
        else:
            self._put(key, CatalogEntry(run, row, mark))
        self._entries[key].read_at = time.monotonic()
        return True

    def _row(self, run: RunDir) -> dict[str, Any]:
        try:
            return self.summarize_run(run)
        except Exception as error:  # a fault in one run must not hide the others
            logger.warning("%s cannot be summarized: %r", _key(str(run.path)), error)
            return {
                "id": _key(run.id),
                "name": _key(run.path.name),
                "state": "unread",
                "reason": _key(f"{type(error).__name__}: {error}"),
            }

    def _put(self, key: str, entry: CatalogEntry) -> None:
        self.version += 1
        entry.version = self.version
        self._removed.pop(key, None)
        self._entries[key] = entry

    def _forget(self, key: str) -> None:
        if self._entries.pop(key, None) is not None:
            self.version += 1
            self._removed[key] = self.version


def _key(text: str) -> str:
    """Return a folder's name as valid UTF-8, which names of files need not be."""
    return os.fsencode(text).decode("utf-8", "backslashreplace")


def _mark(run: RunDir) -> _Mark | None:
    """Return a mark that changes when the run is written to; None: the folder is not a run."""
    return _mark_of(run.events) or _mark_of(run.config)


def _mark_of(path: Path) -> _Mark | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


_LABELS = ("tags", "note", "archived")
MAX_TAGS = 20


def _label_fields(labels: RunLabels) -> dict[str, Any]:
    """Return what a row says of a run's labels; nothing where there is nothing to say."""
    fields = {
        "tags": [_key(tag[:40]) for tag in labels.tags[:MAX_TAGS]],
        "note": _key(labels.note[:MAX_NOTE]),
        "archived": labels.archived,
    }
    return {name: value for name, value in fields.items() if value}


def _has_no_symlinks(run: RunDir) -> bool:
    """Return whether no file of a run is a symbolic link."""
    paths = (run.events, run.config, run.logs, run.lock, run.checkpoints)
    return not any(path.is_symlink() for path in paths)


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
