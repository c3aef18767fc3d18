"""Smoothing: the textbook's loop, quickly."""

import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from instar.logs.plot.transforms import smooth


def by_loop(values, weight):
    average, count, out = 0.0, 0, []
    for value in values:
        if not math.isfinite(value):
            out.append(value)
            continue
        count += 1
        average = weight * average + (1 - weight) * value
        out.append(average / (1 - weight**count))
    return np.array(out, np.float64)


gaps = st.sampled_from([math.nan, math.inf, -math.inf])


@given(
    hnp.arrays(np.float64, st.integers(0, 700), elements=st.floats(0.5, 100) | gaps),
    st.sampled_from([0, 0.1, 0.5, 0.9, 0.99, 0.999]),
)
def test_smoothing_is_the_loop(values, weight):
    np.testing.assert_allclose(smooth(values, weight), by_loop(values, weight), rtol=1e-9)


# numbers below the smallest normal one lose digits in any product
@given(st.floats(-1e6, 1e6, allow_subnormal=False), st.integers(1, 10_000), st.floats(0, 0.9999))
def test_a_constant_stays_what_it_is_from_the_first_point_on(value, count, weight):
    np.testing.assert_allclose(smooth(np.full(count, value), weight), value, rtol=1e-6)


def test_what_is_given_is_not_touched():
    values = np.array([1.0, 2.0])
    result = smooth(values, 0.5)

    assert values.tolist() == [1.0, 2.0]
    assert result.tolist() == pytest.approx([1.0, 5 / 3])


@pytest.mark.parametrize("weight", [-0.1, 1.0, math.nan])
def test_a_weight_outside_is_refused(weight):
    with pytest.raises(ValueError, match="out of range"):
        smooth([1.0], weight)


@pytest.mark.torture
def test_ten_million_points_take_seconds_at_most():
    values = np.random.default_rng(0).normal(size=10_000_000)

    seconds = []
    for _ in range(2):
        start = time.process_time()
        smooth(values, 0.99)
        seconds.append(time.process_time() - start)

    assert min(seconds) < 4
