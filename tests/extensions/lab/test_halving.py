"""Successive halving: who goes on, and how long each rung trains."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from instar.extensions.lab.halving import RUNGS, rung_sizes, rung_steps, survivors

LOSSES = st.lists(st.sampled_from([1.0, 1.5, 2.0, 2.5, math.inf]), max_size=12)


@given(losses=LOSSES, count=st.integers(0, 12))
def test_the_lowest_losses_go_on_and_of_equal_ones_the_first(
    losses: list[float], count: int
) -> None:
    best = survivors(dict(enumerate(losses)), count)
    assert len(best) == min(count, len(losses))
    assert [(losses[n], n) for n in best] == sorted((loss, n) for n, loss in enumerate(losses))[
        :count
    ]


@given(candidates=st.integers(1, 200), steps=st.integers(4, 10**6))
def test_a_rung_has_half_the_candidates_and_twice_the_steps(candidates: int, steps: int) -> None:
    sizes, lengths = rung_sizes(candidates), rung_steps(steps)
    assert sizes[0] == candidates
    assert lengths[-1] == steps
    assert len(sizes) == len(lengths) == len(RUNGS)
    for rung in range(1, len(RUNGS)):
        assert sizes[rung] == math.ceil(sizes[rung - 1] / 2)
        assert lengths[rung] // 2 == lengths[rung - 1]
