"""Images that a run logs: PNG files in the folder `media` of its folder.

Their paths are chosen here. A reader accepts no other paths, because a record is not trusted.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import xxhash

from instar.config.files import make_folder, read_regular
from instar.record.atomic import replace_file

MEDIA = "media"
MOST_FILES = 10_000
"""images of one run"""
MOST_BYTES = 20 << 20
"""of one file that is read"""
_PATH = re.compile(rf"{MEDIA}/[a-z]{{1,10}}-\d{{1,19}}-[0-9a-f]{{16}}\.png")
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_COLORS = {1: 0, 3: 2, 4: 6}
"""color type of PNG by number of channels"""


class Pixels(Protocol):
    """An array of bytes; readers of images need no NumPy."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __iter__(self) -> Iterator[Any]: ...


def save_image(run: Path, split: str, step: int, pixels: Pixels) -> str:
    """Write an image; return its path in the run's folder.

    Args:
        pixels: [height, width, 1, 3 or 4].

    Raises:
        OSError: it cannot be written, or the run has too many images.
    """
    folder = run / MEDIA
    make_folder(folder)
    if sum(1 for _ in folder.iterdir()) >= MOST_FILES:
        raise OSError(f"the run has {MOST_FILES:,} images already")
    content = to_png(pixels)
    path = f"{MEDIA}/{split}-{step}-{xxhash.xxh3_64_hexdigest(content)}.png"
    replace_file(run / path, content)
    return path


def read_image(run: Path, path: str) -> bytes | None:
    """Return the content of an image that a record names; None if it is none of `save_image`."""
    if not _PATH.fullmatch(path) or (run / MEDIA).is_symlink():
        return None
    try:
        content = read_regular(run / path, MOST_BYTES)
    except OSError:
        return None
    return content if content.startswith(_SIGNATURE) else None


def to_png(pixels: Pixels) -> bytes:
    """Encode pixels [height, width, 1, 3 or 4] as PNG."""
    height, width, channels = pixels.shape
    head = struct.pack(">IIBBBBB", width, height, 8, _COLORS[channels], 0, 0, 0)
    # each row begins with its filter: 0, none
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    parts = (b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")
    return _SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
