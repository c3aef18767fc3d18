"""Brings a rank its slice of each step, read ahead of time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Self

from instar.data.reader import Block, Key, Reader, Request, StepBatch

_LONGEST_READ_S = 0.2
_GLANCE_S = 0.05


class GaveUp(Exception):  # noqa: N818
    """The samples had not come when waiting for them was no longer wanted."""


@dataclass(frozen=True, eq=False)
class _Job:
    request: Request
    block: Future[Block] = field(default_factory=Future)


class Feed:
    """Takes a rank's steps from a reader, which works in a thread of its own.

    With prefetch, the next block of steps is read while this one's are consumed, on the guess that
    the cursor and the sizes go on as they are. A guess that fails is dropped: what was read ahead
    was never consumed, and the cursor stays the caller's. What is asked of the reader, and in which
    order, follows from the steps taken alone, so it is the same on all ranks.
    """

    def __init__(self, reader: Reader, prefetch: bool = True) -> None:
        self._reader, self._prefetch = reader, prefetch
        self._ready: Block = {}
        self._coming: _Job | None = None
        self._serial = 0
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def take(
        self,
        cursor: int,
        global_batch: int,
        batch_size: int,
        give_up: Callable[[], bool] = lambda: False,
    ) -> StepBatch:
        """This rank's micro-batches of the step at a cursor, of batch_size samples at most.

        A slice that is empty has one stand-in of weight 0 and samples 0, the first sample of the
        step, so that its rank can take part in the backward pass. What reading raises is raised
        here, with a note of the positions.

        Raises:
            GaveUp: the step did not come, and `give_up`, asked again and again, said so.
        """
        if self._closed:
            raise RuntimeError("the feed is closed")
        key = Key(cursor, global_batch, batch_size)
        step = self._ready.pop(key, None) or self._take_from_next_block(key, give_up)
        if isinstance(step, Exception):
            raise step
        return step

    def close(self, limit_s: float = _LONGEST_READ_S) -> None:
        """Ends the thread; waits for it `limit_s` seconds at most. Closing twice is allowed."""
        self._closed = True
        self._ready, self._coming = {}, None
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(limit_s)
            self._thread = None
        else:
            self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_from_next_block(self, key: Key, give_up: Callable[[], bool]) -> StepBatch | Exception:
        job = self._coming
        if job is None or job.request.first != key:
            self._ready = {}
            job = self._ask(key, ahead=False)
        while not wait([job.block], _GLANCE_S).done:
            if give_up():
                raise GaveUp
        self._ready = job.block.result()
        last = self._ready[next(reversed(self._ready))]
        step = self._ready.pop(key)
        self._coming = None
        if self._prefetch and isinstance(last, StepBatch):
            self._ask(key._replace(cursor=last.plan.cursor + last.plan.count), ahead=True)
        return step

    def _ask(self, first: Key, *, ahead: bool) -> _Job:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="instar-feed", daemon=True)
            self._thread.start()
        self._serial += 1
        self._coming = _Job(Request(self._serial, first, ahead))
        self._jobs.put(self._coming)
        return self._coming

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._closed or job is not self._coming:
                continue
            try:
                job.block.set_result(self._reader.read(job.request))
            except BaseException as error:  # or take() would wait for ever
                job.block.set_exception(error)
        self._reader.close()
