"""Dispatched loading: rank 0 reads for all ranks and sends each one its part of every step.

A message holds several steps. The wire format is a JSON header and flat arrays; nothing is unpickled.

    magic, 8 bytes | header's length, uint64 | header's xxh3-64, uint64 | header | arrays

The header is JSON: {"meta": …, "columns": {name: [type, shape] or [type, shape, samples] or
columns}}. The arrays follow in the same order, each at a multiple of 64 bytes; a ragged column
(the entry with `samples`) as its offsets and its values. Integers are little-endian.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from instar.data.columns import NUMBERS, Column, Columns, Ragged
from instar.data.loader import Block, MicroBatch, Reader, ReadRequest, StepBatch, StepKey
from instar.data.order import StepPlan
from instar.distributed.failure import PeerLost, RunFailed

Bytes = NDArray[np.uint8]

_MAGIC = b"INSTAR\x00\x01"
_FIXED = struct.Struct("<8sQQ")
_ALIGNMENT = 64


def encode_columns(columns: Columns, meta: Mapping[str, Any]) -> Bytes:
    """Encode columns and JSON metadata into one buffer; every array is copied once.

    Raises:
        ValueError: a column is not an array of numbers, or `meta` contains NaN or infinity.
    """
    arrays: list[NDArray[Any]] = []
    schema = _schema(columns, arrays)
    header = json.dumps({"meta": dict(meta), "columns": schema}, allow_nan=False).encode()
    at = _align(_FIXED.size + len(header))
    size = at + sum(_align(array.nbytes) for array in arrays)
    frame = np.empty(size, dtype=np.uint8)
    start = _FIXED.pack(_MAGIC, len(header), xxhash.xxh3_64_intdigest(header)) + header
    frame[:at] = np.frombuffer(start.ljust(at, b"\0"), dtype=np.uint8)
    for array in arrays:
        end = at + array.nbytes
        frame[at:end].view(array.dtype).reshape(array.shape)[...] = array
        at = _align(end)
        frame[end:at] = 0
    return frame


def decode_columns(frame: Any) -> tuple[dict[str, Any], dict[str, Column]]:
    """Decode a frame, given as any buffer, into metadata and columns; arrays are views into it.

    Damage within the values is not detected.

    Raises:
        ValueError: the frame is incomplete or not a frame.
    """
    data: Bytes = np.frombuffer(frame, dtype=np.uint8)
    if data.size < _FIXED.size:
        raise ValueError(f"a frame of {data.size} bytes lacks its beginning")
    magic, length, digest = _FIXED.unpack(data[: _FIXED.size].tobytes())
    header = data[_FIXED.size : _FIXED.size + length].tobytes()
    if magic != _MAGIC or len(header) < length or xxhash.xxh3_64_intdigest(header) != digest:
        raise ValueError(f"a frame of {data.size} bytes does not begin as frames do")
    content = json.loads(header)
    body = _Body(data, _align(_FIXED.size + length))
    columns = _columns(content["columns"], body)
    if body.at != data.size:
        raise ValueError(f"a frame of {data.size} bytes should have {body.at}")
    return content["meta"], columns


@dataclass
class _Body:
    """The arrays of a frame; the next one begins at byte `at`."""

    data: Bytes
    at: int

    def take(self, dtype: np.dtype[Any], shape: Sequence[int]) -> NDArray[Any]:
        end = self.at + dtype.itemsize * math.prod(shape)
        if end > self.data.size:
            raise ValueError(f"a frame of {self.data.size} bytes ends within its arrays")
        array = self.data[self.at : end].view(dtype).reshape(shape)
        self.at = _align(end)
        return array


def _columns(schema: Mapping[str, Any], body: _Body) -> dict[str, Column]:
    return {
        name: _columns(entry, body) if isinstance(entry, dict) else _column(entry, body)
        for name, entry in schema.items()
    }


def _column(entry: Sequence[Any], body: _Body) -> NDArray[Any] | Ragged:
    dtype, shape, *samples = entry
    if not samples:
        return body.take(np.dtype(dtype), shape)
    offsets = body.take(np.dtype(np.int64), [samples[0] + 1])
    values = body.take(np.dtype(dtype), shape)
    if offsets[0] != 0 or offsets[-1] != len(values) or (np.diff(offsets) < 0).any():
        raise ValueError("the offsets of a ragged column are damaged")
    return Ragged(values, offsets)


def _schema(columns: Columns, arrays: list[NDArray[Any]]) -> dict[str, Any]:
    """Return the JSON description of the columns and append their arrays to `arrays` in order."""
    return {
        name: _schema(column, arrays)
        if isinstance(column, Mapping)
        else _entry(name, column, arrays)
        for name, column in columns.items()
    }


def _entry(name: str, column: NDArray[Any] | Ragged, arrays: list[NDArray[Any]]) -> list[Any]:
    values = column.flat if isinstance(column, Ragged) else column
    if values.dtype.kind not in NUMBERS:
        raise ValueError(f"{name} is of type {values.dtype}, not of numbers")
    entry: list[Any] = [values.dtype.str, values.shape]
    if isinstance(column, Ragged):
        arrays.append(column.offsets - column.offsets[0])
        entry.append(len(column))
    arrays.append(values)
    return entry


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


_END = -1


class Transport(Protocol):
    """Sends bytes from rank 0 to every other rank, in order."""

    def send(self, label: Sequence[int], message: Bytes, to: int) -> None: ...

    def receive(self) -> tuple[Sequence[int], Bytes]: ...


class SourceFailed(RunFailed):
    """Rank 0 could not read the samples that this rank waits for; rank 0 reports the cause."""

    secondary = True


class StaleRequest(Exception):  # noqa: N818
    """A request for steps that rank 0 skipped because they are no longer needed."""


class BroadcastSender:
    """Reader of rank 0: reads the steps of all slices, keeps its own part and sends the others.

    Args:
        reader: reads all slices.
        slices_of_ranks: the slices of each rank.
        feed: an identifier shared by the prefetchers of all ranks and used by no other.
    """

    def __init__(
        self, reader: Reader, slices_of_ranks: Sequence[range], transport: Transport, feed: int
    ) -> None:
        self._reader, self._slices_of_ranks = reader, slices_of_ranks
        self._transport, self._feed = transport, feed

    def read(self, request: ReadRequest) -> Block:
        try:
            block = self._reader.read(request)
            parts = [_part(block, slices) for slices in self._slices_of_ranks]
            messages = [pack(part) for part in parts[1:]]
        except Exception as error:  # the others wait for an answer
            parts = [{request.first: error}] * len(self._slices_of_ranks)
            messages = [pack(part) for part in parts[1:]]
        for rank, message in enumerate(messages, 1):
            self._transport.send([self._feed, request.serial], message, to=rank)
        return parts[0]

    def close(self) -> None:
        """Tell the other ranks that nothing more is sent."""
        self._reader.close()
        for rank in range(1, len(self._slices_of_ranks)):
            with suppress(PeerLost):
                self._transport.send([self._feed, _END], np.empty(0, np.uint8), to=rank)


class BroadcastReceiver:
    """Reader of every other rank: receives what rank 0 sends.

    Requests have the same order on all ranks, but either side may skip outdated ones.
    """

    def __init__(self, transport: Transport, feed: int) -> None:
        self._transport, self._feed = transport, feed
        self._is_over = False
        self._message: tuple[int, Bytes] | None = None
        """The newest message, if it has not been requested yet."""

    def read(self, request: ReadRequest) -> Block:
        """Receive the steps of a request.

        Raises:
            StaleRequest: rank 0 skipped this request.
        """
        while self._message is None or self._message[0] < request.serial:
            self._next()
            if self._is_over:
                raise SourceFailed("rank 0 sends no more samples")
        serial, message = self._message
        if serial > request.serial:
            raise StaleRequest
        self._message = None
        return unpack(message)

    def close(self) -> None:
        """Receive the messages in flight, so that the next prefetcher starts with its own."""
        with suppress(PeerLost):
            while not self._is_over:
                self._next()

    def _next(self) -> None:
        (feed, serial), message = self._transport.receive()
        if feed == self._feed:
            self._is_over = serial == _END
            self._message = serial, message


def pack(block: Block) -> Bytes:
    """Serialize steps to bytes."""
    arrays: dict[str, Any] = {}
    steps: list[dict[str, Any]] = []
    for key, step in block.items():
        if isinstance(step, Exception):
            steps.append({"key": list(key), "error": _error_text(step)})
            continue
        micro_batches = []
        for micro in step.micro_batches:
            arrays[str(len(arrays))] = micro.arrays
            weights = None if micro.weights is None else micro.weights.tolist()
            micro_batches.append([micro.weight, micro.samples, micro.rank, micro.first, weights])
        plan = step.plan
        steps.append(
            {
                "key": list(key),
                "plan": dataclasses.astuple(plan),
                "micro_batches": micro_batches,
                "weight": step.weight,
                "passes": step.passes,
                "epoch_samples": step.epoch_samples,
            }
        )
    return encode_columns(arrays, {"steps": steps})


def unpack(message: Bytes) -> Block:
    """Deserialize packed steps; an error becomes a `SourceFailed`."""
    meta, arrays = decode_columns(message)
    columns = iter(arrays.values())
    return {StepKey(*step["key"]): _step(step, columns) for step in meta["steps"]}


def _step(step: Mapping[str, Any], columns: Any) -> StepBatch | Exception:
    if "error" in step:
        return SourceFailed(f"rank 0 could not read samples: {step['error']}")
    micro_batches = tuple(
        MicroBatch(
            next(columns),
            weight,
            samples,
            rank,
            first,
            None if weights is None else np.array(weights, dtype=np.float64),
        )
        for weight, samples, rank, first, weights in step["micro_batches"]
    )
    plan = StepPlan(*step["plan"])
    passes = tuple(step["passes"])
    return StepBatch(plan, micro_batches, step["weight"], passes, step["epoch_samples"])


def _part(block: Block, slices: range) -> Block:
    return {
        key: step if isinstance(step, Exception) else _cut_step(step, slices)
        for key, step in block.items()
    }


def _cut_step(step: StepBatch, slices: range) -> StepBatch:
    micro_batches = tuple(micro for micro in step.micro_batches if micro.rank in slices)
    return replace(step, micro_batches=micro_batches)


def _error_text(error: Exception) -> str:
    return "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
