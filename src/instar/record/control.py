"""Requests to a run that is under way, through files in its folder: no port is open.

`instar control` puts a request there; rank 0 looks between steps, and takes it away when it has
done what was asked.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

Command = Literal["save", "stop"]
COMMANDS: tuple[Command, ...] = get_args(Command)


@dataclass(frozen=True)
class Request:
    """Something asked of a run."""

    command: Command
    path: Path

    def answered(self) -> bool:
        """Whether the run has done it."""
        return not self.path.exists()

    def withdraw(self) -> None:
        """Ask no more."""
        self.path.unlink(missing_ok=True)


def ask(folder: Path, command: Command) -> Request:
    """Put a request into a run's control folder.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(exist_ok=True)
    path = folder / f"{secrets.token_hex(6)}.{command}"
    aside = path.with_suffix(".tmp")
    aside.touch()
    aside.rename(path)
    return Request(command, path)


class Inbox:
    """What is asked of this run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen = -1
        self._requests: list[Request] = []

    def requests(self) -> list[Request]:
        """What is asked and not yet answered; one look at the folder's date if there is nothing new."""
        try:
            changed = self.folder.stat().st_mtime_ns
        except OSError:
            return []
        if changed != self._seen:
            found = (path for path in sorted(self.folder.iterdir()) if path.suffix[1:] in COMMANDS)
            self._requests = [Request(_command(path), path) for path in found]
            # another request within the grain of the disk's clock would leave the date as it is
            self._seen = changed if time.time_ns() - changed > 1e9 else -1
        return self._requests

    def clear(self) -> None:
        """What was asked of an earlier start came too late."""
        for request in self.requests():
            request.withdraw()
        self._seen = -1

    def answer(self, command: Command) -> None:
        """All requests of this kind have been done."""
        for request in self.requests():
            if request.command == command:
                request.withdraw()
        self._seen = -1


def _command(path: Path) -> Command:
    return next(command for command in COMMANDS if command == path.suffix[1:])
