"""Lanes of a stream read forward, in this process or in workers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash

from instar.config.errors import ConfigError
from instar.data.columns import Ragged, leaves
from instar.data.stream import Stream
from instar.distributed.failure import RunFailed


class StreamChanged(RunFailed):
    """A stream did not give the same samples as before."""


class StreamUnfit(RunFailed):
    """A run met an item that cannot be trained on, or none at all."""

    @classmethod
    def of(cls, error: ConfigError) -> StreamUnfit:
        """The same mistake, found when the run had started."""
        return cls("; ".join(map(str, error.problems)))


class Chunk(NamedTuple):
    """Successive samples of a lane; `ended`: the lane has no more."""

    first: int
    samples: list[Any]
    ended: bool


class Lanes(Protocol):
    """Reads lanes, in this process or in others."""

    def expect(self, lane: int, begin: int, count: int) -> None:
        """Says what is fetched next, so that several lanes may be read at the same time."""
        ...

    def fetch(self, lane: int, begin: int, count: int) -> Chunk:
        """Samples begin … begin+count-1, fewer where the lane ends, or where reading one failed:
        the next call raises that. Of a lane that ends before `begin`, its last sample."""
        ...

    def close(self) -> None: ...


@dataclass
class _Reading:
    iterator: Any
    place: int = 0
    last: list[Any] = field(default_factory=list)
    failure: Exception | None = None
    notes: list[str] = field(default_factory=list)
    """of the failure, before those who pass it on add theirs"""


class LaneReader:
    """Reads the lanes of a stream in this process.

    Going back means reading from the beginning again; a lane that then begins otherwise is an
    error.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._readings: dict[int, _Reading] = {}
        self._beginnings: dict[int, str] = {}

    def expect(self, lane: int, begin: int, count: int) -> None:
        """Nothing is read before it is fetched."""

    def fetch(self, lane: int, begin: int, count: int) -> Chunk:
        reading = self._readings.get(lane)
        if reading is None or reading.place > begin:
            reading = self._readings[lane] = _Reading(iter(self._stream.open(lane)))
        samples: list[Any] = []
        while len(samples) < count:
            if reading.failure is None:
                try:
                    sample = next(reading.iterator)
                    if reading.place == 0:
                        self._check_beginning(lane, sample)
                except StopIteration:
                    if reading.place < begin:
                        begin, samples = reading.place - len(reading.last), reading.last
                    return Chunk(begin, samples, ended=True)
                except Exception as error:
                    reading.failure = (
                        StreamUnfit.of(error) if isinstance(error, ConfigError) else error
                    )
                    reading.notes = [*getattr(error, "__notes__", ())]
            if reading.failure is not None:
                if samples:
                    break
                reading.failure.__notes__ = [*reading.notes]
                raise reading.failure
            reading.place += 1
            reading.last = [sample]
            if reading.place > begin:
                samples.append(sample)
        return Chunk(begin, samples, ended=False)

    def close(self) -> None:
        self._readings.clear()

    def _check_beginning(self, lane: int, sample: Any) -> None:
        found = xxhash.xxh3_128()
        for name, column in leaves(self._stream.columns([sample])):
            found.update(name.encode())
            values = column.flat if isinstance(column, Ragged) else column
            found.update(np.ascontiguousarray(values).data)
        if self._beginnings.setdefault(lane, found.hexdigest()) != found.hexdigest():
            raise StreamChanged(
                f"lane {lane} begins with another sample than when it was read before; a stream "
                "must give the same samples in the same order every time, unshuffled: they are "
                "shuffled by data.order"
            )


@dataclass
class _Ahead:
    """What came of a lane from sample `first` on and was not taken yet, and what is under way."""

    first: int
    coming: Future[Chunk]
    samples: list[Any] = field(default_factory=list)
    ended: bool = False


class HostedLanes:
    """Lanes read by worker processes, lane k by worker k mod n, some samples ahead.

    Args:
        ask: begins `LaneReader.fetch(lane, begin, count)` in a worker.
        end: ends the workers.
        ahead: samples of a lane that are asked for in advance.
    """

    def __init__(
        self,
        ask: Callable[[int, int, int], Future[Chunk]],
        end: Callable[[], None],
        ahead: int,
    ) -> None:
        self._ask, self._end, self._ahead = ask, end, ahead
        self._held: dict[int, _Ahead] = {}

    def expect(self, lane: int, begin: int, count: int) -> None:
        if lane not in self._held or self._held[lane].first != begin:
            self._held[lane] = _Ahead(begin, self._ask(lane, begin, count))

    def fetch(self, lane: int, begin: int, count: int) -> Chunk:
        self.expect(lane, begin, count)
        held = self._held[lane]
        while len(held.samples) < count and not held.ended:
            chunk = held.coming.result()
            if chunk.first < begin:
                return chunk
            held.samples += chunk.samples
            held.ended = chunk.ended
            if not held.ended:
                held.coming = self._ask(lane, held.first + len(held.samples), self._ahead)
        taken, held.samples = held.samples[:count], held.samples[count:]
        held.first += len(taken)
        return Chunk(begin, taken, held.ended and len(taken) < count)

    def close(self) -> None:
        self._held.clear()
        self._end()
