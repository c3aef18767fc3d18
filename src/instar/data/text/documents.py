"""The documents of a source: encoded in parts, and compared with each other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from instar.config.errors import ConfigError
from instar.config.language import DataConfig
from instar.data.order import Int64Array
from instar.data.split import Parts, whole_documents
from instar.data.text.corpus import Corpus, open_corpus
from instar.data.text.hf import column_of, load_rows
from instar.data.text.rows import (
    RowsRecord,
    check_ids,
    content_fingerprint,
    id_bytes,
    id_pieces,
    text_corpus,
)
from instar.data.text.tokenizer import Tokenizer, in_pieces, separator_of
from instar.record.progress import Advance, progress

_BATCH_CHARACTERS = min(16, max(4, os.cpu_count() or 1)) << 20
"""Characters encoded at once: `tokenizers` spreads pieces of 2^20 over all cores."""

Pieces = Iterator[tuple[int, NDArray[Any]]]
"""The tokens of a split in order, each with the number of its document in the split; a separator
belongs to the document before it."""


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of a source: text to encode, or a column of token ids."""

    corpus: Corpus | None = None
    ids: Any = None
    rows: RowsRecord | None = None

    @property
    def sizes(self) -> Int64Array:
        """Return the bytes of each document."""
        return id_bytes(self.ids) if self.corpus is None else self.corpus.sizes

    def digests(self, numbers: Int64Array) -> list[bytes]:
        """Return the xxh3-128 of what each of some documents holds; read them."""
        sizes = self.sizes
        parts, digests = whole_documents(numbers, sizes), []
        with progress("comparing documents", int(sizes[numbers].sum())) as advance:
            if self.corpus is None:
                ids_of = {number: ids.astype("<i8") for number, ids in id_pieces(self.ids, parts)}
                return [xxhash.xxh3_128_digest(ids_of[n].tobytes()) for n in range(len(numbers))]
            for texts in self.corpus.texts(parts):
                digest = xxhash.xxh3_128()
                for text in texts:
                    digest.update(content := text.encode())
                    advance(len(content))
                digests.append(digest.digest())
        return digests

    def tokens(self, parts: Parts, tokenizer: Tokenizer, advance: Advance) -> Pieces:
        """Yield the tokens of the parts; `advance` counts the bytes of their documents."""
        if self.corpus is not None:
            yield from _encode_parts(tokenizer, self.corpus, parts, advance)
            return
        for number, ids in id_pieces(self.ids, parts):
            yield number, ids
            advance(ids.nbytes)


def open_rows_of(data: DataConfig, tokenizer: Tokenizer | None) -> Documents:
    """Open the rows of a Hugging Face data set. Raises ConfigError for ids that are not tokens."""
    rows = load_rows(data)
    column = column_of(rows, data.tokens_field or data.text_field)
    if data.tokens_field is not None:
        if tokenizer is None:
            raise ConfigError.of(
                f"a {data.tokenizer} tokenizer cannot be trained on token ids",
                where="data.tokenizer",
                hint="name the tokenizer.json that made them",
                key="data.tokenizer",
            )
        check_ids(column, tokenizer.vocab_size, data.tokens_field, data.source)
    record = RowsRecord(len(rows), rows._fingerprint, content_fingerprint(column))
    if data.tokens_field is not None:
        return Documents(ids=column, rows=record)
    return Documents(text_corpus(column), rows=record)


def open_held_out(data: DataConfig, source: str, tokenizer: Tokenizer | None) -> Documents:
    """Open the documents of `val_source`."""
    if data.tokens_field is None:
        return Documents(open_corpus(source, data.text_field))
    fields = {"source": source, "subset": None, "source_split": "train"}
    return open_rows_of(data.model_copy(update=fields), tokenizer)


def same_documents(
    documents: Documents, other: Documents, numbers: Int64Array, other_numbers: Int64Array
) -> Int64Array:
    """Return for each of some documents of `documents` the first of some of `other` that holds the same, or -1.

    Args:
        numbers, other_numbers: of documents, ascending, [n] and [m]; those compared with themselves may be the
            same.
    """
    matches = np.full(numbers.size, -1, dtype=np.int64)
    sizes, other_sizes = documents.sizes[numbers], other.sizes[other_numbers]
    candidates = np.flatnonzero(np.isin(sizes, other_sizes) & (sizes > 0))
    if documents is other and np.array_equal(numbers, other_numbers):
        values, counts = np.unique(sizes, return_counts=True)
        candidates = np.flatnonzero(np.isin(sizes, values[counts > 1]) & (sizes > 0))
        other_candidates = candidates
    else:
        other_candidates = np.flatnonzero(np.isin(other_sizes, sizes) & (other_sizes > 0))
    if not candidates.size or not other_candidates.size:
        return matches
    keys = documents.digests(numbers[candidates])
    number_of: dict[bytes, int] = {}
    for number, key in zip(
        other_numbers[other_candidates].tolist(),
        keys if other_candidates is candidates else other.digests(other_numbers[other_candidates]),
        strict=True,
    ):
        number_of.setdefault(key, number)
    matches[candidates] = [number_of.get(key, -1) for key in keys]
    return matches


def pieces_of(corpus: Corpus, parts: Parts) -> Iterator[tuple[int, str | None]]:
    """Yield the text of the parts in pieces, each with the part's number; None separates parts."""
    for number, texts in enumerate(corpus.texts(parts)):
        if number:
            yield number - 1, None
        for piece in in_pieces(texts):
            yield number, piece


def _encode_parts(tokenizer: Tokenizer, corpus: Corpus, parts: Parts, advance: Advance) -> Pieces:
    """Yield the tokens of the parts' text, each with what the tokenizer adds to a text, and a separator between
    documents."""
    begin, end, separator = tokenizer.before, tokenizer.after, separator_of(tokenizer)
    batch: list[tuple[int, str | NDArray[Any]]] = []

    def tokens() -> Pieces:
        texts = [text for _, text in batch if isinstance(text, str)]
        encodings = iter(tokenizer.encode_batch(texts))
        for number, piece in batch:
            if isinstance(piece, str):
                yield number, next(encodings)
                advance(len(piece.encode()))
            else:
                yield number, piece

    characters = 0
    batch.append((0, begin))
    for number, piece in pieces_of(corpus, parts):
        if piece is None:
            batch += [(number, end), (number, separator), (number + 1, begin)]
        else:
            batch.append((number, piece))
            characters += len(piece)
        if characters >= _BATCH_CHARACTERS:
            yield from tokens()
            batch, characters = [], 0
    batch.append((len(parts) - 1, end))
    yield from tokens()
