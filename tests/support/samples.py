"""Columns of any kind, and whether two are the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from instar.data.columns import Columns, Ragged

NAMES = st.text(st.characters(exclude_categories=()), max_size=4)
DTYPES = st.one_of(
    arrays.boolean_dtypes(),
    arrays.integer_dtypes(endianness="="),
    arrays.unsigned_integer_dtypes(endianness="="),
    arrays.floating_dtypes(endianness="="),
    arrays.complex_number_dtypes(endianness="="),
)


def same(columns: Any, other: Any) -> bool:
    """Whether columns have the same names, kinds, types and samples, in the same order."""
    if isinstance(columns, Mapping):
        return (
            isinstance(other, Mapping)
            and list(columns) == list(other)
            and all(same(columns[name], other[name]) for name in columns)
        )
    if isinstance(columns, Ragged):
        return (
            isinstance(other, Ragged)
            and np.array_equal(columns.sizes, other.sizes)
            and same(columns.flat, other.flat)
        )
    return (
        isinstance(other, np.ndarray)
        and columns.dtype == other.dtype
        and columns.shape == other.shape
        and columns.tobytes() == other.tobytes()
    )


@st.composite
def dense(draw: st.DrawFn, samples: int) -> NDArray[Any]:
    trailing = draw(st.lists(st.integers(0, 3), max_size=3))
    array: NDArray[Any] = draw(arrays.arrays(draw(DTYPES), (samples, *trailing)))
    return array.swapaxes(0, -1).copy().swapaxes(0, -1) if draw(st.booleans()) else array


@st.composite
def ragged_arrays(draw: st.DrawFn, samples: int) -> Ragged:
    before, after = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    sizes = draw(st.lists(st.integers(0, 3), min_size=samples, max_size=samples))
    values = draw(dense(before + sum(sizes) + after))
    return Ragged(values, before + np.cumsum([0, *sizes], dtype=np.int64))


def columns(samples: int) -> st.SearchStrategy[Columns]:
    """Any columns of so many samples."""
    leaf = st.one_of(dense(samples), ragged_arrays(samples))
    nested = st.recursive(
        leaf, lambda inner: st.dictionaries(NAMES, inner, max_size=2), max_leaves=4
    )
    return st.dictionaries(NAMES, nested, max_size=3)
