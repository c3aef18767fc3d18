from __future__ import annotations

import numpy as np
import pytest
from hosted import Numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import same

from instar.data.columns import stack
from instar.data.mixture import (
    PERIOD,
    Concatenated,
    Mixed,
    PartOrder,
    mixture_order,
    mixture_shares,
)
from instar.data.order import Order, Sequential, Shuffled, make_order
from instar.data.source import TokenWindows

seeds = st.integers(0, 2**63 - 1)


def concatenation(*sizes: int) -> Concatenated:
    firsts = np.cumsum([0, *sizes]).tolist()
    return Concatenated([Numbers(n, first) for n, first in zip(sizes, firsts, strict=False)])


@settings(deadline=None, max_examples=60)
@given(sizes=st.lists(st.integers(0, 12), min_size=1, max_size=4), data=st.data())
def test_sources_end_to_end_are_one(sizes: list[int], data: st.DataObject) -> None:
    total = sum(sizes)
    reference, source = Numbers(total), concatenation(*sizes)
    assert len(source) == total
    if not total:
        return
    ids = np.array(data.draw(st.lists(st.integers(0, total - 1), min_size=1, max_size=10)))
    read = source.read(ids, epoch=3)
    assert same(read, stack([reference.sample(index, 3) for index in ids.tolist()]))
    assert source.weights(ids) == reference.weights(ids)


def test_a_part_with_other_columns_is_named(make_split: object) -> None:
    windows = TokenWindows(make_split(40), context=4)  # type: ignore[operator]
    mixture = Concatenated([Numbers(5), Numbers(5), windows])
    mixture.read(np.array([0, 7]))
    with pytest.raises(ValueError, match="part 2 of the mixture has inputs, targets, not number"):
        mixture.read(np.array([0, 12, 7]))


def test_an_error_within_a_part_names_it() -> None:
    class Broken(Numbers):
        def read(self, *_: object) -> dict[str, object]:
            raise OSError("gone")

    with pytest.raises(OSError, match="gone") as error:
        Concatenated([Numbers(3), Broken(3)]).read(np.array([1, 4]))
    assert error.value.__notes__ == ["in part 1 of the mixture"]


@pytest.mark.parametrize("index", [-1, 7])
def test_a_sample_outside_is_refused(index: int) -> None:
    with pytest.raises(IndexError, match="of 7"):
        concatenation(3, 4).read(np.array([index]))


def test_fingerprints_tell_what_is_mixed_and_in_which_order() -> None:
    first, second = Numbers(3), Numbers(4)
    fingerprints = [
        Concatenated(parts).fingerprint
        for parts in ([first], [first, second], [second, first], [first, second])
    ]
    assert fingerprints[1] == fingerprints[3]
    assert len(set(fingerprints)) == 3


@settings(deadline=None, max_examples=30)
@given(
    parts=st.lists(st.tuples(st.integers(1, 900), st.floats(0.01, 10)), min_size=1, max_size=5),
    seed=seeds,
    first_epoch=st.integers(0, 3),
    data=st.data(),
)
def test_shares_are_exact_and_each_part_comes_in_its_own_order(
    parts: list[tuple[int, float]], seed: int, first_epoch: int, data: st.DataObject
) -> None:
    sizes, weights = zip(*parts, (300, 1.0), strict=True)
    order = mixture_order(Shuffled, sizes, weights, seed)
    assert isinstance(order, Mixed)
    n = sum(sizes)
    assert order.samples_per_epoch == n
    epochs = first_epoch + 1 + 2 * PERIOD // n
    indices = np.concatenate([order.indices(epoch, 0, n) for epoch in range(epochs)])
    firsts = np.cumsum([0, *sizes])
    origin = np.searchsorted(firsts, indices, side="right") - 1
    for begin in range(0, indices.size - PERIOD + 1, PERIOD):
        counts = np.bincount(origin[begin : begin + PERIOD], minlength=len(sizes))
        assert counts.tolist() == mixture_shares(weights)
    for number, part in enumerate(order.parts):
        part_indices = indices[origin == number] - firsts[number]
        size = sizes[number]
        expected = np.concatenate(
            [part.order.indices(epoch, 0, size) for epoch in range(-(-part_indices.size // size))]
            or [part_indices]
        )
        assert np.array_equal(part_indices, expected[: part_indices.size])

    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    stretch = order.indices(first_epoch, start, stop)
    assert np.array_equal(stretch, indices[first_epoch * n + start : first_epoch * n + stop])


def test_turns_are_shuffled_anew_in_each_period() -> None:
    order = Mixed(
        (PartOrder(Sequential(512), 0, 512), PartOrder(Sequential(512), 512, 512)), seed=4
    )
    periods = np.stack([order.indices(epoch, 0, PERIOD) < 512 for epoch in range(50)])
    # two independent patterns agree at half of the places, 16 more or less
    agree = np.count_nonzero(periods[1:] == periods[:-1], axis=1)
    assert abs(float(agree.mean()) - 512) < 5 * 16 / 7
    assert abs(float(periods[:, :10].mean()) - 0.5) < 5 * 0.5 / 500**0.5


def test_parts_of_the_same_size_have_orders_of_their_own() -> None:
    order = mixture_order(Shuffled, (500, 500), (1, 1), seed=4)
    assert isinstance(order, Mixed)
    first, second = (part.order.indices(0, 0, 500) for part in order.parts)
    assert np.count_nonzero(first == second) < 10


def test_an_order_that_repeats_draws_counts_as_many_as_it_draws() -> None:
    def make(n: int, seed: int) -> Order:
        return make_order("random", n, seed, samples_per_epoch=n // 10)

    order = mixture_order(make, (1000, 500), (1, 3), seed=0)
    assert order.samples_per_epoch == 150
    indices = order.indices(0, 0, 150)
    assert (indices >= 1000).sum() > 75
    assert indices.max() < 1500


def test_without_weights_each_sample_comes_once() -> None:
    assert mixture_order(Shuffled, (3, 4), None, 5) == Shuffled(7, 5)


@given(weights=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40))
def test_shares_follow_the_weights(weights: list[float]) -> None:
    shares = mixture_shares(weights)
    assert sum(shares) == PERIOD
    assert min(shares) >= 1
    quotas = np.array(weights) / sum(weights) * PERIOD
    if quotas.min() >= 1:
        assert np.abs(np.array(shares) - quotas).max() < 1


def test_shares_of_known_weights() -> None:
    assert mixture_shares([1, 1, 2]) == [256, 256, 512]
    assert mixture_shares([0.7, 0.3]) == [717, 307]
    assert mixture_shares([1, 1, 1]) == [342, 341, 341]
    assert mixture_shares([1e-9, 1, 1]) == [1, 512, 511]


@pytest.mark.parametrize("weights", [[], [1.0, 0.0], [-1.0], [1.0] * (PERIOD + 1)])
def test_weights_without_meaning_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="needs 1 to 1024 weights above 0"):
        mixture_shares(weights)


def test_the_order_never_changes_between_versions() -> None:
    """Runs are resumed by what these numbers are: they are part of the format."""
    order = mixture_order(Shuffled, (10**6, 10**9), (0.2, 0.8), seed=1337)
    assert order.indices(5, 900_000_000, 900_000_006).tolist() == MIXED


MIXED = [89367335, 926358, 996912657, 675331735, 971100068, 137757253]


def test_positions_outside_the_epoch_are_refused() -> None:
    with pytest.raises(IndexError, match="not within an epoch of 7"):
        mixture_order(Shuffled, (3, 4), (1, 1), 0).indices(0, 0, 8)
