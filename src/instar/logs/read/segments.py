"""Determines which steps of a record were superseded by a resume from an earlier checkpoint.

Each segment resumes from a checkpoint, which an earlier segment saved. Steps on the newest segment's line of descent
count; all others are superseded.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from instar.record.events import Event, RunStarted, Saved

EVERYTHING = 2**63 - 1
NOTHING = -1


class SegmentTree(msgspec.Struct):
    """The segments of a run and the checkpoints they resumed from, updated event by event.

    A segment that names no checkpoint continues the previous segment.
    """

    began: dict[int, int] = {}
    """the step at which each segment starts"""
    parents: dict[int, int] = {}
    """the segment that saved the checkpoint from which a segment resumed"""
    saved: dict[str, int] = {}
    """the segment that saved each checkpoint"""

    def take(self, event: Event) -> None:
        if isinstance(event, Saved):
            name = event.path.rstrip("/").rpartition("/")[
                2
            ]  # not PurePath: a list of runs takes thousands of these events
            self.saved[name] = event.segment
        elif isinstance(event, RunStarted):
            self.began[event.segment] = event.step
            parent = self.saved.get(event.resumed_from or "")
            if parent is None:
                # nothing goes on from a segment that began no earlier: it has saved nothing
                parent = event.segment - 1
                while parent > 0 and event.step <= self.began.get(parent, -1):
                    parent = self.parents.get(parent, parent - 1)
            if parent < event.segment - 1:
                self.parents[event.segment] = parent

    def limits(self, first_steps: Mapping[int, int] | None = None) -> dict[int, int]:
        """Return the last step of each segment that is not superseded; `NOTHING` if all are.

        `first_steps`: the first measured step of each segment, for segments without a `run_started`.
        """
        begins = {segment: max(step - 1, 0) for segment, step in (first_steps or {}).items()}
        began = begins | self.began
        segments = sorted(began)
        limits = dict.fromkeys(segments, NOTHING)
        limit = EVERYTHING
        while segments:
            segment = segments.pop()
            limits[segment] = limit
            limit = min(limit, began[segment])
            parent = self.parents.get(segment, segment)
            segments = [segment for segment in segments if segment <= parent]
        return limits
