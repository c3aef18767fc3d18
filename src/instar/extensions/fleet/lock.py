"""The right to write a fleet's state and to start its processes: one launcher has it."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import psutil

from instar.config.errors import ConfigError
from instar.config.files import check_inside
from instar.extensions.fleet.state import (
    FOLDERS,
    STATE_FILE,
    boot_id,
    fold_events,
    part_name,
    read_fleet_events,
)
from instar.processes.identity import SAME_PROCESS_S, NotHolder
from instar.record.lock import (
    NO_LOCKS,
    lock_owner,
    lock_readable,
    named_holder,
    open_lock,
    signal_owner,
    try_flock,
    write_holder,
)

_LOCK_FILE = "lock"
_TREES_FILE = "trees"
_WAIT_S = 0.05
_QUIET_S = 600.0
"""age of a record that nobody writes any more"""


class FolderBusy(ConfigError):  # noqa: N818
    """Another launcher works in this folder."""


class FolderLock:
    """The right to write a fleet's state and to start its processes; it ends with this process.

    Processes that an earlier, killed launcher has started are waited for: each holds a share of
    `trees` until it has ended and its result is written.

    Raises:
        FolderBusy: another launcher has it, or such processes do not end in `patience_s` seconds.
        ConfigError: a folder in it is a symbolic link, its file system has no locks, or its locks
            cannot be opened.
    """

    def __init__(self, folder: Path, patience_s: float, part: int | None = None) -> None:
        """`part`: the instance, if this host runs only that one; it has locks of its own."""
        try:
            check_inside(folder, FOLDERS)
        except OSError as error:
            raise ConfigError.of(str(error.strerror), where=str(error.filename)) from None
        self._descriptor = _open_lock(folder / part_name(_LOCK_FILE, part))
        deadline = time.monotonic() + patience_s
        # the host of a part may have lost touch with its engine, and is then ending
        if not _try_lock(folder, self._descriptor, 0.0 if part is None else deadline):
            holder = named_holder(self._descriptor)
            os.close(self._descriptor)
            raise FolderBusy.of(
                f"this fleet is running (launcher {holder.pid if holder else 'unknown'})",
                where=str(folder),
                hint=f"see `instar fleet status {folder.name}`",
            )
        write_holder(self._descriptor)
        self.trees = _open_lock(folder / part_name(_TREES_FILE, part))
        """descriptor that every process tree of the fleet inherits"""
        if not _try_lock(folder, self.trees, deadline):
            self.close()
            raise FolderBusy.of(
                "processes of an earlier launcher do not end",
                where=str(folder),
                hint="`instar fleet reap` kills them",
            )
        fcntl.flock(self.trees, fcntl.LOCK_SH)

    def close(self) -> None:
        os.close(self._descriptor)
        os.close(self.trees)


def _open_lock(path: Path) -> int:
    try:
        return open_lock(path)
    except OSError as error:
        raise ConfigError.of(f"cannot be opened: {error.strerror}", where=str(path)) from None


def _try_lock(folder: Path, descriptor: int, deadline: float) -> bool:
    """Lock a file, if others let go of it in time."""
    try:
        while not try_flock(descriptor, fcntl.LOCK_EX):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_WAIT_S)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        raise ConfigError.of(
            f"its file system has no locks ({error.strerror}), by which a fleet knows whether its "
            "processes run",
            where=str(folder),
            hint="start the fleet in a folder of another file system; `output_dir` may be on this one",
        ) from None
    return True


def launcher_pid(folder: Path) -> int | None:
    """Return the process id of the launcher that works in a folder, as its lock names it, 0 if unknown;
    None if none does, or if this user may not read the lock."""
    return lock_owner(folder / _LOCK_FILE)


def may_have_launcher(folder: Path, part: int | None = None) -> bool:
    """Return whether a launcher works in a folder, or on one of its parts, as far as this user can see."""
    lock = folder / part_name(_LOCK_FILE, part)
    return lock.exists() and not lock_readable(lock)


def seen_launcher(folder: Path) -> int | None:
    """Return the process id of a fleet's launcher to whoever looks, also to those who may not read
    its lock: then it is the process that the record names, if it runs on this machine, or, on another
    machine, if the record was written to lately (0).

    Raises:
        ConfigError: there is no fleet in this folder.
    """
    pid, lock = launcher_pid(folder), folder / _LOCK_FILE
    if pid is not None or not lock.exists() or os.access(lock, os.R_OK):
        return pid
    status = fold_events(read_fleet_events(folder))
    start = status.start
    if start is None or status.end is not None:
        return None
    if start.host != socket.gethostname():
        age_s = time.time() - (folder / STATE_FILE).stat().st_mtime
        return 0 if age_s < _QUIET_S else None
    with suppress(psutil.Error, ValueError, OverflowError):
        began = psutil.Process(start.pid).create_time()
        if start.boot == boot_id() and began < start.time + SAME_PROCESS_S:
            return start.pid
    return None


def signal_launcher(folder: Path, number: signal.Signals) -> None:
    """Send a signal to the launcher that works in a folder.

    Raises:
        ConfigError: the process that the folder names is not its launcher, or that cannot be seen
            from here; nothing was sent.
    """
    try:
        signal_owner(folder / _LOCK_FILE, number)
    except NotHolder as error:
        raise ConfigError.of(
            f"its launcher is not known: {error}",
            where=str(folder / _LOCK_FILE),
            hint="end the launcher where it runs, as its user: Ctrl-C, or `instar fleet down`",
        ) from None
