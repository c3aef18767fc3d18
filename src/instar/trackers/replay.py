"""A run that is over, or was cut off, told again to a tracker from its record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from instar.config.errors import InstarError
from instar.record.events import NOT_AN_EVENT, Event, Placed, decode
from instar.trackers.tracker import Outcome, TrackedRun, Tracker, outcome

FLUSH_EVERY = 10_000
"""events"""
EVERYTHING = 2**63 - 1


class TrackerFailed(InstarError):  # noqa: N818
    """A tracker did not take a run."""


def kept_lines(record: Path, last_steps: Mapping[int, int]) -> Iterator[tuple[Event, bytes]]:
    """The events of a record and their lines, without what is behind the last step of its segment
    that counts; what is no event is passed over.

    Raises:
        OSError: it cannot be read.
    """
    with record.open("rb") as file:
        for line in file:
            try:
                event = decode(line)
            except NOT_AN_EVENT:
                continue
            if isinstance(event, Placed) and event.step > last_steps.get(event.segment, EVERYTHING):
                continue
            yield event, line.rstrip(b"\n") + b"\n"


def replay(tracker: Tracker, run: TrackedRun, record: Path, last_steps: Mapping[int, int]) -> int:
    """Tell a tracker all that counts of a run; the number of events.

    Raises:
        TrackerFailed: it cannot take them, or the record cannot be read.
    """
    count = 0
    ended: Outcome = "finished"
    try:
        tracker.start(run)
        for count, (event, _) in enumerate(kept_lines(record, last_steps), 1):
            tracker.take(event)
            ended = outcome(ended, event)
            if count % FLUSH_EVERY == 0:
                tracker.flush()
        tracker.finish(ended)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise TrackerFailed(f"{run.folder}: {tracker.name} does not take it: {said}") from error
    return count
