"""Writing the record: one append per event, by rank 0 alone.

A write that has returned survives the death of the process; one that was followed by `sync`
survives the loss of power.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, Self

from instar.record.events import (
    RUN_STARTED_LINE,
    Event,
    RecordError,
    RunStarted,
    Warn,
    encode,
)

SYNC_EVERY_S = 10.0


class Sink(Protocol):
    """Whatever takes events: the recorder, or `Silent` on every rank but 0."""

    def write(self, event: Event) -> None: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...


class Silent:
    """Takes events and does nothing."""

    def write(self, event: Event) -> None: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...


class Recorder:
    """Appends events to a record, one `write(2)` each; the only writer of its file.

    Opening an existing record goes on with it: earlier segments are counted, and a last line that
    a crash tore is cut off (and a warning says so). Not to be shared between threads.

    Raises:
        RecordError: the file cannot be opened or written, or another process is writing it. A
            record that failed to be written (disk full) leaves no trace of itself in the file.
    """

    def __init__(
        self,
        path: Path,
        *,
        sync_every_s: float = SYNC_EVERY_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self.segment = 0
        self.size = 0
        """Bytes of the file: all of them survive the death of this process."""
        self.synced = 0
        """Bytes of the file that survive the loss of power."""
        self._clock = clock
        self._sync_every_s = sync_every_s
        self._last_sync = time.monotonic()
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
        try:
            self._descriptor = os.open(path, flags, 0o644)
        except OSError as error:
            raise RecordError(f"cannot open {path}: {error.strerror}") from error
        try:
            self._lock()
            self._go_on()
        except BaseException:
            self.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:  # other errors: a file system without locks
                raise RecordError(
                    f"{self.path} is being written by another process: is this run still going?"
                ) from error

    def _go_on(self) -> None:
        line = b""
        with self.path.open("rb") as file:
            for line in file:
                self.size += len(line)
                self.segment += line.startswith(RUN_STARTED_LINE)
        if line and not line.endswith(b"\n"):
            self.size -= len(line)
            os.ftruncate(self._descriptor, self.size)
            self.write(Warn(message=f"cut off a torn last line of {len(line)} bytes"))
        self.sync()
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # without it a power cut may take the file's very name
        finally:
            os.close(folder)

    def write(self, event: Event) -> None:
        """Append one event; when this returns it outlives the process."""
        segment = self.segment + isinstance(event, RunStarted)
        line = encode(event, self._clock(), segment)
        try:
            if os.write(self._descriptor, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self.size)
            raise RecordError(f"cannot write {self.path}: {error.strerror}") from error
        self.segment = segment
        self.size += len(line)
        if time.monotonic() - self._last_sync >= self._sync_every_s:
            self.sync()

    def sync(self) -> None:
        """Wait until all that was written is on the disk."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise RecordError(f"cannot sync {self.path}: {error.strerror}") from error
        self.synced = self.size
        self._last_sync = time.monotonic()

    def close(self) -> None:
        """Sync and let go of the file; closing twice does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        with suppress(OSError):
            os.fsync(descriptor)
        os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
