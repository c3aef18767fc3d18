"""Requests to a running run, as files in its folder instead of an open port.

`instar control` creates a request; rank 0 checks for requests between steps and removes them when
they are done. A request to save or to stop is an empty file; a post has content, an operation that somebody asks
for, and is removed when a checkpoint has it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import pwd
import re
import secrets
import stat
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from instar.config.files import TooDeep, of_bounded_depth, open_inside
from instar.record.atomic import rename_in

logger = logging.getLogger(__name__)

Command = Literal["save", "stop"]
REQUESTED = "asked for"
"""the reason of a checkpoint that was requested"""
COMMANDS: tuple[Command, ...] = get_args(Command)
PostCommand = Literal["apply", "cancel"]
WAITING = "waiting.json"
"""in the control folder: what waits in the schedule and what people asked for, as the run wrote it last"""
MOST_BYTES = 16 * 1024
"""of a post's content"""
MOST_POSTS = 100
"""that are read between two steps; more wait for the next"""
_POST = re.compile(r"([0-9a-f]{12})\.(apply|cancel)")


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


@dataclass(frozen=True)
class Post:
    """What somebody has written to a run."""

    id: str
    command: PostCommand
    path: Path

    def read(self) -> tuple[Any, str]:
        """Return the content, JSON values, and the name of the user who wrote it.

        Raises:
            ValueError: it is not JSON of at most `MOST_BYTES`, or not of the run's owner or root.
            OSError: it cannot be read.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(self.path, flags), "rb") as file:
            status = os.fstat(file.fileno())
            user, owner = status.st_uid, self.path.parent.parent.stat().st_uid
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("it is no regular file")
            if user not in (owner, 0):
                raise ValueError(
                    f"{user_name(user)} is neither the run's owner, {user_name(owner)}, nor root"
                )
            if status.st_nlink != 1 or status.st_mode & 0o022:
                raise ValueError(
                    "others may have written it: it has two names, or a mode that lets them"
                )
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
        try:
            values = json.loads(of_bounded_depth(content))
            # neither NaN, nor 1e999, nor half a character: all ranks hear of it, and the record has it
            json.dumps(values, allow_nan=False, ensure_ascii=False).encode()
        except (TooDeep, ValueError) as error:
            raise ValueError(f"it is not JSON: {error}") from None
        return values, user_name(user)


def user_name(number: int) -> str:
    """Return the name of a user, or the number of one without a name."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def send_post(folder: Path, command: PostCommand, content: Mapping[str, Any]) -> Post:
    """Write to a run.

    Raises:
        ValueError: the content has more than `MOST_BYTES`, or is not JSON.
        OSError: it cannot be written.
    """
    encoded = json.dumps(content, allow_nan=False).encode()
    if len(encoded) > MOST_BYTES:
        raise ValueError(f"{len(encoded):,} bytes; a request has at most {MOST_BYTES:,}")
    number = secrets.token_hex(6)
    post = Post(number, command, folder / f"{number}.{command}")
    put_request(post.path, encoded)
    return post


def send_request(folder: Path, command: Command) -> Request:
    """Create a request in a run's control folder.

    Raises:
        OSError: it cannot be written.
    """
    path = folder / f"{secrets.token_hex(6)}.{command}"
    put_request(path)
    return Request(command, path)


def put_request(path: Path, content: bytes = b"") -> None:
    """Create a file in a control folder, which is created if missing; it appears with all its content.

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
        name = f".{path.name}" if content else path.name
        with os.fdopen(os.open(name, flags, 0o644, dir_fd=descriptor), "wb") as file:
            file.write(content)
            if content:
                file.flush()
                os.fchmod(file.fileno(), 0o644)  # whatever the umask: others must not write it
                os.fsync(file.fileno())
        if content:
            rename_in(descriptor, name, path.name)
    finally:
        os.close(descriptor)


def _written(path: Path) -> int:
    """Return when a file was written, for the order of posts; 0 if it is gone."""
    with suppress(OSError):
        return path.lstat().st_mtime_ns
    return 0


class Inbox:
    """The requests to this run. Files that cannot be read or removed are logged, not raised."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._folder_name = str(folder)
        self._seen_ns = -1
        self._requests: list[Request] = []
        self._posts: list[Post] = []
        self._accepted: dict[str, Post] = {}
        """taken in by the run, whose files stay until a checkpoint has them"""
        self._noted_requests: set[Request] = set()
        self._unremovable: set[Path] = set()
        """answered requests that cannot be removed"""

    def requests(self) -> list[Request]:
        """Return the pending requests; costs one `lstat` if the folder has not changed."""
        try:
            status = os.lstat(self._folder_name)  # twice as fast as that of a `Path`: at every step
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
                self._posts = [
                    Post(match[1], command, path)
                    for path in sorted(paths, key=_written)
                    if (match := _POST.fullmatch(path.name))
                    for command in get_args(PostCommand)
                    if command == match[2]
                ]
                # a later request within the resolution of the clock would not change the time
                self._seen_ns = changed_ns if time.time_ns() - changed_ns > 1e9 else -1
        except FileNotFoundError:
            self._requests, self._posts = [], []
        except OSError as error:
            self._requests, self._posts = [], []
            if self.folder not in self._unremovable:
                self._unremovable.add(self.folder)
                logger.warning("requests cannot be read: %s", error)
        return self._requests

    def posts(self) -> list[Post]:
        """Return the posts that the run had not taken in at the last look (`requests`), at most `MOST_POSTS`."""
        return [
            post
            for post in self._posts
            if post.id not in self._accepted and post.path not in self._unremovable
        ][:MOST_POSTS]

    def accept(self, post: Post) -> None:
        """Keep a post's file until `settle`: a run that is killed before must find it again."""
        self._accepted[post.id] = post

    def unsaved(self) -> list[Post]:
        """Return the posts that the run has taken in, and no checkpoint has."""
        return list(self._accepted.values())

    def settle(self, ids: Collection[str]) -> None:
        """Remove the accepted posts of these ids, which a checkpoint has."""
        for number in [number for number in self._accepted if number in ids]:
            self.discard(self._accepted.pop(number))

    def discard(self, post: Post) -> None:
        """Remove a post that was answered."""
        self._remove([post])

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

    def _remove(self, requests: Iterable[Request | Post]) -> None:
        for request in requests:
            if isinstance(request, Request):
                self._noted_requests.discard(request)
            try:
                request.path.unlink(missing_ok=True)
            except OSError as error:
                self._unremovable.add(request.path)
                logger.warning("the request was answered, but cannot be removed: %s", error)
        self._seen_ns = -1
