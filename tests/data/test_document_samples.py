from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from splits import split_of

from instar.data.source import IGNORED, DocumentSamples

SEPARATOR = [10]


def samples(
    documents: Sequence[Sequence[int]], context: int, separator: Sequence[int], shard: int = 5
) -> DocumentSamples:
    """Documents end to end in shards of so many tokens, a separator between two."""
    sequences = [[*document, *separator] for document in documents]
    flat = np.array([token for sequence in sequences for token in sequence], dtype=np.uint16)
    tokens = flat[: flat.size - len(separator)]
    shards = [tokens[begin : begin + shard] for begin in range(0, tokens.size, shard)]
    split = split_of(*shards)
    sizes = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    return DocumentSamples(split, sizes, np.array(separator, dtype=np.uint16), context)


def expected(document: Sequence[int], separator: Sequence[int], context: int) -> list[list[int]]:
    """A document's inputs and targets, by their definition."""
    tokens = [*document, *separator][: context + 1]
    missing = context + 1 - len(tokens)
    return [tokens[:-1] + [0] * missing, tokens[1:] + [IGNORED] * missing]


@pytest.mark.parametrize("context", [1, 3, 8])
def test_a_document_is_a_sample(context: int) -> None:
    texts = [list(text.encode()) for text in ("word", "", "x", "abcdef")]
    source = samples(texts, context, SEPARATOR)
    assert len(source) == 3  # the empty one is nothing but its separator
    indices = np.array([2, 0, 1, 0])
    batch = source.read(indices)
    expected_rows = [expected(texts[number], SEPARATOR, context) for number in (3, 0, 2, 0)]
    rows = zip(batch["inputs"].tolist(), batch["targets"].tolist(), strict=True)
    assert [list(row) for row in rows] == expected_rows
    assert source.weights(indices) == np.count_nonzero(batch["targets"] >= 0)
    assert batch["inputs"].dtype == batch["targets"].dtype == np.int64
    assert batch["inputs"].flags.c_contiguous


@settings(deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 999), max_size=9), min_size=1, max_size=9).filter(
        lambda documents: any(documents)
    ),
    context=st.integers(1, 6),
    separator=st.lists(st.integers(0, 999), max_size=3),
)
def test_samples_are_the_documents_of_two_tokens_or_more(
    documents: list[list[int]], context: int, separator: list[int]
) -> None:
    source = samples(documents, context, separator)
    usable = [document for document in documents if len(document) + len(separator) >= 2]
    assert len(source) == len(usable)
    for index, document in enumerate(usable):
        indices = np.array([index])
        batch = source.read(indices)
        expected_rows = expected(document, separator, context)
        assert [batch["inputs"][0].tolist(), batch["targets"][0].tolist()] == expected_rows
        assert source.weights(indices) == np.count_nonzero(batch["targets"] >= 0) > 0


def test_a_sample_outside_is_an_error() -> None:
    with pytest.raises(IndexError, match="of 1"):
        samples([[1, 2]], 4, []).read(np.array([1]))
