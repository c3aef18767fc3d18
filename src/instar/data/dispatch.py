"""Dispatched: rank 0 reads for all and sends each rank its part, many steps in one parcel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from instar.data.frames import decode, encode
from instar.data.plan import StepPlan
from instar.data.reader import Block, Key, MicroBatch, Reader, Request, StepBatch
from instar.distributed.failure import PeerLost, RunFailed

Bytes = NDArray[np.uint8]

_END = -1


class Carrier(Protocol):
    """Carries bytes from rank 0 to each other rank, in the order in which they are sent."""

    def send(self, label: Sequence[int], parcel: Bytes, to: int) -> None: ...

    def receive(self) -> tuple[Sequence[int], Bytes]: ...


class SourceFailed(RunFailed):
    """Rank 0 could not read the samples that this rank waits for; its own error says why."""

    secondary = True


class Stale(Exception):  # noqa: N818
    """Nobody waits for these steps any more, and rank 0 has not read them."""


class Sender:
    """Rank 0's reader: reads the steps of all slices, keeps its own part, sends the others.

    Args:
        reader: reads all slices.
        own: the slices of each rank.
        feed: a number that the feeds of all ranks share, and no other feed has.
    """

    def __init__(self, reader: Reader, own: Sequence[range], carrier: Carrier, feed: int) -> None:
        self._reader, self._own = reader, own
        self._carrier, self._feed = carrier, feed

    def read(self, request: Request) -> Block:
        try:
            block = self._reader.read(request)
            parts = [_part(block, own) for own in self._own]
            parcels = [pack(part) for part in parts[1:]]
        except Exception as error:  # the others wait for an answer
            parts = [{request.first: error}] * len(self._own)
            parcels = [pack(part) for part in parts[1:]]
        for rank, parcel in enumerate(parcels, 1):
            self._carrier.send([self._feed, request.serial], parcel, to=rank)
        return parts[0]

    def close(self) -> None:
        """Say that nothing more is sent."""
        self._reader.close()
        for rank in range(1, len(self._own)):
            with suppress(PeerLost):
                self._carrier.send([self._feed, _END], np.empty(0, np.uint8), to=rank)


class Receiver:
    """Any other rank's reader: takes what rank 0 sends.

    Requests come in the same order on all ranks, but either side may pass over one that nobody
    waits for any more.
    """

    def __init__(self, carrier: Carrier, feed: int) -> None:
        self._carrier, self._feed = carrier, feed
        self._ended = False
        self._parcel: tuple[int, Bytes] | None = None
        """the newest that has come and was not asked for yet"""

    def read(self, request: Request) -> Block:
        """
        Raises:
            Stale: rank 0 passed over this request.
        """
        while self._parcel is None or self._parcel[0] < request.serial:
            self._next()
            if self._ended:
                raise SourceFailed("rank 0 sends no more samples")
        serial, parcel = self._parcel
        if serial > request.serial:
            raise Stale
        self._parcel = None
        return unpack(parcel)

    def close(self) -> None:
        """Take what is still under way, so that the next feed begins with its own."""
        with suppress(PeerLost):
            while not self._ended:
                self._next()

    def _next(self) -> None:
        (feed, serial), parcel = self._carrier.receive()
        if feed == self._feed:
            self._ended = serial == _END
            self._parcel = serial, parcel


def pack(block: Block) -> Bytes:
    """Steps as bytes."""
    arrays: dict[str, Any] = {}
    steps: list[dict[str, Any]] = []
    for key, step in block.items():
        if isinstance(step, Exception):
            steps.append({"key": list(key), "error": _told(step)})
            continue
        micro_batches = []
        for micro in step.micro_batches:
            arrays[str(len(arrays))] = micro.arrays
            micro_batches.append([micro.weight, micro.samples, micro.rank, micro.first])
        plan = step.plan
        steps.append(
            {
                "key": list(key),
                "plan": [plan.cursor, plan.epoch, plan.start, plan.count],
                "micro_batches": micro_batches,
                "weight": step.weight,
                "epoch_samples": step.epoch_samples,
            }
        )
    return encode(arrays, {"steps": steps})


def unpack(parcel: Bytes) -> Block:
    """The steps that were packed; an error comes as `SourceFailed`."""
    meta, arrays = decode(parcel)
    columns = iter(arrays.values())
    return {Key(*step["key"]): _step(step, columns) for step in meta["steps"]}


def _step(step: Mapping[str, Any], columns: Any) -> StepBatch | Exception:
    if "error" in step:
        return SourceFailed(f"rank 0 could not read samples: {step['error']}")
    micro_batches = tuple(
        MicroBatch(next(columns), weight, samples, rank, first)
        for weight, samples, rank, first in step["micro_batches"]
    )
    plan = StepPlan(*step["plan"])
    return StepBatch(plan, micro_batches, step["weight"], step["epoch_samples"])


def _part(block: Block, own: range) -> Block:
    return {
        key: step if isinstance(step, Exception) else _own(step, own) for key, step in block.items()
    }


def _own(step: StepBatch, own: range) -> StepBatch:
    mine = tuple(micro for micro in step.micro_batches if micro.rank in own)
    return StepBatch(step.plan, mine, step.weight, step.epoch_samples)


def _told(error: Exception) -> str:
    return "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
