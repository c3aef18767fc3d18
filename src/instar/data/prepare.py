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
from instar.config.schema import DataConfig
from instar.data.corpus import STDLIB, Corpus, open_corpus
from instar.data.order import Int64Array, Shuffled
from instar.data.shards import Shard, ShardWriter, write_synced
from instar.data.tokenizer import (
    TOKENIZER_FILE,
    ByteTokenizer,
    TokenIds,
    Tokenizer,
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

Parts = NDArray[np.int64]
"""Rows (document, first byte, end byte), [n, 3], ascending by document."""

_SEPARATOR = "\n"
_BPE_SAMPLE_BYTES = 8 << 20
_BATCH_BYTES = 4 << 20
_TO_SELECT, _TO_SPLIT, _TO_SAMPLE = range(3)


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
    if (folder / DATASET_FILE).exists():
        _check_made_from(folder, data, seed, say)
        return folder
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError.one(
            f"{folder} is there already and is not a data set",
            where="data.path",
            hint="give another folder",
            key="data.path",
        )
    corpus = open_corpus(data.source, data.text_field)
    wanted = corpus.sizes
    if data.max_bytes is not None:
        wanted = _first_bytes(corpus.sizes, data.max_bytes, seed, _TO_SELECT)
    parts = divide(wanted, data.val_fraction, data.test_fraction, seed)
    documents, size_bytes = int(np.count_nonzero(wanted)), int(wanted.sum())
    what = f"{documents:,} document{'' if documents == 1 else 's'}, {size_bytes:,} bytes"
    say(f"preparing {data.source}: {what} → {folder}")
    source = parameters(data, seed) | {"documents": documents, "bytes": size_bytes}
    if data.source == STDLIB:
        source["python"] = platform.python_version()
    elif Path(data.source).is_file():
        source["file_bytes"] = Path(data.source).stat().st_size

    tokenizer = _make_tokenizer(corpus, parts["train"], data, seed)
    with publishing(folder) as aside:
        splits = {
            name: _write_split(aside, name, corpus, rows, tokenizer, data)
            for name, rows in parts.items()
        }
        write_synced(aside / TOKENIZER_FILE, tokenizer.to_json().encode())
        write_record(
            aside,
            tokenizer=TokenizerRecord(tokenizer.kind, tokenizer.fingerprint),
            vocab_size=tokenizer.vocab_size,
            splits=splits,
            source=source,
        )
    _check_made_from(folder, data, seed, say)
    counts = (f"{name} {sum(s.count for s in shards):,}" for name, shards in splits.items())
    say(f"tokens: {', '.join(counts)}; vocabulary {tokenizer.vocab_size:,}")
    return folder


def default_path(data: DataConfig, seed: int) -> str:
    """Where the data set of a config without data.path is: one folder for each way to make it."""
    stem = Path(data.source).stem or Path(data.source).resolve().name
    names = [re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.") or "text", data.tokenizer]
    names += [str(data.vocab_size)] * (data.tokenizer == "bpe")
    names += [str(data.max_bytes)] * (data.max_bytes is not None)
    identity = msgspec.json.encode(parameters(data, seed), order="sorted")
    return f"data/{'-'.join(names)}-{xxhash.xxh3_128_hexdigest(identity)[:8]}"


def parameters(data: DataConfig, seed: int) -> dict[str, Any]:
    """What decides a data set's content: the fields of DataConfig that count, and the seed."""
    fields = {"source", "tokenizer", "max_bytes", "val_fraction", "test_fraction"}
    fields |= {"vocab_size"} if data.tokenizer == "bpe" else set()
    fields |= {"text_field"} if data.source != STDLIB else set()
    return {"seed": seed} | {field: getattr(data, field) for field in sorted(fields)}


def divide(
    wanted: Int64Array, val_fraction: float, test_fraction: float, seed: int
) -> dict[str, Parts]:
    """Split documents into train, val and, if asked for, test.

    `wanted` is how many bytes of each document count, [documents]. Whole documents, in an order
    that comes from the seed, go where they bring a held-out split nearer to its share. Where
    documents are too few or too large for that, they are laid end to end and cut by position;
    the last parts become val and test.
    """
    shares = {"train": 1 - val_fraction - test_fraction, "val": val_fraction}
    shares |= {"test": test_fraction} if test_fraction > 0 else {}
    targets = {name: share * float(wanted.sum()) for name, share in shares.items()}
    parts = _by_document(wanted, targets, seed)
    realised = {name: int((rows[:, 2] - rows[:, 1]).sum()) for name, rows in parts.items()}
    if all(abs(realised[name] - target) <= 0.5 * target for name, target in targets.items()):
        return parts
    return _by_position(wanted, targets)


def _by_document(wanted: Int64Array, targets: dict[str, float], seed: int) -> dict[str, Parts]:
    names = list(targets)
    split_of = np.zeros(wanted.size, dtype=np.int8)
    missing = {names.index(name): targets[name] for name in names if name != "train"}
    used = np.flatnonzero(wanted)
    smallest = int(wanted[used].min())
    for place in Shuffled(used.size, seed).indices(_TO_SPLIT, 0, used.size).tolist():
        document, size = int(used[place]), int(wanted[used[place]])
        split = next((s for s, room in missing.items() if size / 2 <= room), None)
        if split is not None:
            split_of[document] = split
            missing[split] -= size
        elif all(room < smallest / 2 for room in missing.values()):
            break
    return {name: _rows(used[split_of[used] == split], wanted) for split, name in enumerate(names)}


def _rows(documents: Int64Array, wanted: Int64Array) -> Parts:
    return np.stack([documents, np.zeros_like(documents), wanted[documents]], axis=1)


def _by_position(wanted: Int64Array, targets: dict[str, float]) -> dict[str, Parts]:
    documents = np.arange(wanted.size)
    starts = np.cumsum(wanted) - wanted
    parts: dict[str, Parts] = {}
    begin, share = 0, 0.0
    for name, target in targets.items():
        share += target
        end = round(share)
        firsts = np.clip(begin - starts, 0, wanted)
        ends = np.clip(end - starts, 0, wanted)
        parts[name] = np.stack([documents, firsts, ends], axis=1)[ends > firsts]
        begin = end
    return parts


def _first_bytes(sizes: Int64Array, limit: int, seed: int, purpose: int) -> Int64Array:
    """How much of each document is within the first `limit` bytes of a shuffled order."""
    order = Shuffled(sizes.size, seed).indices(purpose, 0, sizes.size)
    shuffled = sizes[order]
    before = np.cumsum(shuffled) - shuffled
    wanted = np.empty_like(sizes)
    wanted[order] = np.clip(limit - before, 0, shuffled)
    return wanted


def _make_tokenizer(corpus: Corpus, train: Parts, data: DataConfig, seed: int) -> Tokenizer:
    """Byte, or trained on the training split alone; BPE on a bounded sample of it."""
    if data.tokenizer == "byte":
        return ByteTokenizer()
    if data.tokenizer == "char":
        return train_char(
            _SEPARATOR if piece is None else piece for piece in _pieces(corpus, train)
        )
    sample = train.copy()
    sizes = train[:, 2] - train[:, 1]
    sample[:, 2] = train[:, 1] + _first_bytes(sizes, _BPE_SAMPLE_BYTES, seed, _TO_SAMPLE)
    sample = sample[sample[:, 2] > sample[:, 1]]
    texts = (piece for piece in _pieces(corpus, sample) if piece is not None)
    return train_bpe(texts, data.vocab_size)


def _pieces(corpus: Corpus, parts: Parts) -> Iterator[str | None]:
    """The parts' text; None stands between documents."""
    for number, pieces in enumerate(corpus.texts(parts)):
        if number:
            yield None
        yield from pieces


def _encoded(tokenizer: Tokenizer, pieces: Iterable[str | None]) -> Iterator[TokenIds]:
    end = tokenizer.end_id
    separator = tokenizer.encode(_SEPARATOR) if end is None else np.array([end], dtype=np.uint32)
    batch: list[str | None] = []

    def tokens() -> Iterator[TokenIds]:
        encoded = iter(tokenizer.encode_batch([text for text in batch if text is not None]))
        for piece in batch:
            yield separator if piece is None else next(encoded)

    batched = 0
    for piece in pieces:
        batch.append(piece)
        batched += len(piece or "")
        if batched >= _BATCH_BYTES:
            yield from tokens()
            batch, batched = [], 0
    yield from tokens()


def _write_split(
    folder: Path, name: str, corpus: Corpus, parts: Parts, tokenizer: Tokenizer, data: DataConfig
) -> tuple[Shard, ...]:
    writer = ShardWriter(
        folder, name, tokenizer=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size
    )
    for tokens in _encoded(tokenizer, _pieces(corpus, parts)):
        writer.append(tokens)
    shards = writer.close()
    count = sum(shard.count for shard in shards)
    if count < 2:
        raise ConfigError.one(
            f"{data.source} is too short: its {name} split would have {count} tokens, "
            "and it takes two to predict one",
            where="data.source",
            hint="give more text, or other data.val_fraction and data.test_fraction",
            key="data.source",
        )
    return shards


def _check_made_from(folder: Path, data: DataConfig, seed: int, say: Callable[[str], None]) -> None:
    """Raises ConfigError where the data set was made from something else than asked for.

    The seed is not compared: whoever names a folder wants its splits, whatever the run's seed.
    """
    made = open_dataset(folder).source
    asked = parameters(data, seed)
    differing = [key for key in asked if key != "seed" and made.get(key) != asked[key]]
    if differing:
        found = ", ".join(f"{key}={made.get(key)!r}, not {asked[key]!r}" for key in differing)
        raise ConfigError.one(
            f"the data set {folder} was made otherwise: {found}",
            where="data.path",
            hint="set these keys under data as it was made, or name another data.path",
            key="data.path",
        )
    source = Path(data.source)
    if "file_bytes" in made and source.is_file() and source.stat().st_size != made["file_bytes"]:
        say(f"note: {source} has changed since {folder} was made from it; the latter is used")
