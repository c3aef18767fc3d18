"""Atomic, durable writes: files and folders that are complete or do not exist.

A file's content is durable once it is synced; its name is durable once its folder is. Everything
that is published under a name goes through this module; tests record its calls and replay them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from glob import escape
from pathlib import Path

from safetensors import SafetensorError

from instar.config.errors import ConfigError, InstarError
from instar.config.files import make_folder as make_folder
from instar.config.files import sync_folder as sync_folder
from instar.config.files import sync_name as sync_name

TMP = ".tmp-"
"""Prefix of the names of unpublished files and folders."""
TRASH = ".trash-"
"""Prefix of the names of folders that are being deleted."""
DELETER = "instar-deleter"
"""Name of the threads that delete."""
_held: set[Path] = set()
"""What this process is writing."""


class WriteError(InstarError):
    """A file or folder cannot be written."""

    exit_code = 3


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and wait until its content is on disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Wait until the content of a file that other code wrote is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(path: Path, to: Path) -> None:
    """Rename a file or folder; an existing file is replaced, a folder with content is not."""
    path.rename(to)


def rename_in(folder: int, name: str, to: str) -> None:
    """Rename a file within an open folder, whatever its path leads to by now.

    Args:
        folder: its descriptor.
    """
    os.rename(name, to, src_dir_fd=folder, dst_dir_fd=folder)


def remove_tree(path: Path) -> None:
    """Delete a file, or a folder and its content, ignoring errors.

    Leftovers do no harm: their names are never read, and `sweep` removes them.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


@contextmanager
def holding(make: Callable[[], None], path: Path) -> Iterator[None]:
    """Create a temporary file or folder and hold a shared lock on it, so that `sweep` leaves it.

    Another process may sweep the folder at the same time, such as a run that starts in the folder
    that a model is exported to.
    """
    while True:
        make()
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:  # swept before it was locked
            continue
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        try:
            is_same = os.path.samestat(path.stat(), os.fstat(descriptor))
        except FileNotFoundError:
            is_same = False
        if is_same:
            break
        os.close(descriptor)
    _held.add(path)
    try:
        yield
    finally:
        _held.discard(path)
        os.close(descriptor)


def abandon() -> None:
    """Remove what this process is writing and has not published; it ends without unwinding."""
    for path in [*_held]:
        remove_tree(path)


@contextmanager
def atomic_file(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """A temporary file to write and sync, renamed to `path` at the end of the block.

    If the block raises, `path` stays as it was. `durable=False` does not wait for the disk; it is
    for caches, which may be lost.
    """
    temporary = path.with_name(f"{TMP}{secrets.token_hex(8)}")
    try:
        with holding(temporary.touch, temporary):
            yield temporary
            rename(temporary, path)
    finally:
        remove_tree(temporary)
    if durable:
        sync_folder(path.parent)


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically: readers see the old or the new content, also after a crash."""
    with atomic_file(path) as temporary:
        write_synced(temporary, content)


def discard(path: Path) -> None:
    """Delete a published folder: rename it at once, then delete its content in a thread.

    Freeing the pages of a large file takes as long as writing them. Call `finish_deleting` before
    `os._exit`.
    """
    trash = path.with_name(f"{TRASH}{path.name}-{secrets.token_hex(4)}")
    rename(path, trash)
    sync_folder(path.parent)
    threading.Thread(target=remove_tree, args=(trash,), name=DELETER).start()


def finish_deleting(limit_s: float) -> None:
    """Wait for deletions to finish, at most `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    for thread in threading.enumerate():
        if thread.name == DELETER:
            thread.join(max(0.0, deadline - time.monotonic()))


def sweep(folder: Path, name: str = "") -> None:
    """Remove temporary files and folders that a crash left, but none that are being written.

    Args:
        name: only those of the file or folder of this name; default: of all.
    """
    only = f"{escape(name)}-*" if name else "*"
    for pattern in (f"{TMP}{only}", f"{TRASH}{only}"):
        for left_behind in folder.glob(pattern):
            _remove_unless_held(left_behind)


def _remove_unless_held(path: Path) -> None:
    with ExitStack() as stack:
        with suppress(OSError):  # a link, or a file system without locks
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            stack.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
        remove_tree(path)


@contextmanager
def scratch_folder(kind: str) -> Iterator[Path]:
    """A folder for temporary files, which is deleted at the end of the block.

    Those of this user's killed processes are deleted when the next one of their kind is made.
    """
    above = Path(tempfile.gettempdir())
    for left_behind in above.glob(f"instar-{kind}-*"):
        with suppress(OSError):
            if left_behind.lstat().st_uid == os.geteuid():
                _remove_unless_held(left_behind)
    folder = above / f"instar-{kind}-{secrets.token_hex(8)}"
    with holding(lambda: folder.mkdir(0o700, exist_ok=True), folder):
        try:
            yield folder
        finally:
            remove_tree(folder)


def check_new(folder: Path) -> None:
    """Check that `folder` can be created: it is missing or empty, and not the working directory,
    which would be replaced under the processes that are in it.

    Raises:
        WriteError: it cannot.
    """
    if folder.resolve() == Path.cwd().resolve():
        raise WriteError(f"{folder} is the working directory; choose a new folder")
    if folder.exists() and not folder.is_dir():
        raise WriteError(f"{folder} is a file; choose a new folder")
    if folder.is_dir() and (first := next(folder.iterdir(), None)):
        raise WriteError(f"{folder} is not empty, it holds {first.name}; choose a new folder")


@contextmanager
def atomic_dir(folder: Path, *, key: str = "", first_wins: bool = False) -> Iterator[Path]:
    """A temporary folder to write in, renamed to `folder` at the end of the block.

    Args:
        key: the config key that names the folder; errors are then raised as `ConfigError`.
        first_wins: keep the folder that another process has published meanwhile.

    Raises:
        WriteError: the folder cannot be written, and no `key` is given.
        ConfigError: the folder cannot be written, and a `key` is given.
    """
    folder = folder.absolute()
    temporary = folder.with_name(f"{TMP}{folder.name}-{secrets.token_hex(4)}")
    try:
        make_folder(folder.parent)
        with holding(lambda: make_folder(temporary), temporary):
            try:
                yield temporary
                sync_folder(temporary)
                try:
                    rename(temporary, folder)
                except OSError as error:
                    if not first_wins or error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                        raise
                sync_folder(folder.parent)
            finally:
                remove_tree(temporary)
    except (OSError, SafetensorError) as error:
        message = f"cannot write {folder}: {getattr(error, 'strerror', None) or error}"
        if key:
            raise ConfigError.at(key, message) from error
        raise WriteError(message) from error
