"""Things for worker processes to open; importing this is cheap."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instar.data.columns import Columns, stack
from instar.data.order import Int64Array


class Numbers:
    """A source: sample i is made of i, and has i % `sizes` nodes."""

    def __init__(self, n: int, first: int = 0, sizes: int = 4) -> None:
        self.n, self.first, self.sizes = n, first, sizes
        self.fingerprint = f"numbers/{n}/{first}/{sizes}"

    def __len__(self) -> int:
        return self.n

    def sample(self, index: int, epoch: int = 0) -> dict[str, Any]:
        number = self.first + index
        nodes = np.arange(number % self.sizes * 2, dtype=np.float32).reshape(-1, 2) + number
        return {"number": number, "pair": [number, epoch], "graph": {"nodes": nodes}}

    def read(self, indices: Int64Array, epoch: int = 0) -> Columns:
        if indices.size and indices.max() >= self.n:
            error = IndexError(f"sample {indices.max()} of {self.n}")
            error.add_note("a note of the source")
            raise error
        return stack([self.sample(int(index), epoch) for index in indices])

    def weights(self, indices: Int64Array) -> float:
        return float(((indices + self.first) % self.sizes + 1).sum())


class Thing:
    """What a worker may be asked."""

    def echo(self, value: Any) -> Any:
        return value

    def process(self) -> int:
        return os.getpid()

    def has_imported(self, module: str) -> bool:
        return module in sys.modules

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def ignored_signals(self) -> list[bool]:
        numbers = signal.SIGINT, signal.SIGTERM
        signal_mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        return [
            signal.getsignal(number) == signal.SIG_IGN and number not in signal_mask
            for number in numbers
        ]

    def double(self, array: NDArray[Any]) -> NDArray[Any]:
        array *= 2
        return array

    def sleep_for_ever(self) -> None:
        threading.Event().wait()

    def leave(self, code: int) -> None:
        os._exit(code)

    def fail(self, error: Exception) -> None:
        error.add_note("a note of the thing")
        raise error

    def fail_unspeakably(self) -> None:
        raise UnspeakableError(threading.Lock())

    def lock(self) -> object:
        return threading.Lock()


class UnspeakableError(Exception):
    """Holds what cannot be pickled."""


def open_thing() -> Thing:
    return Thing()


def open_nothing() -> Thing:
    raise FileNotFoundError("there is nothing to open")


def hold(workers: int) -> None:
    """Have workers, one of them busy, say their process ids, and wait."""
    from instar.processes.pool import Workers

    pool = Workers(open_thing, workers)
    pool.call(0, "sleep_for_ever")
    print(*pool.processes, flush=True)
    threading.Event().wait()
