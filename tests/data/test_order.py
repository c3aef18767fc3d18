from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from figures import times
from hypothesis import given, settings
from hypothesis import strategies as st

from instar.data.order import Order, OrderKind, RandomWindows, Sequential, Shuffled, make_order

KINDS: tuple[OrderKind, ...] = ("shuffled", "sequential", "random")
seeds = st.integers(0, 2**63 - 1)
epochs = st.integers(0, 2**40)


def epoch_of(order: Order, epoch: int = 0) -> np.ndarray:
    return order.indices(epoch, 0, order.samples_per_epoch)


@pytest.mark.parametrize(
    "n", [1, 2, 3, 4, 5, 7, 8, 9, 31, 63, 64, 65, 257, 1023, 1024, 1025, 7919, 65535, 65537, 10**5]
)
def test_an_epoch_holds_every_sample_once(n: int) -> None:
    assert np.array_equal(np.sort(epoch_of(Shuffled(n, seed=3))), np.arange(n))


@settings(deadline=None)
@given(n=st.integers(1, 3000), seed=seeds, epoch=epochs)
def test_shuffling_is_a_bijection_for_every_size_seed_and_epoch(
    n: int, seed: int, epoch: int
) -> None:
    assert np.array_equal(np.sort(epoch_of(Shuffled(n, seed), epoch)), np.arange(n))


@settings(deadline=None)
@given(kind=st.sampled_from(KINDS), n=st.integers(1, 300), seed=seeds, data=st.data())
def test_a_slice_is_the_same_whatever_came_before(
    kind: OrderKind, n: int, seed: int, data: st.DataObject
) -> None:
    order = make_order(kind, n, seed)
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    assert np.array_equal(order.indices(2, start, stop), epoch_of(order, 2)[start:stop])


def test_a_slice_longer_than_the_working_block_is_seamless() -> None:
    order = Shuffled(200_000, seed=9)
    pieces = [order.indices(0, at, at + 1000) for at in range(0, 200_000, 1000)]
    assert np.array_equal(np.concatenate(pieces), epoch_of(order))


def test_the_order_never_changes_between_versions() -> None:
    """Runs are resumed by what these numbers are: they are part of the format."""
    assert Shuffled(10, seed=1337).indices(0, 0, 10).tolist() == SHUFFLED_10
    assert Shuffled(10**9, seed=1337).indices(3, 900_000_000, 900_000_004).tolist() == SHUFFLED_1E9
    assert RandomWindows(10**9, 10**9, seed=1337).indices(3, 5, 9).tolist() == RANDOM_1E9


SHUFFLED_10 = [4, 1, 9, 3, 7, 8, 0, 5, 6, 2]
SHUFFLED_1E9 = [446099108, 601367015, 225762110, 315279181]
RANDOM_1E9 = [689665619, 837700506, 760769855, 575705021]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [epoch_of(Shuffled(1000, seed), epoch) for seed in (1, 2) for epoch in (0, 1)]
    for number, order in enumerate(orders):
        for other in orders[:number]:
            # two independent permutations agree at one place on average
            assert np.count_nonzero(order == other) <= 8


@pytest.mark.repeated
@pytest.mark.parametrize("n", [3, 5, 16, 100])
def test_every_sample_is_equally_likely_at_every_position(n: int) -> None:
    draws = times(1000, 4000)
    orders = np.stack([epoch_of(Shuffled(n, seed=7), epoch) for epoch in range(draws)])
    counts = np.stack([np.bincount(orders[:, position], minlength=n) for position in range(n)])
    chi_square = float(((counts - draws / n) ** 2 / (draws / n)).sum())
    freedom = (n - 1) ** 2
    assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("n", [16, 100, 2003])
def test_neighbours_and_successive_epochs_are_unrelated(n: int) -> None:
    draws = max(20, 40_000 // n)
    orders = np.stack([epoch_of(Shuffled(n, seed=11), epoch) for epoch in range(draws)])
    steps = (orders[:, 1:] - orders[:, :-1]) % n
    between_neighbours = np.bincount(steps.ravel(), minlength=n)[1:]
    between_epochs = np.bincount(((orders[1:] - orders[:-1]) % n).ravel(), minlength=n)
    for counts in (between_neighbours, between_epochs):
        expected = counts.sum() / counts.size
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        freedom = counts.size - 1
        assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5


def test_random_windows_draw_evenly_and_with_replacement() -> None:
    indices = RandomWindows(50, samples_per_epoch=50_000, seed=5).indices(0, 0, 50_000)
    counts = np.bincount(indices, minlength=50)
    assert counts.size == 50
    chi_square = float(((counts - 1000) ** 2 / 1000).sum())
    assert abs(chi_square - 49) < 5 * (2 * 49) ** 0.5


def test_random_windows_differ_between_epochs() -> None:
    order = RandomWindows(10**6, samples_per_epoch=1000, seed=5)
    assert np.count_nonzero(epoch_of(order, 0) == epoch_of(order, 1)) < 5


def test_sequential_is_the_identity() -> None:
    assert np.array_equal(Sequential(7).indices(4, 2, 6), [2, 3, 4, 5])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 6)])
def test_positions_outside_the_epoch_are_refused(kind: OrderKind, start: int, stop: int) -> None:
    with pytest.raises(IndexError, match="not within an epoch of 5"):
        make_order(kind, 5, seed=0).indices(0, start, stop)


def test_an_order_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        make_order("shuffled", 0, seed=0)


def test_an_epoch_of_a_billion_needs_no_memory() -> None:
    tracemalloc.start()
    try:
        order = make_order("shuffled", 10**9, seed=1)
        order.indices(0, 900_000_000, 900_004_096)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1_000_000
