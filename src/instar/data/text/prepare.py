"""Prepare a data set on disk: select documents, split them, tokenize, publish."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instar.config.errors import ConfigError
from instar.config.language import DataConfig
from instar.data.order import Int64Array
from instar.data.split import (
    Parts,
    chosen_bytes,
    divide,
    divide_held_out,
    divide_whole,
    first_bytes,
    whole,
)
from instar.data.text.corpus import Corpus, open_corpus
from instar.data.text.files import SourceFiles, named
from instar.data.text.hf import column_of, load_rows
from instar.data.text.origin import (
    NOTE,
    check_made_from,
    default_path,
    is_made,
    made_from,
    next_path,
    source_changes,
    source_files,
)
from instar.data.text.provenance import Files, check_unchanged, survey, write_survey
from instar.data.text.rows import (
    RowIndex,
    RowsRecord,
    check_ids,
    content_fingerprint,
    id_bytes,
    id_pieces,
    read_index,
    text_corpus,
    write_index,
)
from instar.data.text.shards import (
    DATASET_FILE,
    Shard,
    ShardWriter,
    TokenizerRecord,
    open_dataset,
    write_once,
    write_record,
)
from instar.data.text.tokenizer import (
    SEPARATOR,
    Tokenizer,
    in_pieces,
    load_tokenizer,
    named_tokenizer,
    separator_of,
    surroundings,
    tokenizer_files,
    train_bpe,
    train_char,
)
from instar.record.atomic import atomic_dir
from instar.record.progress import Advance, progress, tracked

_BPE_SAMPLE_BYTES = 8 << 20
_BATCH_CHARACTERS = min(16, max(4, os.cpu_count() or 1)) << 20
"""Characters encoded at once: `tokenizers` spreads pieces of 2^20 over all cores."""

Say = Callable[[str], None]


Pieces = Iterator[tuple[int, NDArray[Any]]]
"""The tokens of a split in order, each with the number of its document in the split; a separator
belongs to the document before it."""


def prepare(
    data: DataConfig, seed: int, path: str | Path | None = None, say: Say = lambda _: None
) -> Path:
    """Create the data set of a config at `path` (default: data.path, or `default_path`).

    Tokens and rows become token shards; for a stream or an iterable, only the held-out splits do.
    The selection of documents and the splits depend on the seed only. An existing data set is kept.

    Raises:
        ConfigError: bad input, the folder holds something else, or the sources have changed since it was
            prepared and `data.if_changed` refuses that.
    """
    folder, is_complete = settle(data, seed, say, path)
    if is_complete:
        return folder
    if (folder / DATASET_FILE).exists():
        _add_training_tokens(folder, data, say)
        return folder
    if data.kind == "chat":
        _prepare_chat(folder, data, seed, say)
        return folder
    tokenizer = named_tokenizer(data.tokenizer)
    sources = source_files(data)
    _say_left_out(sources, data, say)
    files = survey(sources)
    plan = _plan(data, seed, tokenizer, lambda amounts: say(f"preparing {amounts} → {folder}"))
    with atomic_dir(folder, key="data.path", first_wins=True) as aside:
        splits: dict[str, tuple[Shard, ...]] = {}
        for name, (documents, parts) in plan.splits.items():
            splits[name], sizes = _write_split(aside, name, documents, parts, plan.tokenizer, data)
            if name == "train" and documents.rows is not None:
                index = RowIndex(documents.rows, parts[:, 0].copy(), sizes)
                write_index(aside, index, plan.tokenizer.fingerprint)
        for name, content in tokenizer_files(plan.tokenizer).items():
            write_once(aside / name, content)
        write_record(
            aside,
            tokenizer=TokenizerRecord(plan.tokenizer.kind, plan.tokenizer.fingerprint),
            vocab_size=plan.tokenizer.vocab_size,
            splits=splits,
            source=made_from(data, seed, plan.wanted),
        )
        _write_survey(aside, sources, files)
    check_made_from(folder, data, seed)
    counts = (f"{name} {sum(s.count for s in shards):,}" for name, shards in splits.items())
    told = f"tokens: {', '.join(counts)}; vocabulary {plan.tokenizer.vocab_size:,}"
    say(
        told
        if data.tokens_field is not None
        else f"{told}; documents {surroundings(plan.tokenizer)}"
    )
    return folder


def _prepare_chat(folder: Path, data: DataConfig, seed: int, say: Say) -> None:
    from instar.data.text.chat import write_conversations

    sources = source_files(data)
    _say_left_out(sources, data, say)
    files = survey(sources)
    say(f"preparing {data.source} → {folder}")
    with atomic_dir(folder, key="data.path", first_wins=True) as aside:
        made = made_from(data, seed, np.empty(0, dtype=np.int64))
        counts = write_conversations(aside, data, seed, made, say)
        _write_survey(aside, sources, files)
    check_made_from(folder, data, seed)
    say(f"tokens: {', '.join(f'{name} {count:,}' for name, count in counts.items())}")


def settle(
    data: DataConfig, seed: int, say: Say, path: str | Path | None = None
) -> tuple[Path, bool]:
    """Return the folder of a config's data set, and whether the complete data set is there.

    Sources that have changed since are handled as `data.if_changed` says.

    Raises:
        ConfigError: see `prepare`.
    """
    folder = Path(path or data.path or default_path(data, seed))
    if not is_made(folder, data, seed):
        return folder, False
    found = source_changes(folder, data)
    for key in found.gone:
        say(f"{NOTE}data.{key} {getattr(data, key)} is not there; the tokens in {folder} are used")
    changed = [*found.changed]
    if data.kind == "rows" and "source" not in found.gone and (changed or not found.has_files):
        rows = _changed_rows(folder, data, say)
        others = [text for text in changed if "data.source" not in text]
        changed = changed if rows and changed else [*others, *rows]
    if not changed:
        return folder, True
    text = f"{'; '.join(changed)} since {folder} was prepared"
    if data.if_changed == "keep":
        say(f"{NOTE}{text}; it is used as it was prepared")
        return folder, True
    is_named = bool(path or data.path)
    if data.if_changed == "prepare" and not is_named:
        say(f"{text}; it is prepared anew in another folder")
        return Path(next_path(data, seed)), False
    anew = "name another data.path" if is_named else "set data.if_changed: prepare"
    raise ConfigError.one(
        text,
        where="data.source",
        hint=f"{anew} to prepare it anew, or set data.if_changed: keep to use it as it was prepared",
        key="data.source",
    )


def _say_left_out(sources: Mapping[str, SourceFiles], data: DataConfig, say: Say) -> None:
    for key, files in sources.items():
        if files.left_out:
            say(f"left out of {getattr(data, key)}: {named(files.left_out)}")


def _write_survey(
    aside: Path, sources: Mapping[str, SourceFiles], files: Mapping[str, Files]
) -> None:
    check_unchanged(sources, files)
    write_survey(aside, files)


@dataclass(frozen=True, eq=False)
class _Documents:
    """The documents of a source: text to encode, or a column of token ids."""

    corpus: Corpus | None = None
    ids: Any = None
    rows: RowsRecord | None = None

    @property
    def sizes(self) -> Int64Array:
        """Return the bytes of each document."""
        return id_bytes(self.ids) if self.corpus is None else self.corpus.sizes

    def tokens(self, parts: Parts, tokenizer: Tokenizer, advance: Advance) -> Pieces:
        """Yield the tokens of the parts; `advance` counts the bytes of their documents."""
        if self.corpus is not None:
            yield from _encoded(tokenizer, self.corpus, parts, advance)
            return
        for number, ids in id_pieces(self.ids, parts):
            yield number, ids
            advance(ids.nbytes)


def _open_rows(data: DataConfig, tokenizer: Tokenizer | None) -> _Documents:
    """Open the rows of a Hugging Face data set. Raises ConfigError for ids that are not tokens."""
    rows = load_rows(data)
    column = column_of(rows, data.tokens_field or data.text_field)
    if data.tokens_field is not None:
        if tokenizer is None:
            raise ConfigError.one(
                f"a {data.tokenizer} tokenizer cannot be trained on token ids",
                where="data.tokenizer",
                hint="name the tokenizer.json that made them",
                key="data.tokenizer",
            )
        check_ids(column, tokenizer.vocab_size, data.tokens_field, data.source)
    record = RowsRecord(len(rows), rows._fingerprint, content_fingerprint(column))
    if data.tokens_field is not None:
        return _Documents(ids=column, rows=record)
    return _Documents(text_corpus(column), rows=record)


def _open_held_out(data: DataConfig, source: str, tokenizer: Tokenizer | None) -> _Documents:
    """Open the documents of `val_source`."""
    if data.tokens_field is None:
        return _Documents(open_corpus(source, data.text_field))
    others = {"source": source, "subset": None, "source_split": "train"}
    return _open_rows(data.model_copy(update=others), tokenizer)


@dataclass(frozen=True, eq=False)
class _Plan:
    """The content of a data set; `wanted` is the bytes taken of each document of the source."""

    tokenizer: Tokenizer
    splits: dict[str, tuple[_Documents, Parts]]
    wanted: Int64Array


def _plan(data: DataConfig, seed: int, tokenizer: Tokenizer | None, begins: Say) -> _Plan:
    wanted = np.empty(0, dtype=np.int64)
    splits: dict[str, tuple[_Documents, Parts]] = {}
    if not data.read_from_start:
        if data.kind == "rows":
            documents = _open_rows(data, tokenizer)
        else:
            documents = _Documents(open_corpus(data.source, data.text_field))
        wanted, divided = _divided(documents.sizes, data, seed)
        splits = {name: (documents, parts) for name, parts in divided.items()}
    begins(_amounts(data, wanted))
    if data.val_source is not None:
        documents = _open_held_out(data, data.val_source, tokenizer)
        divided = divide_held_out(documents.sizes, data, seed)
        splits |= {name: (documents, parts) for name, parts in divided.items()}
    if tokenizer is None:
        documents, parts = splits["train"]
        assert documents.corpus is not None
        tokenizer = _train_tokenizer(documents.corpus, parts, data, seed)
    return _Plan(tokenizer, splits, wanted)


def _divided(sizes: Int64Array, data: DataConfig, seed: int) -> tuple[Int64Array, dict[str, Parts]]:
    """Return the bytes taken of each document, and the parts of each split; rows are whole."""
    wanted = chosen_bytes(sizes, data, seed)
    if data.kind == "rows":
        wanted = np.where(wanted > 0, sizes, 0)
        if not wanted.any():
            raise ConfigError.one(
                f"the rows of {data.source} are all empty", where="data.source", key="data.source"
            )
    if data.val_source is not None:
        return wanted, {"train": whole(np.flatnonzero(wanted), wanted)}
    fractions = data.val_fraction, data.test_fraction
    if data.kind != "rows":
        return wanted, divide(wanted, *fractions, seed)
    parts = divide_whole(wanted, *fractions, seed)
    if parts is None:
        raise ConfigError.one(
            f"{_amounts(data, wanted)}: too few or too unequal to hold out whole ones",
            where="data.val_source",
            hint="give text to hold out in data.val_source, or other fractions",
            key="data.val_source",
        )
    return wanted, parts


def _amounts(data: DataConfig, wanted: Int64Array) -> str:
    if data.read_from_start:
        return f"the held-out text of {data.source}, {data.val_source}"
    documents = int(np.count_nonzero(wanted))
    plural = "" if documents == 1 else "s"
    return f"{data.source}: {documents:,} document{plural}, {int(wanted.sum()):,} bytes"


def _train_tokenizer(corpus: Corpus, train: Parts, data: DataConfig, seed: int) -> Tokenizer:
    """Train a tokenizer: characters of the training split, or BPE on a bounded sample."""
    if data.tokenizer == "char":
        pieces = tracked(_pieces(corpus, train), "collecting characters", "pieces")
        return train_char(piece or SEPARATOR for _, piece in pieces)
    sample = train.copy()
    sizes = train[:, 2] - train[:, 1]
    sample[:, 2] = train[:, 1] + first_bytes(sizes, _BPE_SAMPLE_BYTES, seed, "sample")
    sample = sample[sample[:, 2] > sample[:, 1]]
    with progress(f"training a tokenizer of {data.vocab_size:,} tokens") as advance:

        def texts() -> Iterator[str]:
            for _, piece in _pieces(corpus, sample):
                if piece is not None:
                    yield piece
                    advance(len(piece))

        return train_bpe(texts(), data.vocab_size)


def _pieces(corpus: Corpus, parts: Parts) -> Iterator[tuple[int, str | None]]:
    """Yield the text of the parts in pieces, each with the part's number; None separates parts."""
    for number, texts in enumerate(corpus.texts(parts)):
        if number:
            yield number - 1, None
        for piece in in_pieces(texts):
            yield number, piece


def _encoded(tokenizer: Tokenizer, corpus: Corpus, parts: Parts, advance: Advance) -> Pieces:
    """Yield the tokens of the parts' text, each with what the tokenizer adds to a text, and a separator between
    documents."""
    begin, end, separator = tokenizer.before, tokenizer.after, separator_of(tokenizer)
    batch: list[tuple[int, str | NDArray[Any]]] = []

    def tokens() -> Pieces:
        texts = [text for _, text in batch if isinstance(text, str)]
        encoded = iter(tokenizer.encode_batch(texts))
        for number, piece in batch:
            if isinstance(piece, str):
                yield number, next(encoded)
                advance(len(piece.encode()))
            else:
                yield number, piece

    characters = 0
    batch.append((0, begin))
    for number, piece in _pieces(corpus, parts):
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


def _write_split(
    folder: Path,
    name: str,
    documents: _Documents,
    parts: Parts,
    tokenizer: Tokenizer,
    data: DataConfig,
    files: str = "",
) -> tuple[tuple[Shard, ...], Int64Array]:
    """Write a split's token shards; return them and the tokens per document, separators included.

    Raises ConfigError if the split has fewer than two tokens.
    """
    writer = ShardWriter(
        folder, files or name, tokenizer=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size
    )
    sizes = np.zeros(len(parts), dtype=np.int64)
    total = int((parts[:, 2] - parts[:, 1]).sum())
    with progress(f"tokenising {name}", total) as advance:
        for document, some in documents.tokens(parts, tokenizer, advance):
            writer.append(some)
            sizes[document] += some.size
    count = int(sizes.sum())
    if count < 2:
        key, source = "data.source", data.source
        if name != "train" and data.val_source is not None:
            key, source = "data.val_source", data.val_source
        raise ConfigError.one(
            f"{source} is too short: its {name} split would have {count} tokens, "
            "and it takes two to predict one",
            where=key,
            hint="give more text, or other data.val_fraction and data.test_fraction",
            key=key,
        )
    if documents.corpus is not None:
        sizes[-1] += separator_of(tokenizer).size  # the last document's is not written
    return writer.close(), sizes


def _changed_rows(folder: Path, data: DataConfig, say: Say) -> list[str]:
    """Return a text if the source has other rows than those that were tokenized.

    Rows that cannot be loaded any more are not compared. If their `datasets` fingerprint differs,
    for example because files were copied, their content is read once and compared.
    """
    index = read_index(folder, open_dataset(folder).tokenizer_fingerprint)
    try:
        rows = load_rows(data)
    except ConfigError as error:
        say(f"{NOTE}{error.problems[0].message}; the tokens in {folder} are used")
        return []
    if (index.record.rows, index.record.loaded) == (len(rows), rows._fingerprint):
        return []
    found = _open_rows(data, load_tokenizer(folder)).rows
    if found is not None and (found.rows, found.content) == (
        index.record.rows,
        index.record.content,
    ):
        return []
    return [f"the rows of data.source {data.source} have changed"]


def _check_content(
    documents: _Documents, record: RowsRecord, data: DataConfig, folder: Path
) -> None:
    found = documents.rows
    if found is None or (found.rows, found.content) != (record.rows, record.content):
        raise ConfigError.one(
            f"the rows of {data.source} are not those that {folder} was made from",
            where="data.source",
            hint="put them back, or name another data.path",
            key="data.source",
        )


def _add_training_tokens(folder: Path, data: DataConfig, say: Say) -> None:
    """Tokenize the training split of rows in a folder of an earlier version, which has only their
    index and the held-out splits.

    Concurrent processes write separate files; the last record is valid.
    """
    dataset = open_dataset(folder)
    tokenizer = load_tokenizer(folder, fingerprint=dataset.tokenizer_fingerprint)
    index = read_index(folder, tokenizer.fingerprint)
    documents = _open_rows(data, tokenizer)
    _check_content(documents, index.record, data, folder)
    say(f"tokenising the training split of {data.source} → {folder}")
    parts, files = whole(index.chosen, documents.sizes), f"train-{secrets.token_hex(4)}"
    shards, sizes = _write_split(folder, "train", documents, parts, tokenizer, data, files)
    if not np.array_equal(sizes, index.counts):
        raise ConfigError.one(
            "the tokens of the rows are not as many as were counted",
            where=str(folder),
            hint="prepare the data again, in another folder",
        )
    write_record(
        folder,
        tokenizer=TokenizerRecord(tokenizer.kind, tokenizer.fingerprint),
        vocab_size=tokenizer.vocab_size,
        splits={"train": shards} | dict(dataset.shards),
        source=dict(dataset.source),
    )
