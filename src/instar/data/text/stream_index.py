"""Lengths of a stream's lanes, counted in one pass and stored in the data folder.

lanes.json          the tokens of each lane; without packing, its documents
lanes.safetensors   without packing: the tokens of every document
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from instar.config.errors import ConfigError
from instar.config.files import read_regular
from instar.config.language import DataConfig
from instar.data.order import Int64Array, LaneOrder
from instar.data.text.stream import DocumentStream, PackedStream, TokenLanes, open_lanes
from instar.data.text.stream_source import (
    HostedLanes,
    LaneEnd,
    LaneReader,
    Lanes,
    LaneSamples,
    LaneWeights,
    OpenStreamSource,
    StreamSource,
    no_samples,
)
from instar.data.text.tokenizer import load_tokenizer
from instar.data.workers import Workers
from instar.record.atomic import replace_file

LANES_FORMAT = "instar-lanes/1"
LANES_FILE = "lanes.json"
SIZES_FILE = "lanes.safetensors"

_KEPT_BYTES = 32 << 20
_AHEAD_BYTES = 1 << 19


class LanesRecord(msgspec.Struct, frozen=True):
    """lanes.json. `counts` are the tokens of each lane or, without packing, its documents."""

    format: str
    fingerprint: str
    packing: bool
    counts: tuple[int, ...]


@dataclass(frozen=True)
class PackedLane:
    """The samples of a packed lane with `tokens` tokens."""

    tokens: int
    context: int

    @property
    def samples(self) -> int:
        return max(0, -(-(self.tokens - 1) // self.context))

    def total(self, numbers: Int64Array) -> float:
        """Return the number of targets in the given samples."""
        missing = self.samples * self.context - (self.tokens - 1)
        last = np.count_nonzero(numbers == self.samples - 1)
        return float(numbers.size * self.context - missing * last)


@dataclass(frozen=True, eq=False)
class DocumentLane:
    """The samples of an unpacked lane: documents of these sizes in tokens, [samples]."""

    sizes: NDArray[np.uint32]
    context: int

    @property
    def samples(self) -> int:
        return len(self.sizes)

    def total(self, numbers: Int64Array) -> float:
        """Return the number of targets in the given samples."""
        targets = np.minimum(self.sizes[numbers].astype(np.int64) - 1, self.context)
        return float(targets.sum())


class LaneCounter:
    """Counts the tokens or documents of lanes by reading them to the end."""

    def __init__(self, tokens: TokenLanes, *, packing: bool) -> None:
        self._tokens, self._packing = tokens, packing

    def count(self, lane: int) -> int | NDArray[np.uint32]:
        """Return the tokens of a lane, separators included; without packing, those of each document
        that is a sample."""
        between = self._tokens.separator.size
        if self._packing:
            whole = sum(
                document.size + between
                for documents in self._tokens.open(lane)
                for document in documents
            )
            return max(0, whole - between)
        sizes = [
            np.array([document.size + between for document in documents], dtype=np.uint32)
            for documents in self._tokens.open(lane)
        ]
        joined = np.concatenate([np.empty(0, np.uint32), *sizes])
        return joined[joined > 1]


def check_stream(data: DataConfig, folder: Path) -> None:
    """Raise ConfigError if a stream cannot be opened; reads nothing of it."""
    _open_tokens(data, folder)


def count_lanes(
    data: DataConfig, folder: Path, say: Callable[[str], None] = lambda _: None
) -> None:
    """Count the lanes of a stream and store the result in a folder, unless it is there already.

    Sharded loading requires it: each rank then knows what the others read. Call it in one process
    at a time.

    Raises:
        ConfigError: the stream cannot be read or has no samples.
    """
    tokens = _open_tokens(data, folder)
    if _known(tokens, data, folder, sizes=True) is not None:
        return
    workers = min(data.workers, tokens.lanes)
    how = f"in {workers} processes" if workers else "in this process; data.workers makes it faster"
    say(f"counting {data.source}: read once to the end, {tokens.lanes} lanes, {how}")
    try:
        counts = _counted(tokens, data, folder, workers, say)
    except ConfigError:
        raise
    except Exception as error:  # parsers raise any type
        said = "; ".join([str(error), *getattr(error, "__notes__", ())])
        raise ConfigError.one(
            f"{data.source} cannot be read to its end: {said}",
            where="data.source",
            key="data.source",
        ) from error
    if not any(count > 1 if isinstance(count, int) else count.size for count in counts):
        raise no_samples()
    if not data.packing:
        sizes = {f"sizes-{lane}": np.asarray(count) for lane, count in enumerate(counts)}
        metadata = {"format": LANES_FORMAT, "fingerprint": tokens.fingerprint}
        replace_file(folder / SIZES_FILE, safetensors.numpy.save(sizes, metadata=metadata))
    numbers = [count if isinstance(count, int) else count.size for count in counts]
    _keep(tokens, data, folder, numbers)
    say(f"counted: {sum(numbers):,} {'tokens' if data.packing else 'documents'}")


def open_stream(
    data: DataConfig, folder: Path, context: int, seed: int, *, counted: bool
) -> tuple[StreamSource | OpenStreamSource, LaneOrder]:
    """Open the samples of a stream and their order; the caller closes the source.

    Args:
        folder: holds the tokenizer and the counts.
        counted: if true, counts are required and each rank reads its own lanes; otherwise one rank
            reads all lanes, and unknown ends are found while reading and then stored.

    Raises:
        ConfigError: the stream cannot be opened, or differs from the one that was counted.
    """
    tokens = _open_tokens(data, folder)
    stream = _cut(tokens, data, context)
    window = 1 if data.order == "sequential" else data.shuffle_window
    known = _known(tokens, data, folder, sizes=counted)
    if known is None and counted:
        raise ConfigError.one(
            f"the lanes of {data.source} were not counted, or it has changed since",
            where=str(folder / LANES_FILE),
            hint="count them first, or use data.strategy: dispatched, which needs no counts",
            key="data.strategy",
        )
    weights = _weights(known, folder, context) if known is not None and counted else []
    lengths: list[int | None] = [None] * tokens.lanes
    if known is not None and known.packing:
        lengths = [PackedLane(count, context).samples for count in known.counts]
    elif known is not None:
        lengths = list(known.counts)
    sample_bytes = (context + 1) * tokens.dtype.itemsize
    keep = max(2 * window, _KEPT_BYTES // (tokens.lanes * sample_bytes))
    ahead = max(1, _AHEAD_BYTES // sample_bytes)
    samples = LaneSamples(stream, _lanes(stream, data, folder, context, ahead), lengths, keep)
    if counted:
        return StreamSource(samples, weights), LaneOrder(
            [lane.samples for lane in weights], seed, window
        )

    def keep_counts(ends: Sequence[LaneEnd]) -> None:
        counts = [end.samples for end in ends]
        if data.packing:
            counts = [
                (end.samples - 1) * context + int(end.last_weight) + 1 if end.samples else 0
                for end in ends
            ]
        _keep(tokens, data, folder, counts)

    order = LaneOrder(lengths, seed, window)
    return OpenStreamSource(samples, order, keep_counts), order


def _open_tokens(data: DataConfig, folder: Path) -> TokenLanes:
    return open_lanes(data, load_tokenizer(folder))


def _cut(tokens: TokenLanes, data: DataConfig, context: int) -> PackedStream | DocumentStream:
    return PackedStream(tokens, context) if data.packing else DocumentStream(tokens, context)


def _lanes(
    stream: PackedStream | DocumentStream, data: DataConfig, folder: Path, context: int, ahead: int
) -> Lanes:
    number = min(data.workers, stream.lanes)
    if not number:
        return LaneReader(stream)
    workers = Workers(partial(_reader, data, folder, context), number)
    return HostedLanes(
        lambda lane, begin, count: workers.call(lane % number, "fetch", lane, begin, count),
        workers.close,
        ahead,
    )


def _reader(data: DataConfig, folder: Path, context: int) -> LaneReader:
    """Open the samples in a worker."""
    _do_without_torch()
    return LaneReader(_cut(_open_tokens(data, folder), data, context))


def _counter(data: DataConfig, folder: Path) -> LaneCounter:
    """Open the counter in a worker."""
    _do_without_torch()
    return LaneCounter(_open_tokens(data, folder), packing=data.packing)


def _do_without_torch() -> None:
    """Keep `datasets` from importing torch for its streams, which takes seconds and memory."""
    os.environ.setdefault("USE_TORCH", "0")


def _counted(
    tokens: TokenLanes, data: DataConfig, folder: Path, workers: int, say: Callable[[str], None]
) -> list[int | NDArray[np.uint32]]:
    began = time.monotonic()
    counts: list[int | NDArray[np.uint32]] = []

    def told(lane: int, count: int | NDArray[np.uint32]) -> None:
        counts.append(count)
        many = f"{count:,} tokens" if isinstance(count, int) else f"{count.size:,} documents"
        say(f"lane {lane}: {many}, after {time.monotonic() - began:.1f} s")

    if not workers:
        counter = LaneCounter(tokens, packing=data.packing)
        for lane in range(tokens.lanes):
            told(lane, counter.count(lane))
        return counts
    with Workers(partial(_counter, data, folder), workers) as hosts:
        coming = [hosts.call(lane % workers, "count", lane) for lane in range(tokens.lanes)]
        for lane, future in enumerate(coming):
            told(lane, future.result())
    return counts


def _keep(tokens: TokenLanes, data: DataConfig, folder: Path, counts: Sequence[int]) -> None:
    record = LanesRecord(LANES_FORMAT, tokens.fingerprint, data.packing, tuple(counts))
    content = msgspec.json.format(msgspec.json.encode(record), indent=2)
    replace_file(folder / LANES_FILE, content + b"\n")


def _known(
    tokens: TokenLanes, data: DataConfig, folder: Path, *, sizes: bool
) -> LanesRecord | None:
    """Return the stored counts of this stream; with `sizes`, require document sizes if unpacked.

    Raises ConfigError if the file is damaged.
    """
    file = folder / LANES_FILE
    try:
        record = msgspec.json.decode(read_regular(file, follow=True), type=LanesRecord)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError.one(f"cannot be read: {error.strerror}", where=str(file)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError.one(
            f"not a record of lanes: {error}", where=str(file), hint="delete it"
        ) from None
    same = record.fingerprint == tokens.fingerprint and record.packing == data.packing
    if not same or record.format != LANES_FORMAT or len(record.counts) != tokens.lanes:
        return None
    if sizes and not record.packing:
        try:
            with safetensors.safe_open(folder / SIZES_FILE, framework="numpy") as opened:
                found = (opened.metadata() or {}).get("fingerprint")
        except (OSError, safetensors.SafetensorError):
            return None
        return record if found == tokens.fingerprint else None
    return record


def _weights(known: LanesRecord, folder: Path, context: int) -> list[LaneWeights]:
    if known.packing:
        return [PackedLane(count, context) for count in known.counts]
    sizes = safetensors.numpy.load_file(folder / SIZES_FILE)
    return [DocumentLane(sizes[f"sizes-{lane}"], context) for lane in range(len(known.counts))]
