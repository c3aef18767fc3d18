"""Samples that are not all the same work are shared out so that no rank waits long for another."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from instar.data.loader import LocalReader, ReadRequest, StepKey
from instar.data.order import balance_costs, make_order
from instar.data.source import CostedSource, InMemorySource

COSTS = st.lists(st.integers(0, 10_000), max_size=80)


@given(COSTS, st.integers(1, 9))
def test_every_sample_has_one_place_and_slices_are_even(costs: list[int], slices: int) -> None:
    places = balance_costs(np.array(costs, dtype=np.int64), slices)
    assert sorted(np.concatenate(places).tolist()) == list(range(len(costs)))
    counts = [len(part) for part in places]
    assert max(counts) - min(counts) <= 1
    assert all(np.all(np.diff(part) > 0) for part in places)


@given(COSTS, st.integers(1, 9))
def test_work_differs_by_one_sample_at_most(costs: list[int], slices: int) -> None:
    """Within the turns that are whole, and by one more where the last is not."""
    work = [
        sum(costs[place] for place in part)
        for part in balance_costs(np.array(costs, dtype=np.int64), slices)
    ]
    assert max(work) - min(work) <= 2 * max(costs, default=0)


def test_graphs_of_many_sizes_are_nearly_the_same_work() -> None:
    costs = np.random.default_rng(0).integers(64, 257, (200, 64))
    spread = [
        np.ptp([row[part].sum() for part in balance_costs(row, 2)]) / row.sum() for row in costs
    ]
    contiguous = [abs(int(row[:32].sum() - row[32:].sum())) / row.sum() for row in costs]
    assert np.median(spread) < 0.002 < 0.02 < np.median(contiguous)


def test_a_reader_shares_by_work_and_loses_nothing() -> None:
    costs = np.arange(40) ** 2
    source = CostedSource(InMemorySource({"x": np.arange(40)}), costs)
    order = make_order("shuffled", 40, seed=3)
    request = ReadRequest(0, StepKey(0, 24, 12), read_ahead=False)
    samples_of_ranks = []
    for rank in range(3):
        reader = LocalReader(source, order, 3, range(rank, rank + 1), "a rank")
        (step,) = reader.read(request).values()
        assert not isinstance(step, Exception)
        (micro,) = step.micro_batches
        assert micro.samples == 8
        samples_of_ranks.append(np.asarray(micro.arrays["x"]))
    assert sorted(np.concatenate(samples_of_ranks).tolist()) == sorted(
        order.indices(0, 0, 24).tolist()
    )
    work = [int(costs[numbers].sum()) for numbers in samples_of_ranks]
    assert max(work) - min(work) < 0.2 * sum(work) / 3
