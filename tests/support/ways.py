"""One small data set of every kind, and all the ways in which its samples come to ranks."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from feeds import dispatched_feeds, local_feed

from instar.config.language import DataConfig
from instar.data.loader import Prefetcher, StepBatch
from instar.data.text.dataset import create_dataset_files, open_data

SEED = 5
CONTEXT = 16
SHARDS = 6
GLOBAL_BATCH, BATCH_SIZE = 26, 4

KINDS: dict[str, dict[str, Any]] = {
    "tokens": {},
    "tokens in blocks": {"order": "blocks", "block_samples": 8, "shuffle_window": 32},
    "random windows": {"order": "random"},
    "rows of text": {"kind": "rows"},
    "rows of ids": {"kind": "rows", "tokens_field": "tokens", "val_source": "{train}"},
    "rows, a document a sample": {"kind": "rows", "packing": False},
    "rows in blocks": {"kind": "rows", "order": "blocks", "block_samples": 8, "shuffle_window": 32},
    "a stream": {"kind": "stream", "lanes": 4, "order": "sequential"},
    "a shuffled stream": {"kind": "stream", "lanes": 4, "shuffle_window": 10},
    "a stream, a document a sample": {"kind": "stream", "lanes": 4, "packing": False},
    "an iterable": {"kind": "python", "source": "feeds:texts"},
    "a mixture": {
        "mixture": [{"source": "{train}", "weight": 1}, {"source": "{held_out}", "weight": 2}]
    },
    "a mixture of rows": {
        "kind": "rows",
        "mixture": [{"source": "{train}"}, {"source": "{held_out}"}],
    },
    "transformed": {"transform": "feeds:noisy"},
    "masked": {"transform": "feeds:masked"},
}


def make_rows(folder: Path) -> Path:
    """Parquet in six shards and JSONL: documents of 0 to 120 characters."""
    chance = np.random.default_rng(1)
    texts = [
        "".join(chance.choice(list("abcdefgh é"), size=chance.integers(0, 120))) for _ in range(80)
    ]
    for shard in range(SHARDS):
        rows = texts[shard * 13 : (shard + 1) * 13]
        tokens = pa.array([list(text.encode()) for text in rows], pa.list_(pa.uint8()))
        pq.write_table(
            pa.table({"text": rows, "tokens": tokens}), folder / f"train-{shard}.parquet"
        )
    lines = [json.dumps({"text": text}) + "\n" for text in texts[78:] * 20]
    (folder / "held_out.jsonl").write_text("".join(lines))
    return folder


def config(folder: Path, kind: str, **more: Any) -> DataConfig:
    places = {
        "{train}": str(folder / "train-*.parquet"),
        "{held_out}": str(folder / "held_out.jsonl"),
    }
    options = {"source": "{train}", "val_source": "{held_out}", "test_fraction": 0.0}
    text = json.dumps({**options, **KINDS[kind], **more})
    for name, place in places.items():
        text = text.replace(name, place)
    return DataConfig.model_validate_json(text)


@dataclass(frozen=True)
class Way:
    ranks: int
    strategy: str = "sharded"
    workers: int = 0


@contextmanager
def feeds(data: DataConfig, way: Way) -> Iterator[tuple[list[Prefetcher], int]]:
    """The feeds of all ranks, and how many samples an epoch has."""
    data = data.model_copy(update={"strategy": way.strategy, "workers": way.workers})
    create_dataset_files(data, SEED, way.ranks)
    prefetchers: list[Prefetcher] = []
    try:
        if way.strategy == "dispatched" and way.ranks > 1:
            source, order = open_data(data, SEED, way.ranks).train(CONTEXT, SEED)
            prefetchers = dispatched_feeds(source, order, way.ranks, drop_last=data.drop_last)
        else:
            for rank in range(way.ranks):
                source, order = open_data(data, SEED, way.ranks).train(CONTEXT, SEED)
                prefetchers.append(
                    local_feed(source, order, rank, way.ranks, drop_last=data.drop_last)
                )
        yield prefetchers, order.samples_per_epoch
    finally:
        for feed in prefetchers:
            feed.close(20)


def take_steps(
    data: DataConfig, way: Way, steps: int, cursor: int = 0, sizes: tuple[int, int] | None = None
) -> list[list[StepBatch]]:
    """Each step's batches, by rank."""
    global_batch, batch_size = sizes or (GLOBAL_BATCH, BATCH_SIZE)
    history = []
    with feeds(data, way) as (prefetchers, _):
        for _ in range(steps):
            batches = [feed.take(cursor, global_batch, batch_size) for feed in prefetchers]
            cursor = batches[0].plan.after
            history.append(batches)
    return history


def samples_of(batches: list[StepBatch]) -> Counter[bytes]:
    """What a step trains on, over all ranks."""
    return Counter(row for batch in batches for row in rows_of(batch))


def rows_of(batch: StepBatch) -> list[bytes]:
    """A rank's samples of a step, in their order."""
    return [
        micro.arrays["inputs"][row].tobytes() + micro.arrays["targets"][row].tobytes()
        for micro in batch.micro_batches
        for row in range(micro.samples)
    ]


def invariants(batches: list[StepBatch]) -> tuple[Any, ...]:
    """All that must not depend on the way."""
    plans = {batch.plan for batch in batches}
    shares = sum(micro.weight for batch in batches for micro in batch.micro_batches)
    owns = [batch.own_weight for batch in batches]
    if None in owns:
        weights = {batch.weight for batch in batches}
        assert owns == [None] * len(owns)
    else:  # each rank knows its own, and they agree on the sum before the step
        weights = {sum(own_weight for own_weight in owns if own_weight is not None)}
    assert len(plans) == len(weights) == 1
    assert shares == pytest.approx(min(weights))
    digest = hashlib.sha256(repr(sorted(samples_of(batches).items())).encode()).hexdigest()
    return plans.pop(), weights.pop(), digest
