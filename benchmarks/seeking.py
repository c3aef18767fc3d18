"""How soon a loader that starts anew gives the first batch at 90 % of an epoch, and of a
stream near its end.

    python benchmarks/seeking.py JSON

for one of the loaders that compete; `Asked` as JSON. It says the milliseconds of each turn.
"""

from __future__ import annotations

import json
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from instar.config.language import DataConfig
from instar.data.order import OrderKind, make_order
from instar.data.source import TokenWindows
from instar.data.text.shards import open_dataset
from instar.data.text.streams.index import count_lanes, open_stream
from instar.data.text.tokenizer import TOKENIZER_FILE, train_bpe
from loaders import Asked, GrainWindows, Windows, hf_rows, lone_feed

Seek = Callable[[Asked], Callable[[], object]]
"""What need not be done at a start is done at once; the rest is what is timed."""


def instar_seek(folder: Path, order: OrderKind, batch: int, context: int) -> Callable[[], object]:
    """Opens the data set, makes the order, and takes the step at 90 % of its second epoch."""

    def seek() -> object:
        windows = TokenWindows(open_dataset(folder).split("train"), context)
        sample_order = make_order(order, len(windows), seed=1)
        cursor = sample_order.samples_per_epoch + sample_order.samples_per_epoch * 9 // 10
        with lone_feed(windows, sample_order, prefetch=False) as feed:
            return feed.take(cursor, batch, batch)

    return seek


def make_stream(folder: Path, documents: int, words: int) -> DataConfig:
    """A stream of sixteen Parquet files, and its data folder with a BPE tokenizer, counted."""
    rng = np.random.default_rng(1)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    lexicon = np.array(["".join(rng.choice(letters, rng.integers(2, 10))) for _ in range(5000)])
    texts = [" ".join(rng.choice(lexicon, words)) for _ in range(documents)]
    folder.mkdir()
    for number, part in enumerate(np.array_split(np.array(texts, dtype=object), 16)):
        pq.write_table(pa.table({"text": part}), folder / f"part-{number:02}.parquet")
    (folder / TOKENIZER_FILE).write_text(train_bpe(texts[:500], 4096).to_json())
    source = str(folder / "*.parquet")
    data = DataConfig(kind="stream", source=source, order="sequential", lanes=4)
    count_lanes(data, folder)
    return data


def stream_seek(data: DataConfig, folder: Path, context: int) -> Callable[[], object]:
    """Opens a stream and reads a batch near its end, of samples of every lane."""

    def seek() -> object:
        source, order = open_stream(data, folder, context, seed=1, use_sizes=True)
        try:
            end = order.samples_per_epoch - 4 * data.lanes
            return source.read(order.indices(0, end, end + 2 * data.lanes))
        finally:
            source.close()

    return seek


def stateful(request: Asked) -> Callable[[], object]:
    """Its state is that of a run that came so far."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    windows = Windows(request)

    def loader() -> Any:
        return StatefulDataLoader(windows, batch_size=request.batch, shuffle=True)

    running = loader()
    for number, _ in enumerate(running, start=1):
        if number == ninety_percent(len(windows)) // request.batch:
            break
    state = running.state_dict()

    def seek() -> object:
        fresh_loader = loader()
        fresh_loader.load_state_dict(state)
        return next(iter(fresh_loader))

    return seek


def hf_map(request: Asked) -> Callable[[], object]:
    rows = hf_rows(request)

    def seek() -> object:
        begin = ninety_percent(len(rows))
        return rows.shuffle(seed=1, keep_in_memory=True)[begin : begin + request.batch]

    return seek


def hf_iterable(request: Asked) -> Callable[[], object]:
    rows = hf_rows(request)

    def seek() -> object:
        stream = rows.to_iterable_dataset(num_shards=8).skip(ninety_percent(len(rows)))
        return next(iter(stream.iter(request.batch)))

    return seek


def grain_map(request: Asked) -> Callable[[], object]:
    import grain

    windows = GrainWindows(request)

    def seek() -> object:
        dataset = grain.MapDataset.source(windows).seed(1).shuffle().batch(request.batch)
        return dataset[ninety_percent(len(windows)) // request.batch]

    return seek


def ninety_percent(samples: int) -> int:
    return samples * 9 // 10


SEEKS: dict[str, Seek] = {
    "StatefulDataLoader, by its state": stateful,
    "HF data set, shuffled": hf_map,
    "HF iterable, by skip": hf_iterable,
    "grain, by position": grain_map,
}


def milliseconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - begin)


def traced_mb(work: Callable[[], object]) -> float:
    """The most memory that is held at once meanwhile, in MB, as Python and numpy count it."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1] / 1e6
    finally:
        tracemalloc.stop()


if __name__ == "__main__":
    request = Asked(**json.loads(sys.argv[1]))
    work = SEEKS[request.loader](request)
    print(json.dumps([milliseconds(work) for _ in range(request.turns)]))
