"""From text to a data set on disk: choose documents, split them, tokenise, publish."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from instar.config.errors import ConfigError
from instar.config.language import DataConfig
from instar.data.corpus import STDLIB, Corpus, open_corpus
from instar.data.order import Int64Array
from instar.data.shards import Shard, ShardWriter, write_synced
from instar.data.split import (
    Parts,
    chosen_bytes,
    divide,
    divide_held_out,
    first_bytes,
    whole,
)
from instar.data.tokenizer import (
    SEPARATOR,
    TOKENIZER_FILE,
    TRAINED,
    TokenIds,
    Tokenizer,
    in_pieces,
    named_file,
    named_tokenizer,
    separator_of,
    train_bpe,
    train_char,
)
from instar.data.tokens import (
    DATASET_FILE,
    TokenDataset,
    TokenizerRecord,
    open_dataset,
    publishing,
    write_record,
)

_BPE_SAMPLE_BYTES = 8 << 20
_BATCH_BYTES = 4 << 20


def ensure_dataset(
    data: DataConfig, seed: int, say: Callable[[str], None] = lambda _: None
) -> TokenDataset:
    """Open the data set of a config; make it first if it is not there.

    Raises ConfigError where it cannot be made, or is there and was made otherwise.
    """
    return open_dataset(prepare(data, seed, say=say))


def prepare(
    data: DataConfig,
    seed: int,
    path: str | Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Path:
    """Make the data set of a config at `path` (default: data.path, or `default_path`).

    Which documents are taken and which are held out comes from the seed alone. A data set that
    is already there is left as it is. Raises ConfigError for bad input, and where the folder
    holds something else.
    """
    folder = Path(path or data.path or default_path(data, seed))
    if is_made(folder, data, seed, say):
        return folder
    named_file(data.tokenizer)
    corpus = open_corpus(data.source, data.text_field)
    wanted = chosen_bytes(corpus.sizes, data, seed)
    say(f"preparing {data.source}: {amounts(wanted)} → {folder}")
    if data.val_source is None:
        parts = divide(wanted, data.val_fraction, data.test_fraction, seed)
        texts = {name: (corpus, rows) for name, rows in parts.items()}
    else:
        texts = {"train": (corpus, whole(np.flatnonzero(wanted), wanted))}
        texts |= held_out_texts(data.val_source, data, seed)

    tokenizer = make_tokenizer(*texts["train"], data, seed)
    with publishing(folder) as aside:
        splits = {
            name: write_split(aside, name, encoded(tokenizer, *text), tokenizer, data)
            for name, text in texts.items()
        }
        write_made(aside, tokenizer, splits, made_from(data, seed, wanted))
    check_made_from(folder, data, seed, say)
    counts = (f"{name} {sum(s.count for s in shards):,}" for name, shards in splits.items())
    say(f"tokens: {', '.join(counts)}; vocabulary {tokenizer.vocab_size:,}")
    return folder


def is_made(folder: Path, data: DataConfig, seed: int, say: Callable[[str], None]) -> bool:
    """Whether the folder holds the data set that is asked for; if not, it may be made there.

    Raises ConfigError where the folder holds another data set, or something else.
    """
    if (folder / DATASET_FILE).exists():
        check_made_from(folder, data, seed, say)
        return True
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError.one(
            f"{folder} is there already and is not a data set",
            where="data.path",
            hint="give another folder",
            key="data.path",
        )
    return False


def made_from(data: DataConfig, seed: int, wanted: Int64Array) -> dict[str, Any]:
    """What a data set's record says of its source; `wanted` is the bytes taken, [documents]."""
    source = parameters(data, seed)
    source |= {"documents": int(np.count_nonzero(wanted)), "bytes": int(wanted.sum())}
    if data.source == STDLIB:
        source["python"] = platform.python_version()
    elif Path(data.source).is_file():
        source["file_bytes"] = Path(data.source).stat().st_size
    return source


def write_made(
    aside: Path,
    tokenizer: Tokenizer,
    splits: dict[str, tuple[Shard, ...]],
    source: dict[str, Any],
) -> None:
    """The tokenizer and, last, the record of a data set."""
    write_synced(aside / TOKENIZER_FILE, tokenizer.to_json().encode())
    write_record(
        aside,
        tokenizer=TokenizerRecord(tokenizer.kind, tokenizer.fingerprint),
        vocab_size=tokenizer.vocab_size,
        splits=splits,
        source=source,
    )


def amounts(wanted: Int64Array) -> str:
    """How many documents, and their bytes, in words."""
    documents = int(np.count_nonzero(wanted))
    return f"{documents:,} document{'' if documents == 1 else 's'}, {int(wanted.sum()):,} bytes"


def default_path(data: DataConfig, seed: int) -> str:
    """Where the data set of a config without data.path is: one folder for each way to make it."""
    stem = Path(data.source).stem or Path(data.source).resolve().name
    names = [_plain(stem) or "text", _tokenizer_name(data.tokenizer)]
    names += [str(data.vocab_size)] * (data.tokenizer == "bpe")
    names += [str(data.max_bytes)] * (data.max_bytes is not None)
    identity = msgspec.json.encode(parameters(data, seed), order="sorted")
    return f"data/{'-'.join(names)}-{xxhash.xxh3_128_hexdigest(identity)[:8]}"


def parameters(data: DataConfig, seed: int) -> dict[str, Any]:
    """What decides a data set's content: the fields of DataConfig that count, and the seed."""
    fields = {"source", "tokenizer", "max_bytes", "val_fraction", "test_fraction"}
    fields |= {"vocab_size"} if data.tokenizer == "bpe" else set()
    fields |= {"val_source"} if data.val_source is not None else set()
    if data.kind != "tokens":
        fields |= {"kind", "subset", "source_split"}
        fields |= {"text_field" if data.tokens_field is None else "tokens_field"}
    elif {data.source, data.val_source} - {None, STDLIB}:
        fields |= {"text_field"}
    return {"seed": seed} | {field: getattr(data, field) for field in sorted(fields)}


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")


def _tokenizer_name(name: str) -> str:
    """A tokenizer in the name of a folder: its file's, or that of the folder it lies in."""
    if name in TRAINED:
        return name
    path = Path(name).resolve()
    return _plain(path.parent.name if path.name == TOKENIZER_FILE else path.stem) or "file"


def held_out_texts(source: str, data: DataConfig, seed: int) -> dict[str, tuple[Corpus, Parts]]:
    """The text of `val_source` for each held-out split."""
    corpus = open_corpus(source, data.text_field)
    parts = divide_held_out(corpus.sizes, data, seed)
    return {name: (corpus, rows) for name, rows in parts.items()}


def make_tokenizer(corpus: Corpus, train: Parts, data: DataConfig, seed: int) -> Tokenizer:
    """The one that is named, or trained on the training split alone; BPE on a bounded sample."""
    named = named_tokenizer(data.tokenizer)
    if named is not None:
        return named
    if data.tokenizer == "char":
        return train_char(SEPARATOR if piece is None else piece for piece in _pieces(corpus, train))
    sample = train.copy()
    sizes = train[:, 2] - train[:, 1]
    sample[:, 2] = train[:, 1] + first_bytes(sizes, _BPE_SAMPLE_BYTES, seed, "sample")
    sample = sample[sample[:, 2] > sample[:, 1]]
    texts = (piece for piece in _pieces(corpus, sample) if piece is not None)
    return train_bpe(texts, data.vocab_size)


def _pieces(corpus: Corpus, parts: Parts) -> Iterator[str | None]:
    """The parts' text; None stands between documents."""
    for number, texts in enumerate(corpus.texts(parts)):
        if number:
            yield None
        yield from in_pieces(texts)


def encoded(tokenizer: Tokenizer, corpus: Corpus, parts: Parts) -> Iterator[TokenIds]:
    """The tokens of the parts' text, with a separator between documents, bit by bit."""
    separator = separator_of(tokenizer)
    batch: list[str | None] = []

    def tokens() -> Iterator[TokenIds]:
        encoded = iter(tokenizer.encode_batch([text for text in batch if text is not None]))
        for piece in batch:
            yield separator if piece is None else next(encoded)

    batched = 0
    for piece in _pieces(corpus, parts):
        batch.append(piece)
        batched += len(piece or "")
        if batched >= _BATCH_BYTES:
            yield from tokens()
            batch, batched = [], 0
    yield from tokens()


def write_split(
    folder: Path, name: str, tokens: Iterable[NDArray[Any]], tokenizer: Tokenizer, data: DataConfig
) -> tuple[Shard, ...]:
    """Write a split's token shards. Raises ConfigError where it has fewer than two tokens."""
    writer = ShardWriter(
        folder, name, tokenizer=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size
    )
    for some in tokens:
        writer.append(some)
    shards = writer.close()
    count = sum(shard.count for shard in shards)
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
    return shards


def check_made_from(folder: Path, data: DataConfig, seed: int, say: Callable[[str], None]) -> None:
    """Raises ConfigError where the data set was made from something else than asked for.

    The seed is not compared: whoever names a folder wants its splits, whatever the run's seed.
    """
    dataset = open_dataset(folder)
    made = {"kind": "tokens", "val_source": None} | dict(dataset.source)
    asked = {"kind": data.kind, "val_source": data.val_source} | parameters(data, seed)
    differing = [key for key in asked if key != "seed" and made.get(key) != asked[key]]
    if differing:
        found = ", ".join(f"{key}={made.get(key)!r}, not {asked[key]!r}" for key in differing)
        raise ConfigError.one(
            f"the data set {folder} was made otherwise: {found}",
            where="data.path",
            hint="set these keys under data as it was made, or name another data.path",
            key="data.path",
        )
    if data.tokenizer not in TRAINED and Path(data.tokenizer).exists():
        tokenizer = named_tokenizer(data.tokenizer)
        if tokenizer is not None and tokenizer.fingerprint != dataset.tokenizer_fingerprint:
            raise ConfigError.one(
                f"{data.tokenizer} is not the tokenizer that made the data set {folder}",
                where="data.tokenizer",
                hint="put back what it was, or name another data.path",
                key="data.tokenizer",
            )
    source = Path(data.source)
    if "file_bytes" in made and source.is_file() and source.stat().st_size != made["file_bytes"]:
        say(f"note: {source} has changed since {folder} was made from it; the latter is used")
