"""Lists the runs of a folder and their states, updated from the sizes and times of files."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from instar.record.rundir import RunDir, lock_owner

logger = logging.getLogger(__name__)


FRESH_S = 0.9
"""age up to which the list is not refreshed"""
LOOK_S = 0.3
"""time limit of one refresh; the remaining runs are updated by the next"""

_Mark = tuple[int, int, int]
"""time of the last change, size, number of the file"""
_NEVER: _Mark = (0, 0, 0)


@dataclass
class CatalogEntry:
    """What is known of a run, and since which version of the list."""

    run: RunDir
    row: dict[str, Any]
    mark: _Mark
    version: int = 0
    looked: float = 0.0


@dataclass
class Catalog:
    """The runs in `root`, by the names of their folders; `root` itself if it is a run.

    What `look` says of a run is only asked for again when its record has changed, or its process
    is gone. A folder or a file that leads out of `root` is not there.
    """

    root: Path
    look: Callable[[RunDir], dict[str, Any]]
    """what is said of a run"""
    unseen: Callable[[RunDir, float], dict[str, Any]]
    """what is said of one that was not looked at yet, last written to at a time"""
    boot: str = field(default_factory=lambda: secrets.token_hex(4))
    """of this process's list; versions of another one's mean nothing"""
    version: int = 0
    _entries: dict[str, CatalogEntry] = field(default_factory=dict)
    _gone: dict[str, int] = field(default_factory=dict)
    _looked: float = float("-inf")
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def refresh(self) -> None:
        """Look at the folder, unless that was done just now."""
        if time.monotonic() - self._looked >= FRESH_S:
            self._refresh()

    def _refresh(self) -> None:
        with self._lock:
            there = self._folders()
            for key in [key for key in self._entries if key not in there]:
                self._forget(key)
            begin = time.monotonic()
            marks = {key: _mark(run) for key, run in there.items()}
            is_late = False
            for key in sorted(there, key=lambda key: self._turn(key, marks[key])):
                looked = self._update(key, there[key], marks[key], is_late)
                is_late = is_late or (looked and time.monotonic() - begin > LOOK_S)
            self._looked = time.monotonic()

    def _turn(self, key: str, mark: _Mark | None) -> tuple[float, int]:
        """Whose look is longest ago comes first; of those without one, who was written to last."""
        known = self._entries.get(key)
        return known.looked if known else 0.0, -mark[0] if mark else 0

    def since(self, version: int) -> tuple[list[dict[str, Any]], list[str]]:
        """The runs that changed after a version, and the names of those that are gone."""
        with self._lock:
            rows = [entry.row for entry in self._entries.values() if entry.version > version]
            return rows, [key for key, at in self._gone.items() if at > version]

    def find(self, key: str) -> RunDir | None:
        """The run of that name, if there is one now."""
        self.refresh()
        if key not in self._entries:
            there = self._folders().get(key)
            if there is not None and there.holds_run():
                self._refresh()
        with self._lock:
            entry = self._entries.get(key)
        return entry.run if entry else None

    def file(self, run: RunDir, path: Path) -> Path | None:
        """`path` of `run`, if it is a file and within the run's own folder."""
        try:
            real = path.resolve(strict=True)
            return path if real.is_file() and real.is_relative_to(run.path.resolve()) else None
        except (OSError, RuntimeError):
            return None

    def _folders(self) -> dict[str, RunDir]:
        """Folders that may be runs; nothing in them has been looked at."""
        if RunDir(self.root).holds_run():
            root = self.root.resolve()
            return {_key(root.name): RunDir(root)}
        try:
            with os.scandir(self.root) as found:
                names = [entry.name for entry in found if entry.is_dir(follow_symlinks=False)]
        except OSError:
            return {}
        return {_key(name): RunDir(self.root / name) for name in names}

    def _update(self, key: str, run: RunDir, mark: _Mark | None, is_late: bool) -> bool:
        """Whether the run was looked at."""
        known = self._entries.get(key)
        running = known is not None and known.row.get("state") == "running"
        if known and known.mark == mark and not (running and lock_owner(run) is None):
            return False
        if mark is None or not _is_own(run):
            self._forget(key)
            return False
        if is_late:
            if known is None:
                self._put(
                    key, CatalogEntry(run, {"key": key, **self.unseen(run, mark[0] / 1e9)}, _NEVER)
                )
            return False
        row = {"key": key, **self._looked_at(run)}
        if known and known.row == row:
            known.mark = mark
        else:
            self._put(key, CatalogEntry(run, row, mark))
        self._entries[key].looked = time.monotonic()
        return True

    def _looked_at(self, run: RunDir) -> dict[str, Any]:
        try:
            return self.look(run)
        except Exception as error:  # whatever is odd in one run, the others are listed
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
        self._gone.pop(key, None)
        self._entries[key] = entry

    def _forget(self, key: str) -> None:
        if self._entries.pop(key, None) is not None:
            self.version += 1
            self._gone[key] = self.version


def _key(text: str) -> str:
    """A name as JSON and addresses can say it: not every folder's is UTF-8."""
    return os.fsencode(text).decode("utf-8", "backslashreplace")


def _mark(run: RunDir) -> _Mark | None:
    """Returns what changes when a run is written to; None: the folder is not a run."""
    for path in (run.events, run.config):
        try:
            status = path.stat()
        except OSError:
            continue
        return status.st_mtime_ns, status.st_size, status.st_ino
    return None


def _is_own(run: RunDir) -> bool:
    """Whether no file of a run is a symbolic link."""
    own = (run.events, run.config, run.logs, run.lock, run.checkpoints)
    return not any(path.is_symlink() for path in own)
