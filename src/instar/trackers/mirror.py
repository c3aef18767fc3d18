"""The record, copied into trackers while it is written, and never in training's way.

Every tracker has a queue and a thread of its own: one that hangs or fails holds up neither training
nor the others. A full queue leaves events out; the record has them all, and
`instar logs export RUN --to TOOL` makes up for what a tracker did not get.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from instar.config.errors import InstarError
from instar.record.events import Event, Warn
from instar.record.recorder import Sink
from instar.trackers.tracker import Outcome, TrackedRun, Tracker, outcome

logger = logging.getLogger(__name__)

QUEUE_EVENTS = 10_000
"""that may wait for one tracker"""
FLUSH_EVERY_S = 2.0
CLOSE_WAIT_S = 5.0
"""that the end of a run waits for all trackers together"""


class Mirror:
    """A sink that writes to another sink first, then hands each event to the trackers' threads.

    What goes wrong with a tracker becomes a warning in the record and for `tell`, once for each
    tracker; both happen in the thread that writes.
    """

    def __init__(
        self,
        sink: Sink,
        trackers: Sequence[Tracker],
        run: TrackedRun,
        tell: Callable[[str], None],
        *,
        queue_events: int = QUEUE_EVENTS,
        close_wait_s: float = CLOSE_WAIT_S,
    ) -> None:
        self._sink = sink
        self._tell = tell
        self._run = run
        self._close_wait_s = close_wait_s
        self._faults: deque[str] = deque()
        self._lanes = [Lane(each, run, self._faults, queue_events) for each in trackers]

    def write(self, event: Event) -> None:
        self._sink.write(event)
        event = msgspec.structs.replace(event, time=time.time())
        for lane in self._lanes:
            lane.put(event)
        if self._faults:
            self._say_faults()

    def sync(self) -> None:
        self._sink.sync()

    def close(self) -> None:
        """Wait a little for the trackers, say which of them lack something, close the record."""
        try:
            if self._lanes:
                self._sink.sync()
                self._end_lanes()
        finally:
            self._sink.close()

    def _end_lanes(self) -> None:
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.end()
        until = time.monotonic() + self._close_wait_s
        for lane in lanes:
            lane.join(until - time.monotonic())
        self._faults += filter(None, (lane.shortage() for lane in lanes))
        self._say_faults()

    def _say_faults(self) -> None:
        while self._faults:
            message = self._faults.popleft()
            logger.warning("%s", message)
            self._tell(message)
            with suppress(InstarError):
                self._sink.write(Warn(message=message))


class Lane:
    """One tracker, its queue and its thread, which begins with the first event."""

    def __init__(
        self, tracker: Tracker, run: TrackedRun, faults: deque[str], queue_events: int
    ) -> None:
        self._tracker = tracker
        self._run = run
        self._faults = faults
        self._offered = 0
        self._taken = 0
        self._told = False
        self._queue: queue.Queue[Event | None] = queue.Queue(queue_events)
        self._ending = threading.Event()
        self._outcome: Outcome = "finished"
        self._thread = threading.Thread(target=self._work, name=f"to {tracker.name}", daemon=True)

    def put(self, event: Event) -> None:
        """Hand over an event, or leave it out where too many wait already."""
        self._offered += 1
        if self._offered == 1:
            self._attempt("starting", self._thread.start)
        with suppress(queue.Full):
            self._queue.put_nowait(event)

    def end(self) -> None:
        """No event comes any more."""
        self._ending.set()
        with suppress(queue.Full):
            self._queue.put_nowait(None)

    def join(self, seconds: float) -> None:
        if self._thread.ident is not None:
            self._thread.join(max(0.0, seconds))

    def shortage(self) -> str:
        """What the tracker lacks at the end, in words; empty where nothing, or it was told before."""
        lacking = self._offered - self._taken
        if self._told or not (lacking or self._thread.is_alive()):
            return ""
        ended = ", and has not ended yet" if self._thread.is_alive() else ""
        return (
            f"{self._tracker.name} was too slow for this run: it lacks {lacking:,} of "
            f"{self._offered:,} events{ended}; {self._instead()}"
        )

    def _instead(self) -> str:
        return f"afterwards: instar logs export {self._run.folder} --to {self._tracker.name}"

    def _work(self) -> None:
        opened = self._attempt("starting", lambda: self._tracker.start(self._run))
        flushed = time.monotonic()
        while opened and self._one():
            if time.monotonic() - flushed >= FLUSH_EVERY_S:
                self._attempt("writing", self._tracker.flush)
                flushed = time.monotonic()
        if opened:
            self._attempt("ending", lambda: self._tracker.finish(self._outcome))

    def _one(self) -> bool:
        """Take the next event, if one comes soon; False at the end."""
        try:
            event = self._queue.get(timeout=0 if self._ending.is_set() else FLUSH_EVERY_S)
        except queue.Empty:
            return not self._ending.is_set()
        if event is None:
            return False
        self._outcome = outcome(self._outcome, event)
        self._taken += self._attempt("taking an event", lambda: self._tracker.take(event))
        return True

    def _attempt(self, doing: str, call: Callable[[], None]) -> bool:
        """Whether it went well; the first time that it does not is told."""
        try:
            call()
            return True
        except BaseException as error:  # also a library that would end the process
            if not self._told:
                self._told = True
                said = " ".join(str(error).split())[:300]
                self._faults.append(
                    f"{self._tracker.name} failed at {doing}, training goes on: "
                    f"{type(error).__name__}: {said}; {self._instead()}"
                )
            return False
