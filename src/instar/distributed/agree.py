"""One decides, all act: the only road on which ranks exchange anything but tensors of training.

What travels is JSON bytes or float64 numbers in CPU tensors; nothing is ever unpickled. Every
exchange is a collective: all ranks must come to it, in the same order. A rank that fails on the
way says so (`together`), and a rank that is gone is noticed (`PeerLost`).
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias, cast

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from instar.config.errors import InstarError
from instar.distributed.failure import (
    PeerError,
    PeerLost,
    RunFailed,
    exit_code_of,
    is_secondary,
    told,
)
from instar.distributed.world import World

Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None

# What fits into one frame takes one exchange; anything longer a second one.
_FRAME_BYTES = 1024
_LENGTH = struct.Struct("<q")
_ROOM = _FRAME_BYTES - _LENGTH.size


def agree(world: World, value: Json) -> Json:
    """Rank 0's `value` on every rank, as JSON gives it back (tuples become lists).

    Raises RunFailed on every rank if rank 0's value is not JSON: NaN and infinity, keys that are
    not strings, other types.
    """
    sent = _encoded(value) if world.is_main else b""
    return _decoded(_broadcast(world, sent))


def gather(world: World, value: Json) -> list[Json]:
    """Every rank's `value` on every rank, in the order of ranks; raises as `agree` does."""
    return [_decoded(data) for data in _gather(world, _encoded(value))]


def reduce_sums(world: World, sums: Mapping[str, float]) -> dict[str, float]:
    """The sum over all ranks of each entry, rounded once: the order of ranks does not matter.

    Raises RunFailed on every rank if the ranks' keys differ.
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
def together(world: World, what: str) -> Iterator[None]:
    """Around anything one rank may fail in alone: all fail, or none.

    `what` completes "failed while …". If some ranks failed, every rank raises PeerError naming
    the first of them; the failing rank's own exception is its cause. If every rank failed alike
    there is no peer to name, and each raises its own exception; so does a single process.
    """
    mine: BaseException | None = None
    try:
        yield
    except BaseException as error:
        mine = error
    try:
        faults = gather(world, None if mine is None else _fault(mine))
    except PeerLost:
        if mine is not None:
            raise mine from None
        raise
    failed = {rank: cast(dict[str, Json], fault) for rank, fault in enumerate(faults) if fault}
    if not failed:
        return
    alike = len({fault["message"] for fault in failed.values()}) == 1
    if mine is not None and alike and len(failed) == world.size:
        raise mine
    # whoever failed only because another did is not named beside it
    failed = {rank: fault for rank, fault in failed.items() if not fault["secondary"]} or failed
    blamed = min(failed)
    fault = failed[blamed]
    ranks = f"rank{'s' if len(failed) > 1 else ''} {', '.join(map(str, failed))}"
    of = f"rank {blamed}: " if len(failed) > 1 else ""
    raise PeerError(
        f"{ranks} failed while {what}: {of}{fault['message']}",
        what=what,
        rank=blamed,
        exit_code=cast(int, fault["exit_code"]),
        secondary=mine is None or is_secondary(mine),
    ) from mine


@contextmanager
def meeting(world: World, what: str, number: int | None = None) -> Iterator[None]:
    """Around a collective: the transport's error becomes PeerLost with the rank and `what`.

    `number`: of the meeting this rank came to before, and waits for the end of.
    """
    world.position.arrive(what, number)
    try:
        yield
    except RuntimeError as error:
        # Gloo begins with the place in its source and ends with advice and an emoji.
        cause = re.sub(r"^\[[^\]]*\]\s*|\. This is typically.*", "", str(error), flags=re.DOTALL)
        raise PeerLost(f"rank {world.rank} lost another rank while {what}: {cause}") from error
    else:
        world.position.go_on()


class Request(IntEnum):
    """What a rank asks of all."""

    NONE = 0
    STOP = 1
    ERROR = 2


@dataclass(frozen=True)
class PulseResult:
    """How many ranks asked to stop, how many failed, and the sums over all ranks."""

    stop: int
    errors: int
    sums: tuple[float, ...]


class Beat:
    """One pulse under way."""

    def __init__(self, world: World, vector: Tensor, work: dist.Work | None) -> None:
        self._world = world
        self._vector = vector
        self._work = work
        self._number = world.position.arrived

    def wait(self) -> PulseResult:
        """What all ranks sent; may be asked again. Raises PeerLost if one of them is gone."""
        if self._work is not None:
            with meeting(self._world, "waiting for the pulse", self._number):
                self._work.wait()
            self._work = None
        stop, errors, *sums = self._vector.tolist()
        return PulseResult(int(stop), int(errors), tuple(sums))


class Pulse:
    """Posts the beats of one run; with one rank a beat is at once its own answer."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._width: int | None = None

    def send(self, request: int = Request.NONE, sums: Sequence[float] = ()) -> Beat:
        """Post `request` and `sums` (float64, as many at every beat) and go on without waiting.

        All ranks send in the same order relative to their other exchanges. Raises ValueError if
        the number of sums changes, which would leave the ranks adding different things.
        """
        if self._width is None:
            self._width = len(sums)
        if len(sums) != self._width:
            raise ValueError(f"a pulse of {self._width} sums cannot carry {len(sums)}")
        asked = Request(request)
        vector = torch.tensor(
            [asked is Request.STOP, asked is Request.ERROR, *sums], dtype=torch.float64
        )
        if self._world.size == 1:
            return Beat(self._world, vector, None)
        with meeting(self._world, "sending the pulse"):
            work = dist.all_reduce(vector, group=self._world.group, async_op=True)
        return Beat(self._world, vector, work)


def _fault(error: BaseException) -> dict[str, Json]:
    text = told(error)[:4000]
    if not isinstance(error, InstarError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return {
        "message": text,
        "exit_code": exit_code_of(error) or RunFailed.exit_code,
        "secondary": is_secondary(error),
    }


def _encoded(value: Json) -> bytes:
    """JSON after "=", or what is wrong with the value after "!", which all ranks then raise."""
    problem = _not_json(value, "value")
    if problem:
        return b"!" + problem.encode()
    return b"=" + json.dumps(value, separators=(",", ":")).encode()


def _decoded(data: bytes) -> Json:
    if data[:1] == b"!":
        raise RunFailed(f"ranks can only agree on JSON: {data[1:].decode()}")
    return cast(Json, json.loads(data[1:]))


def _not_json(value: object, path: str) -> str:
    """What in `value` JSON cannot carry, or an empty string."""
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
    with meeting(world, "hearing a decision"):
        dist.broadcast(frame, 0, group=world.group)
        length = _length(frame)
        if length <= _ROOM:
            return _body(frame, length)
        rest = _bytes(data) if world.is_main else torch.empty(length, dtype=torch.uint8)
        dist.broadcast(rest, 0, group=world.group)
    return _raw(rest)


def _gather(world: World, data: bytes) -> list[bytes]:
    if world.size == 1:
        return [data]
    frames = list(torch.empty(world.size, _FRAME_BYTES, dtype=torch.uint8).unbind())
    with meeting(world, "gathering answers"):
        dist.all_gather(frames, _frame(data), group=world.group)
        lengths = [_length(frame) for frame in frames]
        longest = max(lengths)
        if longest <= _ROOM:
            return [_body(frame, n) for frame, n in zip(frames, lengths, strict=True)]
        wholes = list(torch.empty(world.size, longest, dtype=torch.uint8).unbind())
        dist.all_gather(wholes, _bytes(data.ljust(longest, b"\0")), group=world.group)
    return [_raw(whole[:n]) for whole, n in zip(wholes, lengths, strict=True)]


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
        f"rank {rank} has {', '.join(sorted(keys - shared)) or 'no others'}"
        for rank, keys in enumerate(sets)
    )
