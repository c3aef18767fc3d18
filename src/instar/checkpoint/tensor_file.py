"""Write safetensors files one tensor at a time, and hash them meanwhile.

The library's writer needs all tensors in memory, and what it has written must be read again for a
checksum. The header at the beginning of a file has the position of each tensor, so all dtypes and
shapes must be known before the first tensor is written.

Large files are written past the page cache, with `O_DIRECT`: copying what nobody reads again into it takes more
processor time than the transfer to the disk, and displaces what is read. Direct writes need aligned memory,
positions and sizes. What is in memory as it is in the file, up to whole blocks, is written from there; all else is
collected in buffers. A thread writes.
"""

from __future__ import annotations

import errno
import fcntl
import math
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from instar.checkpoint.layout import Layout, SavedRows, TensorEntry, encode_header
from instar.checkpoint.manifest import CheckpointError
from instar.distributed.shards import is_sharded, local_row_range, to_local
from instar.record import atomic

Read = Callable[[str], Tensor]
"""Return a tensor by its name."""

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
"""Safetensors dtypes that runs save, in the order in which the format sorts tensors."""

_WORDS = {dtype: word for word, dtype in DTYPES.items()}
_CHUNK_BYTES = 1 << 20
"""copied to the page cache, and then hashed while it is in the processor's"""
_DIRECT_CHUNK_BYTES = 16 << 20
"""hashed while it is written past the page cache, where each chunk has a small write of its own"""
_FLUSHED_BYTES = 128 << 20
"""A file of this size is written past the page cache, or else leaves it as it is written."""
_FLUSHES = 2
"""that may wait"""
O_DIRECT: int = getattr(os, "O_DIRECT", 0)
"""0 where the system has no such flag"""
_BUFFER_BYTES = 1 << 20
"""of each direct write: smaller ones take more processor time, larger ones leave the processor's cache"""
_BUFFERS = 2
BLOCK_BYTES = 4096
"""of which memory, position and size of a direct write are multiples"""


@dataclass(frozen=True)
class Outline:
    """Dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @staticmethod
    def of(tensor: Tensor) -> Outline:
        return Outline(tensor.dtype, tuple(tensor.shape))


def outlines_of(tensors: Mapping[str, Tensor]) -> dict[str, Outline]:
    """Return dtype and shape of every tensor."""
    return {name: Outline.of(tensor) for name, tensor in tensors.items()}


def outlines(layout: Layout) -> dict[str, Outline]:
    """Return dtype and shape of every tensor of a layout.

    Raises:
        CheckpointError: one has an unsupported dtype.
    """
    for name, entry in layout.entries.items():
        if entry.dtype not in DTYPES:
            raise CheckpointError(
                f"{layout.folder}: {name} has dtype {entry.dtype}, which is not supported"
            )
    return {name: Outline(DTYPES[e.dtype], e.shape) for name, e in layout.entries.items()}


def write_tensors(
    path: Path,
    outlines: Mapping[str, Outline],
    read: Read,
    metadata: Mapping[str, str] | None = None,
) -> str:
    """Write and sync a file of the tensors that `read` returns; read each tensor once.

    The file is the same as that of `safetensors.torch.save_file`.

    Returns:
        its xxh3-128, in hexadecimal digits.

    Raises:
        ValueError: a tensor does not match its outline, or the format has no such dtype.
    """
    header, order = _header(outlines, metadata), file_order(outlines)
    digest = xxhash.xxh3_128()
    with _open_file(path, sum(outline.size_bytes for outline in outlines.values())) as writer:
        append, chunk_bytes = writer

        def write(content: memoryview) -> None:
            for first in range(0, len(content), chunk_bytes):
                chunk = content[first : first + chunk_bytes]
                append(chunk)
                digest.update(chunk)

        write(memoryview(header))
        for name in order:
            tensor = read(name)
            if (outline := Outline.of(tensor)) != outlines[name]:
                raise ValueError(f"{name}: {outline}, not {outlines[name]}")
            write(_content(tensor))
    atomic.sync_file(path)
    return digest.hexdigest()


def allocate(like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of these names, shapes and dtypes in host memory, not filled.

    They lie in memory as in the file of them, one after the other and, up to whole blocks, at the same
    positions, so that a large file is written without copying them. Pinned if one of `like` is on a GPU.

    Raises:
        ValueError: they cannot be saved.
    """
    check_dense(like)
    outlines = outlines_of(like)
    position, size = (
        len(_header(outlines)),
        sum(outline.size_bytes for outline in outlines.values()),
    )
    pin = any(tensor.is_cuda for tensor in like.values())
    memory = torch.empty(size + BLOCK_BYTES, dtype=torch.uint8, pin_memory=pin)
    first = (position - memory.data_ptr()) % BLOCK_BYTES
    tensors = {}
    for name in file_order(outlines):
        outline = outlines[name]
        last = first + outline.size_bytes
        tensors[name] = memory[first:last].view(outline.dtype).view(outline.shape)
        first = last
    return tensors


def _header(outlines: Mapping[str, Outline], metadata: Mapping[str, str] | None = None) -> bytes:
    for name, outline in outlines.items():
        if outline.dtype not in _WORDS:
            raise ValueError(
                f"{name} has dtype {outline.dtype}, which the file format does not have"
            )
    return encode_header({name: _entry(outlines[name]) for name in file_order(outlines)}, metadata)


@contextmanager
def _open_file(path: Path, size: int) -> Iterator[tuple[Callable[[memoryview], None], int]]:
    """Context manager: a function that appends bytes to a new file of about `size`, and how many at once.

    When the page cache is full of what nobody reads again, writing is three times as slow, and what is
    read is no longer in it.
    """
    direct = open_direct(path) if size >= _FLUSHED_BYTES else None
    if direct is not None:
        with direct:
            yield direct.write, _DIRECT_CHUNK_BYTES
        return
    with path.open("wb") as file, _flush_pages(file.fileno()) as flush:

        def append(chunk: memoryview) -> None:
            file.write(chunk)
            flush(file.tell())

        yield append, _CHUNK_BYTES


@contextmanager
def _flush_pages(descriptor: int) -> Iterator[Callable[[int], None]]:
    """Context manager: a function to be called with the size of a file that is being written.

    A thread brings what was written to the disk and takes it out of the page cache.
    """
    flushed_bytes, waiting = 0, deque[Future[None]]()
    with ThreadPoolExecutor(1) as pool:

        def flush(size: int) -> None:
            nonlocal flushed_bytes
            if size - flushed_bytes < _FLUSHED_BYTES:
                return
            flushed_bytes = size
            waiting.append(pool.submit(_flush, descriptor))
            while len(waiting) > _FLUSHES:
                waiting.popleft().result()

        yield flush
        for future in waiting:
            future.result()


def _flush(descriptor: int) -> None:
    os.fsync(descriptor)
    if hasattr(os, "posix_fadvise"):  # Linux
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def file_order(outlines: Mapping[str, Outline]) -> list[str]:
    """Return the names of tensors in the order in which a file has them."""
    ranks = list(DTYPES.values())
    return sorted(outlines, key=lambda name: (-ranks.index(outlines[name].dtype), name))


def check_dense(tensors: Mapping[str, Tensor]) -> None:
    """Check that tensors can be saved, and no element twice.

    Raises:
        ValueError: one is sparse, or two share memory.
    """
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided:
            raise ValueError(f"{name} is a sparse tensor, which the file format does not have")
    spans = sorted(
        (str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name)
        for name, tensor in tensors.items()
        if tensor.nbytes and tensor.is_contiguous()
    )
    for (device, _, end, name), (other_device, begin, _, other) in pairwise(spans):
        if device == other_device and begin < end:
            raise ValueError(f"{name} and {other} share memory; a tensor is saved once")


def rows_to_save(tensor: Tensor) -> Tensor | SavedRows:
    """Return what this rank holds of a tensor, to be saved; not copied."""
    if not is_sharded(tensor):
        return tensor.detach()
    mesh = tensor.device_mesh
    first, _ = local_row_range(tensor)
    # the ranks of a replica are neighbours, and rank 0 is in the first
    is_saved = int(mesh.mesh.min()) == 0
    return SavedRows(
        to_local(tensor), first, tuple(tensor.shape), mesh.get_local_rank(), mesh.size(), is_saved
    )


def _entry(outline: Outline) -> TensorEntry:
    return TensorEntry(_WORDS[outline.dtype], outline.shape, outline.size_bytes)


def _content(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor without copying."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


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
