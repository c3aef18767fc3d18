"""What becomes of memory that arrays give back."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_KEPT_BYTES = 64 << 20
_KEPT_BYTES = 256 << 20


def keep_freed_memory() -> None:
    """Have the C library keep what large arrays give back for those that come next.

    By default glibc returns arrays of megabytes to the system, which then hands out each page of the
    next one anew, filled with zeros: twice the time of reading a batch of tokens. Elsewhere than on
    Linux with glibc nothing is done.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
