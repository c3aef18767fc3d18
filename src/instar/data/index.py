"""Which rows are trained on and how many tokens each has: counted once, kept in one file."""

from __future__ import annotations

from pathlib import Path

import msgspec
import safetensors
import safetensors.numpy
import xxhash

from instar.config.errors import ConfigError
from instar.data.order import Int64Array
from instar.data.shards import write_synced
from instar.data.tokenizer import Tokenizer

INDEX_FORMAT = "instar-rows/1"
INDEX_FILE = "index-train.safetensors"


class IndexRecord(msgspec.Struct, frozen=True):
    """What an index says of the rows it was made from.

    `loaded` is what the library calls these rows: its fingerprint is another one when files or
    their times change. `content` is the xxh3-128 of the column itself.
    """

    rows: int
    loaded: str
    content: str


def identity(content: str, tokenizer: Tokenizer) -> str:
    """Of a column's content as tokens."""
    return xxhash.xxh3_128_hexdigest(f"{content}{tokenizer.fingerprint}".encode())


def write_index(
    folder: Path,
    record: IndexRecord,
    tokenizer: Tokenizer,
    chosen: Int64Array,
    counts: Int64Array,
) -> None:
    metadata = {
        "format": INDEX_FORMAT,
        "index": msgspec.json.encode(record).decode(),
        "fingerprint": _fingerprint(record, tokenizer, chosen, counts),
    }
    tensors = {"chosen": chosen, "counts": counts}
    write_synced(folder / INDEX_FILE, safetensors.numpy.save(tensors, metadata=metadata))


def read_index(file: Path, tokenizer: Tokenizer) -> tuple[IndexRecord, Int64Array, Int64Array, str]:
    """What an index says, the chosen documents, their counts, and the fingerprint of it all."""
    if not file.is_file():
        raise ConfigError.one(
            "the index of the rows is missing",
            where=str(file),
            hint="prepare the data again, in another folder",
        )
    try:
        with safetensors.safe_open(file, "numpy") as index:
            metadata = index.metadata() or {}
            record = msgspec.json.decode(metadata.get("index", ""), type=IndexRecord)
            chosen, counts = index.get_tensor("chosen"), index.get_tensor("counts")
    except (OSError, safetensors.SafetensorError, msgspec.DecodeError) as error:
        raise ConfigError.one(f"not an index of rows: {error}", where=str(file)) from None
    fingerprint = _fingerprint(record, tokenizer, chosen, counts)
    if metadata.get("format") != INDEX_FORMAT or fingerprint != metadata.get("fingerprint"):
        raise ConfigError.one(
            f"this is not the index that was written ({INDEX_FORMAT}) for this tokenizer",
            where=str(file),
            hint="prepare the data again, in another folder",
        )
    return record, chosen, counts, fingerprint


def _fingerprint(
    record: IndexRecord, tokenizer: Tokenizer, chosen: Int64Array, counts: Int64Array
) -> str:
    """Of what is trained on: nothing in it says where the rows lie, or how they were loaded."""
    found = xxhash.xxh3_128(identity(record.content, tokenizer).encode())
    found.update(chosen.data)
    found.update(counts.data)
    return found.hexdigest()
