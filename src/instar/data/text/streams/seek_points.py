"""Seek points: documents of a lane at which reading can begin, kept in the data folder.

seek-points/lane-K.json   the points of lane K

A lane's samples are numbered from its beginning. A point says how many tokens, or documents, of the
lane come before a document, so that reading can begin there. Points depend on neither the context
nor the number of ranks. They are a cache: without them the same samples are read, later.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from instar.config.files import of_bounded_depth, read_regular
from instar.record.atomic import atomic_file, sweep

logger = logging.getLogger(__name__)

POINTS_FORMAT = "instar-seek-points/1"
POINTS_FOLDER = "seek-points"

_FINENESS = 1 << 13
_MOST_BYTES = 1 << 23
_SAVE_EVERY_S = 1.0
_NEVER = float("-inf")

Natural = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class SeekPoint(NamedTuple):
    """A document of a lane.

    `offset` is the number of the lane's tokens before it, separators included, or of its documents if
    they are not packed. `part` and `row` are those of its item, `digest` is `digest_of` its tokens.
    """

    offset: Natural
    part: Natural
    row: Natural
    digest: Natural


def digest_of(tokens: NDArray[Any]) -> int:
    """Return 63 bits of the xxh3-64 of some tokens."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(tokens).data) >> 1


START = SeekPoint(0, 0, 0, 0)
"""The beginning of a lane; no document is known there."""


class PointsRecord(msgspec.Struct, frozen=True):
    """The file of a lane; `checksum` is the xxh3-128 of the points as JSON."""

    format: str
    fingerprint: str
    checksum: str
    points: list[SeekPoint]


@dataclass
class _Lane:
    points: list[SeekPoint]
    """ascending"""
    first: int = 0
    """offset at which the current pass began"""
    last: int = 0
    """offset of the point that the current pass noted last"""
    is_complete: bool = False
    """Whether the current pass has reached the lane's end."""
    has_start: bool = False
    """Whether this process has read the lane's first document."""
    is_dirty: bool = False

    def lies_beyond(self, point: SeekPoint) -> bool:
        """Return whether the current pass has not come to a point."""
        return not self.is_complete and point.offset > self.last


@dataclass
class SeekPoints:
    """The seek points of a stream.

    Points are at least `spacing` apart, or 1/8192 of the offset where that is more: so their number
    grows with the logarithm of the lane's length. A pass replaces the points that it comes by, as they may be those of an older stream.

    `folder` is that of the data; a file in it that cannot be read or written is done without. None:
    nothing is kept.
    """

    folder: Path | None
    fingerprint: str
    spacing: int
    _lanes: dict[int, _Lane] = field(default_factory=dict)
    _save_time: float = _NEVER
    _has_warned: bool = False

    def before(self, lane: int, offset: int) -> SeekPoint:
        """Return the last point of a lane at or before an offset, or START.

        The first document is only compared with what this process has read: a new run may begin
        with another stream than the one that the points are of.
        """
        state = self._of(lane)
        index = bisect_right(state.points, offset, key=_OFFSET)
        if index and (state.has_start or state.points[index - 1].offset):
            return state.points[index - 1]
        if not state.points and offset > 2 * self.spacing and self.folder is not None:
            self._warn(f"there are no seek points of lane {lane} in {self.folder}")
        return START

    def begin(self, lane: int, point: SeekPoint) -> None:
        """Begin a pass over a lane at a point."""
        state = self._of(lane)
        if state.is_dirty:
            self._write(lane, state)
        state.first = state.last = point.offset
        state.is_complete = False

    def note(self, lane: int, point: SeekPoint) -> None:
        """Take up a document of the current pass, unless it is too close to the last point."""
        state = self._of(lane)
        state.has_start |= point.offset == 0
        if 0 < point.offset < state.last + max(self.spacing, point.offset // _FINENESS):
            return
        low = bisect_right(state.points, state.last, key=_OFFSET) if point.offset else 0
        high = bisect_right(state.points, point.offset, key=_OFFSET)
        state.is_dirty |= state.points[low:high] != [point]
        state.points[low:high] = [point]
        state.last = point.offset
        if time.monotonic() >= self._save_time + _SAVE_EVERY_S:
            self.save()

    def end(self, lane: int, length: int) -> None:
        """Forget what an older stream had after the end of a lane."""
        state = self._of(lane)
        index = bisect_left(state.points, max(length, 1), key=_OFFSET)
        state.is_dirty |= index < len(state.points)
        state.is_complete = True
        del state.points[index:]

    def save(self) -> None:
        """Write the points noted since the last call."""
        if self.folder is None:
            return
        if self._save_time == _NEVER:
            sweep(self.folder / POINTS_FOLDER)
        for lane, state in self._lanes.items():
            if state.is_dirty:
                self._write(lane, state)
        self._save_time = time.monotonic()

    def _write(self, lane: int, state: _Lane) -> None:
        # another rank may have passed through the lane meanwhile, and this one only through a part
        if saved_points := self._load(lane):
            state.points = [
                *(point for point in saved_points if point.offset < state.first),
                *(p for p in state.points if state.first <= p.offset and not state.lies_beyond(p)),
                *filter(state.lies_beyond, saved_points),
            ]
        points = state.points
        record = PointsRecord(POINTS_FORMAT, self.fingerprint, _checksum(points), points)
        try:
            self._file(lane).parent.mkdir(exist_ok=True)
            with atomic_file(self._file(lane), durable=False) as temporary:
                temporary.write_bytes(msgspec.json.encode(record))
        except OSError as error:
            self._warn(f"cannot write {self._file(lane)}: {error.strerror}")
        state.is_dirty = False

    def _of(self, lane: int) -> _Lane:
        if lane not in self._lanes:
            self._lanes[lane] = _Lane(self._load(lane))
        return self._lanes[lane]

    def _load(self, lane: int) -> list[SeekPoint]:
        if self.folder is None:
            return []
        file = self._file(lane)
        try:
            record = msgspec.json.decode(
                of_bounded_depth(read_regular(file, _MOST_BYTES)), type=PointsRecord
            )
        except FileNotFoundError:
            return []
        except (OSError, msgspec.DecodeError, ValueError) as error:
            self._warn(f"{file} is not used: {error}")
            return []
        if (record.format, record.fingerprint) != (POINTS_FORMAT, self.fingerprint):
            return []
        pairs = pairwise(record.points)
        ascending = all(a.offset < b.offset and a[1:3] < b[1:3] for a, b in pairs)
        if record.checksum != _checksum(record.points) or not ascending:
            self._warn(f"{file} is not used: it is damaged")
            return []
        return record.points

    def _file(self, lane: int) -> Path:
        assert self.folder is not None
        return self.folder / POINTS_FOLDER / f"lane-{lane}.json"

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            logger.warning("%s: a resumed stream is read from its beginning", what)
        self._has_warned = True


_OFFSET = attrgetter("offset")


def _checksum(points: list[SeekPoint]) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(points))
