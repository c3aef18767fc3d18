"""Token data sets larger than a disk, made of holes, and what reading one takes of memory.

    python benchmarks/sparse.py FOLDER BATCHES BATCH CONTEXT

reads random batches through a feed and says as JSON, in MB, by how much the process grew meanwhile
at most: `anonymous`, what it holds itself, and `file`, pages of the mapped shard, which the kernel
takes back when it needs room but which count as resident all the same.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from instar.data.loader import LocalReader, Prefetcher
from instar.data.order import make_order
from instar.data.source import TokenWindows
from instar.data.text.shards import (
    SHARD_FORMAT,
    Shard,
    TokenizerRecord,
    open_dataset,
    write_record,
)
from instar.record.atomic import atomic_dir

VOCABULARY = 1 << 16
LOOK_EVERY = 20


def make_sparse(folder: Path, tokens: int) -> None:
    """A data set of one shard with so many uint16 tokens, all 0, that takes no room on the disk."""
    size = 2 * tokens
    shard = Shard("train-00000.safetensors", tokens, "holes")
    metadata = {
        "tokenizer": "holes",
        "vocab_size": str(VOCABULARY),
        "format": SHARD_FORMAT,
        "count": str(tokens),
        "dtype": "uint16",
        "fingerprint": shard.fingerprint,
    }
    tensor = {"dtype": "U16", "shape": [tokens], "data_offsets": [0, size]}
    header = json.dumps({"__metadata__": metadata, "tokens": tensor}).encode()
    header += b" " * (-len(header) % 8)
    with atomic_dir(folder) as new_folder:
        with (new_folder / shard.file).open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + size)
        write_record(
            new_folder,
            tokenizer=TokenizerRecord("holes", "holes"),
            vocab_size=VOCABULARY,
            splits={"train": (shard,)},
            source={},
        )


def growth(folder: Path, batches: int, batch: int, context: int) -> dict[str, float]:
    """MB by which this process grew at most while it read batches at random, by kind."""
    windows = TokenWindows(open_dataset(folder).split("train"), context)
    order = make_order("shuffled", len(windows), seed=1)
    before = peak = resident()
    with Prefetcher(LocalReader(windows, order, 1, range(1), "rank 0")) as feed:
        for step in range(batches):
            feed.take(step * batch, batch, batch)
            if step % LOOK_EVERY == LOOK_EVERY - 1:
                peak = {kind: max(mb, peak[kind]) for kind, mb in resident().items()}
    return {kind: peak[kind] - before[kind] for kind in peak}


def resident() -> dict[str, float]:
    """What this process has in memory, in MB."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    kinds = {"anonymous": "RssAnon", "file": "RssFile", "all": "VmRSS"}
    return {kind: int(fields[name].split()[0]) * 1024 / 1e6 for kind, name in kinds.items()}


if __name__ == "__main__":
    folder, *numbers = sys.argv[1:]
    print(json.dumps(growth(Path(folder), *map(int, numbers))))
