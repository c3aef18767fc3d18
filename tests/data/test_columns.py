from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hosted import Numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import columns, same

from instar.data.columns import (
    Columns,
    Ragged,
    cut,
    difference,
    join_columns,
    leaves,
    nbytes,
    pick,
    ragged_names,
    stack,
)

ids = st.lists(st.integers(0, 30), min_size=1, max_size=8)


def read(*indices: int) -> Columns:
    return Numbers(31).read(np.array(indices, dtype=np.int64))


@settings(deadline=None, max_examples=60)
@given(ids=ids, data=st.data())
def test_parts_joined_are_what_was_cut(ids: list[int], data: st.DataObject) -> None:
    batch = read(*ids)
    at = data.draw(st.integers(0, len(ids)))
    assert same(join_columns([cut(batch, 0, at), cut(batch, at, len(ids))]), batch)


@settings(deadline=None, max_examples=60)
@given(ids=ids, data=st.data())
def test_parts_stacked_apart_are_joined_as_if_stacked_at_once(
    ids: list[int], data: st.DataObject
) -> None:
    cuts = sorted({0, len(ids), *data.draw(st.lists(st.integers(0, len(ids)), max_size=3))})
    parts = [read(*ids[begin:end]) for begin, end in itertools.pairwise(cuts)]
    assert same(join_columns(parts), read(*ids))


@settings(deadline=None, max_examples=60)
@given(ids=ids, data=st.data())
def test_picked_samples_are_those_read_in_that_order(ids: list[int], data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, len(ids) - 1), min_size=1, max_size=8))
    batch = pick(read(*ids), np.array(rows))
    # a sample may be ragged among others, and dense alone
    assert flat(batch) == flat(read(*(ids[row] for row in rows)))


@settings(deadline=None, max_examples=60)
@given(data=st.data(), samples=st.integers(0, 5))
def test_any_columns_are_cut_picked_and_joined_without_loss(
    data: st.DataObject, samples: int
) -> None:
    batch = data.draw(columns(samples))
    at = data.draw(st.integers(0, samples))
    first, second = cut(batch, 0, at), cut(batch, at, samples)
    assert same(join_columns([first, second]), batch)
    backwards = np.arange(samples)[::-1]
    assert same(pick(pick(batch, backwards), backwards), batch)
    assert nbytes(first) <= nbytes(batch) + 8 * len(list(leaves(batch)))


def flat(columns: Columns) -> list[list[Any]]:
    """The samples of all columns as lists, dense and ragged alike."""
    lists = []
    for _, column in leaves(columns):
        if isinstance(column, Ragged):
            lists.append(
                [part.tolist() for part in np.split(column.flat, np.cumsum(column.sizes)[:-1])]
            )
        else:
            lists.append(column.tolist())
    return lists


def test_samples_alike_are_dense_and_others_ragged() -> None:
    batch = stack([{"a": [1, 2], "b": 1.5, "c": [1]}, {"a": [3, 4], "b": 2.5, "c": [2, 3]}])
    assert batch["a"].tolist() == [[1, 2], [3, 4]]
    assert batch["b"].tolist() == [1.5, 2.5]
    assert isinstance(batch["c"], Ragged)
    assert batch["c"].flat.tolist() == [1, 2, 3]
    assert batch["c"].sizes.tolist() == [1, 2]


def test_named_columns_are_ragged_and_no_others() -> None:
    samples = [{"a": [1], "g": {"b": [2, 3]}, "c": 1}, {"a": [4], "g": {"b": [5, 6]}, "c": 2}]
    batch = stack(samples, ragged={"g.b", "c"})
    assert ragged_names(batch) == {"g.b"}
    assert flat(batch) == [[[1], [4]], [[2, 3], [5, 6]], [1, 2]]
    samples.append({"a": [7, 8], "g": {"b": [9]}, "c": 3})
    with pytest.raises(ValueError, match=r"sample 6: a has 2 rows, sample 4 has 1; .* pad all"):
        stack(samples, [4, 5, 6], ragged={"g.b"})


def test_leaves_are_named_by_their_paths() -> None:
    assert [name for name, _ in leaves(read(1, 2))] == ["number", "pair", "graph.nodes"]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "no samples"),
        ([{"x": 1}, 5], "sample 20 is a int, where named arrays are expected"),
        ([{"x": 1}, {"y": 1}], "sample 20 has y, the first one x"),
        ([{"x": 1}, {}], "sample 20 has nothing, the first one x"),
        ([{"x": 1}, {"x": 1.5}], r"sample 20: x is float64\[\], in the first sample int64\[\]"),
        ([{"x": [1]}, {"x": 1}], r"sample 20: x is int64\[\], in the first sample int64\[1\]"),
        ([{"x": np.ones((2, 3))}, {"x": np.ones((2, 4))}], r"sample 20: x is float64\[2, 4\]"),
        ([{"x": {"y": 1}}, {"x": {"z": 1}}], "in x: sample 20 has z, the first one y"),
        ([{"x": 1}, {"x": {"y": 1}}], "sample 20: x is {'y': 1}, which is no array of numbers"),
        ([{"x": None}], "sample 10: x is None, which is no array of numbers"),
        ([{"x": "text"}], "sample 10: x is 'text', which is no array of numbers"),
        ([{"x": [[1], [2, 3]]}], "sample 10: x is .*, which is no array of numbers"),
    ],
)
def test_samples_that_do_not_fit_are_named(samples: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stack(samples, [10, 20][: len(samples)])


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"x": np.zeros((2, 5), np.float32)}, ""),
        ({"x": Ragged(np.zeros(4, np.float32), np.array([0, 1, 4]))}, ""),
        ({"y": np.zeros((2, 3), np.float32)}, "y, not x"),
        ({"x": np.zeros((2, 3))}, "x as float64[*], not float32[*]"),
        ({"x": np.zeros(2, np.float32)}, "x as float32, not float32[*]"),
        ({"x": np.zeros((2, 3, 1), np.float32)}, "x as float32[*, 1], not float32[*]"),
        ({"x": {"z": np.zeros((2, 3), np.float32)}}, "x.z, not x"),
    ],
)
def test_parts_that_cannot_be_joined_are_named(other: Columns, expected: str) -> None:
    first = {"x": np.zeros((2, 3), np.float32)}
    assert difference(first, other) == expected
    if expected:
        with pytest.raises(ValueError, match="part 1 has"):
            join_columns([first, other])
    else:
        join_columns([first, other])
