"""Lengths of a stream's lanes, counted in one pass and stored in the data folder.

lanes.json          the tokens of each lane; without packing, its documents
lanes.safetensors   without packing: the tokens of every document
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from instar.config.errors import ConfigError
from instar.config.language import DataConfig
from instar.data.text.shards import read_record
from instar.data.text.streams.items import open_items, version_of
from instar.data.text.streams.reader import HostedLanes, LaneReader, Lanes
from instar.data.text.streams.samples import (
    DocumentLane,
    DocumentStream,
    LaneWeights,
    PackedLane,
    PackedStream,
    TokenLanes,
)
from instar.data.text.streams.seek_points import SeekPoints
from instar.data.text.streams.source import (
    LaneOrder,
    LaneSamples,
    OpenStreamSource,
    StreamSource,
    no_samples,
)
from instar.data.text.tokenizer import load_saved_tokenizer
from instar.processes.pool import WorkerLost, Workers
from instar.record.atomic import replace_file
from instar.record.progress import track_items

LANES_FORMAT = "instar-lanes/1"
LANES_FILE = "lanes.json"
SIZES_FILE = "lanes.safetensors"

_KEPT_BYTES = 32 << 20
_AHEAD_BYTES = 1 << 19
_SAVING_S = 0.2
"""Longest wait of a close for workers to save their seek points, in seconds; they may be reading."""


class LanesRecord(msgspec.Struct, frozen=True):
    """lanes.json. `counts` are the tokens of each lane or, without packing, its documents."""

    format: str
    fingerprint: str
    packing: bool
    counts: tuple[int, ...]


def check_stream(data: DataConfig, folder: Path) -> None:
    """Raise ConfigError if a stream cannot be opened; read nothing of it."""
    _open_tokens(data, folder)


def count_lanes(
    data: DataConfig, folder: Path, say: Callable[[str], None] = lambda _: None
) -> None:
    """Count the lanes of a stream and store the result in a folder, unless it is there already.

    Sharded loading requires it: each rank then knows what the others read. Call it in one process at a time.

    Raises:
        ConfigError: the stream cannot be read or has no samples.
    """
    tokens = _open_tokens(data, folder)
    if _stored_record(tokens, data, folder, sizes=True) is not None:
        return
    workers = min(data.workers, tokens.lanes)
    how = f"in {workers} processes" if workers else "in this process; data.workers makes it faster"
    say(f"counting {data.source}: read once to the end, {tokens.lanes} lanes, {how}")
    try:
        counts = _count(tokens, data, folder, workers, say)
    except ConfigError:
        raise
    except Exception as error:  # parsers raise any type
        reason = "; ".join([str(error), *getattr(error, "__notes__", ())])
        message = f"{data.source} cannot be read to its end: {reason}"
        raise ConfigError.at("data.source", message) from error
    if not any(count > 1 if isinstance(count, int) else count.size for count in counts):
        raise no_samples()
    if not data.packing:
        sizes = {f"sizes-{lane}": np.asarray(count) for lane, count in enumerate(counts)}
        metadata = {"format": LANES_FORMAT, "fingerprint": _counted(tokens, data)}
        replace_file(folder / SIZES_FILE, safetensors.numpy.save(sizes, metadata=metadata))
    numbers = [count if isinstance(count, int) else count.size for count in counts]
    _keep(tokens, data, folder, numbers)
    say(f"counted: {sum(numbers):,} {'tokens' if data.packing else 'documents'}")


def open_stream(
    data: DataConfig, folder: Path, context: int, seed: int, *, use_sizes: bool
) -> tuple[StreamSource | OpenStreamSource, LaneOrder]:
    """Open the samples of a stream and their order; the caller closes the source.

    Args:
        folder: holds the tokenizer, the counts and the seek points.
        use_sizes: if true, counts are required and each rank reads its own lanes; otherwise one rank
            reads all lanes, and unknown ends are found while reading and then stored.

    Raises:
        ConfigError: the stream cannot be opened, or differs from the one that was counted.
    """
    tokens = _open_tokens(data, folder)
    stream = _cut(tokens, data, context)
    window = 1 if data.order == "sequential" else data.shuffle_window
    record = _stored_record(tokens, data, folder, sizes=use_sizes)
    if record is None and use_sizes:
        raise ConfigError.of(
            f"the lanes of {data.source} were not counted, or it has changed since",
            where=str(folder / LANES_FILE),
            hint="count them first, or use data.strategy: dispatched, which needs no counts",
            key="data.strategy",
        )
    counts = [None] * tokens.lanes if record is None else record.counts
    sample_bytes = (context + 1) * tokens.dtype.itemsize
    keep = max(2 * window, _KEPT_BYTES // (tokens.lanes * sample_bytes))
    lanes = _lanes(stream, data, folder, max(1, _AHEAD_BYTES // sample_bytes))
    record_file = None if record is None else folder / LANES_FILE
    samples = LaneSamples(stream, lanes, counts, keep, window, record_file)
    lengths = [samples.length(lane) for lane in range(tokens.lanes)]
    order = LaneOrder(lengths, seed, window)
    if record is not None and use_sizes:
        return StreamSource(samples, _weights(record, folder, context)), order
    return OpenStreamSource(samples, order, partial(_keep, tokens, data, folder)), order


def _open_tokens(data: DataConfig, folder: Path) -> TokenLanes:
    ids = data.tokens_field is not None
    return TokenLanes(open_items(data), load_saved_tokenizer(folder), ids=ids)


def _cut(tokens: TokenLanes, data: DataConfig, context: int) -> PackedStream | DocumentStream:
    return PackedStream(tokens, context) if data.packing else DocumentStream(tokens, context)


def _lanes(
    stream: PackedStream | DocumentStream, data: DataConfig, folder: Path, fetch_ahead: int
) -> Lanes:
    number = min(data.workers, stream.lanes)
    if not number:
        return _reader(stream, folder)
    workers = Workers(partial(_worker, data, folder, stream.context), number)

    def close() -> None:
        with suppress(WorkerLost):  # closed already, or dead
            wait([workers.call(number, "close") for number in range(number)], _SAVING_S)
        workers.close()

    return HostedLanes(
        lambda lane, begin, count: workers.call(lane % number, "fetch", lane, begin, count),
        close,
        fetch_ahead,
    )


def _reader(stream: PackedStream | DocumentStream, folder: Path) -> LaneReader:
    return LaneReader(stream, SeekPoints(folder, stream.cut, stream.spacing))


def _worker(data: DataConfig, folder: Path, context: int) -> LaneReader:
    """Open a reader in a worker, without torch: `datasets` would import it for its streams, which
    takes seconds and memory."""
    os.environ.setdefault("USE_TORCH", "0")
    return _reader(_cut(_open_tokens(data, folder), data, context), folder)


def _count(
    tokens: TokenLanes, data: DataConfig, folder: Path, workers: int, say: Callable[[str], None]
) -> list[int | NDArray[np.uint32]]:
    began = time.monotonic()
    counts: list[int | NDArray[np.uint32]] = []

    def report(lane: int, count: int | NDArray[np.uint32]) -> None:
        counts.append(count)
        amount = f"{count:,} tokens" if isinstance(count, int) else f"{count.size:,} documents"
        say(f"lane {lane}: {amount}, after {time.monotonic() - began:.1f} s")

    context = 1  # counts do not depend on it
    if not workers:
        reader = _reader(_cut(tokens, data, context), folder)
        for lane in track_items(range(tokens.lanes), "counting", "lanes", tokens.lanes):
            report(lane, reader.count(lane))
        return counts
    with Workers(partial(_worker, data, folder, context), workers) as hosts:
        coming = [hosts.call(lane % workers, "count", lane) for lane in range(tokens.lanes)]
        for lane, future in enumerate(track_items(coming, "counting", "lanes", tokens.lanes)):
            report(lane, future.result())
    return counts


def _keep(tokens: TokenLanes, data: DataConfig, folder: Path, counts: Sequence[int]) -> None:
    record = LanesRecord(LANES_FORMAT, _counted(tokens, data), data.packing, tuple(counts))
    content = msgspec.json.format(msgspec.json.encode(record), indent=2)
    replace_file(folder / LANES_FILE, content + b"\n")


def _stored_record(
    tokens: TokenLanes, data: DataConfig, folder: Path, *, sizes: bool
) -> LanesRecord | None:
    """Return the stored counts of this stream; with `sizes`, require document sizes if unpacked.

    Raises ConfigError if the file is damaged.
    """
    file = folder / LANES_FILE
    try:
        record = read_record(file, LanesRecord, "a record of lanes", "delete it")
    except FileNotFoundError:
        return None
    counted = _counted(tokens, data)
    same = record.fingerprint == counted and record.packing == data.packing
    if not same or record.format != LANES_FORMAT or len(record.counts) != tokens.lanes:
        return None
    if sizes and not record.packing:
        try:
            with safetensors.safe_open(folder / SIZES_FILE, framework="numpy") as reader:
                fingerprint = (reader.metadata() or {}).get("fingerprint")
        except (OSError, safetensors.SafetensorError):
            return None
        return record if fingerprint == counted else None
    return record


def _counted(tokens: TokenLanes, data: DataConfig) -> str:
    """Return the fingerprint of what is counted. Seek points have that of the lanes alone: a resumed run compares the
    document at its place with what it was, which a new run passes."""
    version = version_of(data)
    return f"{tokens.fingerprint}/{version}" if version else tokens.fingerprint


def _weights(record: LanesRecord, folder: Path, context: int) -> list[LaneWeights]:
    if record.packing:
        return [PackedLane(count, context) for count in record.counts]
    sizes = safetensors.numpy.load_file(folder / SIZES_FILE)
    return [DocumentLane(sizes[f"sizes-{lane}"], context) for lane in range(len(record.counts))]
