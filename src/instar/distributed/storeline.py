"""The way to the store for one rank's heartbeats, in a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

from instar.distributed.heartbeat import Heartbeat, Verdict

T = TypeVar("T")

_VERDICT = "verdict"


class Store(Protocol):
    """What is needed of a torch.distributed store, for one thread alone."""

    def set(self, key: str, value: str, /) -> None: ...
    def check(self, keys: list[str], /) -> bool: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def compare_set(self, key: str, expected_value: str, desired_value: str, /) -> bytes: ...


@dataclass(frozen=True)
class News:
    """The other ranks' newest heartbeats, as far as there are any, and a verdict if there is one."""

    beats: dict[int, Heartbeat]
    verdict: Verdict | None


class StoreLine:
    """Talks with the store in a thread of its own: a store that is stopped never answers."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank = store, rank
        self._absent = [other for other in range(size) if other != rank]
        self._present: list[int] = []
        self._begun = False
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True, name="heartbeat").start()

    def exchange(self, mine: Heartbeat) -> Future[News]:
        return self._do(lambda: self._exchange(mine))

    def decide(self, verdict: Verdict) -> Future[Verdict]:
        return self._do(
            lambda: Verdict.decode(self._store.compare_set(_VERDICT, "", verdict.encode()))
        )

    def close(self) -> None:
        self._tasks.put(None)

    def _exchange(self, mine: Heartbeat) -> News:
        if not self._begun:
            # An absent key would make reading it wait.
            self._store.compare_set(_VERDICT, "", "")
            self._begun = True
        self._store.set(_key(self._rank), mine.encode())
        for rank in [rank for rank in self._absent if self._store.check([_key(rank)])]:
            self._absent.remove(rank)
            self._present.append(rank)
        verdict, *beats = self._store.multi_get([_VERDICT, *map(_key, self._present)])
        return News(
            {rank: Heartbeat.decode(b) for rank, b in zip(self._present, beats, strict=True)},
            Verdict.decode(verdict) if verdict else None,
        )

    def _do(self, task: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def answer() -> None:
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)

        self._tasks.put(answer)
        return future

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()


def _key(rank: int) -> str:
    return f"beat/{rank}"
