"""A Hugging Face data set as training data: read where it lies, tokenised on the way.

Its folder holds what reading it again would cost too much to know:

dataset.json  val-00000.safetensors …   what is held out, as token shards
tokenizer.json
index-train.safetensors                 the documents to train on, and the tokens of each
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from instar.config.errors import ConfigError
from instar.config.language import DataConfig
from instar.data.corpus import Corpus
from instar.data.documents import (
    ColumnText,
    Documents,
    TextDocuments,
    TokenDocuments,
    check_ids,
    content_fingerprint,
    count_tokens,
    text_bytes,
)
from instar.data.hf import column_of, load_rows
from instar.data.index import INDEX_FILE, IndexRecord, identity, read_index, write_index
from instar.data.order import Int64Array
from instar.data.packed import DocumentSamples, PackedSplit
from instar.data.prepare import (
    amounts,
    check_made_from,
    default_path,
    encoded,
    held_out_texts,
    is_made,
    made_from,
    make_tokenizer,
    write_made,
    write_split,
)
from instar.data.split import Parts, chosen_bytes, divide_held_out, divide_whole, whole
from instar.data.tokenizer import (
    Tokenizer,
    from_json,
    load_tokenizer,
    named_file,
    named_tokenizer,
)
from instar.data.tokens import TokenDataset, TokenSplit, open_dataset, publishing
from instar.data.workers import Workers

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

_COUNTED_AT_ONCE = 4096
_TELL_EVERY_S = 10.0

Say = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class RowsDataset:
    """Rows to train on and token shards to evaluate on.

    `fingerprint` is that of the content: the column, which documents are chosen, the tokenizer, and
    what is held out. `counts` are the tokens of the chosen documents, separators included, [n].
    """

    path: Path
    vocab_size: int
    tokenizer: str
    tokenizer_fingerprint: str
    fingerprint: str
    documents: Documents
    chosen: Int64Array
    counts: Int64Array
    held_out: TokenDataset

    def split(self, name: str) -> PackedSplit | TokenSplit:
        """Raises ConfigError where the data set has no such split."""
        return self._train if name == "train" else self.held_out.split(name)

    @cached_property
    def _train(self) -> PackedSplit:
        return PackedSplit("train", self.documents, self.chosen, self.counts)

    def samples(self, context: int) -> DocumentSamples:
        """The training documents, each a sample of its own."""
        return DocumentSamples(self.documents, self.chosen, self.counts, context)


def prepare_rows(
    data: DataConfig, seed: int, path: str | Path | None = None, say: Say = lambda _: None
) -> Path:
    """Make the folder of a config's rows at `path` (default: data.path, or `default_path`).

    Whole documents are held out by the seed alone, unless there is a `val_source`. A folder that
    is already there is left as it is. Raises ConfigError for bad input, and where the folder holds
    something else.
    """
    folder = Path(path or data.path or default_path(data, seed))
    if is_made(folder, data, seed, say):
        return folder
    named_file(data.tokenizer)
    rows = load_rows(data)
    plan = (_plan_text if data.tokens_field is None else _plan_ids)(rows, data, seed)
    say(f"preparing {data.source}: {amounts(plan.wanted)} → {folder}")
    with publishing(folder) as aside:
        splits = {
            name: write_split(aside, name, tokens, plan.tokenizer, data)
            for name, tokens in plan.held_out.items()
        }
        counts = _counted(plan, data, say)
        record = IndexRecord(len(rows), rows._fingerprint, plan.content)
        write_index(aside, record, plan.tokenizer, plan.chosen, counts)
        write_made(aside, plan.tokenizer, splits, made_from(data, seed, plan.wanted))
    check_made_from(folder, data, seed, say)
    told = [f"train {len(PackedSplit('train', plan.documents, plan.chosen, counts)):,}"]
    told += [f"{name} {sum(s.count for s in shards):,}" for name, shards in splits.items()]
    say(f"tokens: {', '.join(told)}; vocabulary {plan.tokenizer.vocab_size:,}")
    return folder


def open_rows(data: DataConfig, seed: int) -> RowsDataset:
    """Open rows that `prepare_rows` has counted, without reading them.

    Where the library says that they are not those that were counted, for files may have been
    copied, their content is read once and decides. Raises ConfigError where it is another one, and
    where anything is missing or damaged.
    """
    folder = Path(data.path or default_path(data, seed))
    held_out = open_dataset(folder)
    tokenizer = load_tokenizer(folder, fingerprint=held_out.tokenizer_fingerprint)
    record, chosen, counts, fingerprint = read_index(folder / INDEX_FILE, tokenizer)
    rows = load_rows(data)
    column = _column(rows, data)
    if (record.rows, record.loaded) != (len(rows), rows._fingerprint):
        _check_content(column, record, tokenizer, data, folder)
    return RowsDataset(
        path=folder,
        vocab_size=held_out.vocab_size,
        tokenizer=held_out.tokenizer,
        tokenizer_fingerprint=held_out.tokenizer_fingerprint,
        fingerprint=xxhash.xxh3_128_hexdigest(f"{fingerprint}{held_out.fingerprint}".encode()),
        documents=_documents(column, tokenizer, data, record.content),
        chosen=chosen,
        counts=counts,
        held_out=held_out,
    )


@dataclass(frozen=True, eq=False)
class _Plan:
    """What is made of rows. `wanted` is the bytes of each document that is taken, [rows], `chosen`
    the documents to train on; `held_out` the tokens of the other splits, to be written once."""

    wanted: Int64Array
    chosen: Int64Array
    tokenizer: Tokenizer
    content: str
    documents: Documents
    held_out: dict[str, Iterator[NDArray[Any]]]


def _plan_text(rows: datasets.Dataset, data: DataConfig, seed: int) -> _Plan:
    column = _column(rows, data)
    sizes = text_bytes(column)
    wanted, parts = _divided(sizes, data, seed)
    corpus = Corpus((ColumnText(column),), np.array([0, len(column)], dtype=np.int64), sizes)
    tokenizer = make_tokenizer(corpus, parts["train"], data, seed)
    chosen = parts.pop("train")[:, 0].copy()
    texts = {name: (corpus, part) for name, part in parts.items()}
    held_out = {name: encoded(tokenizer, *text) for name, text in texts.items()}
    content = content_fingerprint(column)
    return _Plan(
        wanted=wanted,
        chosen=chosen,
        tokenizer=tokenizer,
        content=content,
        documents=_documents(column, tokenizer, data, content),
        held_out=held_out or held_out_tokens(data, seed, tokenizer),
    )


def _plan_ids(rows: datasets.Dataset, data: DataConfig, seed: int) -> _Plan:
    tokenizer = named_tokenizer(data.tokenizer)
    if tokenizer is None:
        raise ConfigError.one(
            f"a {data.tokenizer} tokenizer cannot be trained on token ids",
            where="data.tokenizer",
            hint="name the tokenizer.json that made them",
            key="data.tokenizer",
        )
    content, documents = _checked_ids(rows, tokenizer, data)
    wanted, parts = _divided(_id_bytes(documents), data, seed)
    chosen = parts.pop("train")[:, 0].copy()
    held_out = {name: _ids(documents, part) for name, part in parts.items()}
    held_out = held_out or held_out_tokens(data, seed, tokenizer)
    return _Plan(wanted, chosen, tokenizer, content, documents, held_out)


def held_out_tokens(
    data: DataConfig, seed: int, tokenizer: Tokenizer
) -> dict[str, Iterator[NDArray[Any]]]:
    """The tokens of `val_source` for each held-out split."""
    assert data.val_source is not None
    if data.tokens_field is None:
        texts = held_out_texts(data.val_source, data, seed)
        return {name: encoded(tokenizer, *text) for name, text in texts.items()}
    others = data.model_copy(
        update={"source": data.val_source, "subset": None, "source_split": "train"}
    )
    _, documents = _checked_ids(load_rows(others), tokenizer, others)
    parts = divide_held_out(_id_bytes(documents), data, seed)
    return {name: _ids(documents, part) for name, part in parts.items()}


def _divided(sizes: Int64Array, data: DataConfig, seed: int) -> tuple[Int64Array, dict[str, Parts]]:
    """The bytes of the documents that are taken, each whole, and what becomes of them."""
    wanted = np.where(chosen_bytes(sizes, data, seed) > 0, sizes, 0)
    if not wanted.any():
        raise ConfigError.one(
            f"the rows of {data.source} are all empty", where="data.source", key="data.source"
        )
    if data.val_source is not None:
        return wanted, {"train": whole(np.flatnonzero(wanted), wanted)}
    parts = divide_whole(wanted, data.val_fraction, data.test_fraction, seed)
    if parts is None:
        raise ConfigError.one(
            f"{data.source} has {amounts(wanted)}: too few or too unequal to hold out whole ones",
            where="data.val_source",
            hint="give text to hold out in data.val_source, or other fractions",
            key="data.val_source",
        )
    return wanted, parts


def _column(rows: datasets.Dataset, data: DataConfig) -> pa.ChunkedArray:
    return column_of(rows, data.tokens_field or data.text_field)


def _documents(
    column: pa.ChunkedArray, tokenizer: Tokenizer, data: DataConfig, content: str
) -> Documents:
    fingerprint = identity(content, tokenizer)
    if data.tokens_field is not None:
        return TokenDocuments(column, fingerprint)
    return TextDocuments(column, tokenizer, fingerprint)


def _checked_ids(
    rows: datasets.Dataset, tokenizer: Tokenizer, data: DataConfig
) -> tuple[str, TokenDocuments]:
    column = _column(rows, data)
    check_ids(column, tokenizer.vocab_size, str(data.tokens_field), data.source)
    content = content_fingerprint(column)
    return content, TokenDocuments(column, identity(content, tokenizer))


def _id_bytes(documents: TokenDocuments) -> Int64Array:
    return documents.counts(np.arange(len(documents))) * documents.dtype.itemsize


def _ids(documents: TokenDocuments, parts: Parts) -> Iterator[NDArray[Any]]:
    width = documents.dtype.itemsize
    for number, begin, end in parts.tolist():
        yield documents.tokens(number)[begin // width : end // width]


def _counted(plan: _Plan, data: DataConfig, say: Say) -> Int64Array:
    """The tokens of the chosen documents, [n]."""
    chosen, documents = plan.chosen, plan.documents
    if not isinstance(documents, TextDocuments) or plan.tokenizer.kind != "bpe":
        return documents.counts(chosen)
    say(f"counting the tokens of {chosen.size:,} documents: each is tokenised once")
    batches = [chosen[at : at + _COUNTED_AT_ONCE] for at in range(0, chosen.size, _COUNTED_AT_ONCE)]
    counts: list[Int64Array] = []
    told = time.monotonic()
    for some in _counts_of_batches(documents, plan.tokenizer, data.workers, batches):
        counts.append(some)
        if time.monotonic() - told > _TELL_EVERY_S:
            told = time.monotonic()
            say(f"counted {len(counts) * _COUNTED_AT_ONCE:,} of {chosen.size:,} documents")
    return np.concatenate(counts)


def _counts_of_batches(
    documents: TextDocuments, tokenizer: Tokenizer, processes: int, batches: list[Int64Array]
) -> Iterator[Int64Array]:
    if not processes:
        yield from map(documents.counts, batches)
        return
    opening = partial(_Counter, tokenizer.to_json())
    with Workers(opening, min(processes, len(batches))) as workers:
        for at in range(0, len(batches), len(workers)):
            futures = [
                workers.call(k, "counts", [*map(documents.text, some.tolist())])
                for k, some in enumerate(batches[at : at + len(workers)])
            ]
            for future in futures:
                yield future.result() + documents.separator.size


class _Counter:
    """Counts tokens in a process of its own."""

    def __init__(self, tokenizer: str) -> None:
        self._tokenizer = from_json(tokenizer)

    def counts(self, texts: list[str]) -> Int64Array:
        return count_tokens(self._tokenizer, texts)


def _check_content(
    column: pa.ChunkedArray,
    record: IndexRecord,
    tokenizer: Tokenizer,
    data: DataConfig,
    folder: Path,
) -> None:
    same = len(column) == record.rows
    if same and data.tokens_field is not None:
        check_ids(column, tokenizer.vocab_size, data.tokens_field, data.source)
    if not same or content_fingerprint(column) != record.content:
        raise ConfigError.one(
            f"the rows of {data.source} are not those that {folder} was made from",
            where="data.source",
            hint="put them back, or name another data.path",
            key="data.source",
        )
