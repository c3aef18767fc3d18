from __future__ import annotations

import numpy as np
import pytest
from feeds import Numbers, Queues, dispatched_feeds
from hypothesis import given, settings
from hypothesis import strategies as st

from instar.data.broadcast import SourceFailed
from instar.data.columns import leaves
from instar.data.loader import LocalReader, Prefetcher, StepBatch, WaitCancelled
from instar.data.order import Shuffled, plan_step


def same_batches(batch: StepBatch, other: StepBatch) -> bool:
    assert (batch.plan, batch.weight, batch.epoch_samples) == (
        other.plan,
        other.weight,
        other.epoch_samples,
    )
    for left, right in zip(batch.micro_batches, other.micro_batches, strict=True):
        assert (left.weight, left.samples, left.rank, left.first) == (
            right.weight,
            right.samples,
            right.rank,
            right.first,
        )
        for (name, array), (other_name, other_array) in zip(
            leaves(left.arrays), leaves(right.arrays), strict=True
        ):
            assert name == other_name
            assert np.array_equal(array, other_array)
            assert array.dtype == other_array.dtype
    return True


@settings(deadline=None, max_examples=40)
@given(
    samples=st.integers(1, 60),
    sizes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), min_size=1, max_size=6),
    world=st.integers(2, 4),
)
def test_dispatched_ranks_get_what_they_would_read(
    samples: int, sizes: list[tuple[int, int]], world: int
) -> None:
    """Also while sizes change, so that what was read ahead is dropped on both sides."""
    source, order = Numbers(samples), Shuffled(samples, seed=3)
    remote_feeds = dispatched_feeds(source, order, world)
    local_feeds = [
        Prefetcher(LocalReader(source, order, world, range(rank, rank + 1), f"rank {rank}"))
        for rank in range(world)
    ]
    cursor = 0
    for batch_size, accumulation in sizes:
        for _ in range(3):
            request = cursor, batch_size * accumulation, batch_size
            for rank in range(world):
                assert same_batches(
                    remote_feeds[rank].take(*request), local_feeds[rank].take(*request)
                )
            cursor += plan_step(cursor, samples, request[1]).count
    for feed in [*remote_feeds, *local_feeds]:
        feed.close(5)


def test_what_rank_0_cannot_read_is_an_error_on_every_rank_at_the_same_step() -> None:
    order = Shuffled(100, seed=1)
    broken = int(order.indices(0, 42, 43)[0])
    feeds = dispatched_feeds(Numbers(100, broken=broken), order, 3)
    for cursor in range(0, 40, 8):
        for feed in feeds:
            feed.take(cursor, 8, 8)
    with pytest.raises(OSError, match=f"sample {broken} cannot be read"):
        feeds[0].take(40, 8, 8)
    for feed in feeds[1:]:
        with pytest.raises(SourceFailed, match=f"OSError: sample {broken} cannot be read") as error:
            feed.take(40, 8, 8)
        assert "positions 40..47 of epoch 0" in str(error.value)
        assert error.value.secondary
    for feed in feeds:
        feed.close(5)


def test_a_rank_that_waits_may_give_up_and_takes_the_step_later() -> None:
    feeds = dispatched_feeds(Numbers(100), Shuffled(100, seed=1), 2)
    with pytest.raises(WaitCancelled):
        feeds[1].take(0, 8, 4, give_up=lambda: True)
    expected = feeds[0].take(0, 8, 4)
    assert feeds[1].take(0, 8, 4).plan == expected.plan
    for feed in feeds:
        feed.close(5)


def test_a_new_feed_begins_where_the_old_one_was_given_up() -> None:
    queues, source, order = Queues(2), Numbers(1000), Shuffled(1000, seed=1)
    first = dispatched_feeds(source, order, 2, queues=queues)
    for feed in first:
        feed.take(0, 8, 4)
    for feed in first:
        feed.close(5)
    second = dispatched_feeds(source, order, 2, queues=queues, number=2)
    local_feed = Prefetcher(LocalReader(source, order, 2, range(1, 2), "rank 1"))
    second[0].take(16, 4, 4)
    assert same_batches(second[1].take(16, 4, 4), local_feed.take(16, 4, 4))
    for feed in [*second, local_feed]:
        feed.close(5)
    assert queues.of[1].empty()


def test_a_rank_whose_sender_has_ended_is_told() -> None:
    feeds = dispatched_feeds(Numbers(100), Shuffled(100, seed=1), 2)
    feeds[0].close(5)
    with pytest.raises(SourceFailed, match="sends no more"):
        feeds[1].take(0, 8, 4)
    feeds[1].close(5)
