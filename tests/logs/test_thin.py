"""Thinning: what is left out cannot be seen."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from instar.logs.plot.transforms import thin

columns = hnp.arrays(np.float64, st.integers(0, 400), elements=st.floats(width=64))


@given(columns, st.integers(0, 120))
def test_a_thinned_curve_keeps_its_ends_and_its_extremes(values, points):
    indices = thin(values, points)

    assert indices.dtype == np.int64
    assert (np.diff(indices) > 0).all()
    assert len(indices) <= max(points, 5)
    if len(values):
        assert indices[0] == 0
        assert indices[-1] == len(values) - 1
    finite = values[np.isfinite(values)]
    if len(finite):
        kept_values = values[indices][np.isfinite(values[indices])]
        assert kept_values.min() == finite.min()
        assert kept_values.max() == finite.max()
    else:
        assert bool(len(indices)) == bool(len(values))


@given(columns, st.integers(0, 120))
def test_where_values_are_not_finite_one_of_them_stays(values, points):
    indices = thin(values, points)

    assert np.isfinite(values).all() == np.isfinite(values[indices]).all()


@given(
    hnp.arrays(np.float64, st.integers(201, 3000), elements=st.floats(-1e9, 1e9)),
    st.integers(10, 200),
)
def test_every_bucket_keeps_its_smallest_and_its_largest(values, points):
    kept_values = values[thin(values, points)]

    length = -(-len(values) // ((points - 2) // 2))
    for start in range(0, len(values), length):
        bucket = values[start : start + length]
        assert bucket.min() in kept_values
        assert bucket.max() in kept_values


def test_a_short_curve_is_left_alone():
    assert thin([3.0, float("nan"), 1.0], 5).tolist() == [0, 1, 2]


@pytest.mark.parametrize("spike", [1e3, -1e3, np.nan, np.inf, -np.inf])
def test_a_spike_of_one_step_survives(spike):
    values = np.linspace(5, 3, 1_000_000)
    values[654_321] = spike

    assert 654_321 in thin(values, 500)


def test_a_gap_in_the_middle_stays_a_gap():
    values = np.sin(np.linspace(0, 50, 100_000))
    values[40_000:60_000] = np.nan

    indices = thin(values, 300)

    gap = indices[(indices >= 40_000) & (indices < 60_000)]
    assert len(gap) > 20
    assert np.isfinite(np.delete(values[indices], np.flatnonzero(np.isin(indices, gap)))).all()


def test_ten_million_points_take_no_time():
    values = np.random.default_rng(0).normal(size=10_000_000)

    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        thin(values, 2000)
        seconds.append(time.perf_counter() - start)

    assert min(seconds) < 0.2
