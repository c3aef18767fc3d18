"""Stream sources: samples of a stream by number, read forward, with a cache of recent ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from instar.config.errors import ConfigError
from instar.data.columns import Columns
from instar.data.order import UNKNOWN, Int64Array, LaneOrder
from instar.data.text.stream import SampleStream, StreamChanged
from instar.data.text.stream_reader import Lanes, StreamUnfit


@dataclass
class _LaneCache:
    """The samples first … first+len-1 of a lane."""

    first: int = 0
    samples: dict[int, Any] = field(default_factory=dict)

    @property
    def stop(self) -> int:
        return self.first + len(self.samples)


class LaneSamples:
    """Random access to the samples of lanes.

    Lanes are read from the beginning of a window of `window` samples, which are shuffled together.
    The last `keep` samples of each lane are cached, and at least twice as many as the largest range
    requested; older ones are read again.

    Args:
        counts: the counts of the lanes, as far as they are known.
    """

    def __init__(
        self,
        stream: SampleStream,
        lanes: Lanes,
        counts: Sequence[int | None],
        keep: int,
        window: int = 1,
    ) -> None:
        self.stream = stream
        self.counts = list(counts)
        self._lanes, self._keep, self._window = lanes, keep, window
        self._kept = [_LaneCache() for _ in self.counts]

    def take(self, ids: Int64Array) -> list[Any]:
        """Return the samples with these ids.

        Raises:
            IndexError: a lane has no such sample.
            StreamChanged: a lane gives other samples than before, or another number than counted.
        """
        if ids.size and ids.min() < 0:
            raise IndexError(f"sample {ids.min()}")
        numbers, lanes = np.divmod(ids, len(self.counts))
        ranges = {}
        for lane in np.unique(lanes).tolist():
            of_lane = numbers[lanes == lane]
            ranges[lane] = range(int(of_lane.min()), int(of_lane.max()) + 1)
        self.read(ranges)
        for lane, wanted in ranges.items():
            if self._kept[lane].stop < wanted.stop:
                there = self.length(lane)
                raise IndexError(f"sample {wanted[-1]} of lane {lane}, which has {there}")
        places = zip(lanes.tolist(), numbers.tolist(), strict=True)
        return [self._kept[lane].samples[number] for lane, number in places]

    def read(self, ranges: Mapping[int, range]) -> None:
        """Cache ranges of samples by lane, as far as the lanes go."""
        for lane, wanted in ranges.items():
            kept, begin = self._kept[lane], wanted.start // self._window * self._window
            self._keep = max(self._keep, 2 * (wanted.stop - begin))
            # a window of which a part was dropped is read whole: a worker that reads ahead cannot
            # go back for what the cache lacked
            if not kept.first <= begin <= kept.stop:
                kept = self._kept[lane] = _LaneCache(begin)
            if missing := self._missing(lane, wanted.stop):
                self._lanes.expect(lane, kept.stop, missing)
        for lane, wanted in ranges.items():
            while missing := self._missing(lane, wanted.stop):
                self._fetch(lane, missing)
            kept = self._kept[lane]
            for number in range(kept.first, wanted.stop - self._keep):
                del kept.samples[number]
                kept.first = number + 1

    def seen(self, lane: int) -> int:
        """Return the number of samples of a lane that are known to exist."""
        length = self.length(lane)
        return self._kept[lane].stop if length is None else length

    def length(self, lane: int) -> int | None:
        """Return the number of samples of a lane, None if unknown."""
        count = self.counts[lane]
        return None if count is None else self.stream.samples(count)

    def close(self) -> None:
        self._lanes.close()

    def _missing(self, lane: int, stop: int) -> int:
        """Return the number of samples to fetch of a lane; at its expected end one more, to verify
        that it ends."""
        there, length = self._kept[lane].stop, self.length(lane)
        end = stop if length is None else min(stop, length)
        return end - there + (length is not None and stop >= length) if there < end else 0

    def _fetch(self, lane: int, count: int) -> None:
        kept, length = self._kept[lane], self.length(lane)
        chunk = self._lanes.fetch(lane, kept.stop, count)
        for sample in chunk.samples:
            kept.samples[kept.stop] = sample
        if length is None:
            self.counts[lane] = chunk.end
        elif kept.stop > length or chunk.end not in (None, self.counts[lane]):
            ended = "goes on" if chunk.end is None else self.stream.samples(chunk.end)
            what = "goes on" if chunk.end is None else f"ended after {ended:,} samples"
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


class OpenStreamSource(_LaneSource):
    """A stream of unknown length, read by one rank.

    Ends of lanes are reported to the order when they are reached. `ended` is called with the counts
    of the lanes once all are known.
    """

    def __init__(
        self,
        samples: LaneSamples,
        order: LaneOrder,
        ended: Callable[[Sequence[int]], None] = lambda _: None,
    ) -> None:
        super().__init__(samples)
        self._order, self._ended = order, ended
        order.explorer = self.explore

    def __len__(self) -> int:
        return self._order.samples_per_epoch

    def weights(self, indices: Int64Array) -> float:
        return float(sum(map(self._samples.stream.weight_of, self._samples.take(indices))))

    def explore(self, start: int, stop: int) -> int:
        """Read ahead until the samples at positions start … stop-1 are determined, and whether one
        follows.

        Returns:
            The number of samples per epoch: exact if all lanes have ended, otherwise the number
            determined so far, at least stop + 1.

        Raises:
            StreamUnfit: the stream has no samples at all.
        """
        order, samples = self._order, self._samples
        while order.samples_per_epoch == UNKNOWN and order.certain <= stop:
            _, first = order.turn(start)
            wanted = order.wanted(stop + 1)
            # at least one of each lane, as that it has those before is not known without
            samples.read({lane: range(first, max(end, first + 1)) for lane, end in wanted.items()})
            for lane in wanted:
                if (length := samples.length(lane)) is not None:
                    order.end(lane, length)
            order.seen([samples.seen(lane) for lane in range(order.lanes)])
            if order.samples_per_epoch != UNKNOWN:
                self._ended([count for count in samples.counts if count is not None])
        if order.samples_per_epoch == 0:
            raise StreamUnfit.of(no_samples())
        return min(order.samples_per_epoch, order.certain)


def no_samples() -> ConfigError:
    return ConfigError.one(
        "the stream has no samples: no document in it has two tokens",
        where="data.source",
        key="data.source",
    )
