"""The loaders that compete in `loading.py`, one process each.

    python benchmarks/loaders.py JSON

`Asked` as JSON says which, and how long. The process says on its standard output, again as JSON,
one pair for each turn: million tokens per second of plain copying, and of the loader.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from instar.data.loader import LocalReader, Prefetcher
from instar.data.order import BlockShuffled, Order, Sequential, Shuffled
from instar.data.source import TokenWindows
from instar.data.text.shards import (
    ShardWriter,
    TokenizerRecord,
    open_dataset,
    write_record,
)
from instar.record.atomic import atomic_dir
from instar.record.system import keep_freed_memory
from instar.run.step.stepper import to_device

VOCABULARY = 1 << 16
TOKEN_BYTES = 16
"""of an int64 input and an int64 target"""
WARM_UP_BATCHES = 16
CPU = torch.device("cpu")

Pair = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets, int64 [batch, context]."""
Pairs = Iterator[Pair]


@dataclass(frozen=True)
class Asked:
    """One loader's work."""

    loader: str
    folder: str
    """what `make_data` made"""
    batch: int
    context: int
    turns: int
    seconds: float
    """of a turn; of copying as well"""
    copy_bytes: int
    workers: int = 0


def make_data(folder: Path, tokens: int, context: int) -> None:
    """The same random tokens as token shards, and as Arrow rows of context + 1, the last one twice.

    A row begins where the one before it has its last target, so that rows and windows agree.
    """
    import datasets
    import pyarrow

    random_tokens = np.random.default_rng(1).integers(VOCABULARY, size=tokens, dtype=np.uint16)
    with atomic_dir(folder / "shards") as new_folder:
        writer = ShardWriter(new_folder, "train", "random", VOCABULARY)
        writer.append(random_tokens)
        write_record(
            new_folder,
            tokenizer=TokenizerRecord("random", "random"),
            vocab_size=VOCABULARY,
            splits={"train": writer.close()},
            source={},
        )
    starts = np.arange((tokens - 1) // context) * context
    rows = np.lib.stride_tricks.sliding_window_view(random_tokens, context + 1)[starts]
    column = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(rows.reshape(-1)), context + 1)
    features = datasets.Features(
        {"tokens": datasets.List(datasets.Value("uint16"), length=context + 1)}
    )
    table = pyarrow.table({"tokens": column}).cast(features.arrow_schema)
    datasets.disable_progress_bars()
    datasets.Dataset(table).save_to_disk(folder / "rows", num_shards=8)


class Windows(Dataset[Pair]):
    """One window of a memory-mapped file of tokens, made when it is asked for."""

    def __init__(self, request: Asked) -> None:
        self.tokens, self.context = flat_tokens(request), request.context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> Pair:
        window = self.tokens[index * self.context : (index + 1) * self.context + 1]
        tokens = torch.from_numpy(window.astype(np.int64))
        return tokens[:-1], tokens[1:]


def flat_tokens(request: Asked) -> NDArray[np.uint16]:
    """All tokens as a file without shards, which is what the others' recipes read."""
    return np.memmap(flat_file(Path(request.folder)), dtype=np.uint16, mode="r")


def flat_file(folder: Path) -> Path:
    """Written once."""
    file = folder / "tokens.bin"
    if not file.exists():
        split = open_dataset(folder / "shards").split("train")
        split.read(0, len(split)).tofile(file)
    return file


def instar_feed(request: Asked, order: Callable[[int], Order], *, prefetch: bool = False) -> Pairs:
    """Steps of one micro-batch, as a run on one rank takes them."""
    windows = TokenWindows(
        open_dataset(Path(request.folder) / "shards").split("train"), request.context
    )
    cursor = 0
    with lone_feed(windows, order(len(windows)), prefetch=prefetch) as feed:
        while True:
            step = feed.take(cursor, request.batch, request.batch)
            (micro,) = step.micro_batches
            tensors: Any = to_device(micro.arrays, CPU)
            yield tensors["inputs"], tensors["targets"]
            cursor += step.plan.count


def shuffled_order(n: int) -> Order:
    return Shuffled(n, seed=1)


def in_blocks(n: int) -> Order:
    return BlockShuffled(n, seed=1, block=256, window=4096)


def lone_feed(windows: TokenWindows, order: Order, *, prefetch: bool) -> Prefetcher:
    """As of a run on one rank."""
    keep_freed_memory()
    reader = LocalReader(windows, order, 1, range(1), "rank 0")
    return Prefetcher(reader, prefetch, in_caller=not prefetch)


def epochs_of(loader: Any, take: Callable[[Any], Pair]) -> Pairs:
    while True:
        yield from map(take, loader)


def of_workers(request: Asked) -> dict[str, Any]:
    return {"num_workers": request.workers, "persistent_workers": request.workers > 0}


def one_batch(request: Asked) -> Pairs:
    """One batch, copied over and over: what could be done if nothing had to be found or widened."""
    inputs, targets = (
        torch.stack(part) for part in zip(*islice(Windows(request), request.batch), strict=True)
    )
    copies = torch.empty_like(inputs), torch.empty_like(targets)
    while True:
        np.copyto(copies[0].numpy(), inputs.numpy())
        np.copyto(copies[1].numpy(), targets.numpy())
        yield copies


def per_item(request: Asked) -> Pairs:
    loader = DataLoader(
        Windows(request), batch_size=request.batch, shuffle=True, **of_workers(request)
    )
    return epochs_of(loader, tuple)


def stateful(request: Asked) -> Pairs:
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader: Any = StatefulDataLoader(
        Windows(request), batch_size=request.batch, shuffle=True, **of_workers(request)
    )
    return epochs_of(loader, tuple)


def hf_map(request: Asked) -> Pairs:
    """Whole batches are asked of the data set, which its documentation calls the faster way."""
    rows: Any = hf_rows(request)
    sampler = BatchSampler(RandomSampler(rows), request.batch, drop_last=False)
    loader: Any = DataLoader(rows, sampler=sampler, batch_size=None, **of_workers(request))
    return epochs_of(loader, shift)


def hf_iterable(request: Asked) -> Pairs:
    """Not shuffled, which would cost it more."""
    rows = hf_rows(request).to_iterable_dataset(num_shards=8)
    loader: Any = DataLoader(rows, batch_size=request.batch, **of_workers(request))
    return epochs_of(loader, shift)


def hf_rows(request: Asked) -> Any:
    import datasets

    return datasets.load_from_disk(Path(request.folder) / "rows").with_format("torch")


def shift(batch: dict[str, torch.Tensor]) -> Pair:
    return batch["tokens"][:, :-1], batch["tokens"][:, 1:]


def grain_map(request: Asked, *, threads: int | None) -> Pairs:
    """With None for the threads, as many as grain takes of itself."""
    import grain

    options = grain.ReadOptions() if threads is None else grain.ReadOptions(threads, threads)
    dataset: Any = grain.MapDataset.source(GrainWindows(request)).seed(1).shuffle().repeat()
    dataset = dataset.batch(request.batch).to_iter_dataset(options)
    if request.workers:
        dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=request.workers))
    return (
        (torch.from_numpy(batch["inputs"]), torch.from_numpy(batch["targets"])) for batch in dataset
    )


class GrainWindows:
    """What grain calls a random access data source, of numpy arrays."""

    def __init__(self, request: Asked) -> None:
        self.request = request
        self.tokens = flat_tokens(request)

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.request.context

    def __getitem__(self, index: int) -> dict[str, NDArray[np.int64]]:
        context = self.request.context
        window = self.tokens[index * context : (index + 1) * context + 1].astype(np.int64)
        return {"inputs": window[:-1], "targets": window[1:]}

    def __getstate__(self) -> Asked:
        return self.request

    def __setstate__(self, request: Asked) -> None:
        self.__init__(request)  # type: ignore[misc]


ONE_BATCH = "one batch copied, in the cache"
LOADERS: dict[str, Callable[[Asked], Pairs]] = {
    ONE_BATCH: one_batch,
    "Instar, shuffled": lambda request: instar_feed(request, shuffled_order),
    "Instar, shuffled in blocks": lambda request: instar_feed(request, in_blocks),
    "Instar, sequential": lambda request: instar_feed(request, Sequential),
    "Instar, shuffled, read ahead": lambda request: instar_feed(
        request, shuffled_order, prefetch=True
    ),
    "Instar, sequential, read ahead": lambda request: instar_feed(
        request, Sequential, prefetch=True
    ),
    "DataLoader, memmap by item": per_item,
    "DataLoader, HF data set": hf_map,
    "DataLoader, HF iterable": hf_iterable,
    "StatefulDataLoader, memmap by item": stateful,
    "grain, its own threads": lambda request: grain_map(request, threads=None),
    "grain, no threads": lambda request: grain_map(request, threads=0),
}


def main() -> None:
    request = Asked(**json.loads(sys.argv[1]))
    source, copy = (np.ones(request.copy_bytes // 8, dtype=np.int64) for _ in range(2))
    check(request)
    results = []
    for _ in range(request.turns):
        copy_rate = copying(source, copy, request.seconds)
        results.append((copy_rate, loading(request)))
    print(json.dumps(results))


def copying(source: NDArray[np.int64], copy: NDArray[np.int64], seconds: float) -> float:
    """Million tokens per second whose inputs and targets a plain copy would write."""
    begin, copies = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        np.copyto(copy, source)
        copies += 1
    return copies * copy.nbytes / TOKEN_BYTES / (time.perf_counter() - begin) / 1e6


def loading(request: Asked) -> float:
    """Million tokens per second that a loader gives, once it runs."""
    with closing(as_generator(LOADERS[request.loader](request))) as pairs:
        for _ in range(WARM_UP_BATCHES):
            next(pairs)
        tokens, begin = 0, time.perf_counter()
        while (seconds := time.perf_counter() - begin) < request.seconds:
            tokens += next(pairs)[0].numel()
        return tokens / seconds / 1e6


def as_generator(pairs: Pairs) -> Generator[Pair]:
    yield from pairs


def check(request: Asked) -> None:
    """Raises SystemExit unless what comes are windows of the data, ready to train on."""
    tokens = torch.from_numpy(flat_tokens(request).astype(np.int64))
    starts = torch.arange((len(tokens) - 1) // request.context) * request.context
    with closing(as_generator(LOADERS[request.loader](request))) as pairs:
        for inputs, targets in islice(pairs, 2):
            has_types = inputs.dtype == targets.dtype == torch.int64
            has_shapes = inputs.shape == targets.shape == (request.batch, request.context)
            if not (
                has_types
                and has_shapes
                and all(map(partial(stands, tokens, starts), inputs, targets))
            ):
                sys.exit(f"{request.loader} gave something that is no batch of windows of the data")


def stands(
    tokens: torch.Tensor, starts: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor
) -> bool:
    """Whether inputs and targets are those at one of the starts."""
    return any(
        torch.equal(tokens[start : start + len(inputs)], inputs)
        and torch.equal(tokens[start + 1 : start + 1 + len(inputs)], targets)
        for start in starts[tokens[starts] == inputs[0]].tolist()
    )


if __name__ == "__main__":
    main()
