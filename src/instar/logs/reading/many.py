"""Many records at once, on all cores."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from instar.config.errors import InstarError
from instar.distributed.cores import cores
from instar.logs.reading import cache
from instar.logs.reading.record import RunRecord, read
from instar.record.rundir import RunDir

_WORTH_BYTES = 1 << 26
"""From here on, starting a process takes less time than it saves."""


def read_many(runs: Sequence[RunDir]) -> list[RunRecord]:
    """The records of many runs, in their order.

    What is not in the runs' column caches yet is parsed by a process for each core, which leave it
    there. Runs whose folder cannot be written are parsed here, one after another.

    Raises:
        RecordError: see `read`.
    """
    unread = {run: _unread_bytes(run) for run in runs}
    shares = _shares(unread, cores())
    if len(shares) > 1 and sum(unread.values()) >= _WORTH_BYTES:
        started = [_start(share) for share in shares[1:]]
        try:
            _fill(shares[0])
        finally:
            for process in started:
                process.wait()
    return [read(run) for run in runs]


def _unread_bytes(run: RunDir) -> int:
    try:
        size = run.events.stat().st_size
    except OSError:
        return 0
    if size < cache.SMALL_BYTES or not os.access(run.path, os.W_OK):
        return 0
    return max(0, size - cache.held_bytes(run.events, run.path / "cache"))


def _shares(unread: dict[RunDir, int], count: int) -> list[list[RunDir]]:
    """About equal shares of the work, the largest records first."""
    shares: list[list[RunDir]] = [[] for _ in range(count)]
    loads = [0] * count
    for run in sorted(unread, key=lambda run: -unread[run]):
        if unread[run] >= cache.SMALL_BYTES:
            least = loads.index(min(loads))
            shares[least].append(run)
            loads[least] += unread[run]
    return [share for share in shares if share]


def _start(share: Sequence[RunDir]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "instar.logs.reading.many"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(b"\0".join(os.fsencode(run.path) for run in share))
    return process


def _fill(runs: Sequence[RunDir]) -> None:
    """Bring the caches of runs up to date; what is wrong with one shows when it is read."""
    for run in runs:
        with suppress(InstarError):
            cache.content(run.events, run.path / "cache", workers=1)


if __name__ == "__main__":
    _fill([RunDir(Path(os.fsdecode(name))) for name in sys.stdin.buffer.read().split(b"\0")])
