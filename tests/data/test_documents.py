from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instar.config.errors import ConfigError
from instar.data import documents as module
from instar.data.documents import (
    ColumnText,
    Documents,
    Stretches,
    TextDocuments,
    TokenDocuments,
    check_ids,
    content_fingerprint,
    text_bytes,
)
from instar.data.tokenizer import ByteTokenizer, Tokenizer, train_bpe, train_char

LISTS = [
    pa.list_(pa.int64()),
    pa.large_list(pa.int32()),
    pa.list_(pa.uint16()),
    pa.list_(pa.int8()),
]
TEXTS = ["one\n  two", "", "thrée", "再见", "x" * 50]


def chunked(rows: list[Any], kind: pa.DataType, sizes: list[int]) -> pa.ChunkedArray:
    """Rows in chunks, each cut out of a longer array, as memory-mapped ones are."""
    filler = [rows[0]] if rows else []
    chunks, begin = [], 0
    for size in [*sizes, len(rows)]:
        part = rows[begin : begin + size]
        chunks.append(pa.array([*filler, *part, *filler], type=kind)[len(filler) :][: len(part)])
        begin += len(part)
    return pa.chunked_array(chunks, type=kind)


def everything(documents: Documents) -> list[list[int]]:
    """Every document's tokens, copied in one call, last one first."""
    numbers = np.arange(len(documents))[::-1].copy()
    sizes = documents.counts(numbers)
    places = np.cumsum(sizes) - sizes
    out = np.zeros(int(sizes.sum()), dtype=documents.dtype)
    documents.copy(Stretches(*documents.locate(numbers), sizes, places), out)
    return [out[p : p + n].tolist() for p, n in zip(places, sizes, strict=True)][::-1]


@settings(deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 100), max_size=6), max_size=12),
    kind=st.sampled_from(LISTS),
    sizes=st.lists(st.integers(0, 4), max_size=4),
)
def test_ids_are_those_of_the_rows_however_arrow_keeps_them(
    rows: list[list[int]], kind: pa.DataType, sizes: list[int]
) -> None:
    documents = TokenDocuments(chunked(rows, kind, sizes), "")
    assert len(documents) == len(rows)
    assert everything(documents) == rows
    assert [documents.tokens(number).tolist() for number in range(len(rows))] == rows


def test_lists_of_one_size_are_read_too() -> None:
    rows = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    column = chunked(rows, pa.list_(pa.int32(), 3), [1])
    assert everything(TokenDocuments(column, "")) == rows


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_ids_are_not_converted(width: int) -> None:
    stored = {1: pa.int8(), 2: pa.uint16(), 4: pa.int32(), 8: pa.int64()}[width]
    values = pa.array([1, 2, 3], type=stored)
    lists = pa.ListArray.from_arrays(pa.array([0, 2, 3]), values)
    documents = TokenDocuments(pa.chunked_array([lists]), "")
    assert documents.dtype == f"uint{8 * width}"
    assert documents.tokens(1).ctypes.data == values.buffers()[1].address + 2 * width


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), train_char(TEXTS), train_bpe(TEXTS, 300)])
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_texts_are_tokenised_with_the_separator_after_each(
    tokenizer: Tokenizer, kind: pa.DataType
) -> None:
    column = chunked([*TEXTS, None], kind, [2, 1])
    end = [tokenizer.end_id] if tokenizer.end_id is not None else tokenizer.encode("\n").tolist()
    expected = [[*tokenizer.encode(text).tolist(), *end] for text in [*TEXTS, ""]]
    documents = TextDocuments(column, tokenizer, "")
    assert documents.separator.tolist() == end
    assert everything(documents) == expected
    assert documents.counts(np.array([4, 1, 5])).tolist() == [len(expected[n]) for n in (4, 1, 5)]


class Counting(ByteTokenizer):
    """Bytes; counts the characters that it was given."""

    characters = 0

    def encode_batch(self, texts: Any) -> Any:
        type(self).characters += sum(map(len, texts))
        return super().encode_batch(texts)


@pytest.fixture
def given_characters(monkeypatch: pytest.MonkeyPatch) -> type[Counting]:
    monkeypatch.setattr(Counting, "characters", 0)
    return Counting


def read(documents: TextDocuments, *numbers: int) -> None:
    which = np.array(numbers)
    zeros = np.zeros_like(which)
    stretches = Stretches(which, zeros, zeros + 1, np.arange(which.size))
    documents.copy(stretches, np.empty(which.size, np.uint16))


def test_a_document_is_tokenised_once_in_a_call_and_remembered(
    given_characters: type[Counting],
) -> None:
    documents = TextDocuments(chunked(["ab", "cde"], pa.string(), []), Counting(), "")
    read(documents, 0, 1, 0, 1, 1)
    assert given_characters.characters == 5
    read(documents, 1, 0)
    assert given_characters.characters == 5


def test_what_was_read_longest_ago_is_forgotten_but_never_the_last(
    monkeypatch: pytest.MonkeyPatch, given_characters: type[Counting]
) -> None:
    monkeypatch.setattr(module, "_CACHED_TOKENS", 7)
    documents = TextDocuments(chunked(["ab", "cd", "x" * 100], pa.string(), []), Counting(), "")
    read(documents, 0)
    read(documents, 1)  # two documents of three tokens are within seven
    read(documents, 0)
    assert given_characters.characters == 4
    read(documents, 2)
    read(documents, 2)
    assert given_characters.characters == 104
    read(documents, 0)
    assert given_characters.characters == 106


def test_one_call_may_need_more_than_is_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_CACHED_TOKENS", 4)
    column = chunked(TEXTS, pa.string(), [])
    expected = [[*text.encode(), 10] for text in TEXTS]
    assert everything(TextDocuments(column, ByteTokenizer(), "")) == expected


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
        check_ids(chunked(rows, pa.list_(pa.int64()), sizes), 256, "ids", "here")


def test_a_bad_id_in_lists_of_one_size_is_named() -> None:
    column = chunked([[1, 2], [3, 999]], pa.list_(pa.int64(), 2), [])
    with pytest.raises(ConfigError, match="row 1 of here: the token 999"):
        check_ids(column, 256, "ids", "here")


def test_good_ids_are_let_through() -> None:
    check_ids(chunked([[0, 255], []], pa.list_(pa.int64()), [1]), 256, "ids", "here")


@settings(deadline=None)
@given(
    rows=st.lists(st.text(max_size=5), min_size=1, max_size=8),
    sizes=st.lists(st.integers(0, 4), max_size=4),
)
def test_the_fingerprint_of_text_does_not_depend_on_chunks(
    rows: list[str], sizes: list[int]
) -> None:
    once, cut = chunked(rows, pa.string(), []), chunked(rows, pa.string(), sizes)
    assert content_fingerprint(once) == content_fingerprint(cut)
    changed = [*rows[:-1], rows[-1] + "x"]
    assert content_fingerprint(chunked(changed, pa.string(), sizes)) != content_fingerprint(once)
    assert text_bytes(cut).tolist() == [len(text.encode()) for text in rows]


def test_the_fingerprint_knows_where_a_row_ends() -> None:
    for kind, rows, others in (
        (pa.string(), ["ab", "c"], ["a", "bc"]),
        (pa.list_(pa.int64()), [[1, 2], [3]], [[1], [2, 3]]),
    ):
        found = {content_fingerprint(chunked(some, kind, [])) for some in (rows, others, rows[:1])}
        assert len(found) == 3


def test_a_column_is_a_corpus_of_whole_characters() -> None:
    text = ColumnText(chunked(["aé", None, "bc"], pa.string(), [1]))
    assert list(text.sizes()) == [3, 0, 2]
    parts = [(0, 0, 2), (2, 0, 2)]
    assert [list(pieces) for pieces in text.texts(parts)] == [["aé"], ["bc"]]
