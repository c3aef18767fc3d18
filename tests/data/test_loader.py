from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from feeds import Numbers, local_feed
from hypothesis import given, settings
from hypothesis import strategies as st

from instar.data.broadcast import pack, unpack
from instar.data.loader import BLOCK_S, LocalReader, ReadRequest, StepBatch, StepKey
from instar.data.order import (
    Int64Array,
    Order,
    Sequential,
    Shuffled,
    StepPlan,
    divide_step,
    make_order,
    micro_slices,
    plan_step,
)
from instar.data.source import InMemorySource, TokenWindows


def numbers_of(batch: StepBatch) -> list[int]:
    return [
        int(n) for micro in batch.micro_batches if micro.samples for n in micro.arrays["number"]
    ]


def ids(order: Order, plan: StepPlan) -> list[int]:
    return order.indices(plan.epoch, plan.start, plan.start + plan.count).tolist()


def steps(cursor: int, end: int, samples: int, global_batch: int) -> list[StepPlan]:
    plans = []
    while cursor < end:
        plans.append(plan_step(cursor, samples, global_batch))
        cursor += plans[-1].count
    return plans


def test_a_step_never_crosses_the_end_of_an_epoch() -> None:
    assert plan_step(0, 10, 4) == StepPlan(cursor=0, epoch=0, start=0, count=4)
    assert plan_step(8, 10, 4) == StepPlan(cursor=8, epoch=0, start=8, count=2)
    assert plan_step(10, 10, 4) == StepPlan(cursor=10, epoch=1, start=0, count=4)
    assert plan_step(23, 10, 40) == StepPlan(cursor=23, epoch=2, start=3, count=7)


@settings(deadline=None)
@given(count=st.integers(1, 100), start=st.integers(0, 1000), world=st.integers(1, 17))
def test_ranks_share_a_step_evenly_and_without_gaps(count: int, start: int, world: int) -> None:
    places = divide_step(StepPlan(start, 0, start, count), world)
    assert len(places) == world
    assert [at for share in places for at in share] == list(range(count))
    sizes = [len(share) for share in places]
    assert max(sizes) - min(sizes) <= 1


@settings(deadline=None)
@given(size=st.integers(0, 200), batch_size=st.integers(1, 40))
def test_micro_batches_are_few_even_and_small_enough(size: int, batch_size: int) -> None:
    slices = micro_slices(size, batch_size)
    positions = [at for first, end in slices for at in range(first, end)]
    assert positions == list(range(size))
    assert len(slices) == -(-size // batch_size)
    sizes = {end - first for first, end in slices}
    assert not sizes or (max(sizes) <= batch_size and max(sizes) - min(sizes) <= 1)


@settings(deadline=None)
@given(
    samples=st.integers(1, 60),
    batches=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    cursor=st.integers(0, 150),
)
def test_without_the_last_samples_of_an_epoch_every_step_is_whole(
    samples: int, batches: list[int], cursor: int
) -> None:
    """And the cursor counts what is left out, so that an epoch and a place in it are its parts, wherever one begins."""
    batches = [min(batch, samples) for batch in batches]
    for batch in batches * 3:
        plan = plan_step(cursor, samples, batch, drop_last=True)
        epoch, start = divmod(cursor, samples)
        assert plan.count == batch
        fits = start + batch <= samples
        assert (plan.epoch, plan.start) == ((epoch, start) if fits else (epoch + 1, 0))
        end = plan.epoch * samples + plan.start + batch
        over = end + batch > (plan.epoch + 1) * samples
        assert plan.after == ((plan.epoch + 1) * samples if over else end)
        cursor = plan.after


def test_an_epoch_without_a_whole_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="leaves out every sample: an epoch has 7, fewer than a"):
        plan_step(0, 7, 8, drop_last=True)


@st.composite
def changing_sizes(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """(world size, batch size, accumulation) at each of a run's stretches of three steps."""
    stretch = st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 4))
    return draw(st.lists(stretch, min_size=1, max_size=5))


@settings(deadline=None, max_examples=50)
@given(
    samples=st.integers(1, 40),
    stretches=changing_sizes(),
    epochs=st.integers(1, 3),
    kind=st.sampled_from(["shuffled", "sequential"]),
    prefetch=st.booleans(),
)
def test_feeds_of_any_ranks_leave_out_the_same_samples(
    samples: int, stretches: list[tuple[int, int, int]], epochs: int, kind: Any, prefetch: bool
) -> None:
    source, order, cursor = Numbers(samples), make_order(kind, samples, seed=4), 0
    for world, batch_size, accumulation in stretches * epochs:
        batch = min(batch_size * accumulation, samples)
        feeds = [
            local_feed(source, order, rank, world, prefetch, drop_last=True)
            for rank in range(world)
        ]
        for _ in range(3):
            plan = plan_step(cursor, samples, batch, drop_last=True)
            batches = [feed.take(cursor, batch, batch_size) for feed in feeds]
            assert all(step_batch.plan == plan for step_batch in batches)
            assert [number for step_batch in batches for number in numbers_of(step_batch)] == ids(
                order, plan
            )
            cursor = plan.after
        for feed in feeds:
            feed.close()


@settings(deadline=None, max_examples=50)
@given(
    samples=st.integers(1, 40),
    stretches=changing_sizes(),
    epochs=st.integers(1, 3),
    kind=st.sampled_from(["shuffled", "sequential"]),
    prefetch=st.booleans(),
)
def test_epochs_are_the_data_set_whatever_batch_accumulation_and_world_size_do(
    samples: int, stretches: list[tuple[int, int, int]], epochs: int, kind: Any, prefetch: bool
) -> None:
    source, order = Numbers(samples), make_order(kind, samples, seed=4)
    epoch_counts: list[Counter[int]] = [Counter() for _ in range(epochs)]
    cursor, stretch = 0, 0
    while cursor < samples * epochs:
        world, batch_size, accumulation = stretches[stretch % len(stretches)]
        stretch += 1
        feeds = [local_feed(source, order, rank, world, prefetch) for rank in range(world)]
        for _ in range(3):
            if cursor == samples * epochs:
                break
            plan = plan_step(cursor, samples, batch_size * accumulation)
            batches = [feed.take(cursor, batch_size * accumulation, batch_size) for feed in feeds]
            assert all(batch.plan == plan for batch in batches)
            numbers = [number for batch in batches for number in numbers_of(batch)]
            assert numbers == ids(order, plan)
            assert all(batch.weight == sum(n % 3 for n in numbers) for batch in batches)
            micros = [micro for batch in batches for micro in batch.micro_batches]
            assert sum(micro.weight for micro in micros) == batches[0].weight
            assert sum(micro.samples for micro in micros) == plan.count
            epoch_counts[plan.epoch].update(numbers)
            cursor += plan.count
        for feed in feeds:
            feed.close()
    assert all(epoch == Counter(range(samples)) for epoch in epoch_counts)


@settings(deadline=None, max_examples=50)
@given(
    samples=st.integers(1, 40),
    batch_size=st.integers(1, 6),
    accumulation=st.integers(1, 4),
    world=st.sampled_from([1, 2, 4]),
)
def test_virtual_ranks_have_the_same_micro_batches_whoever_runs_them(
    samples: int, batch_size: int, accumulation: int, world: int
) -> None:
    source, order = Numbers(samples), Shuffled(samples, seed=4)
    single_feed = local_feed(source, order, 0, 1, virtual_ranks=4)
    shared = [local_feed(source, order, rank, world, virtual_ranks=4) for rank in range(world)]
    rank_feeds = [local_feed(source, order, rank, 4) for rank in range(4)]
    for plan in steps(0, 2 * samples, samples, batch_size * accumulation):
        cut = [
            [
                (micro.rank, micro.first, micro.samples, micro.arrays["number"].tolist())
                for feed in feeds
                for micro in feed.take(
                    plan.cursor, batch_size * accumulation, batch_size
                ).micro_batches
            ]
            for feeds in ([single_feed], shared, rank_feeds)
        ]
        assert cut[0] == cut[1] == cut[2]
        assert {rank for rank, *_ in cut[0]} == {0, 1, 2, 3}
        assert all(
            numbers[:count] == ids(order, plan)[first : first + count]
            for _, first, count, numbers in cut[0]
        )
    for feed in (single_feed, *shared, *rank_feeds):
        feed.close()


def test_a_rank_without_samples_gets_a_stand_in_of_no_weight() -> None:
    with local_feed(Numbers(10), Sequential(10), rank=0, world_size=4) as feed:
        batch = feed.take(4, 2, batch_size=8)
    (stand_in,) = batch.micro_batches
    assert stand_in.arrays["number"].tolist() == [4]
    assert (stand_in.weight, stand_in.samples) == (0.0, 0)
    assert batch.weight == 4 % 3 + 5 % 3


def test_prefetching_changes_nothing_but_the_time(make_split: Any) -> None:
    windows = TokenWindows(make_split(700, 333), context=8)
    order = Shuffled(len(windows), seed=2)
    with (
        local_feed(windows, order, 1, 3, prefetch=True) as prefetch_feed,
        local_feed(windows, order, 1, 3, prefetch=False) as direct,
    ):
        for plan in steps(0, 3 * len(windows), len(windows), 7):
            batch, other = prefetch_feed.take(plan.cursor, 7, 2), direct.take(plan.cursor, 7, 2)
            assert batch.weight == other.weight
            for left, right in zip(batch.micro_batches, other.micro_batches, strict=True):
                assert (left.weight, left.samples) == (right.weight, right.samples)
                for name, array in left.arrays.items():
                    assert np.array_equal(array, right.arrays[name])
                    assert array.flags.c_contiguous


def test_steps_are_read_ahead_in_blocks_by_another_thread() -> None:
    source = Numbers(2000)
    with local_feed(source, Shuffled(2000, seed=1)) as feed:
        for plan in steps(0, 2000, 2000, 8):
            feed.take(plan.cursor, 8, 4)
    assert {thread for thread, _ in source.reads} == {"instar-prefetch"}
    assert source.reads[0][1] == 8
    assert max(size for _, size in source.reads) == 64 * 8


def test_without_prefetch_steps_are_read_where_they_are_taken() -> None:
    source = Numbers(100)
    with local_feed(source, Shuffled(100, seed=1), prefetch=False) as feed:
        for plan in steps(0, 100, 100, 8):
            feed.take(plan.cursor, 8, 4)
    assert {thread for thread, _ in source.reads} == {threading.current_thread().name}
    assert max(size for _, size in source.reads) == 8


def test_of_a_slow_source_few_steps_are_read_ahead() -> None:
    class Slow(Numbers):
        def read(self, indices: Int64Array, epoch: int = 0) -> dict[str, np.ndarray]:
            time.sleep(indices.size / 100)
            return super().read(indices, epoch)

    source = Slow(1000)
    with local_feed(source, Sequential(1000)) as feed:
        for plan in steps(0, 64, 1000, 8):
            feed.take(plan.cursor, 8, 8)
    assert max(size for _, size in source.reads) <= 8 * BLOCK_S / 0.08


def test_what_was_read_ahead_is_dropped_when_the_batch_changes() -> None:
    with local_feed(Numbers(100), Sequential(100)) as feed:
        assert numbers_of(feed.take(0, 4, 4)) == [0, 1, 2, 3]
        assert numbers_of(feed.take(4, 6, 3)) == [4, 5, 6, 7, 8, 9]
        assert numbers_of(feed.take(10, 4, 4)) == [10, 11, 12, 13]


def test_a_step_may_be_taken_again_or_out_of_order() -> None:
    with local_feed(Numbers(30), Sequential(30)) as feed:
        for cursor in (0, 4, 4, 20, 0, 28, 30):
            expected = [position % 30 for position in range(cursor, cursor + 4)]
            plan = plan_step(cursor, 30, 4)
            assert numbers_of(feed.take(cursor, 4, 4)) == expected[: plan.count]


@pytest.mark.parametrize("prefetch", [True, False])
def test_an_error_is_raised_at_its_own_step_and_names_the_positions(prefetch: bool) -> None:
    source = Numbers(100, broken=42)
    with local_feed(source, Sequential(100), prefetch=prefetch) as feed:
        for plan in steps(0, 40, 100, 8):
            feed.take(plan.cursor, 8, 8)
        with pytest.raises(OSError, match="sample 42 cannot be read") as error:
            feed.take(40, 8, 8)
    assert "positions 40..47 of epoch 0" in error.value.__notes__[0]
    assert "read" in [entry.name for entry in error.traceback]


def test_a_source_that_gives_too_few_samples_is_an_error() -> None:
    class Short(Numbers):
        def read(self, indices: Int64Array, epoch: int = 0) -> dict[str, np.ndarray]:  # noqa: ARG002
            return {"number": indices[:-1]}

    with (
        local_feed(Short(10), Sequential(10)) as feed,
        pytest.raises(ValueError, match="3 samples of 'number', asked for 4"),
    ):
        feed.take(0, 4, 4)


def test_closing_ends_the_thread() -> None:
    feed = local_feed(Numbers(10), Sequential(10))
    feed.take(0, 2, 2)
    feed.close()
    feed.close()
    assert "instar-prefetch" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(RuntimeError, match="closed"):
        feed.take(2, 2, 2)


def test_weights_may_be_numbers_of_numpy() -> None:
    class Weighing(InMemorySource):
        def weights(self, indices: Int64Array) -> float:
            return np.ones(32, dtype=np.int64)[indices].sum()  # type: ignore[no-any-return]

    source = Weighing({"x": np.arange(32.0)})
    reader = LocalReader(source, Sequential(32), 2, range(2), "rank 0")
    key = StepKey(0, 8, 8)
    step = unpack(pack(reader.read(ReadRequest(1, key, False))))[key]
    assert isinstance(step, StepBatch)
    assert step.weight == sum(micro.weight for micro in step.micro_batches) == 8.0
