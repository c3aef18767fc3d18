"""Stages of a mixture: shares within a sample at every prefix, and no sample lost or repeated between them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instar.data.mixture import (
    LONGEST_PERIOD,
    MixtureStage,
    even_turns,
    exact_shares,
    mixture_order,
)
from instar.data.order import Shuffled

WEIGHTS = st.lists(
    st.sampled_from([0, 1, 2, 3, 5, 0.1, 0.25, 0.7, 1.5, 12.0]), min_size=2, max_size=6
).filter(any)


@given(WEIGHTS)
@settings(max_examples=200, deadline=None)
def test_turns_are_even_at_every_prefix(weights: list[float]) -> None:
    shares = exact_shares(weights)
    assert [share / sum(shares) for share in shares] == pytest.approx(
        [weight / sum(weights) for weight in weights], rel=1e-12
    )
    turns = np.tile(even_turns(tuple(shares)), 3)
    prefix = np.arange(1, turns.size + 1)
    for number, weight in enumerate(weights):
        counts = np.cumsum(turns == number)
        assert np.abs(counts - prefix * (weight / sum(weights))).max() < 1


@pytest.mark.parametrize(
    "weights", [[np.pi, 1.0], [1e-9, 1.0], [0.123456789, 0.9, 0.0], [1, 10**9, 3]]
)
def test_weights_without_a_short_period_are_rounded(weights: list[float]) -> None:
    shares = exact_shares(weights)
    assert sum(shares) == LONGEST_PERIOD
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - weight / sum(weights) * LONGEST_PERIOD) < 2
        assert (share > 0) == (weight > 0)


@pytest.mark.parametrize("weights", [[], [0, 0], [-1, 2]])
def test_weights_that_are_none_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="needs weights of at least 0"):
        exact_shares(weights)


@given(
    st.lists(
        st.tuples(WEIGHTS.map(lambda w: (w * 3)[:3]).filter(any), st.integers(1, 70)),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 9),
)
@settings(max_examples=100, deadline=None)
def test_every_part_goes_on_in_its_own_order_through_all_stages(
    stages: list[tuple[list[float], int]], seed: int
) -> None:
    sizes = (7, 20, 11)
    order = mixture_order(Shuffled, sizes, (1, 1, 1), seed)
    begin, samples = (0, 0, 0), list[int]()
    for weights, length in stages:
        stage = order.at_stage(MixtureStage(tuple(weights), begin))  # type: ignore[attr-defined]
        per_epoch, place, of_stage = stage.samples_per_epoch, 0, list[int]()
        while place < length:
            epoch, start = divmod(place, per_epoch)
            stop = min(per_epoch, start + length - place, start + 5)
            of_stage += stage.indices(epoch, start, stop).tolist()
            place += stop - start
            assert stage.counts(place)[0] == begin[0] + sum(index < 7 for index in of_stage)
        samples += of_stage
        parts = np.searchsorted(np.cumsum(sizes), of_stage, side="right")
        begin = tuple(before + int((parts == number).sum()) for number, before in enumerate(begin))  # type: ignore[assignment]
        assert stage.counts(length) == begin
    firsts = (0, 7, 27)
    for number, (first, size) in enumerate(zip(firsts, sizes, strict=True)):
        part_samples = [index - first for index in samples if first <= index < first + size]
        part = order.parts[number].order  # type: ignore[attr-defined]
        expected = [
            index
            for epoch in range(len(part_samples) // size + 1)
            for index in part.indices(epoch, 0, size)
        ]
        assert part_samples == expected[: len(part_samples)]


def test_draws_of_a_sample_have_numbers_of_their_own_through_all_stages() -> None:
    sizes = (3, 20, 11)
    order = mixture_order(Shuffled, sizes, (5, 1, 1), 4)
    draws, samples = list[int](), list[int]()
    for tells_draws, indices in ((True, draws), (False, samples)):
        whole = replace(order, tells_draws=tells_draws)  # type: ignore[type-var]
        stage = whole.at_stage(MixtureStage((1.0, 2.0, 0.0), whole.counts(2 * sum(sizes))))
        for part_order in (whole, stage):
            for epoch in range(2):
                indices += part_order.indices(epoch, 0, sum(sizes)).tolist()
    assert len({*draws}) == len(draws) == 4 * sum(sizes)
    assert [draw % sum(sizes) for draw in draws] == samples
