"""Prepare a data set on disk: select documents, split them, tokenize, publish."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

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
    is_cut,
    whole_documents,
)
from instar.data.text.chat import write_conversations
from instar.data.text.corpus import Corpus
from instar.data.text.documents import (
    Documents,
    RowIndex,
    open_held_out,
    open_rows_of,
    open_text,
    pieces_of,
    read_row_index,
    same_documents,
    write_row_index,
)
from instar.data.text.files import SourceFiles, names_text
from instar.data.text.hf import load_rows, unread_files, unread_splits
from instar.data.text.origin import (
    NOTE,
    check_made_from,
    default_path,
    is_made,
    made_from,
    next_path,
    preparation_files,
    source_changes,
)
from instar.data.text.shards import (
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
    load_saved_tokenizer,
    named_tokenizer,
    separator_of,
    surroundings,
    tokenizer_files,
    train_bpe,
    train_char,
)
from instar.data.text.verify import Files, check_unchanged, survey, write_survey
from instar.record.atomic import atomic_dir
from instar.record.progress import progress, track_items

_BPE_SAMPLE_BYTES = 8 << 20
Say = Callable[[str], None]


def prepare_dataset(
    data: DataConfig,
    seed: int,
    path: str | Path | None = None,
    say: Say = lambda _: None,
    *,
    held_out: bool = False,
) -> Path:
    """Create the data set of a config at `path` (default: data.path, or `default_path`).

    Tokens and rows become token shards; for a stream or an iterable, only the held-out splits do.
    The selection of documents and the splits depend on the seed only. An existing data set is kept.

    Args:
        held_out: all of the source is held out, as its only split, val.

    Raises:
        ConfigError: bad input, the folder holds something else, or the sources have changed since it was
            prepared and `data.if_changed` refuses that.
    """
    folder, is_complete = settle_folder(data, seed, say, path, held_out=held_out)
    if is_complete:
        return folder
    if data.kind == "chat":
        _prepare_chat(folder, data, seed, say)
        return folder
    tokenizer = named_tokenizer(data.tokenizer, data.bos, data.eos)
    sources, files = _survey(data, say)

    def begins(amounts: str) -> None:
        say(f"preparing {amounts} → {folder}")

    plan = (_plan_held_out if held_out else _plan)(data, seed, tokenizer, begins, say)
    with atomic_dir(folder, key="data.path", first_wins=True) as temporary:
        splits: dict[str, tuple[Shard, ...]] = {}
        for name, (documents, parts) in plan.splits.items():
            splits[name], sizes = _write_split(
                temporary, name, documents, parts, plan.tokenizer, data
            )
            if name == "train" and documents.rows is not None:
                index = RowIndex(documents.rows, parts[:, 0].copy(), sizes)
                write_row_index(temporary, index, plan.tokenizer.fingerprint)
        for name, content in tokenizer_files(plan.tokenizer).items():
            write_once(temporary / name, content)
        write_record(
            temporary,
            tokenizer=TokenizerRecord(plan.tokenizer.kind, plan.tokenizer.fingerprint),
            vocab_size=plan.tokenizer.vocab_size,
            splits=splits,
            source=made_from(data, seed, plan.byte_counts),
        )
        _write_survey(temporary, sources, files)
    check_made_from(folder, data, seed)
    counts = (f"{name} {sum(s.count for s in shards):,}" for name, shards in splits.items())
    summary = f"tokens: {', '.join(counts)}; vocabulary {plan.tokenizer.vocab_size:,}"
    has_ids = all(documents.corpus is None for documents, _ in plan.splits.values())
    text = "" if has_ids else f"; documents {surroundings(plan.tokenizer)}"
    say(f"{summary}{text}")
    return folder


def _prepare_chat(folder: Path, data: DataConfig, seed: int, say: Say) -> None:
    sources, files = _survey(data, say)
    say(f"preparing {data.source} → {folder}")
    with atomic_dir(folder, key="data.path", first_wins=True) as temporary:
        source = made_from(data, seed, np.empty(0, dtype=np.int64))
        counts = write_conversations(temporary, data, seed, source, say)
        _write_survey(temporary, sources, files)
    check_made_from(folder, data, seed)
    say(f"tokens: {', '.join(f'{name} {count:,}' for name, count in counts.items())}")


def settle_folder(
    data: DataConfig,
    seed: int,
    say: Say,
    path: str | Path | None = None,
    *,
    held_out: bool = False,
) -> tuple[Path, bool]:
    """Return the folder of a config's data set, and whether the complete data set is there.

    Sources that have changed since are handled as `data.if_changed` says.

    Raises:
        ConfigError: see `prepare_dataset`.
    """
    folder = Path(path or data.path or default_path(data, seed, held_out=held_out))
    if not is_made(folder, data, seed):
        return folder, False
    difference = source_changes(folder, data)
    for key in difference.absent:
        say(f"{NOTE}data.{key} {getattr(data, key)} is not there; the tokens in {folder} are used")
    sentences = [*difference.sentences]
    is_there = "source" not in difference.absent
    if data.kind == "rows" and is_there and (sentences or not difference.has_files):
        rows = _changed_rows(folder, data, say)
        other_sentences = [text for text in sentences if "data.source" not in text]
        sentences = sentences if rows and sentences else [*other_sentences, *rows]
    if not sentences:
        return folder, True
    text = f"{'; '.join(sentences)} since {folder} was prepared"
    if data.if_changed == "keep":
        say(f"{NOTE}{text}; it is used as it was prepared")
        return folder, True
    is_named = bool(path or data.path)
    if data.if_changed == "prepare" and not is_named:
        say(f"{text}; it is prepared anew in another folder")
        return Path(next_path(data, seed, held_out=held_out)), False
    remedy = "name another data.path" if is_named else "set data.if_changed: prepare"
    keeping = "set data.if_changed: keep to use it as it was prepared"
    raise ConfigError.at("data.source", text, f"{remedy} to prepare it anew, or {keeping}")


def _survey(data: DataConfig, say: Say) -> tuple[Mapping[str, SourceFiles], Mapping[str, Files]]:
    """Return the files of each source, and what they hold; say which are left out."""
    sources = preparation_files(data)
    left_out = {key: files.left_out for key, files in sources.items()}
    if data.kind in ("rows", "stream"):
        left_out["source"] = unread_files(data)
        held_out = [
            file for key, files in sources.items() if key != "source" for file in files.files
        ]
        if splits := unread_splits(data, held_out):
            unread = ", ".join(splits)
            say(f"splits of {data.source} that are not trained on (data.source_split): {unread}")
    for key, names in left_out.items():
        if names:
            say(f"left out of {getattr(data, key)}: {names_text(names)}")
    return sources, survey(sources)


def _write_survey(
    folder: Path, sources: Mapping[str, SourceFiles], files: Mapping[str, Files]
) -> None:
    check_unchanged(sources, files)
    write_survey(folder, files)


@dataclass(frozen=True, eq=False)
class _Plan:
    """The content of a data set; `byte_counts` are the bytes taken of each document of the source."""

    tokenizer: Tokenizer
    splits: dict[str, tuple[Documents, Parts]]
    byte_counts: Int64Array


def _plan_held_out(
    data: DataConfig,
    seed: int,  # noqa: ARG001
    tokenizer: Tokenizer | None,
    begins: Say,
    say: Say,  # noqa: ARG001
) -> _Plan:
    """Return the plan of a data set of which all is held out."""
    assert tokenizer is not None  # that of the run
    documents = open_text(data, data.source, tokenizer)
    sizes = documents.sizes
    begins(_amounts(data, sizes))
    parts = whole_documents(np.flatnonzero(sizes), sizes)
    return _Plan(tokenizer, {"val": (documents, parts)}, sizes)


def _plan(data: DataConfig, seed: int, tokenizer: Tokenizer | None, begins: Say, say: Say) -> _Plan:
    byte_counts, empty = np.empty(0, dtype=np.int64), 0
    splits: dict[str, tuple[Documents, Parts]] = {}
    held_out = None if data.val_source is None else open_held_out(data, data.val_source, tokenizer)
    if not data.read_from_start:
        if data.kind == "rows":
            documents = open_rows_of(data, tokenizer)
        else:
            documents = open_text(data, data.source, tokenizer)
        empty = int(np.count_nonzero(documents.sizes == 0))
        byte_counts = _bytes_to_take(documents, held_out, data, seed, say)
        parts_of = _divide_documents(byte_counts, data, seed, say)
        splits = {name: (documents, parts) for name, parts in parts_of.items()}
    begins(_amounts(data, byte_counts) + (f", without {empty:,} empty ones" if empty else ""))
    if held_out is not None:
        parts_of = divide_held_out(held_out.sizes, data, seed)
        splits |= {name: (held_out, parts) for name, parts in parts_of.items()}
    if "train" in splits:
        _say_leaks(splits, say)
    if tokenizer is None:
        documents, parts = splits["train"]
        assert documents.corpus is not None
        tokenizer = _train_tokenizer(documents.corpus, parts, data, seed)
    return _Plan(tokenizer, splits, byte_counts)


def _bytes_to_take(
    documents: Documents, held_out: Documents | None, data: DataConfig, seed: int, say: Say
) -> Int64Array:
    """Return the bytes to take of each document of the source."""
    byte_counts = chosen_bytes(documents.sizes, data, seed)
    if data.kind == "rows":
        byte_counts = np.where(byte_counts > 0, documents.sizes, 0)
    if not byte_counts.any():
        raise ConfigError.at("data.source", f"the rows of {data.source} are all empty")
    if not data.drop_duplicates:
        return byte_counts
    documents_in_use = np.flatnonzero(byte_counts)
    first = same_documents(documents, documents, documents_in_use, documents_in_use)
    is_duplicate = (first >= 0) & (first != documents_in_use)
    if held_out is not None:
        every = np.arange(held_out.sizes.size)
        is_duplicate |= same_documents(documents, held_out, documents_in_use, every) >= 0
    if count := int(np.count_nonzero(is_duplicate)):
        of = "" if held_out is None else " or held out"
        say(
            f"left out {count:,} of {documents_in_use.size:,} documents, which are there before{of}"
        )
    unique_counts = byte_counts.copy()
    unique_counts[documents_in_use[is_duplicate]] = 0
    if not unique_counts.any():
        message = f"every document of {data.source} is held out by data.val_source too"
        raise ConfigError.at("data.drop_duplicates", message)
    return unique_counts


def _divide_documents(
    byte_counts: Int64Array, data: DataConfig, seed: int, say: Say
) -> dict[str, Parts]:
    """Return the parts of each split; rows are whole."""
    if data.val_source is not None:
        return {"train": whole_documents(np.flatnonzero(byte_counts), byte_counts)}
    fractions = data.val_fraction, data.test_fraction
    if data.kind != "rows":
        parts = divide(byte_counts, *fractions, seed)
        if is_cut(parts, byte_counts):
            number = int(np.count_nonzero(byte_counts))
            what = "one document is" if number == 1 else f"{number:,} documents are"
            ends = "its end is" if number == 1 else "their ends are"
            say(
                f"{what} too few or too unequal to hold out whole ones: {ends} held out, "
                f"{sum(fractions):.3g} of the text"
            )
        return parts
    whole_parts = divide_whole(byte_counts, *fractions, seed)
    if whole_parts is None:
        raise ConfigError.at(
            "data.val_source",
            f"{_amounts(data, byte_counts)}: too few or too unequal to hold out whole ones",
            "give text to hold out in data.val_source, or other fractions",
        )
    return whole_parts


def _say_leaks(splits: Mapping[str, tuple[Documents, Parts]], say: Say) -> None:
    """Say how many held-out documents are trained on too."""
    documents, parts = splits["train"]
    for name, (held_out, held_parts) in splits.items():
        if name == "train":
            continue
        numbers, train_numbers = held_parts[:, 0], parts[:, 0]
        if held_out is documents and np.intersect1d(numbers, train_numbers).size:
            return  # parts of the same documents
        copies = same_documents(held_out, documents, numbers, train_numbers)
        count = int(np.count_nonzero(copies >= 0))
        if count:
            say(
                f"warning: {count:,} of {numbers.size:,} documents of {name} are trained on too, word for "
                "word; data.drop_duplicates: true takes each text once"
            )


def _amounts(data: DataConfig, byte_counts: Int64Array) -> str:
    if data.read_from_start:
        return f"the held-out text of {data.source}, {data.val_source}"
    documents = int(np.count_nonzero(byte_counts))
    plural = "" if documents == 1 else "s"
    return f"{data.source}: {documents:,} document{plural}, {int(byte_counts.sum()):,} bytes"


def _train_tokenizer(corpus: Corpus, train: Parts, data: DataConfig, seed: int) -> Tokenizer:
    """Train a tokenizer: characters of the training split, or BPE on a bounded sample."""
    if data.tokenizer == "char":
        pieces = track_items(pieces_of(corpus, train), "collecting characters", "pieces")
        return train_char(piece or SEPARATOR for _, piece in pieces)
    sample = train.copy()
    sizes = train[:, 2] - train[:, 1]
    sample[:, 2] = train[:, 1] + first_bytes(sizes, _BPE_SAMPLE_BYTES, seed, "sample")
    sample = sample[sample[:, 2] > sample[:, 1]]
    with progress(f"training a tokenizer of {data.vocab_size:,} tokens") as advance:

        def texts() -> Iterator[str]:
            for _, piece in pieces_of(corpus, sample):
                if piece is not None:
                    yield piece
                    advance(len(piece))

        return train_bpe(texts(), data.vocab_size)


def _write_split(
    folder: Path,
    name: str,
    documents: Documents,
    parts: Parts,
    tokenizer: Tokenizer,
    data: DataConfig,
) -> tuple[tuple[Shard, ...], Int64Array]:
    """Write a split's token shards; return them and the tokens per document, separators included.

    Raises ConfigError if the split has fewer than two tokens.
    """
    writer = ShardWriter(folder, name, tokenizer.fingerprint, tokenizer.vocab_size)
    sizes = np.zeros(len(parts), dtype=np.int64)
    total = int((parts[:, 2] - parts[:, 1]).sum())
    with progress(f"tokenising {name}", total) as advance:
        for document, tokens in documents.tokens(parts, tokenizer, advance):
            writer.append(tokens)
            sizes[document] += tokens.size
    count = int(sizes.sum())
    if count < 2:
        key, source = "data.source", data.source
        if name != "train" and data.val_source is not None:
            key, source = "data.val_source", data.val_source
        raise ConfigError.at(
            key,
            f"{source} is too short: its {name} split would have {count} tokens, and it takes two to predict one",
            "give more text, or other data.val_fraction and data.test_fraction",
        )
    if documents.corpus is not None:
        sizes[-1] += separator_of(tokenizer).size  # the last document's is not written
    return writer.close(), sizes


def _changed_rows(folder: Path, data: DataConfig, say: Say) -> list[str]:
    """Return a text if the source has other rows than those that were tokenized.

    Rows that cannot be loaded any more are not compared. If their `datasets` fingerprint differs,
    for example because files were copied, their content is read once and compared.
    """
    index = read_row_index(folder, open_dataset(folder).tokenizer_fingerprint)
    try:
        rows = load_rows(data)
    except ConfigError as error:
        say(f"{NOTE}{error.problems[0].message}; the tokens in {folder} are used")
        return []
    if (index.record.rows, index.record.loaded) == (len(rows), rows._fingerprint):
        return []
    current = open_rows_of(data, load_saved_tokenizer(folder)).rows
    recorded = index.record.rows, index.record.content
    if current is not None and (current.rows, current.content) == recorded:
        return []
    return [f"the rows of data.source {data.source} have changed"]
