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

from instar.distributed.failure import RunFailed


class Store(Protocol):
    """What is needed of a torch.distributed store."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...


def roll_call(store: Store, rank: int, size: int, timeout_s: float) -> str:
    """A name of this round, the same on all ranks and new; raises RunFailed naming who is missing."""
    sign = uuid.uuid4().hex
    store.set(_here(rank), sign)
    deadline = time.monotonic() + timeout_s
    return _lead(store, size, deadline) if rank == 0 else _follow(store, rank, sign, deadline)


def _lead(store: Store, size: int, deadline: float) -> str:
    heres = [_here(rank) for rank in range(size)]
    seen: list[str] = []
    name = ""
    for _ in _until(deadline):
        if store.check(heres):
            signs = [sign.decode() for sign in store.multi_get(heres)]
            if signs != seen:
                seen, name = signs, uuid.uuid4().hex
                store.set("instar/offer", json.dumps({"name": name, "signs": signs}))
            if store.check([_answer(name, rank) for rank in range(1, size)]):
                store.set(_go(name), "")
                return name
    missing = [
        str(rank)
        for rank in range(1, size)
        if not store.check([_answer(name, rank) if name else _here(rank)])
    ]
    raise RunFailed(f"rank {', '.join(missing)} of {size} did not come to the start in time")


def _follow(store: Store, rank: int, sign: str, deadline: float) -> str:
    for _ in _until(deadline):
        if store.check(["instar/offer"]):
            offer = json.loads(store.get("instar/offer"))
            if rank < len(offer["signs"]) and offer["signs"][rank] == sign:
                name: str = offer["name"]
                store.set(_answer(name, rank), "")
                if store.check([_go(name)]):
                    return name
    raise RunFailed(f"rank {rank} came to the start, but not all others did in time")


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
