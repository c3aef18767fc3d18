"""The order of samples that lie in lanes, each of which can only be read from its beginning."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from instar.data.order import Int64Array, Shuffled
from instar.data.plan import UNKNOWN

Places = tuple[Int64Array, Int64Array]
"""Lanes, and numbers within them, of successive positions."""


@dataclass(frozen=True)
class LaneOrder:
    """Round robin over the lanes that have not ended; lane k's j-th sample has the id j · L + k.

    Within a lane, samples are shuffled among each other in windows of `window` successive ones, in
    each epoch anew. `lengths` are the samples of each lane; L is their number.
    """

    lengths: tuple[int, ...]
    seed: int = 0
    window: int = 1

    @property
    def lanes(self) -> int:
        return len(self.lengths)

    @property
    def samples_per_epoch(self) -> int:
        return sum(self.lengths)

    def indices(self, epoch: int, start: int, stop: int) -> Int64Array:
        if epoch < 0 or not 0 <= start <= stop <= self.samples_per_epoch:
            raise IndexError(
                f"positions {start}..{stop} of epoch {epoch} are not within an epoch of "
                f"{self.samples_per_epoch} samples"
            )
        lanes, numbers = self.places(start, stop)
        if self.window > 1:
            for lane in np.unique(lanes).tolist():
                rows = np.flatnonzero(lanes == lane)
                begin = int(numbers[rows[0]])
                numbers[rows] = self._shuffled(epoch, lane, begin, begin + rows.size)
        ids: Int64Array = numbers * self.lanes + lanes
        return ids

    def lane_of(self, epoch: int, start: int, stop: int) -> Int64Array:  # noqa: ARG002
        """The lanes of the samples at positions start … stop-1, int64 [stop - start]."""
        return self.places(start, stop)[0]

    def places(self, start: int, stop: int) -> Places:
        """Whose turn it is at positions start … stop-1, and which of its turns, before shuffling."""
        lanes = np.empty(stop - start, dtype=np.int64)
        numbers = np.empty_like(lanes)
        rounds, firsts = self._stretches
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

    def position(self, lane: int, number: int) -> int:
        """Where a lane's turn of that number comes, or would come if the lane were longer."""
        rounds_before = int(np.minimum(self._lengths, number).sum())
        return rounds_before + int(np.count_nonzero(self._lengths[:lane] > number))

    @cached_property
    def _lengths(self) -> Int64Array:
        return np.array(self.lengths, dtype=np.int64)

    @cached_property
    def _stretches(self) -> Places:
        """Between two ends the same lanes take turns: the round in which each such stretch begins,
        and its first position; last, where the epoch ends."""
        ends = np.unique(self._lengths)
        rounds = np.concatenate([[0], ends]) if ends[0] else ends
        running = [np.count_nonzero(self._lengths > round_) for round_ in rounds[:-1]]
        firsts = np.cumsum([0, *(np.diff(rounds) * np.array(running, dtype=np.int64))])
        return rounds.astype(np.int64), firsts.astype(np.int64)

    def _shuffled(self, epoch: int, lane: int, begin: int, end: int) -> Int64Array:
        """Which samples of a lane come at its turns begin … end-1."""
        numbers = np.empty(end - begin, dtype=np.int64)
        for window in range(begin // self.window, (end - 1) // self.window + 1):
            first = window * self.window
            size = min(self.window, self.lengths[lane] - first)
            low, high = max(begin, first), min(end, first + size)
            permuted = Shuffled(size, _window_seed(self.seed, lane, window))
            numbers[low - begin : high - begin] = first + permuted.indices(
                epoch, low - first, high - first
            )
        return numbers


class OpenOrder:
    """The same order while the ends of the lanes are not known: they are told as they are met.

    `indices` answers up to position `certain`. One rank reads it all.
    """

    def __init__(self, lanes: int, seed: int = 0, window: int = 1) -> None:
        self.lanes, self.seed, self.window = lanes, seed, window
        self.explorer: Callable[[int, int], object] = lambda _epoch, _stop: None
        """the source's; it tells the ends that it meets"""
        self._ends: dict[int, int] = {}
        self._endless = UNKNOWN // lanes // window * window
        self._order = self._as_known()
        self.certain = 0

    @property
    def samples_per_epoch(self) -> int:
        """UNKNOWN until every lane has ended, from then on exact, in every epoch."""
        return self._order.samples_per_epoch if len(self._ends) == self.lanes else UNKNOWN

    @property
    def ends(self) -> Mapping[int, int]:
        """The samples of each lane whose end was met."""
        return self._ends

    def indices(self, epoch: int, start: int, stop: int) -> Int64Array:
        """
        Raises:
            IndexError: the positions are not within the epoch, or not certain yet.
        """
        if stop > self.certain:
            raise IndexError(f"what stands at position {stop - 1} is certain up to {self.certain}")
        return self._order.indices(epoch, start, stop)

    def lane_of(self, epoch: int, start: int, stop: int) -> Int64Array:
        """The lanes of the samples at positions start … stop-1, int64 [stop - start]."""
        return self._order.lane_of(epoch, start, stop)

    def explore(self, epoch: int, stop: int) -> None:
        """Have the source read ahead until it is certain what stands before position `stop`, and
        whether more follows."""
        self.explorer(epoch, stop)

    def end(self, lane: int, length: int) -> None:
        """A lane has so many samples."""
        self._ends[lane] = length
        self._order = self._as_known()

    def wanted(self, stop: int) -> dict[int, int]:
        """How many samples of each lane that goes on must be there for positions before `stop` to
        be certain: whole windows, because a window that the lane's end cuts short is shuffled
        otherwise."""
        if len(self._ends) == self.lanes:
            return {}
        last, number = self.turn(stop - 1)
        return {
            lane: -(-(number + (lane <= last)) // self.window) * self.window
            for lane in range(self.lanes)
            if lane not in self._ends
        }

    def turn(self, position: int) -> tuple[int, int]:
        """Whose turn it is at a position, as far as is known, and which of its turns."""
        lanes, numbers = self._order.places(position, position + 1)
        return int(lanes[0]), int(numbers[0])

    def seen(self, counts: Sequence[int]) -> int:
        """Up to which position the order is certain once so many samples of each lane are there."""
        going_on = [
            (counts[lane] // self.window * self.window, lane)
            for lane in range(self.lanes)
            if lane not in self._ends
        ]
        if going_on:
            number, lane = min(going_on)
            self.certain = max(self.certain, self._order.position(lane, number))
        else:
            self.certain = self._order.samples_per_epoch
        return self.certain

    def _as_known(self) -> LaneOrder:
        lengths = tuple(self._ends.get(lane, self._endless) for lane in range(self.lanes))
        return LaneOrder(lengths, self.seed, self.window)


def _window_seed(seed: int, lane: int, window: int) -> int:
    digest = hashlib.shake_256(f"instar/lanes/{seed}/{lane}/{window}".encode()).digest(16)
    return int.from_bytes(digest, "little")
