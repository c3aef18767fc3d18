"""Appends to a file on a disk that may refuse writes for a while: full, over quota, or failing."""

from __future__ import annotations

import errno
import io
import os
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any

RETRY_EVERY_S = 0.5


class Appender:
    """Appends chunks to a file, in order and whole; chunks that the disk refuses are held in memory.

    Held chunks are written before the next one, or by a thread that retries every `RETRY_EVERY_S`
    seconds. Methods may be called from any thread.
    """

    def __init__(
        self, descriptor: int, size: int | None = None, max_bytes: int | None = None
    ) -> None:
        """
        Args:
            descriptor: a file opened with O_APPEND; owned by this object.
            size: bytes in the file, if it has no other writer: a partly written chunk is then
                truncated; otherwise it is completed later.
            max_bytes: limit of held bytes, beyond which chunks are dropped while the disk refuses; None: no limit.
        """
        self.size = size or 0
        """bytes of complete chunks in the file"""
        self.held_bytes = 0
        self.dropped = 0
        """number of dropped chunks"""
        self.refused_since: float | None = None
        """by `time.monotonic`; None while writes succeed"""
        self.error: OSError | None = None
        """the last error, kept after writes succeed again"""
        self._descriptor = descriptor
        self._alone, self._max_bytes = size is not None, max_bytes
        self._held_lines: deque[bytes] = deque()
        self._torn_bytes = 0
        """bytes of the first held chunk that are in the file and could not be truncated"""
        self._lock = threading.RLock()
        self._is_closed = threading.Event()

    def __len__(self) -> int:
        """Return the number of chunks held."""
        return len(self._held_lines)

    def fileno(self) -> int:
        return self._descriptor

    def append(self, chunk: bytes) -> None:
        """Write a chunk, or hold it.

        Raises:
            OSError: EBADF, after `close`.
        """
        with self._lock:
            if self._descriptor < 0:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            is_full = self._max_bytes is not None and self.held_bytes + len(chunk) > self._max_bytes
            if is_full and self.refused_since is not None:
                self.dropped += 1
            else:
                self._held_lines.append(chunk)
                self.held_bytes += len(chunk)
            self._write_held()

    def sync(self) -> bool:
        """Flush to the disk; return False if chunks are held or the disk refuses."""
        with self._lock:
            self._write_held()
            if self._held_lines:
                return False
            try:
                os.fsync(self._descriptor)
            except OSError as error:
                self.error = error
                return False
            return True

    def close(self, wait_s: float = 0.0) -> int:
        """Try for `wait_s` seconds to write held chunks, and close the file.

        Returns:
            the number of chunks that could not be written.
        """
        deadline = time.monotonic() + wait_s
        while not self._write_out() and time.monotonic() < deadline:
            time.sleep(0.05)
        with self._lock:
            self._is_closed.set()
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor >= 0:
                with suppress(OSError):
                    os.fsync(descriptor)
                with suppress(OSError):
                    os.close(descriptor)
            return len(self._held_lines) + self.dropped

    def _write_out(self) -> bool:
        """Write held chunks; return True if none is left."""
        with self._lock:
            if self._descriptor >= 0:
                self._write_held()
            return not self._held_lines

    def _write_held(self) -> None:
        while self._held_lines:
            chunk = self._held_lines[0]
            try:
                while self._torn_bytes < len(chunk):
                    self._torn_bytes += os.write(self._descriptor, chunk[self._torn_bytes :])
            except OSError as error:
                self._note_refusal(error)
                return
            self._torn_bytes = 0
            self._held_lines.popleft()
            self.held_bytes -= len(chunk)
            self.size += len(chunk)
        self.refused_since = None

    def _note_refusal(self, error: OSError) -> None:
        if self._alone:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self.size)
                self._torn_bytes = 0
        self.error = error
        if self.refused_since is None:
            self.refused_since = time.monotonic()
            threading.Thread(target=self._retry, daemon=True, name="instar-appender").start()

    def _retry(self) -> None:
        while not self._is_closed.wait(RETRY_EVERY_S):
            if self._write_out():
                return


class AppendingStream(io.RawIOBase):
    """An `Appender` as a raw stream; writing never fails."""

    def __init__(self, appender: Appender) -> None:
        self._appender = appender

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._appender.fileno()

    def write(self, chunk: Any, /) -> int:
        data = bytes(chunk)
        with suppress(OSError):  # closed, at the very end of the process
            self._appender.append(data)
        return len(data)
