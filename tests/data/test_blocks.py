from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from figures import times
from hypothesis import given, settings
from hypothesis import strategies as st

from instar.data.order import BlockShuffled, permuted_apart

seeds = st.integers(0, 2**63 - 1)
epochs = st.integers(0, 2**40)
orders = st.builds(
    BlockShuffled,
    n=st.integers(1, 2000),
    seed=seeds,
    block=st.integers(1, 70),
    window=st.integers(1, 300),
)


def epoch_of(order: BlockShuffled, epoch: int = 0) -> np.ndarray:
    return order.indices(epoch, 0, order.n)


@settings(deadline=None)
@given(order=orders, epoch=epochs)
def test_an_epoch_holds_every_sample_once(order: BlockShuffled, epoch: int) -> None:
    assert np.array_equal(np.sort(epoch_of(order, epoch)), np.arange(order.n))


@settings(deadline=None)
@given(order=orders, data=st.data())
def test_a_slice_is_the_same_whatever_came_before(
    order: BlockShuffled, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, order.n))
    stop = data.draw(st.integers(start, order.n))
    assert np.array_equal(order.indices(2, start, stop), epoch_of(order, 2)[start:stop])


@settings(deadline=None)
@given(order=orders, epoch=epochs)
def test_blocks_are_read_whole_within_a_window(order: BlockShuffled, epoch: int) -> None:
    """As soon as no block is left half read, at most a window's samples have come."""
    window = -(-order.window // order.block) * order.block
    sizes = np.bincount(np.arange(order.n) // order.block)
    unread_counts: dict[int, int] = {}
    run = 0
    for block in (epoch_of(order, epoch) // order.block).tolist():
        run += 1
        unread_counts[block] = unread_counts.get(block, int(sizes[block])) - 1
        if not any(unread_counts.values()):
            assert run <= window
            run, unread_counts = 0, {}
    assert run == 0


@pytest.mark.repeated
@pytest.mark.parametrize(
    ("n", "block", "window"), [(12, 2, 6), (16, 1, 16), (15, 5, 5), (18, 3, 7)]
)
def test_every_sample_is_equally_likely_at_every_position(n: int, block: int, window: int) -> None:
    draws = times(300, 1000)
    order = BlockShuffled(n, 7, block, window)
    indices = np.stack([epoch_of(order, epoch) for epoch in range(draws)])
    counts = np.stack([np.bincount(indices[:, position], minlength=n) for position in range(n)])
    chi_square = float(((counts - draws / n) ** 2 / (draws / n)).sum())
    freedom = (n - 1) ** 2
    assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5


def test_the_short_block_takes_every_turn() -> None:
    order = BlockShuffled(13, seed=3, block=4, window=1)
    places = [int(np.flatnonzero(epoch_of(order, epoch) == 12)[0]) for epoch in range(800)]
    counts = np.bincount(places, minlength=13)
    assert np.flatnonzero(counts).tolist() == [0, 4, 8, 12]
    assert float(((counts[::4] - 200) ** 2 / 200).sum()) < 20


def test_samples_of_a_window_are_mixed_and_windows_differ() -> None:
    order = BlockShuffled(4096 * 4, seed=1, block=256, window=4096)
    windows = epoch_of(order).reshape(4, 4096)
    for window in windows:
        assert np.unique(window // 256).size == 16
        # neighbours are of the same block once in 16, where blocks are mixed well
        assert np.count_nonzero(np.diff(window // 256) == 0) < 4096 / 16 * 1.5
    ranks = windows.argsort(axis=1)
    assert np.count_nonzero(ranks[0] == ranks[1]) < 10


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [
        epoch_of(BlockShuffled(1000, seed, 8, 64), epoch) for seed in (1, 2) for epoch in (0, 1)
    ]
    for number, order in enumerate(orders):
        for other in orders[:number]:
            assert np.count_nonzero(order == other) <= 10


def test_a_slice_longer_than_the_working_block_is_seamless() -> None:
    order = BlockShuffled(200_000, seed=9, block=100, window=1000)
    pieces = [order.indices(0, at, at + 1000) for at in range(0, 200_000, 1000)]
    assert np.array_equal(np.concatenate(pieces), epoch_of(order))


def test_the_order_never_changes_between_versions() -> None:
    """Runs are resumed by what these numbers are: they are part of the format."""
    assert epoch_of(BlockShuffled(11, seed=1337, block=2, window=4)).tolist() == BLOCKS_11
    far = BlockShuffled(10**9, seed=1337, block=256, window=4096)
    assert far.indices(3, 900_000_000, 900_000_004).tolist() == BLOCKS_1E9


BLOCKS_11 = [4, 8, 9, 5, 1, 10, 0, 3, 2, 6, 7]
BLOCKS_1E9 = [469882288, 377848857, 88567268, 648956191]


@settings(deadline=None, max_examples=60)
@given(size=st.integers(1, 1500), seed=seeds, domains=st.lists(st.integers(0, 2**50), max_size=4))
def test_each_domain_has_a_permutation_of_its_own(size: int, seed: int, domains: list[int]) -> None:
    key = np.uint64(seed)
    permutations = [
        permuted_apart(
            np.arange(size, dtype=np.uint64), size, np.full(size, domain, dtype=np.uint64), key
        )
        for domain in domains
    ]
    for permutation in permutations:
        assert np.array_equal(np.sort(permutation), np.arange(size))
    if not domains:
        return
    # asked for all at once, in turns, as lanes are
    offsets = np.repeat(np.arange(size, dtype=np.uint64), len(domains))
    numbers = np.tile(np.array(domains, dtype=np.uint64), size)
    joint_permutations = permuted_apart(offsets, size, numbers, key).reshape(size, len(domains))
    assert np.array_equal(joint_permutations, np.stack(permutations, axis=1))


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 6)])
def test_positions_outside_the_epoch_are_refused(start: int, stop: int) -> None:
    with pytest.raises(IndexError, match="not within an epoch of 5"):
        BlockShuffled(5, 0, 2, 4).indices(0, start, stop)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_an_order_of_nothing_is_refused(sizes: tuple[int, int, int]) -> None:
    n, block, window = sizes
    with pytest.raises(ValueError, match="at least 1"):
        BlockShuffled(n, 0, block, window)


def test_an_epoch_of_a_billion_needs_no_memory() -> None:
    tracemalloc.start()
    try:
        order = BlockShuffled(10**9, 1, 256, 4096)
        order.indices(0, 900_000_000, 900_004_096)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2_000_000
