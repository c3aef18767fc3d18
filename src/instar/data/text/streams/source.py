"""Stream sources: samples of a stream by number, read forward, with a cache of recent ones; and the
order of samples in lanes, whose ends may be unknown."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from instar.config.errors import ConfigError
from instar.data.columns import Columns
from instar.data.order import UNKNOWN, Int64Array, Shuffled, check_positions
from instar.data.text.streams.reader import Lanes, StreamUnfit
from instar.data.text.streams.samples import LaneWeights, SampleStream, StreamChanged


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
        record: the file of these counts, if they were read from one.
    """

    def __init__(
        self,
        stream: SampleStream,
        lanes: Lanes,
        counts: Sequence[int | None],
        keep: int,
        window: int = 1,
        record: Path | None = None,
    ) -> None:
        self.stream, self._record = stream, record
        self.counts = list(counts)
        self._lanes, self._keep, self._window = lanes, keep, window
        self._caches = [_LaneCache() for _ in self.counts]

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
        for lane, positions in ranges.items():
            if self._caches[lane].stop < positions.stop:
                length = self.length(lane)
                raise IndexError(f"sample {positions[-1]} of lane {lane}, which has {length}")
        places = zip(lanes.tolist(), numbers.tolist(), strict=True)
        return [self._caches[lane].samples[number] for lane, number in places]

    def read(self, ranges: Mapping[int, range]) -> None:
        """Cache ranges of samples by lane, as far as the lanes go."""
        for lane, positions in ranges.items():
            cache, begin = self._caches[lane], positions.start // self._window * self._window
            self._keep = max(self._keep, 2 * (positions.stop - begin))
            # a window of which a part was dropped is read whole: a worker that reads ahead cannot
            # go back for what the cache lacked
            if not cache.first <= begin <= cache.stop:
                cache = self._caches[lane] = _LaneCache(begin)
            if missing := self._missing(lane, positions.stop):
                self._lanes.expect(lane, cache.stop, missing)
        for lane, positions in ranges.items():
            while missing := self._missing(lane, positions.stop):
                self._fetch(lane, missing)
            cache = self._caches[lane]
            for number in range(cache.first, positions.stop - self._keep):
                del cache.samples[number]
                cache.first = number + 1

    def sample_count(self, lane: int) -> int:
        """Return the number of samples of a lane that are known to exist."""
        length = self.length(lane)
        return self._caches[lane].stop if length is None else length

    def length(self, lane: int) -> int | None:
        """Return the number of samples of a lane, None if unknown."""
        count = self.counts[lane]
        return None if count is None else self.stream.samples(count)

    def close(self) -> None:
        self._lanes.close()

    def _missing(self, lane: int, stop: int) -> int:
        """Return the number of samples to fetch of a lane; at its expected end one more, to verify that it ends."""
        cache_end, length = self._caches[lane].stop, self.length(lane)
        end = stop if length is None else min(stop, length)
        return end - cache_end + (length is not None and stop >= length) if cache_end < end else 0

    def _fetch(self, lane: int, count: int) -> None:
        cache, length = self._caches[lane], self.length(lane)
        chunk = self._lanes.fetch(lane, cache.stop, count)
        for sample in chunk.samples:
            cache.samples[cache.stop] = sample
        if length is None:
            self.counts[lane] = chunk.end
        elif cache.stop > length or chunk.end not in (None, self.counts[lane]):
            end = chunk.end
            what = "goes on" if end is None else f"ended after {self.stream.samples(end):,} samples"
            way_out = f"; if it was changed on purpose, delete {self._record} and begin a new run"
            raise StreamChanged(
                f"lane {lane} {what}, when it was read before it had {length:,}; a stream must give "
                f"the same samples every time{way_out if self._record else ''}"
            )


class LaneOrder:
    """Round robin over the lanes that have not ended; sample j of lane k has the id j · L + k.

    L is the number of lanes. Within a lane, samples are shuffled in windows of `window` successive
    ones, differently in each epoch. The length of a lane may be unknown until it is set by `end`;
    `indices` is defined up to position `certain`.
    """

    def __init__(self, lengths: Sequence[int | None], seed: int = 0, window: int = 1) -> None:
        """
        Args:
            lengths: the number of samples of each lane, None if unknown.
        """
        self.lanes, self.seed, self.window = len(lengths), seed, window
        self.explorer: Callable[[int, int], object] = lambda _start, _stop: None
        """Set by the source, which reports the ends of lanes that it reaches."""
        self.ends = {lane: length for lane, length in enumerate(lengths) if length is not None}
        """The number of samples of each lane whose end is known."""
        self.certain = 0
        self._lay_out()
        self.certain_until([0] * self.lanes)

    @property
    def samples_per_epoch(self) -> int:
        """UNKNOWN until every lane has ended, then exact for every epoch."""
        return int(self._lengths.sum()) if len(self.ends) == self.lanes else UNKNOWN

    def indices(self, epoch: int, start: int, stop: int) -> Int64Array:
        """Return the samples at positions start … stop-1 of an epoch, int64 [stop - start].

        Raises:
            IndexError: the positions are not within the epoch, or not determined yet.
        """
        check_positions(self, epoch, start, stop)
        if stop > self.certain:
            raise IndexError(
                f"position {stop - 1} is not determined yet, only those before {self.certain}"
            )
        lanes, numbers = self._places(start, stop)
        if self.window > 1:
            for lane in np.unique(lanes).tolist():
                rows = np.flatnonzero(lanes == lane)
                begin = int(numbers[rows[0]])
                numbers[rows] = self._shuffle(epoch, lane, begin, begin + rows.size)
        ids: Int64Array = numbers * self.lanes + lanes
        return ids

    def lane_of(self, epoch: int, start: int, stop: int) -> Int64Array:  # noqa: ARG002
        """Return the lanes of the samples at positions start … stop-1, int64 [stop - start]."""
        return self._places(start, stop)[0]

    def explore(self, start: int, stop: int) -> None:
        """Make the source read ahead until the samples at positions start … stop-1 are determined,
        and whether more follow."""
        self.explorer(start, stop)

    def end(self, lane: int, length: int) -> None:
        """Set the number of samples of a lane."""
        self.ends[lane] = length
        self._lay_out()

    def samples_needed(self, stop: int) -> dict[int, int]:
        """Return how many samples of each unended lane must be read to determine all positions before `stop`: whole
        windows, because a window that is cut short by the lane's end is shuffled differently."""
        if len(self.ends) == self.lanes:
            return {}
        last, number = self.turn(stop - 1)
        return {
            lane: -(-(number + (lane <= last)) // self.window) * self.window
            for lane in self._open_lanes()
        }

    def turn(self, position: int) -> tuple[int, int]:
        """Return the lane at a position and the sample's number within it, as far as is known."""
        lanes, numbers = self._places(position, position + 1)
        return int(lanes[0]), int(numbers[0])

    def certain_until(self, counts: Sequence[int]) -> int:
        """Return the position up to which the samples read of each lane determine the order."""
        unknown = [(counts[lane] // self.window * self.window, lane) for lane in self._open_lanes()]
        if unknown:
            number, lane = min(unknown)
            rounds_before = int(np.minimum(self._lengths, number).sum())
            within_round = int(np.count_nonzero(self._lengths[:lane] > number))
            self.certain = max(self.certain, rounds_before + within_round)
        else:
            self.certain = self.samples_per_epoch
        return self.certain

    def _open_lanes(self) -> list[int]:
        return [lane for lane in range(self.lanes) if lane not in self.ends]

    def _lay_out(self) -> None:
        """Find the stretches of rounds in which the same lanes alternate, between two ends of lanes: the first
        round and first position of each stretch, and finally the end of the epoch."""
        endless = UNKNOWN // self.lanes // self.window * self.window
        lengths = [self.ends.get(lane, endless) for lane in range(self.lanes)]
        self._lengths = np.array(lengths, dtype=np.int64)
        ends = np.unique(self._lengths)
        self._rounds: Int64Array = np.concatenate([[0], ends]).astype(np.int64) if ends[0] else ends
        running = [np.count_nonzero(self._lengths > round_) for round_ in self._rounds[:-1]]
        sizes = np.diff(self._rounds) * np.array(running, dtype=np.int64)
        self._firsts: Int64Array = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    def _places(self, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        """Return the lane and the number within it, before shuffling, of some positions."""
        lanes = np.empty(stop - start, dtype=np.int64)
        numbers = np.empty_like(lanes)
        rounds, firsts = self._rounds, self._firsts
        stretch, at = int(np.searchsorted(firsts, start, side="right")) - 1, start
        while at < stop:
            end = min(stop, int(firsts[stretch + 1]))
            running = np.flatnonzero(self._lengths > rounds[stretch])
            turns = np.arange(at - firsts[stretch], end - firsts[stretch])
            round_, turn = np.divmod(turns, running.size)
            lanes[at - start : end - start] = running[turn]
            numbers[at - start : end - start] = rounds[stretch] + round_
            stretch, at = stretch + 1, end
        return lanes, numbers

    def _shuffle(self, epoch: int, lane: int, begin: int, end: int) -> Int64Array:
        """Return the samples of a lane at its turns begin … end-1."""
        numbers = np.empty(end - begin, dtype=np.int64)
        for window in range(begin // self.window, (end - 1) // self.window + 1):
            first = window * self.window
            size = min(self.window, int(self._lengths[lane]) - first)
            low, high = max(begin, first), min(end, first + size)
            permutation = Shuffled(size, _window_seed(self.seed, lane, window))
            numbers[low - begin : high - begin] = first + permutation.indices(
                epoch, low - first, high - first
            )
        return numbers


def _window_seed(seed: int, lane: int, window: int) -> int:
    digest = hashlib.shake_256(f"instar/lanes/{seed}/{lane}/{window}".encode()).digest(16)
    return int.from_bytes(digest, "little")


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

    Ends of lanes are reported to the order when they are reached. `on_end` is called with the counts
    of the lanes once all are known.
    """

    def __init__(
        self,
        samples: LaneSamples,
        order: LaneOrder,
        on_end: Callable[[Sequence[int]], None] = lambda _: None,
    ) -> None:
        super().__init__(samples)
        self._order, self._on_end = order, on_end
        order.explorer = self.explore

    def __len__(self) -> int:
        return self._order.samples_per_epoch

    def weights(self, indices: Int64Array) -> float:
        return float(sum(map(self._samples.stream.weight_of, self._samples.take(indices))))

    def explore(self, start: int, stop: int) -> int:
        """Read ahead until the samples at positions start … stop-1 are determined, and whether one follows.

        Returns:
            The number of samples per epoch: exact if all lanes have ended, otherwise the number
            determined so far, at least stop + 1.

        Raises:
            StreamUnfit: the stream has no samples at all.
        """
        order, samples = self._order, self._samples
        while order.samples_per_epoch == UNKNOWN and order.certain <= stop:
            _, first = order.turn(start)
            ranges = order.samples_needed(stop + 1)
            # at least one of each lane, as that it has those before is not known without
            samples.read({lane: range(first, max(end, first + 1)) for lane, end in ranges.items()})
            for lane in ranges:
                if (length := samples.length(lane)) is not None:
                    order.end(lane, length)
            order.certain_until([samples.sample_count(lane) for lane in range(order.lanes)])
            if order.samples_per_epoch != UNKNOWN:
                self._on_end([count for count in samples.counts if count is not None])
        if order.samples_per_epoch == 0:
            raise StreamUnfit.of(no_samples())
        return min(order.samples_per_epoch, order.certain)


def no_samples() -> ConfigError:
    message = "the stream has no samples: no document in it has two tokens"
    return ConfigError.at("data.source", message)
