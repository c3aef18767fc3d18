"""Requests to a running run, as files in its folder instead of an open port.

`instar control` creates a request; rank 0 checks for requests between steps and removes them when
they are done.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from instar.config.files import open_inside

logger = logging.getLogger(__name__)

Command = Literal["save", "stop"]
REQUESTED = "asked for"
"""the reason of a checkpoint that was requested"""
COMMANDS: tuple[Command, ...] = get_args(Command)


@dataclass(frozen=True)
class Request:
    """A request to a run."""

    command: Command
    path: Path

    def is_answered(self) -> bool:
        """Return whether the run has carried it out."""
        return not self.path.exists()

    def withdraw(self) -> None:
        """Remove the request."""
        self.path.unlink(missing_ok=True)


def send_request(folder: Path, command: Command) -> Request:
    """Create a request in a run's control folder.

    Raises:
        OSError: it cannot be written.
    """
    path = folder / f"{secrets.token_hex(6)}.{command}"
    put_request(path)
    return Request(command, path)


def put_request(path: Path) -> None:
    """Create an empty file in a control folder, which is created if missing.

    Raises:
        OSError: it cannot be written, or the folder is a symbolic link.
    """
    folder, is_new_folder = path.parent, False
    with suppress(FileExistsError):
        folder.mkdir()
        is_new_folder = True
    descriptor = open_inside(folder)
    try:
        if is_new_folder:
            # everyone who may write to the folder above may remove requests of others
            above = folder.parent.stat()
            with suppress(OSError):
                os.fchown(descriptor, -1, above.st_gid)
                os.fchmod(descriptor, above.st_mode & 0o777)
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        os.close(os.open(path.name, flags, 0o644, dir_fd=descriptor))
    finally:
        os.close(descriptor)


class Inbox:
    """The requests to this run. Files that cannot be read or removed are logged, not raised."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen_ns = -1
        self._requests: list[Request] = []
        self._noted_requests: set[Request] = set()
        self._unremovable: set[Path] = set()
        """answered requests that cannot be removed"""

    def requests(self) -> list[Request]:
        """Return the pending requests; costs one `lstat` if the folder has not changed."""
        try:
            status = self.folder.lstat()
            if stat.S_ISLNK(status.st_mode):  # it could lead to other files
                raise OSError(errno.ELOOP, "a symbolic link, which is not followed", self.folder)
            changed_ns = status.st_mtime_ns
            if changed_ns != self._seen_ns:
                paths = [
                    path for path in sorted(self.folder.iterdir()) if path not in self._unremovable
                ]
                self._requests = [
                    Request(command, path)
                    for path in paths
                    for command in COMMANDS
                    if command == path.suffix[1:]
                ]
                # a later request within the resolution of the clock would not change the time
                self._seen_ns = changed_ns if time.time_ns() - changed_ns > 1e9 else -1
        except FileNotFoundError:
            return []
        except OSError as error:
            if self.folder not in self._unremovable:
                self._unremovable.add(self.folder)
                logger.warning("requests cannot be read: %s", error)
            return []
        return self._requests

    def is_requested(self, command: Command) -> bool:
        """Return whether a command is requested; notes its requests for the next `answer`."""
        requests = [request for request in self.requests() if request.command == command]
        self._noted_requests.update(requests)
        return bool(requests)

    def clear(self) -> None:
        """Remove all requests, which were made to an earlier start."""
        self._remove(self.requests())

    def answer(self, command: Command) -> None:
        """Remove the noted requests of a command after it was carried out.

        Later requests stay, because the command may have begun before they were made.
        """
        self._remove([request for request in self._noted_requests if request.command == command])

    def _remove(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._noted_requests.discard(request)
            try:
                request.withdraw()
            except OSError as error:
                self._unremovable.add(request.path)
                logger.warning("the request was answered, but cannot be removed: %s", error)
        self._seen_ns = -1
