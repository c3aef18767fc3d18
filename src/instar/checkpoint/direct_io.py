"""Files written past the page cache, with `O_DIRECT`.

Copying what nobody reads again into the page cache takes more processor time than the transfer to the
disk, and displaces what is read. Direct writes need aligned memory, positions and sizes, so content is
collected in buffers, which a thread writes.
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
_BUFFER_BYTES = 4 << 20
"""of each write: smaller ones take more processor time, larger ones leave the processor's cache"""
_BUFFERS = 3
_ALIGNMENT = 4096
"""of the size of a direct write; memory is aligned to pages, positions to buffers"""


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
        self._used = 0
        """bytes in the last free buffer"""
        self._pool = ThreadPoolExecutor(1, "instar-direct-io")

    def write(self, content: memoryview) -> None:
        """Append bytes. The memory may change afterwards."""
        rest = np.frombuffer(content, np.uint8)
        while len(rest):
            taken = min(len(rest), _BUFFER_BYTES - self._used)
            # unlike an assignment to a memoryview, this releases the GIL
            np.copyto(self._free[-1][self._used : self._used + taken], rest[:taken])
            self._used += taken
            rest = rest[taken:]
            if self._used == _BUFFER_BYTES:
                self._submit()

    def _submit(self) -> None:
        buffer = self._free.pop()
        content, self._used = memoryview(buffer)[: self._used], 0
        self._writes.append((self._pool.submit(_write_all, self._descriptor, content), buffer))
        if not self._free:
            self._wait()

    def _wait(self) -> None:
        """Wait for the oldest write."""
        write, buffer = self._writes.popleft()
        write.result()
        self._free.append(buffer)

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._submit()
                while self._writes:
                    self._wait()
        finally:
            self._pool.shutdown(cancel_futures=True)
            os.close(self._descriptor)


def _write_all(descriptor: int, content: memoryview) -> None:
    if len(content) % _ALIGNMENT:
        _through_page_cache(descriptor)
    while content:
        try:
            content = content[os.write(descriptor, content) :]
        except OSError as error:
            # the file system wants another alignment, or the rest of an incomplete write has none
            if error.errno != errno.EINVAL or not _through_page_cache(descriptor):
                raise


def _through_page_cache(descriptor: int) -> bool:
    """Make the writes that follow ordinary ones; return whether they were direct."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~O_DIRECT)
    return bool(flags & O_DIRECT)
