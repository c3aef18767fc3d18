"""Reads the lanes of a stream forward, in this process or in workers."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from instar.config.errors import ConfigError
from instar.data.text.streams.samples import SampleStream
from instar.data.text.streams.seek_points import START, SeekPoint, SeekPoints
from instar.distributed.failure import RunFailed
from instar.record.progress import progress


class StreamUnfit(RunFailed):
    """A stream has an item that cannot be trained on, or no items."""

    @classmethod
    def of(cls, error: ConfigError) -> StreamUnfit:
        """Convert a config error that was found after the run had started."""
        return cls("; ".join(map(str, error.problems)))


class Chunk(NamedTuple):
    """Successive samples of a lane, and the lane's count if it has no more."""

    samples: list[Any]
    end: int | None


class Lanes(Protocol):
    """Reads lanes, in this process or in others."""

    def expect(self, lane: int, begin: int, count: int) -> None:
        """Announce the next `fetch`, so that several lanes are read concurrently."""
        ...

    def fetch(self, lane: int, begin: int, count: int) -> Chunk:
        """Return samples begin … begin+count-1 of a lane; fewer if the lane ends, or if reading one
        fails: the next call raises that error."""
        ...

    def close(self) -> None: ...


@dataclass
class _Pass:
    """A pass over a lane; `place` is the number of the next sample."""

    iterator: Generator[Any, None, int]
    place: int
    end: int | None = None
    failure: Exception | None = None
    notes: list[str] = field(default_factory=list)
    """Notes of the failure before callers add theirs."""


class LaneReader:
    """Reads the lanes of a stream in this process.

    A lane is read on from where it is or, if that is not on the way or there is a closer one, from
    a seek point; it is an error if the document there is another one than it was.
    """

    def __init__(self, stream: SampleStream, points: SeekPoints) -> None:
        self._stream, self._points = stream, points
        self._passes: dict[int, _Pass] = {}

    def expect(self, lane: int, begin: int, count: int) -> None:
        """Do nothing: this reader reads in `fetch`."""

    def fetch(self, lane: int, begin: int, count: int) -> Chunk:
        reading = self._pass(lane, begin)
        samples: list[Any] = []
        while len(samples) < count and reading.end is None:
            sample = self._next(lane, reading)
            if reading.failure is not None:
                if samples:
                    break
                reading.failure.__notes__ = [*reading.notes]
                raise reading.failure
            if reading.end is None and reading.place > begin:
                samples.append(sample)
        return Chunk(samples, reading.end)

    def count(self, lane: int) -> int | NDArray[np.uint32]:
        """Return `SampleStream.measure` of a lane, and save its seek points."""
        self._points.begin(lane, START)
        with progress(f"counting lane {lane}", unit=self._stream.unit) as advance:
            before = 0

            def note(point: SeekPoint) -> None:
                nonlocal before
                self._points.note(lane, point)
                advance(point.offset - before)
                before = point.offset

            count = self._stream.measure(lane, note)
        self._points.end(lane, count if isinstance(count, int) else count.size)
        self._points.save()
        return count

    def close(self) -> None:
        self._passes.clear()
        self._points.save()

    def _pass(self, lane: int, begin: int) -> _Pass:
        """Return the pass that comes to sample `begin` soonest."""
        reading = self._passes.get(lane)
        if reading is None or reading.place != begin:
            seek = self._points.before(lane, self._stream.offset_of(begin))
            first = self._stream.first_after(seek.offset)
            if reading is None or not first <= reading.place <= begin:
                self._points.begin(lane, seek)
                note = partial(self._points.note, lane)
                reading = _Pass(self._stream.open(lane, seek, note), first)
                self._passes[lane] = reading
        return reading

    def _next(self, lane: int, reading: _Pass) -> Any:
        """Return the next sample, or set the pass's end or failure."""
        if reading.failure is None:
            try:
                sample = next(reading.iterator)
                reading.place += 1
                return sample
            except StopIteration as stop:
                reading.end = stop.value
                self._points.end(lane, stop.value)
            except Exception as error:
                unfit = StreamUnfit.of(error) if isinstance(error, ConfigError) else None
                reading.failure = unfit or error
                reading.notes = [*getattr(error, "__notes__", ())]
        return None


@dataclass
class _Ahead:
    """Samples of a lane from `first` on, received and not yet taken, and the pending request."""

    first: int
    coming: Future[Chunk]
    samples: list[Any] = field(default_factory=list)
    end: int | None = None


class HostedLanes:
    """Reads lanes ahead in worker processes, lane k in worker k mod n.

    Args:
        ask: starts `LaneReader.fetch(lane, begin, count)` in a worker.
        close: stops the workers.
        fetch_ahead: the number of samples of a lane that are requested in advance.
    """

    def __init__(
        self,
        ask: Callable[[int, int, int], Future[Chunk]],
        close: Callable[[], None],
        fetch_ahead: int,
    ) -> None:
        self._ask, self._close, self._fetch_ahead = ask, close, fetch_ahead
        self._read_ahead: dict[int, _Ahead] = {}

    def expect(self, lane: int, begin: int, count: int) -> None:
        if lane not in self._read_ahead or self._read_ahead[lane].first != begin:
            self._read_ahead[lane] = _Ahead(begin, self._ask(lane, begin, count))

    def fetch(self, lane: int, begin: int, count: int) -> Chunk:
        self.expect(lane, begin, count)
        read_ahead = self._read_ahead[lane]
        while len(read_ahead.samples) < count and read_ahead.end is None:
            chunk = read_ahead.coming.result()
            read_ahead.samples += chunk.samples
            read_ahead.end = chunk.end
            if read_ahead.end is None:
                read_ahead.coming = self._ask(
                    lane, read_ahead.first + len(read_ahead.samples), self._fetch_ahead
                )
        samples, read_ahead.samples = read_ahead.samples[:count], read_ahead.samples[count:]
        read_ahead.first += len(samples)
        return Chunk(samples, read_ahead.end if len(samples) < count else None)

    def close(self) -> None:
        self._read_ahead.clear()
        self._close()
