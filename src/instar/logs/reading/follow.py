"""A record while it is written: what has been added since one looked last."""

from __future__ import annotations

import os
from pathlib import Path

from instar.record.events import NOT_AN_EVENT, Event, decode


class Follower:
    """Reads on from a place in a record.

    Only whole lines are read, so a line that is being written comes with a later look. A line
    that is no event is passed over. A record that is shorter than what was read of it, or is
    another file now, is read anew from its beginning; one that is not there yet holds nothing.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset
        """bytes read so far, always at the beginning of a line"""
        self.restarts = 0
        """how often the record turned out to be another one, and was read anew"""
        self._inode: int | None = None

    def poll(self) -> list[Event]:
        """The events that were added since the last look, in their order."""
        events = []
        for line in self._new_lines():
            try:
                events.append(decode(line))
            except NOT_AN_EVENT:
                continue
        return events

    def _new_lines(self) -> list[bytes]:
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_size < self.offset or self._inode not in (None, status.st_ino):
                    self.offset = 0
                    self.restarts += 1
                self._inode = status.st_ino
                file.seek(self.offset)
                block = file.read()
        except OSError:
            return []
        whole = block[: block.rfind(b"\n") + 1]
        self.offset += len(whole)
        return whole.split(b"\n")[:-1]
