"""The processors that this process may use."""

from __future__ import annotations

import os


def cores() -> int:
    """How many there are; one where nobody knows."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
