"""Writes the record of a run: one append per event, on rank 0 only.

An event survives the death of the process when `write` has returned, and a loss of power when
`sync` has returned, unless the disk refuses writes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, Self

import msgspec

from instar.config.errors import redact_text
from instar.config.files import own_regular, sync_folder
from instar.distributed.appender import Appender
from instar.record.events import (
    RUN_STARTED_LINE,
    Event,
    Failed,
    RecordError,
    RunStarted,
    Warn,
    encode_event,
)

SYNC_EVERY_S = 10.0
MAX_HELD_BYTES = 16 << 20
"""size of unwritten lines above which a run should stop"""
MAX_REFUSED_S = 600.0
"""time for which the disk may refuse writes before the run should stop"""
CLOSE_WAIT_S = 5.0
"""time for which `close` waits for a disk that refuses writes"""


class Sink(Protocol):
    """Receives events: the recorder, or `Silent` on ranks other than 0."""

    def write(self, event: Event) -> None: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...


class Silent:
    """Discards events."""

    def write(self, event: Event) -> None: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...


class Recorder:
    """Appends events to a record. The lock of the run (`record.rundir.hold`) ensures that there is
    only one writer.

    An existing record is continued: earlier segments are counted, and an incomplete last line is
    cut off with a warning. Not thread-safe.

    While the disk refuses writes (full, over quota, failing), lines are held in memory with one
    warning, and written in order as soon as possible. `failure` returns why the run should not
    continue like that.

    Raises:
        RecordError: the file cannot be opened.
    """

    def __init__(
        self,
        path: Path,
        *,
        sync_every_s: float = SYNC_EVERY_S,
        clock: Callable[[], float] = time.time,
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`warn`: shows a warning to the user."""
        self.path = path
        self.segment = 0
        self.synced_bytes = 0
        """Bytes of the file that survive a loss of power."""
        self._clock = clock
        self._warn = warn
        self._sync_every_s = sync_every_s
        self._last_sync = time.monotonic()
        self._held_since: float | None = None
        try:
            descriptor = own_regular(path, mode=0o666, append=True)
        except OSError as error:
            raise RecordError(f"cannot open {path}: {error.strerror}") from error
        try:
            torn_bytes = self._continue(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._file = Appender(descriptor, os.fstat(descriptor).st_size)
        if torn_bytes:
            self.write(Warn(message=f"cut off a torn last line of {torn_bytes} bytes"))
        self.sync()

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._file.size

    def failure(self) -> str | None:
        """Return why the run should stop: too many lines are held, or for too long; else None."""
        since = self._file.refused_since
        if since is None:
            return None
        refused_s = time.monotonic() - since
        if self._file.held_bytes <= MAX_HELD_BYTES and refused_s <= MAX_REFUSED_S:
            return None
        return f"{self._refusal()}, for {refused_s:.0f} s; {len(self._file):,} lines are held in memory"

    def _continue(self, descriptor: int) -> int:
        """Count the segments and cut off an incomplete last line; return its size."""
        line, size = b"", 0
        with self.path.open("rb") as file:
            for line in file:
                size += len(line)
                self.segment += line.startswith(RUN_STARTED_LINE)
        torn_bytes = len(line) if line and not line.endswith(b"\n") else 0
        if torn_bytes:
            os.ftruncate(descriptor, size - torn_bytes)
        sync_folder(self.path.parent)  # else a loss of power may remove the file's name
        return torn_bytes

    def write(self, event: Event) -> None:
        """Append one event.

        Raises:
            RecordError: the recorder is closed.
        """
        if isinstance(event, Warn | Failed):  # of which some repeat what a library said
            event = msgspec.structs.replace(event, message=redact_text(event.message))
        segment = self.segment + isinstance(event, RunStarted)
        try:
            self._file.append(encode_event(event, self._clock(), segment))
        except OSError as error:
            raise RecordError(f"cannot write {self.path}: {error.strerror}") from error
        self.segment = segment
        self._report_refusal()
        if time.monotonic() - self._last_sync >= self._sync_every_s:
            self.sync()

    def sync(self) -> None:
        """Wait until everything written is on disk; tries again later if the disk refuses."""
        if self._file.sync():
            self.synced_bytes = self.size
        self._last_sync = time.monotonic()
        self._report_refusal()

    def close(self) -> None:
        """Sync and close the file; closing twice does nothing."""
        pending = len(self._file)
        lost_lines = self._file.close(CLOSE_WAIT_S)
        if pending and lost_lines:
            self._warn(f"{self._refusal()}: the last {lost_lines:,} lines of the record are lost")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refusal(self) -> str:
        error = self._file.error
        return f"cannot write {self.path}: {error.strerror if error else 'unknown error'}"

    def _report_refusal(self) -> None:
        """Warn once when lines begin to be held, and record when they no longer are."""
        since = self._file.refused_since
        if since is not None and self._held_since is None:
            self._held_since = since
            self._warn(
                f"{self._refusal()}; training continues, and the lines of the record are held in "
                "memory until they can be written"
            )
        elif since is None and self._held_since is not None:
            seconds, self._held_since = time.monotonic() - self._held_since, None
            message = f"{self._refusal()}, for up to {seconds:.1f} s; no line was lost"
            self.write(Warn(message=message))
            self._warn(f"{self.path} can be written again; no line was lost")
