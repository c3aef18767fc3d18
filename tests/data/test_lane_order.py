from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instar.data.order import UNKNOWN, Laned
from instar.data.text.streams.source import LaneOrder

lengths_of_lanes = st.lists(st.integers(0, 30), min_size=1, max_size=6).map(tuple)
windows = st.sampled_from([1, 2, 3, 7, 50])


def epoch_of(order: LaneOrder, epoch: int = 0) -> list[int]:
    return order.indices(epoch, 0, order.samples_per_epoch).tolist()


def round_robin(lengths: tuple[int, ...]) -> list[int]:
    """By the definition: lanes take turns, and those that have ended are passed over."""
    return [
        number * len(lengths) + lane
        for number in range(max(lengths))
        for lane in range(len(lengths))
        if number < lengths[lane]
    ]


@settings(deadline=None)
@given(lengths=lengths_of_lanes)
def test_lanes_that_have_not_ended_take_turns(lengths: tuple[int, ...]) -> None:
    assert epoch_of(LaneOrder(lengths)) == round_robin(lengths)


@settings(deadline=None)
@given(
    lengths=lengths_of_lanes, window=windows, seed=st.integers(0, 2**64), epoch=st.integers(0, 9)
)
def test_an_epoch_holds_every_sample_once_whatever_the_lengths(
    lengths: tuple[int, ...], window: int, seed: int, epoch: int
) -> None:
    order = LaneOrder(lengths, seed, window)
    assert order.samples_per_epoch == sum(lengths)
    assert sorted(epoch_of(order, epoch)) == sorted(round_robin(lengths))


@settings(deadline=None)
@given(lengths=lengths_of_lanes, window=windows, data=st.data())
def test_a_slice_is_the_same_whatever_came_before(
    lengths: tuple[int, ...], window: int, data: st.DataObject
) -> None:
    order = LaneOrder(lengths, seed=5, window=window)
    start = data.draw(st.integers(0, order.samples_per_epoch))
    stop = data.draw(st.integers(start, order.samples_per_epoch))
    ids = order.indices(1, start, stop)
    assert ids.tolist() == epoch_of(order, 1)[start:stop]
    assert order.lane_of(1, start, stop).tolist() == (ids % order.lanes).tolist()


@settings(deadline=None)
@given(lengths=lengths_of_lanes, window=windows)
def test_shuffling_leaves_a_sample_in_its_lane_and_window(
    lengths: tuple[int, ...], window: int
) -> None:
    plain, shuffled_order = LaneOrder(lengths), LaneOrder(lengths, seed=3, window=window)
    turns, ids = (
        np.divmod(epoch_of(plain), len(lengths)),
        np.divmod(epoch_of(shuffled_order), len(lengths)),
    )
    assert np.array_equal(turns[1], ids[1])
    assert np.array_equal(turns[0] // window, ids[0] // window)


def test_seeds_epochs_lanes_and_windows_are_shuffled_differently() -> None:
    def numbers(seed: int = 1, epoch: int = 0, lane: int = 0, window: int = 0) -> list[int]:
        ids = LaneOrder((200, 200), seed, 100).indices(epoch, 0, 400)
        lane_ids = ids[ids % 2 == lane] // 2
        return (lane_ids[window * 100 : (window + 1) * 100] - window * 100).tolist()

    orders = [numbers(), numbers(seed=2), numbers(epoch=1), numbers(lane=1), numbers(window=1)]
    assert all(order != other for k, order in enumerate(orders) for other in orders[:k])


def test_a_place_far_away_is_reached_at_once() -> None:
    order = LaneOrder((10**15, 3, 10**15 + 7), seed=1, window=4096)
    last = order.indices(2, order.samples_per_epoch - 3, order.samples_per_epoch)
    assert set((last % 3).tolist()) == {2}


def test_the_order_never_changes_between_versions() -> None:
    """Runs are resumed by what these numbers are: they are part of the format."""
    assert epoch_of(LaneOrder((5, 0, 3), seed=1337, window=3), 1) == FIVE_AND_THREE
    order = LaneOrder((10**9, 10**9), seed=1337, window=4096)
    assert order.indices(3, 1_500_000_000, 1_500_000_004).tolist() == FAR


@pytest.mark.parametrize(("epoch", "start", "stop"), [(-1, 0, 1), (0, 2, 1), (0, 0, 8), (0, -1, 2)])
def test_positions_outside_an_epoch_are_refused(epoch: int, start: int, stop: int) -> None:
    with pytest.raises(IndexError, match="not within an epoch of 7 samples"):
        LaneOrder((4, 3)).indices(epoch, start, stop)


@settings(deadline=None)
@given(lengths=lengths_of_lanes, window=windows, data=st.data())
def test_what_an_open_order_calls_certain_stays_true(
    lengths: tuple[int, ...], window: int, data: st.DataObject
) -> None:
    """However far each lane was read, and whichever ends were met."""
    counts = [data.draw(st.integers(0, length)) for length in lengths]
    order = LaneOrder([None] * len(lengths), seed=5, window=window)
    for lane, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        if count == length and data.draw(st.booleans()):
            order.end(lane, length)
    certain = order.certain_until(counts)
    closed_order = LaneOrder(lengths, seed=5, window=window)
    assert order.indices(1, 0, certain).tolist() == epoch_of(closed_order, 1)[:certain]
    with pytest.raises(IndexError):
        order.indices(1, 0, certain + 1)


@settings(deadline=None)
@given(lengths=lengths_of_lanes, window=windows, data=st.data())
def test_what_is_wanted_is_enough_and_no_lane_could_do_with_a_window_less(
    lengths: tuple[int, ...], window: int, data: st.DataObject
) -> None:
    order = LaneOrder([None] * len(lengths), window=window)
    for lane in data.draw(st.sets(st.sampled_from(range(len(lengths))), max_size=len(lengths) - 1)):
        order.end(lane, lengths[lane])
    stop = data.draw(st.integers(1, 200))
    sample_counts = order.samples_needed(stop)
    counts = [sample_counts.get(lane, 0) for lane in range(len(lengths))]
    assert order.certain_until(counts) >= stop
    for lane, count in sample_counts.items():
        if count:
            fewer = LaneOrder([None] * len(lengths), window=window)
            for other_lane, length in order.ends.items():
                fewer.end(other_lane, length)
            counts_less = [*counts]
            counts_less[lane] = count - window
            assert fewer.certain_until(counts_less) < stop


def test_the_end_is_unknown_until_the_last_lane_has_ended() -> None:
    order = LaneOrder([None] * 2)
    order.end(0, 3)
    assert order.samples_per_epoch == UNKNOWN
    order.end(1, 2)
    assert (order.samples_per_epoch, order.certain_until([3, 2])) == (5, 5)
    assert epoch_of(order) == round_robin((3, 2))


def test_samples_are_shared_out_alike_whether_the_ends_of_lanes_are_known_or_not() -> None:
    """So that dispatched ranks train on the very parts of a step that sharded ones read."""
    counted_order, open_order = LaneOrder((5, 3, 4)), LaneOrder([None] * 3)
    assert isinstance(counted_order, Laned)
    assert isinstance(open_order, Laned)
    assert open_order.lane_of(0, 0, 9).tolist() == counted_order.lane_of(0, 0, 9).tolist()


FIVE_AND_THREE = [0, 5, 3, 2, 6, 8, 9, 12]
FAR = [1499997978, 1500002389, 1500003720, 1500004341]
