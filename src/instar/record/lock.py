"""Locks of folders: the right of one process to write there, which the kernel releases at its end."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from contextlib import closing, suppress
from pathlib import Path

from instar.config.files import open_regular, own_regular
from instar.processes.identity import NotHolder, ProcessName, signal_holder

NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
"""Errors of `flock` on a file system without locks, or without its lock server."""
_MOST_BYTES = 320


def open_lock(path: Path) -> int:
    """Open a folder's lock, created if missing; return its descriptor.

    Everyone who can open a file can lock it, so only those who may write to the folder may open it.

    Raises:
        OSError: see `own_regular`.
    """
    descriptor = own_regular(path, mode=0o600)
    lock, folder = os.fstat(descriptor), path.parent.stat()
    writers = folder.st_mode & (0o022 if lock.st_gid == folder.st_gid else 0o002)
    with suppress(PermissionError):  # the file of another user who shares the folder
        os.fchmod(descriptor, 0o600 | writers | writers << 1)
    return descriptor


def try_flock(descriptor: int, kind: int) -> bool:
    """Try to take a lock; return False if another process holds it.

    Raises:
        OSError: the file system has no locks (`NO_LOCKS`), or another error.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_holder(descriptor: int) -> None:
    """Write into a held lock which process holds it; a full disk leaves it empty."""
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{ProcessName.of_this()}\n".encode(), 0)


def named_holder(descriptor: int) -> ProcessName | None:
    """Return the process that a lock names, whether or not it holds it; None if it names none."""
    with suppress(OSError):
        text = os.pread(descriptor, _MOST_BYTES, 0).decode("utf-8", "replace")
        return ProcessName.from_text(text)
    return None


def lock_owner(path: Path) -> int | None:
    """Return the id of the process that holds a lock, as it names itself, 0 if unknown; else None.

    None also if this user may not read the lock; see `lock_readable`.
    """
    with suppress(OSError), open_regular(path) as file:
        if not try_flock(file.fileno(), fcntl.LOCK_SH):
            name = named_holder(file.fileno())
            return name.pid if name else 0
    return None


def lock_readable(path: Path) -> bool:
    """Return whether a `lock_owner` of None means that no process of this machine holds the lock."""
    try:
        with open_regular(path) as file:
            return try_flock(file.fileno(), fcntl.LOCK_SH)
    except OSError:
        return False


def signal_owner(path: Path, number: signal.Signals) -> None:
    """Send a signal to the process that holds a lock.

    Raises:
        NotHolder: the process that the lock names does not hold it, or that cannot be seen from
            here; nothing was sent.
    """
    try:
        descriptor = open_regular(path)
    except OSError as error:
        raise NotHolder(f"{path} cannot be read: {error.strerror}") from None
    with closing(descriptor) as file:
        name = named_holder(file.fileno())
        if name is None:
            raise NotHolder(f"{path} does not say which process holds it")
        signal_holder(file.fileno(), name, number)
