from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instar.config.errors import ConfigError
from instar.data.split import whole_documents
from instar.data.text.documents import (
    check_ids,
    content_fingerprint,
    id_bytes,
    id_pieces,
    text_corpus,
)

LISTS = [
    pa.list_(pa.int64()),
    pa.large_list(pa.int32()),
    pa.list_(pa.uint16()),
    pa.list_(pa.int8()),
]


def chunked_column(rows: list[Any], kind: pa.DataType, sizes: list[int]) -> pa.ChunkedArray:
    """Rows in chunks, each cut out of a longer array, as memory-mapped ones are."""
    filler = [rows[0]] if rows else []
    chunks, begin = [], 0
    for size in [*sizes, len(rows)]:
        part = rows[begin : begin + size]
        chunks.append(pa.array([*filler, *part, *filler], type=kind)[len(filler) :][: len(part)])
        begin += len(part)
    return pa.chunked_array(chunks, type=kind)


@settings(deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 100), max_size=6), max_size=12),
    kind=st.sampled_from(LISTS),
    sizes=st.lists(st.integers(0, 4), max_size=4),
    data=st.data(),
)
def test_ids_are_those_of_the_rows_however_arrow_keeps_them(
    rows: list[list[int]], kind: pa.DataType, sizes: list[int], data: st.DataObject
) -> None:
    column = chunked_column(rows, kind, sizes)
    width = column.type.value_type.bit_width // 8
    assert id_bytes(column).tolist() == [width * len(row) for row in rows]
    numbers = [number for number in range(len(rows)) if data.draw(st.booleans())]
    parts = whole_documents(np.array(numbers, dtype=np.int64), id_bytes(column))
    pieces = [(number, ids.tolist()) for number, ids in id_pieces(column, parts)]
    assert pieces == [(place, rows[number]) for place, number in enumerate(numbers)]


def test_lists_of_one_size_are_read_too_and_cut_at_bytes() -> None:
    column = chunked_column([[1, 2, 3], [4, 5, 6], [7, 8, 9]], pa.list_(pa.int32(), 3), [1])
    parts = np.array([[0, 4, 12], [2, 0, 8]])
    assert [ids.tolist() for _, ids in id_pieces(column, parts)] == [[2, 3], [7, 8]]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([[1], [2, 300]], "row 1 of here: the token 300 in the column 'ids'"),
        ([[1], [], [2, 256, 300]], "row 2 of here: the token 256"),
        ([[-1]], "row 0 of here: the token -1"),
        ([[1], [2], None], "row 2 of here: a null"),
        ([[1], [2, None], [3]], "row 1 of here: a null"),
    ],
)
@pytest.mark.parametrize("sizes", [[], [1], [1, 1]])
def test_an_id_that_is_no_token_is_named_with_its_row(
    rows: list[Any], says: str, sizes: list[int]
) -> None:
    with pytest.raises(ConfigError, match=says):
        check_ids(chunked_column(rows, pa.list_(pa.int64()), sizes), 256, "ids", "here")


def test_a_bad_id_in_lists_of_one_size_is_named() -> None:
    column = chunked_column([[1, 2], [3, 999]], pa.list_(pa.int64(), 2), [])
    with pytest.raises(ConfigError, match="row 1 of here: the token 999"):
        check_ids(column, 256, "ids", "here")


def test_good_ids_are_let_through() -> None:
    check_ids(chunked_column([[0, 255], []], pa.list_(pa.int64()), [1]), 256, "ids", "here")


@settings(deadline=None)
@given(
    rows=st.lists(st.text(max_size=5), min_size=1, max_size=8),
    sizes=st.lists(st.integers(0, 4), max_size=4),
)
def test_the_fingerprint_of_text_does_not_depend_on_chunks(
    rows: list[str], sizes: list[int]
) -> None:
    column, cut = chunked_column(rows, pa.string(), []), chunked_column(rows, pa.string(), sizes)
    assert content_fingerprint(column) == content_fingerprint(cut)
    other_rows = [*rows[:-1], rows[-1] + "x"]
    assert content_fingerprint(
        chunked_column(other_rows, pa.string(), sizes)
    ) != content_fingerprint(column)
    assert text_corpus(cut).sizes.tolist() == [len(text.encode()) for text in rows]


def test_the_fingerprint_knows_where_a_row_ends() -> None:
    for kind, rows, other_rows in (
        (pa.string(), ["ab", "c"], ["a", "bc"]),
        (pa.list_(pa.int64()), [[1, 2], [3]], [[1], [2, 3]]),
    ):
        fingerprints = {
            content_fingerprint(chunked_column(values, kind, []))
            for values in (rows, other_rows, rows[:1])
        }
        assert len(fingerprints) == 3


def test_a_column_is_a_corpus_of_whole_characters() -> None:
    corpus = text_corpus(chunked_column(["aé", None, "bc"], pa.string(), [1]))
    assert corpus.sizes.tolist() == [3, 0, 2]
    parts = np.array([[0, 0, 2], [2, 0, 2]])
    assert [list(pieces) for pieces in corpus.texts(parts)] == [["aé"], ["bc"]]
