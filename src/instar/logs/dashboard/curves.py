"""Curves as a page draws them, thinned once and kept while the stream can bring what is missing."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from instar.logs.plotting.thin import thin
from instar.logs.reading.record import ALIASES, Series, read
from instar.logs.reporting.chartdata import curve, marks
from instar.record.rundir import RunDir

KEPT = 400
POINTS = 2000
STALE_BYTES = 256 << 10
"""By so much a record may have grown since its curve was thinned."""


@dataclass(frozen=True)
class Drawn:
    """A run's curves as JSON, and the byte of its record up to which they go."""

    inode: int
    offset: int
    json: bytes

    def suits(self, inode: int, size: int) -> bool:
        return inode == self.inode and 0 <= size - self.offset <= STALE_BYTES


@dataclass
class Curves:
    """The curves that were asked for lately; safe in threads."""

    _kept: OrderedDict[tuple[str, tuple[str, ...], int], Drawn] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, key: str, run: RunDir, metrics: Sequence[str], points: int) -> bytes:
        """`{key, offset, names, series, marks}`; a metric that the run lacks is left out.

        No metric at all: what happened, as it is now.

        Raises:
            RecordError: the record cannot be read.
        """
        place = (key, tuple(metrics), points)
        status = run.events.stat()
        with self._lock:
            drawn = self._kept.get(place)
            if drawn is not None:
                self._kept.move_to_end(place)
        suits = drawn is not None and drawn.suits(status.st_ino, status.st_size)
        if metrics and drawn is not None and suits and not _begins_anew(run, drawn.offset):
            return drawn.json
        data, offset = draw(key, run, metrics, points)
        drawn = Drawn(status.st_ino, offset, msgspec.json.encode(data))
        if not metrics:
            return drawn.json
        with self._lock:
            self._kept[place] = drawn
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return drawn.json


def draw(key: str, run: RunDir, metrics: Sequence[str], points: int) -> tuple[dict[str, Any], int]:
    """A run's curves and marks, and the byte up to which they were read."""
    record = read(run)
    there = [name for name in dict.fromkeys(metrics) if ALIASES.get(name, name) in record]
    found = {name: record.series(name) for name in there}
    data = {
        "key": key,
        "offset": record.end,
        "names": [name for name in record.metrics if not name.endswith(":error")],
        "series": {
            name: curve(_thinned(series, points), points) | {"segment": _last_segment(series)}
            for name, series in found.items()
        },
        "marks": marks(record),
    }
    return data, record.end


def _begins_anew(run: RunDir, offset: int) -> bool:
    """Whether a segment may have begun since: it may count what the curves do not."""
    with run.events.open("rb") as file:
        file.seek(offset)
        return b'"run_started"' in file.read(STALE_BYTES)


def _thinned(series: Series, points: int) -> Series:
    """The places that `curve` will choose, found before all the others are copied."""
    return series.take(thin(series.value, points)) if series.kept.all() else series


def _last_segment(series: Series) -> int:
    there = np.flatnonzero(series.kept)
    return int(series.segment[there[-1]]) if len(there) else 0
