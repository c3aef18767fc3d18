"""Stream sources: samples of a stream by number, read forward, with a cache of recent ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash

from instar.config.errors import ConfigError
from instar.data.columns import Columns, Ragged, leaves
from instar.data.order import UNKNOWN, Int64Array, LaneOrder
from instar.data.text.stream import SampleStream
from instar.distributed.failure import RunFailed


class StreamChanged(RunFailed):
    """A stream gave other samples than when it was read before."""


class StreamUnfit(RunFailed):
    """A stream has an item that cannot be trained on, or no items."""

    @classmethod
    def of(cls, error: ConfigError) -> StreamUnfit:
        """Convert a config error that was found after the run had started."""
        return cls("; ".join(map(str, error.problems)))


class Chunk(NamedTuple):
    """Successive samples of a lane; `ended` if the lane has no more."""

    first: int
    samples: list[Any]
    ended: bool


class Lanes(Protocol):
    """Reads lanes, in this process or in others."""

    def expect(self, lane: int, begin: int, count: int) -> None:
        """Announce the next `fetch`, so that several lanes are read concurrently."""
        ...

    def fetch(self, lane: int, begin: int, count: int) -> Chunk:
        """Return samples begin … begin+count-1 of a lane; fewer if the lane ends, or if reading one
        fails: the next call raises that error. If the lane ends before `begin`, return its last."""
        ...

    def close(self) -> None: ...


@dataclass
class _LaneState:
    iterator: Any
    place: int = 0
    last: list[Any] = field(default_factory=list)
    failure: Exception | None = None
    notes: list[str] = field(default_factory=list)
    """Notes of the failure before callers add theirs."""


class LaneReader:
    """Reads the lanes of a stream in this process.

    Seeking backward reads the lane again from its beginning; it is an error if the first sample
    then differs.
    """

    def __init__(self, stream: SampleStream) -> None:
        self._stream = stream
        self._readings: dict[int, _LaneState] = {}
        self._beginnings: dict[int, str] = {}

    def expect(self, lane: int, begin: int, count: int) -> None:
        """Do nothing: this reader reads in `fetch`."""

    def fetch(self, lane: int, begin: int, count: int) -> Chunk:
        reading = self._readings.get(lane)
        if reading is None or reading.place > begin:
            reading = self._readings[lane] = _LaneState(iter(self._stream.open(lane)))
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
    """Samples of a lane from `first` on, received and not yet taken, and the pending request."""

    first: int
    coming: Future[Chunk]
    samples: list[Any] = field(default_factory=list)
    ended: bool = False


class HostedLanes:
    """Reads lanes ahead in worker processes, lane k in worker k mod n.

    Args:
        ask: starts `LaneReader.fetch(lane, begin, count)` in a worker.
        end: stops the workers.
        ahead: the number of samples of a lane that are requested in advance.
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


@dataclass
class _LaneCache:
    """The samples first … first+len-1 of a lane."""

    first: int = 0
    samples: dict[int, Any] = field(default_factory=dict)

    @property
    def stop(self) -> int:
        return self.first + len(self.samples)


class LaneSamples:
    """Random access to the samples of lanes. The last `keep` of each lane are cached, and at least
    twice as many as the largest range requested; older ones are read again from the beginning.

    `lengths` are the numbers of samples of the lanes, as far as they are known.
    """

    def __init__(
        self, stream: SampleStream, lanes: Lanes, lengths: Sequence[int | None], keep: int
    ) -> None:
        self.stream = stream
        self.lengths = list(lengths)
        self._lanes, self._keep = lanes, keep
        self._kept = [_LaneCache() for _ in self.lengths]

    def take(self, ids: Int64Array) -> list[Any]:
        """Return the samples with these ids.

        Raises:
            IndexError: a lane has no such sample.
            StreamChanged: a lane gives other samples than before, or another number than counted.
        """
        if ids.size and ids.min() < 0:
            raise IndexError(f"sample {ids.min()}")
        numbers, lanes = np.divmod(ids, len(self.lengths))
        stops: dict[int, int] = {}
        floors: dict[int, int] = {}
        for lane in np.unique(lanes).tolist():
            of_lane = numbers[lanes == lane]
            low, stops[lane] = int(of_lane.min()), int(of_lane.max()) + 1
            self._keep = max(self._keep, 2 * (stops[lane] - low))
            floors[lane] = max(0, stops[lane] - self._keep)
            if low < self._kept[lane].first:
                self._kept[lane] = _LaneCache(floors[lane])
        self._read(stops, floors)
        for lane, stop in stops.items():
            if self._kept[lane].stop < stop:
                there = self._kept[lane].stop
                raise IndexError(f"sample {stop - 1} of lane {lane}, which has {there}")
        places = zip(lanes.tolist(), numbers.tolist(), strict=True)
        return [self._kept[lane].samples[number] for lane, number in places]

    def extend(self, stops: Mapping[int, int], last: int) -> None:
        """Read lanes up to sample stop-1 or to their ends; keep those from `last + 1 - keep` on."""
        self._read(stops, dict.fromkeys(stops, max(0, last + 1 - self._keep)))

    def seen(self, lane: int) -> int:
        """Return the number of samples of a lane that have been read, from its beginning."""
        return self._kept[lane].stop

    def cost(self, ids: Int64Array) -> int:
        """Return the number of samples that must be read, or read again, only to reach these."""
        numbers, lanes = np.divmod(ids, len(self.lengths))
        cost = 0
        for lane in np.unique(lanes).tolist():
            kept, lowest = self._kept[lane], int(numbers[lanes == lane].min())
            cost += lowest if lowest < kept.first else max(0, lowest - kept.stop)
        return cost

    def close(self) -> None:
        self._lanes.close()

    def _read(self, stops: Mapping[int, int], floors: Mapping[int, int]) -> None:
        """Read each lane up to its stop, then drop the samples before its floor."""
        for lane, floor in floors.items():
            if self._kept[lane].stop < floor:
                self._kept[lane] = _LaneCache(floor)
            if missing := self._missing(lane, stops[lane]):
                self._lanes.expect(lane, self._kept[lane].stop, missing)
        for lane, floor in floors.items():
            while missing := self._missing(lane, stops[lane]):
                self._fetch(lane, missing)
            kept = self._kept[lane]
            # keep a lane's last sample, whose weight is needed
            needed = kept.stop if self.lengths[lane] is None else kept.stop - 1
            for number in range(kept.first, min(floor, needed)):
                del kept.samples[number]
                kept.first = number + 1

    def _missing(self, lane: int, stop: int) -> int:
        """Return the number of samples to fetch of a lane; at its expected end one more, to verify
        that it ends."""
        there, length = self._kept[lane].stop, self.lengths[lane]
        end = stop if length is None else min(stop, length)
        return end - there + (length is not None and stop >= length) if there < end else 0

    def _fetch(self, lane: int, count: int) -> None:
        kept, length = self._kept[lane], self.lengths[lane]
        chunk = self._lanes.fetch(lane, kept.stop, count)
        kept.first = min(kept.first, chunk.first)
        for sample in chunk.samples:
            kept.samples[kept.stop] = sample
        if chunk.ended and length is None:
            self.lengths[lane] = kept.stop
        elif length is not None and (kept.stop > length or (chunk.ended and kept.stop < length)):
            what = f"ended after {kept.stop:,} samples" if chunk.ended else "goes on"
            raise StreamChanged(
                f"lane {lane} {what}, when it was read before it had {length:,}; a stream must give "
                "the same samples every time"
            )


class LaneWeights(Protocol):
    """The loss weights of a lane's samples, known without reading them."""

    @property
    def samples(self) -> int: ...

    def total(self, numbers: Int64Array) -> float:
        """Return the sum of the weights of some samples."""
        ...


class _LaneSource:
    """A source over `LaneSamples`."""

    def __init__(self, samples: LaneSamples) -> None:
        self._samples = samples
        self.fingerprint = samples.stream.fingerprint

    def read(self, indices: Int64Array, epoch: int = 0) -> Columns:  # noqa: ARG002
        return self._samples.stream.columns(self._samples.take(indices))

    def cost(self, indices: Int64Array) -> int:
        """Return the number of samples that must be read, or read again, only to reach these."""
        return self._samples.cost(indices)

    def close(self) -> None:
        self._samples.close()


class StreamSource(_LaneSource):
    """A stream whose lanes were counted: each rank may read its own lanes."""

    def __init__(self, samples: LaneSamples, weights: Sequence[LaneWeights]) -> None:
        super().__init__(samples)
        self._weights = tuple(weights)

    def __len__(self) -> int:
        return sum(lane.samples for lane in self._weights)

    def weights(self, indices: Int64Array) -> float:
        numbers, lanes = np.divmod(indices, len(self._weights))
        present = np.unique(lanes).tolist()
        return float(sum(self._weights[lane].total(numbers[lanes == lane]) for lane in present))


class LaneEnd(NamedTuple):
    """The number of samples of a lane, and the loss weight of the last one."""

    samples: int
    last_weight: float


class OpenStreamSource(_LaneSource):
    """A stream of unknown length, read by one rank.

    Ends of lanes are reported to the order when they are reached. `ended` is called once all are
    known.
    """

    def __init__(
        self,
        samples: LaneSamples,
        order: LaneOrder,
        ended: Callable[[Sequence[LaneEnd]], None] = lambda _: None,
    ) -> None:
        super().__init__(samples)
        self._order, self._ended = order, ended
        self._ends: dict[int, LaneEnd] = {}
        order.explorer = self.explore

    def __len__(self) -> int:
        return self._order.samples_per_epoch

    def weights(self, indices: Int64Array) -> float:
        return float(sum(map(self._samples.stream.weight_of, self._samples.take(indices))))

    def explore(self, epoch: int, stop: int) -> int:  # noqa: ARG002
        """Read ahead until the samples before position `stop` are determined, and whether one
        follows.

        Returns:
            The number of samples per epoch: exact if all lanes have ended, otherwise the number
            determined so far, at least stop + 1.

        Raises:
            StreamUnfit: the stream has no samples at all.
        """
        order, samples = self._order, self._samples
        while order.samples_per_epoch == UNKNOWN and order.certain <= stop:
            _, last = order.turn(stop)
            wanted = order.wanted(stop + 1)
            samples.extend(wanted, last)
            for lane in wanted:
                if samples.lengths[lane] is not None:
                    self._ends[lane] = self._end_of(lane)
                    order.end(lane, self._ends[lane].samples)
            order.seen([samples.seen(lane) for lane in range(order.lanes)])
            if order.samples_per_epoch != UNKNOWN:
                self._ended([self._ends[lane] for lane in range(order.lanes)])
        if order.samples_per_epoch == 0:
            raise StreamUnfit.of(no_samples())
        return min(order.samples_per_epoch, order.certain)

    def _end_of(self, lane: int) -> LaneEnd:
        length = self._samples.lengths[lane] or 0
        last = np.array([(length - 1) * self._order.lanes + lane])
        return LaneEnd(length, self.weights(last) if length else 0.0)


def no_samples() -> ConfigError:
    return ConfigError.one(
        "the stream has no samples: no document in it has two tokens",
        where="data.source",
        key="data.source",
    )
