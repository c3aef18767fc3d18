"""Sends events to trackers while a run trains, or later by replaying its record.

Every tracker has its own queue and thread, so that one that hangs or fails delays neither training
nor other trackers. A full queue drops events; the record has them all, and `instar logs export RUN
--to TOOL` replays it into the tracker.
"""

from __future__ import annotations

import logging
import queue
import shlex
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from instar.config.errors import InstarError, redacted_error
from instar.config.files import open_regular
from instar.record.events import Event, Placed, Warn, events_in
from instar.record.progress import track_items
from instar.record.recorder import Sink
from instar.record.trackers.tracker import Outcome, TrackedRun, Tracker, outcome

logger = logging.getLogger(__name__)


QUEUE_EVENTS = 10_000
"""maximum queue length of one tracker"""
FLUSH_EVERY_S = 2.0
CLOSE_WAIT_S = 5.0
"""time limit for all trackers together when a run was stopped or has failed"""
END_WAIT_S = 45.0
"""the same when a run has ended by itself: on a busy machine a tool may take longer to start than a short
run to end"""
FLUSH_EVERY = 10_000
"""events"""
_NO_LIMIT = 2**63 - 1


class TrackerSink:
    """Writes events to another sink, and then queues them for the trackers.

    The first failure of each tracker is written to the record as a warning and passed to `warn`, in
    the thread that writes.
    """

    def __init__(
        self,
        sink: Sink,
        trackers: Sequence[Tracker],
        run: TrackedRun,
        warn: Callable[[str], None],
        *,
        queue_events: int = QUEUE_EVENTS,
        close_wait_s: float = CLOSE_WAIT_S,
        end_wait_s: float = END_WAIT_S,
    ) -> None:
        self._sink = sink
        self._warn = warn
        self._run = run
        self._close_wait_s, self._end_wait_s = close_wait_s, end_wait_s
        self._outcome: Outcome = "crashed"
        self._faults: deque[str] = deque()
        self._queues = [
            TrackerQueue(tracker, run, self._faults, queue_events) for tracker in trackers
        ]

    def write(self, event: Event) -> None:
        self._sink.write(event)
        event = msgspec.structs.replace(event, time=time.time())
        self._outcome = outcome(self._outcome, event)
        for queue_ in self._queues:
            queue_.put(event)
        if self._faults:
            self._report_faults()

    def sync(self) -> None:
        self._sink.sync()

    def close(self) -> None:
        """Wait for the trackers, report those that lack events, and close the other sink."""
        try:
            if self._queues:
                self._sink.sync()
                self._end_queues()
        finally:
            self._sink.close()

    def _end_queues(self) -> None:
        queues, self._queues = self._queues, []
        for queue_ in queues:
            queue_.end()
        start_s = time.monotonic()
        for queue_ in queues:
            queue_.join(start_s + self._close_wait_s - time.monotonic())
        if self._outcome == "finished":
            for queue_ in queues:
                if text := queue_.pending():
                    self._warn(f"{text}; waiting for at most {self._end_wait_s:.0f} s")
                queue_.join(start_s + self._end_wait_s - time.monotonic())
        self._faults += filter(None, (queue_.shortage() for queue_ in queues))
        self._report_faults()

    def _report_faults(self) -> None:
        while self._faults:
            message = self._faults.popleft()
            logger.warning("%s", message)
            self._warn(message)
            with suppress(InstarError):
                self._sink.write(Warn(message=message))


class TrackerQueue:
    """The queue and the thread of one tracker; the thread starts with the first event."""

    def __init__(
        self, tracker: Tracker, run: TrackedRun, faults: deque[str], queue_events: int
    ) -> None:
        self._tracker = tracker
        self._run = run
        self._faults = faults
        self._n_offered = 0
        self._n_taken = 0
        self._reported = False
        self._queue: queue.Queue[Event | None] = queue.Queue(queue_events)
        self._ending = threading.Event()
        self._outcome: Outcome = "finished"
        self._thread = threading.Thread(target=self._work, name=f"to {tracker.name}", daemon=True)

    def put(self, event: Event) -> None:
        """Queue an event; drop it if the queue is full."""
        self._n_offered += 1
        if self._n_offered == 1:
            self._attempt("starting", self._thread.start)
        with suppress(queue.Full):
            self._queue.put_nowait(event)

    def end(self) -> None:
        """Signals that no more events come."""
        self._ending.set()
        with suppress(queue.Full):
            self._queue.put_nowait(None)

    def join(self, seconds: float) -> None:
        if self._thread.ident is not None:
            self._thread.join(max(0.0, seconds))

    def pending(self) -> str:
        """Return what a tracker that has not ended still has to do; "" if it has."""
        if not self._thread.is_alive():
            return ""
        return f"{self._tracker.name} has taken {self._n_taken:,} of {self._n_offered:,} events"

    def shortage(self) -> str:
        """Return a warning if the tracker lacks events and has not been reported before."""
        missing = self._n_offered - self._n_taken
        if self._reported or not (missing or self._thread.is_alive()):
            return ""
        still_running = ", and has not ended yet" if self._thread.is_alive() else ""
        return (
            f"{self._tracker.name} was too slow for this run: it lacks {missing:,} of "
            f"{self._n_offered:,} events{still_running}; {self._replay_hint()}"
        )

    def _replay_hint(self) -> str:
        return f"afterwards: instar logs export {shlex.quote(str(self._run.folder))} --to {self._tracker.name}"

    def _work(self) -> None:
        is_open = self._attempt("starting", lambda: self._tracker.start(self._run))
        flushed_at = time.monotonic()
        while is_open and self._take_next():
            if time.monotonic() - flushed_at >= FLUSH_EVERY_S:
                self._attempt("writing", self._tracker.flush)
                flushed_at = time.monotonic()
        if is_open:
            self._attempt("ending", lambda: self._tracker.finish(self._outcome))

    def _take_next(self) -> bool:
        """Take the next event if one comes in time; return False at the end."""
        try:
            event = self._queue.get(timeout=0 if self._ending.is_set() else FLUSH_EVERY_S)
        except queue.Empty:
            return not self._ending.is_set()
        if event is None:
            return False
        self._outcome = outcome(self._outcome, event)
        self._n_taken += self._attempt("taking an event", lambda: self._tracker.take(event))
        return True

    def _attempt(self, doing: str, call: Callable[[], None]) -> bool:
        """Call the tracker; return whether it succeeded, and report the first failure."""
        try:
            call()
            return True
        except BaseException as error:  # a library may raise SystemExit
            if not self._reported:
                self._reported = True
                text = redacted_error(error, self._tracker.secrets)
                self._faults.append(
                    f"{self._tracker.name} failed at {doing}, training continues: "
                    f"{type(error).__name__}: {text}; {self._replay_hint()}"
                )
            return False


class TrackerFailed(InstarError):  # noqa: N818
    """A tracker failed while a record was replayed."""


def current_lines(record: Path, last_steps: Mapping[int, int]) -> Iterator[tuple[Event, bytes]]:
    """Yield events of a record with their lines, except superseded ones and invalid lines.

    Args:
        last_steps: the last step of each segment that is not superseded.

    Raises:
        OSError: the record cannot be read.
    """
    with open_regular(record) as file:
        for line, event in events_in(file):
            if isinstance(event, Placed) and event.step > last_steps.get(event.segment, _NO_LIMIT):
                continue
            yield event, line.rstrip(b"\n") + b"\n"


def replay_record(
    tracker: Tracker, run: TrackedRun, record: Path, last_steps: Mapping[int, int]
) -> int:
    """Send all events of a run that are not superseded to a tracker; return their number.

    Raises:
        TrackerFailed: the tracker failed, or the record cannot be read.
    """
    count = 0
    result: Outcome = "finished"
    try:
        tracker.start(run)
        events = track_items(current_lines(record, last_steps), f"exporting {run.folder}", "events")
        for count, (event, _) in enumerate(events, 1):
            tracker.take(event)
            result = outcome(result, event)
            if count % FLUSH_EVERY == 0:
                tracker.flush()
        tracker.finish(result)
    except Exception as error:
        text = f"{type(error).__name__}: {redacted_error(error, tracker.secrets)}"
        raise TrackerFailed(f"{run.folder}: {tracker.name} failed: {text}") from error
    return count
