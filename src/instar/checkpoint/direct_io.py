"""Files written past the page cache, with `O_DIRECT`.

Copying what nobody reads again into the page cache takes more processor time than the transfer to the
disk, and displaces what is read. Direct writes need aligned memory, positions and sizes. What is in memory
as it is in the file, up to whole blocks, is written from there; all else is collected in buffers. A thread
writes.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

O_DIRECT: int = getattr(os, "O_DIRECT", 0)
"""0 where the system has no such flag"""
_BUFFER_BYTES = 1 << 20
"""of each write: smaller ones take more processor time, larger ones leave the processor's cache"""
_BUFFERS = 2
BLOCK_BYTES = 4096
"""of which memory, position and size of a direct write are multiples"""


def open_direct(path: Path) -> DirectFile | None:
    """Create a file for direct writes; return None if the file system or the system has none."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | O_DIRECT
    try:
        return DirectFile(os.open(path, flags, 0o666)) if O_DIRECT else None
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None


class DirectFile:
    """A new file that is written from its beginning to its end; a context manager.

    `write` raises OSError also for earlier content, and leaving the block for the last. The content is
    on disk after an fsync.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._free = [
            np.frombuffer(mmap.mmap(-1, _BUFFER_BYTES), np.uint8) for _ in range(_BUFFERS)
        ]
        self._writes = deque[tuple[Future[None], Any]]()
        """of buffers"""
        self._in_place = deque[Future[None]]()
        """writes of the memory that the last call was given"""
        self._used = 0
        """bytes in the last free buffer"""
        self._pool = ThreadPoolExecutor(1, "instar-direct-io")

    def write(self, content: memoryview) -> None:
        """Append bytes. They may change after the next call, or the end of the block."""
        while self._in_place:
            self._in_place.popleft().result()
        data = np.frombuffer(content, np.uint8)
        while len(data):
            # bytes up to the end of a block in the file, and in memory
            room, offset = -self._used % BLOCK_BYTES, -data.ctypes.data % BLOCK_BYTES
            blocks = (len(data) - room) // BLOCK_BYTES * BLOCK_BYTES
            if room != offset or blocks <= 0:
                data = self._collect(data, _BUFFER_BYTES - self._used)
            elif room:
                data = self._collect(data, room)
            else:
                self._submit()
                self._in_place.append(self._pool.submit(self._put, data[:blocks].data))
                data = data[blocks:]

    def _collect(self, content: Any, limit: int) -> Any:
        """Copy at most so many bytes into a buffer; return the others."""
        count = min(len(content), limit)
        # unlike an assignment to a memoryview, this releases the GIL
        np.copyto(self._free[-1][self._used : self._used + count], content[:count])
        self._used += count
        if self._used == _BUFFER_BYTES:
            self._submit()
        return content[count:]

    def _submit(self) -> None:
        """Write the buffer, if there is anything in it."""
        if not self._used:
            return
        buffer = self._free.pop()
        content, self._used = buffer[: self._used].data, 0
        self._writes.append((self._pool.submit(self._put, content), buffer))
        if not self._free:
            self._wait()

    def _wait(self) -> None:
        """Wait for the oldest write of a buffer."""
        write, buffer = self._writes.popleft()
        write.result()
        self._free.append(buffer)

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._submit()
                while self._writes:
                    self._wait()
                while self._in_place:
                    self._in_place.popleft().result()
        finally:
            self._pool.shutdown(cancel_futures=True)
            os.close(self._descriptor)

    def _put(self, content: memoryview) -> None:
        if len(content) % BLOCK_BYTES:
            self._through_page_cache()
        while content:
            try:
                content = content[os.write(self._descriptor, content) :]
            except OSError as error:
                # the file system's blocks are larger, or the rest of an incomplete write is none
                if error.errno != errno.EINVAL or not self._through_page_cache():
                    raise

    def _through_page_cache(self) -> bool:
        """Make the writes that follow ordinary ones; return whether they were direct."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~O_DIRECT)
        return bool(flags & O_DIRECT)
