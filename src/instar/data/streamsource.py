"""Samples of a stream by number: its lanes are read forward, and what was just read is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from instar.config.errors import ConfigError
from instar.data.columns import Columns
from instar.data.lanereader import Lanes, StreamChanged, StreamUnfit
from instar.data.lanes import OpenOrder
from instar.data.order import Int64Array
from instar.data.plan import UNKNOWN
from instar.data.stream import Stream


@dataclass
class _Kept:
    """The samples first … first+len-1 of a lane."""

    first: int = 0
    samples: dict[int, Any] = field(default_factory=dict)

    @property
    def stop(self) -> int:
        return self.first + len(self.samples)


class LaneSamples:
    """The samples of lanes by number. The last `keep` of each lane stay at hand, and at least twice
    as many as were ever asked for at once; what lies behind them is read again from the beginning.

    `lengths` are the lanes' samples, as far as they are known.
    """

    def __init__(
        self, stream: Stream, lanes: Lanes, lengths: Sequence[int | None], keep: int
    ) -> None:
        self.stream = stream
        self.lengths = list(lengths)
        self._lanes, self._keep = lanes, keep
        self._kept = [_Kept() for _ in self.lengths]

    def take(self, ids: Int64Array) -> list[Any]:
        """The samples of these ids.

        Raises:
            IndexError: a lane has no such sample.
            StreamChanged: a lane did not give what it gave before, or has not the length counted.
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
                self._kept[lane] = _Kept(floors[lane])
        self._read(stops, floors)
        for lane, stop in stops.items():
            if self._kept[lane].stop < stop:
                there = self._kept[lane].stop
                raise IndexError(f"sample {stop - 1} of lane {lane}, which has {there}")
        places = zip(lanes.tolist(), numbers.tolist(), strict=True)
        return [self._kept[lane].samples[number] for lane, number in places]

    def extend(self, stops: Mapping[int, int], last: int) -> None:
        """Read some lanes up to their samples stop-1, or to their ends, and keep them from `keep`
        before `last` on."""
        self._read(stops, dict.fromkeys(stops, max(0, last + 1 - self._keep)))

    def seen(self, lane: int) -> int:
        """The first samples of a lane that were read."""
        return self._kept[lane].stop

    def cost(self, ids: Int64Array) -> int:
        """How many samples must be read, or read again, only to get to these."""
        numbers, lanes = np.divmod(ids, len(self.lengths))
        cost = 0
        for lane in np.unique(lanes).tolist():
            kept, lowest = self._kept[lane], int(numbers[lanes == lane].min())
            cost += lowest if lowest < kept.first else max(0, lowest - kept.stop)
        return cost

    def close(self) -> None:
        self._lanes.close()

    def _read(self, stops: Mapping[int, int], floors: Mapping[int, int]) -> None:
        """Each lane up to its stop; then only what is from its floor on is kept."""
        for lane, floor in floors.items():
            if self._kept[lane].stop < floor:
                self._kept[lane] = _Kept(floor)
            if missing := self._missing(lane, stops[lane]):
                self._lanes.expect(lane, self._kept[lane].stop, missing)
        for lane, floor in floors.items():
            while missing := self._missing(lane, stops[lane]):
                self._fetch(lane, missing)
            kept = self._kept[lane]
            # a lane's last sample stays, to say what it weighs
            needed = kept.stop if self.lengths[lane] is None else kept.stop - 1
            for number in range(kept.first, min(floor, needed)):
                del kept.samples[number]
                kept.first = number + 1

    def _missing(self, lane: int, stop: int) -> int:
        """How many samples must be fetched of a lane; where it should end, one more, to see that it
        does."""
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
        """The sum over some samples."""
        ...


class StreamSource:
    """A stream whose lanes were counted: each rank may read its own lanes."""

    def __init__(self, samples: LaneSamples, weights: Sequence[LaneWeights]) -> None:
        self._samples, self._weights = samples, tuple(weights)
        self.fingerprint = samples.stream.fingerprint

    def __len__(self) -> int:
        return sum(lane.samples for lane in self._weights)

    def read(self, indices: Int64Array, epoch: int = 0) -> Columns:  # noqa: ARG002
        return self._samples.stream.columns(self._samples.take(indices))

    def weights(self, indices: Int64Array) -> float:
        numbers, lanes = np.divmod(indices, len(self._weights))
        present = np.unique(lanes).tolist()
        return float(sum(self._weights[lane].total(numbers[lanes == lane]) for lane in present))

    def cost(self, indices: Int64Array) -> int:
        """How many samples must be read, or read again, only to get to these."""
        return self._samples.cost(indices)

    def close(self) -> None:
        self._samples.close()


class LaneEnd(NamedTuple):
    """How many samples a lane has, and the loss weight of the last one."""

    samples: int
    last_weight: float


class OpenStreamSource:
    """A stream whose end is not known before it is reached, read by one rank.

    What is found of the lanes' ends goes into the order. `ended` is called once all are known.
    """

    def __init__(
        self,
        samples: LaneSamples,
        order: OpenOrder,
        ended: Callable[[Sequence[LaneEnd]], None] = lambda _: None,
    ) -> None:
        self._samples, self._order, self._ended = samples, order, ended
        self._ends: dict[int, LaneEnd] = {}
        self.fingerprint = samples.stream.fingerprint
        order.explorer = self.explore

    def __len__(self) -> int:
        return self._order.samples_per_epoch

    def read(self, indices: Int64Array, epoch: int = 0) -> Columns:  # noqa: ARG002
        return self._samples.stream.columns(self._samples.take(indices))

    def weights(self, indices: Int64Array) -> float:
        return float(sum(map(self._samples.stream.weight_of, self._samples.take(indices))))

    def explore(self, epoch: int, stop: int) -> int:  # noqa: ARG002
        """Read ahead until it is certain which samples stand before position `stop`, and whether
        one stands there.

        Returns how many samples an epoch has: exact if all lanes have ended, else so many as are
        certain, stop + 1 at least.

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

    def cost(self, indices: Int64Array) -> int:
        """How many samples must be read, or read again, only to get to these."""
        return self._samples.cost(indices)

    def close(self) -> None:
        self._samples.close()

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
