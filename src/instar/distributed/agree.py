"""Control messages between ranks: rank 0 decides, all ranks act.

Messages are JSON bytes or float64 numbers in CPU tensors; nothing is unpickled. Every exchange is a
collective, which all ranks must enter in the same order. A failure of one rank is raised on all
(`raise_on_all_ranks`); a lost rank raises `PeerLost`.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias, cast

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from instar.config.errors import InstarError
from instar.distributed.failure import (
    PeerError,
    PeerLost,
    RunFailed,
    exception_text,
    exit_code_of,
    is_secondary,
    may_be_secondary,
    transport_text,
)
from instar.distributed.world import World, with_own_group

Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None

# Messages longer than a frame take a second exchange.
_FRAME_BYTES = 1024
_LENGTH = struct.Struct("<q")
_ROOM = _FRAME_BYTES - _LENGTH.size
_PART_BYTES = 4 << 20


def agree(world: World, value: Json) -> Json:
    """Broadcast rank 0's `value` to every rank, as decoded from JSON (tuples become lists).

    Raises:
        RunFailed: on every rank, if rank 0's value is not JSON (NaN, infinity, keys that are not
            strings, other types).
    """
    content = _encode(value) if world.is_main else b""
    return _decode(_broadcast(world, content))


def gather(world: World, value: Json) -> list[Json]:
    """All-gather every rank's `value`, in the order of ranks; raises as `agree` does."""
    return [_decode(data) for data in _gather(world, _encode(value))]


def gather_parts(world: World, part: bytes) -> list[bytes]:
    """Gather every rank's `part`, of any size, on rank 0, in the order of ranks; [] on other ranks."""
    if world.size == 1:
        return [part]
    sizes = [int(str(size)) for size in gather(world, len(part))]
    parts = [bytearray() for _ in sizes]
    for begin in range(0, max(sizes), _PART_BYTES):
        width = min(_PART_BYTES, max(sizes) - begin)
        chunk = _bytes(part[begin : begin + width].ljust(width, b"\0"))
        rows = list(torch.empty(world.size, width, dtype=torch.uint8).unbind())
        with collective(world, "gathering data on rank 0"):
            dist.gather(chunk, rows if world.is_main else None, 0, group=world.group)
        if world.is_main:
            for buffer, row in zip(parts, rows, strict=True):
                buffer += _raw(row)
    if not world.is_main:
        return []
    return [bytes(part[:size]) for part, size in zip(parts, sizes, strict=True)]


def reduce_sums(world: World, sums: Mapping[str, float]) -> dict[str, float]:
    """Sum each entry over all ranks, rounded once, so that the order of ranks does not matter.

    Raises:
        RunFailed: on every rank, if the ranks' keys differ.
    """
    keys = sorted(sums)
    signature = xxhash.xxh3_64_digest("\0".join(keys).encode())
    values = struct.pack(f"<{len(keys)}d", *(sums[key] for key in keys))
    answers = _gather(world, signature + values)
    if any(answer[:8] != signature for answer in answers):
        everyones = gather(world, keys)
        raise RunFailed(f"ranks reduce different sums: {_differences(everyones)}")
    columns = zip(*(struct.unpack(f"<{len(keys)}d", answer[8:]) for answer in answers), strict=True)
    return {key: _sum(column) for key, column in zip(keys, columns, strict=True)}


@contextmanager
def raise_on_all_ranks(world: World, what: str) -> Iterator[None]:
    """Context manager for code that may fail on some ranks: raises on all ranks, or on none.

    `what` completes "failed while …". If some ranks failed, every rank raises PeerError naming
    the first of them; the failing rank's own exception is its cause. If every rank failed alike
    there is no peer to name, and each raises its own exception; so does a single process.
    """
    own_error: BaseException | None = None
    try:
        yield
    except BaseException as error:
        own_error = error
    try:
        faults = gather(world, None if own_error is None else _fault(own_error))
    except PeerLost:
        if own_error is not None:
            raise own_error from None
        raise
    fault_of = {rank: cast(dict[str, Json], fault) for rank, fault in enumerate(faults) if fault}
    if not fault_of:
        return
    is_same = len({fault["message"] for fault in fault_of.values()}) == 1
    if own_error is not None and is_same and len(fault_of) == world.size:
        raise own_error
    # a rank that failed only because another one did is not blamed
    fault_of = {
        rank: fault for rank, fault in fault_of.items() if not fault["secondary"]
    } or fault_of
    first_rank = min(fault_of)
    fault = fault_of[first_rank]
    ranks = f"rank{'s' if len(fault_of) > 1 else ''} {', '.join(map(str, fault_of))}"
    of = f"rank {first_rank}: " if len(fault_of) > 1 else ""
    raise PeerError(
        f"{ranks} failed while {what}: {of}{fault['message']}",
        what=what,
        rank=first_rank,
        exit_code=cast(int, fault["exit_code"]),
        secondary=own_error is None or is_secondary(own_error),
    ) from own_error


@contextmanager
def collective(world: World, what: str, number: int | None = None) -> Iterator[None]:
    """Context manager for a collective: the transport's error becomes PeerLost with rank and `what`.

    `number`: of the collective that this rank started before and now waits for.
    """
    world.position.arrive(what, number)
    try:
        yield
    except RuntimeError as error:
        if may_be_secondary(error):  # the watchdog knows whether a rank is lost
            raise
        cause = transport_text(error)
        raise PeerLost(f"rank {world.rank} lost another rank while {what}: {cause}") from error
    else:
        world.position.leave()


class Flag(IntEnum):
    """What a rank reports to all others."""

    NONE = 0
    STOP = 1
    ERROR = 2


@dataclass(frozen=True)
class ReducedFlags:
    """The number of ranks that asked to stop, the number that failed, and sums over all ranks."""

    stop: int
    errors: int
    sums: tuple[float, ...]


class PendingFlags:
    """The handle of an asynchronous flag reduce."""

    def __init__(self, world: World, rows: Sequence[Tensor], work: dist.Work | None) -> None:
        """
        Args:
            rows: flags and sums of each rank, float64 [n], once `work` is done.
        """
        self._world = world
        self._rows = rows
        self._work = work
        self._number = world.position.n_arrived

    def wait(self) -> ReducedFlags:
        """Return the result, also if called again. Raises PeerLost if a rank is lost."""
        if self._work is not None:
            with collective(self._world, "waiting for the other ranks' flags", self._number):
                self._work.wait()
            self._work = None
        stop, errors, *sums = map(_sum, zip(*(row.tolist() for row in self._rows), strict=True))
        return ReducedFlags(int(stop), int(errors), tuple(sums))


class FlagReducer:
    """Asynchronous reduction of stop and error flags and of sums, once per step of a run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._width: int | None = None

    def send(self, request: int = Flag.NONE, sums: Sequence[float] = ()) -> PendingFlags:
        """Start the reduction of `request` and `sums` (float64) and return without waiting.

        All ranks call it in the same order relative to their other collectives. Raises ValueError
        if the number of sums differs from that of the first call.
        """
        if self._width is None:
            self._width = len(sums)
        if len(sums) != self._width:
            raise ValueError(f"expected {self._width} sums as in the first call, got {len(sums)}")
        flag = Flag(request)
        flags = torch.tensor([flag is Flag.STOP, flag is Flag.ERROR, *sums], dtype=torch.float64)
        if self._world.size == 1:
            return PendingFlags(self._world, [flags], None)
        # one tensor each: rows of a matrix take four times as many operators
        rows = [torch.empty(len(flags), dtype=flags.dtype) for _ in range(self._world.size)]
        with collective(self._world, "sending its flags"):
            # not an all-reduce, whose ring takes twice as many messages, one after the other
            work = dist.all_gather(rows, flags, group=self._world.group, async_op=True)
        return PendingFlags(self._world, rows, work)


def _fault(error: BaseException) -> dict[str, Json]:
    text = exception_text(error)[:4000]
    if not isinstance(error, InstarError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return {
        "message": text,
        "exit_code": exit_code_of(error) or RunFailed.exit_code,
        "secondary": is_secondary(error),
    }


def _encode(value: Json) -> bytes:
    """Encode as "=" and JSON, or as "!" and an error message, which all ranks then raise."""
    problem = _not_json(value, "value")
    if problem:
        return b"!" + problem.encode()
    return b"=" + json.dumps(value, separators=(",", ":")).encode()


def _decode(data: bytes) -> Json:
    if data[:1] == b"!":
        raise RunFailed(f"ranks can only agree on JSON: {data[1:].decode()}")
    return cast(Json, json.loads(data[1:]))


def _not_json(value: object, path: str) -> str:
    """Return what in `value` JSON cannot represent, or an empty string."""
    if value is None or isinstance(value, bool | int | str):
        return ""
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"{path} is {value}, which JSON does not have"
    if isinstance(value, list | tuple):
        problems = (_not_json(item, f"{path}[{i}]") for i, item in enumerate(value))
        return next(filter(None, problems), "")
    if isinstance(value, dict):
        wrong = next((key for key in value if not isinstance(key, str)), None)
        if wrong is not None:
            return f"{path} has the key {wrong!r}, which is not a string"
        problems = (_not_json(item, f"{path}.{key}") for key, item in value.items())
        return next(filter(None, problems), "")
    return f"{path} is of type {type(value).__name__}"


def _broadcast(world: World, data: bytes) -> bytes:
    if world.size == 1:
        return data
    frame = _frame(data)
    with collective(world, "receiving a decision of rank 0"):
        dist.broadcast(frame, 0, group=world.group)
        length = _length(frame)
        if length <= _ROOM:
            return _body(frame, length)
        payload = _bytes(data) if world.is_main else torch.empty(length, dtype=torch.uint8)
        dist.broadcast(payload, 0, group=world.group)
    return _raw(payload)


def _gather(world: World, data: bytes) -> list[bytes]:
    if world.size == 1:
        return [data]
    frames = list(torch.empty(world.size, _FRAME_BYTES, dtype=torch.uint8).unbind())
    with collective(world, "gathering answers"):
        dist.all_gather(frames, _frame(data), group=world.group)
        lengths = [_length(frame) for frame in frames]
        longest = max(lengths)
        if longest <= _ROOM:
            return [_body(frame, n) for frame, n in zip(frames, lengths, strict=True)]
        buffers = list(torch.empty(world.size, longest, dtype=torch.uint8).unbind())
        dist.all_gather(buffers, _bytes(data.ljust(longest, b"\0")), group=world.group)
    return [_raw(buffer[:n]) for buffer, n in zip(buffers, lengths, strict=True)]


def _frame(data: bytes) -> Tensor:
    return _bytes((_LENGTH.pack(len(data)) + data[:_ROOM]).ljust(_FRAME_BYTES, b"\0"))


def _length(frame: Tensor) -> int:
    return cast(int, _LENGTH.unpack(_raw(frame[: _LENGTH.size]))[0])


def _body(frame: Tensor, length: int) -> bytes:
    return _raw(frame[_LENGTH.size : _LENGTH.size + length])


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _raw(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _sum(values: Sequence[float]) -> float:
    # fsum refuses infinities of both signs and overflow; plain addition gives NaN and infinity.
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


def _differences(everyones: Sequence[Json]) -> str:
    sets = [set(cast(list[str], keys)) for keys in everyones]
    shared = set.intersection(*sets)
    return "; ".join(
        f"rank {rank} has {', '.join(sorted(keys - shared)) or 'no further keys'}"
        for rank, keys in enumerate(sets)
    )


class P2PChannel:
    """Sends bytes from rank 0 to one other rank at a time, over its own process group.

    Construction is a collective. Only one thread per rank may use it; `send` blocks until the
    other rank receives.
    """

    def __init__(self, world: World) -> None:
        self._world = with_own_group(world)

    def send(self, label: Sequence[int], payload: NDArray[np.uint8], to: int) -> None:
        """Send two numbers and any bytes.

        Raises:
            PeerLost: rank `to` is gone.
        """
        head = torch.tensor([*label, payload.size], dtype=torch.int64)
        try:
            dist.send(head, to, group=self._world.group)
            if payload.size:
                dist.send(torch.from_numpy(payload), to, group=self._world.group)
        except RuntimeError as error:
            raise PeerLost(f"rank 0 lost rank {to} while sending samples") from error

    def receive(self) -> tuple[list[int], NDArray[np.uint8]]:
        """Wait for the next message and return its two numbers and its bytes, owned by the caller.

        Raises:
            PeerLost: rank 0 is gone.
        """
        head = torch.zeros(3, dtype=torch.int64)
        try:
            dist.recv(head, 0, group=self._world.group)
            *label, size = head.tolist()
            payload = torch.empty(size, dtype=torch.uint8)
            if size:
                dist.recv(payload, 0, group=self._world.group)
        except RuntimeError as error:
            rank = self._world.rank
            raise PeerLost(f"rank {rank} lost rank 0 while receiving samples") from error
        return label, payload.numpy()
