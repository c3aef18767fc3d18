"""The roll call: all ranks of one start find each other, and agree on a name for it.

Workers that torchrun restarts meet in the same store as their dead predecessors, whose addresses
are still in it. A restart count does not tell the rounds apart, because agents on different nodes
count differently. So rank 0 offers a fresh name together with the sign of every rank it saw; a
rank answers only an offer that carries its own sign of this start; and when all have answered,
the name is good and its keys are empty.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from typing import Protocol

from instar.distributed.failure import RankMissing

_OFFER = "instar/offer"
_OVER = "instar/over"


class Store(Protocol):
    """What is needed of a torch.distributed store."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...


def roll_call(store: Store, rank: int, size: int, timeout_s: float) -> str:
    """A name of this round, the same on all ranks and new.

    Raises RankMissing, on all ranks that came, naming those who did not within `timeout_s` seconds
    of the first.
    """
    sign = uuid.uuid4().hex
    store.set(_here(rank), sign)
    deadline = time.monotonic() + timeout_s
    came = _lead(store, size) if rank == 0 else _follow(store, rank, sign)
    for _ in _until(deadline):
        name = next(came)
        if name:
            return name
        _hear(store, sign)
    absent = _absent(store, rank, size, sign)
    raise _post(store, absent, size, timeout_s)


def _lead(store: Store, size: int) -> Iterator[str]:
    """Looks once each time it is asked; the name of the round when all have come, before it ""."""
    heres = [_here(rank) for rank in range(size)]
    seen: list[str] = []
    name = ""
    while True:
        if store.check(heres):
            signs = [sign.decode() for sign in store.multi_get(heres)]
            if signs != seen:
                seen, name = signs, uuid.uuid4().hex
                store.set(_OFFER, json.dumps({"name": name, "signs": signs}))
            if store.check([_answer(name, rank) for rank in range(1, size)]):
                store.set(_go(name), "")
                yield name
        yield ""


def _follow(store: Store, rank: int, sign: str) -> Iterator[str]:
    while True:
        name = _offered(store, rank, sign)
        if name:
            store.set(_answer(name, rank), "")
            if store.check([_go(name)]):
                yield name
        yield ""


def _offered(store: Store, rank: int, sign: str) -> str:
    """The name that rank 0 offers to this start of this rank; "" if it offers none."""
    if not store.check([_OFFER]):
        return ""
    offer = json.loads(store.get(_OFFER))
    mine = rank < len(offer["signs"]) and offer["signs"][rank] == sign
    return str(offer["name"]) if mine else ""


def _absent(store: Store, rank: int, size: int, sign: str) -> list[int]:
    """Who has not come, as far as the store tells this rank."""
    name = _offered(store, rank, sign)
    others = [other for other in range(1, size) if other != rank]
    if name:
        absent = [other for other in others if not store.check([_answer(name, other)])]
    else:
        absent = [other for other in range(size) if not store.check([_here(other)])]
    # Without an offer, or with one that all have answered, it is rank 0 that does nothing.
    return absent or [0]


def _post(store: Store, absent: list[int], size: int, timeout_s: float) -> RankMissing:
    """Tell the others who came that it is over, so that all end with one error."""
    ranks = ", ".join(map(str, absent))
    message = f"rank {ranks} of {size} did not come to the start within {timeout_s:g} s"
    heres = [_here(rank) for rank in range(size) if store.check([_here(rank)])]
    signs = [sign.decode() for sign in store.multi_get(heres)]
    store.set(_OVER, json.dumps({"signs": signs, "message": message, "ranks": absent}))
    return RankMissing(message, absent)


def _hear(store: Store, sign: str) -> None:
    """Raise what another rank has posted to this start."""
    if store.check([_OVER]):
        over = json.loads(store.get(_OVER))
        if sign in over["signs"]:
            raise RankMissing(over["message"], over["ranks"])


def _until(deadline: float) -> Iterator[None]:
    pause_s = 0.005
    while True:
        yield
        if time.monotonic() > deadline:
            return
        time.sleep(pause_s)
        pause_s = min(0.1, 1.2 * pause_s)


def _here(rank: int) -> str:
    return f"instar/here/{rank}"


def _answer(name: str, rank: int) -> str:
    return f"instar/answer/{name}/{rank}"


def _go(name: str) -> str:
    return f"instar/go/{name}"
