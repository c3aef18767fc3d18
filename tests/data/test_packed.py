from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instar.data.documents import Documents, TextDocuments, TokenDocuments
from instar.data.packed import DocumentSamples, PackedSplit
from instar.data.source import TokenWindows
from instar.data.tokenizer import ByteTokenizer, Tokenizer, train_bpe

BPE = train_bpe(["several words, several times over\n"] * 10, 300)


def of_ids(rows: list[list[int]], chunk: int) -> Documents:
    kind = pa.list_(pa.int64())
    chunks = [pa.array(rows[at : at + chunk], type=kind) for at in range(0, len(rows), chunk)]
    return TokenDocuments(pa.chunked_array(chunks, type=kind), "ids")


def of_texts(rows: list[str], tokenizer: Tokenizer) -> Documents:
    return TextDocuments(pa.chunked_array([rows], type=pa.string()), tokenizer, "texts")


def packed(documents: Documents, chosen: list[int]) -> PackedSplit:
    which = np.array(chosen, dtype=np.int64)
    return PackedSplit("train", documents, which, documents.counts(which))


@st.composite
def splits(draw: Any) -> tuple[PackedSplit, list[int]]:
    """A split, and its tokens laid end to end by hand."""
    if draw(st.booleans()):
        rows = draw(st.lists(st.lists(st.integers(0, 999), max_size=7), min_size=1, max_size=10))
        documents, tokens, separator = of_ids(rows, draw(st.integers(1, 5))), rows, []
    else:
        texts = draw(st.lists(st.text(max_size=7), min_size=1, max_size=10))
        tokenizer = draw(st.sampled_from([ByteTokenizer(), BPE]))
        documents = of_texts(texts, tokenizer)
        tokens = [tokenizer.encode(text).tolist() for text in texts]
        separator = documents.separator.tolist()
    chosen = draw(st.lists(st.integers(0, len(tokens) - 1), max_size=12))
    by_hand: list[int] = []
    for place, number in enumerate(chosen):
        by_hand += [*(separator if place else []), *tokens[number]]
    return packed(documents, chosen), by_hand


@settings(deadline=None)
@given(split=splits(), length=st.integers(1, 20), data=st.data())
def test_any_windows_are_those_of_the_documents_end_to_end(
    split: tuple[PackedSplit, list[int]], length: int, data: st.DataObject
) -> None:
    found, by_hand = split
    assert len(found) == len(by_hand)
    assert found.read(0, len(found)).tolist() == by_hand
    if len(by_hand) < length:
        return
    starts = data.draw(st.lists(st.integers(0, len(by_hand) - length), max_size=8))
    expected = [by_hand[start : start + length] for start in starts]
    assert found.windows(np.array(starts, dtype=np.int64), length).tolist() == expected


def test_outside_is_an_error() -> None:
    split = packed(of_ids([[1, 2, 3], [4]], 1), [0, 1])
    for start, stop in ((-1, 2), (0, 5), (3, 2)):
        with pytest.raises(IndexError, match="of train, which has 4"):
            split.read(start, stop)
    for start in (-1, 3):
        with pytest.raises(IndexError, match="a window of 2 tokens leaves train"):
            split.windows(np.array([0, start]), 2)


def test_nothing_chosen_is_an_empty_split() -> None:
    assert len(packed(of_texts(["a"], ByteTokenizer()), [])) == 0


def test_a_document_much_longer_than_the_context_is_cut_into_samples() -> None:
    text = "".join(f"line {number}\n" for number in range(3000))
    split = packed(of_texts(["first", text, "", "last"], ByteTokenizer()), [0, 1, 3])
    windows = TokenWindows(split, 64)
    batch = windows.read(np.arange(len(windows)))
    tokens = np.frombuffer(f"first\n{text}\nlast".encode(), dtype=np.uint8)
    valid = batch["targets"].reshape(-1) >= 0
    assert batch["targets"].reshape(-1)[valid].tolist() == tokens[1:].tolist()
    assert batch["inputs"].reshape(-1)[valid].tolist() == tokens[:-1].tolist()


def test_the_fingerprint_tells_documents_and_their_order() -> None:
    documents = of_ids([[1, 2], [3]], 2)
    found = {packed(documents, chosen).fingerprint for chosen in ([0], [0, 1], [1, 0], [1])}
    assert len(found) == 4


@pytest.mark.parametrize("context", [1, 3, 8])
def test_a_document_is_a_sample(context: int) -> None:
    texts = ["abcdef", "", "x", "word"]
    documents = of_texts(texts, ByteTokenizer())
    chosen = np.array([3, 1, 2, 0])
    samples = DocumentSamples(documents, chosen, documents.counts(chosen), context)
    assert len(samples) == 3  # the empty one is nothing but its separator
    indices = np.array([2, 0, 1, 0])
    batch = samples.read(indices)
    weight = 0
    for row, text in enumerate(["abcdef", "word", "x", "word"]):
        tokens = [*text.encode(), 10][: context + 1]
        missing = context + 1 - len(tokens)
        assert batch["inputs"][row].tolist() == tokens[:-1] + [0] * missing
        assert batch["targets"][row].tolist() == tokens[1:] + [-1] * missing
        weight += len(tokens) - 1
    assert samples.weights(indices) == weight
    assert batch["inputs"].dtype == batch["targets"].dtype == np.int64
    assert batch["inputs"].flags.c_contiguous


@settings(deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 999), max_size=9), min_size=1, max_size=9),
    context=st.integers(1, 6),
)
def test_a_samples_weight_is_its_targets(rows: list[list[int]], context: int) -> None:
    documents = of_ids(rows, 4)
    chosen = np.arange(len(rows))
    samples = DocumentSamples(documents, chosen, documents.counts(chosen), context)
    assert len(samples) == sum(len(row) >= 2 for row in rows)
    for index in range(len(samples)):
        one = np.array([index])
        assert samples.weights(one) == np.count_nonzero(samples.read(one)["targets"] >= 0) > 0


def test_a_sample_outside_is_an_error() -> None:
    documents = of_ids([[1, 2]], 1)
    samples = DocumentSamples(documents, np.array([0]), np.array([2]), 4)
    with pytest.raises(IndexError, match="of 1"):
        samples.read(np.array([1]))
