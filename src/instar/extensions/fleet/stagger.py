"""Pauses between the starts of a fleet's processes (`stagger`), also of those on different hosts."""

from __future__ import annotations

import asyncio
import fcntl
import os
from contextlib import suppress
from pathlib import Path

from instar.extensions.fleet.state import now
from instar.record.lock import open_lock, try_flock

_POLL_S = 0.2


async def wait_for_turn(folder: Path, role: str, gap_s: float) -> None:
    """Wait until the last start of this role in the fleet is `gap_s` seconds ago; this is the last then.

    The file `ROLE.started` in the fleet's folder has its time. Its lock is held while a host waits, so
    that launchers on other hosts take their turns after it.

    Raises:
        OSError: the file cannot be opened or locked.
    """
    descriptor = open_lock(folder / f"{role}.started")
    try:
        while not try_flock(descriptor, fcntl.LOCK_EX):
            await asyncio.sleep(min(gap_s, _POLL_S))
        await asyncio.sleep(stagger_pause_s(os.pread(descriptor, 64, 0), gap_s, now()))
        with suppress(OSError):  # on a full disk the next start does not wait
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, repr(now()).encode(), 0)
    finally:
        os.close(descriptor)


def stagger_pause_s(last_start: bytes, gap_s: float, now_s: float) -> float:
    """Return how long to wait after a start at the time written in a file; 0 if there is none.

    No longer than `gap_s`, whatever the file says: clocks are set, and files are damaged.
    """
    with suppress(ValueError):
        return min(max(0.0, float(last_start) + gap_s - now_s), gap_s)
    return 0.0
