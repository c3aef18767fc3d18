"""What a run that went on from an earlier step has superseded.

Each segment grows out of a checkpoint, and that out of the segment which saved it. What the newest
segment descends from still counts; all else is superseded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath

import msgspec

from instar.record.events import Event, RunStarted, Saved

EVERYTHING = 2**63 - 1
NOTHING = -1


class Lineage(msgspec.Struct):
    """Which segment goes on from where, told by the events in the order in which they were written.

    A segment that does not say from which checkpoint it goes on follows the one before it.
    """

    began: dict[int, int] = {}
    """the step from which each segment goes on"""
    parents: dict[int, int] = {}
    """the segment that saved the checkpoint from which one goes on"""
    saved: dict[str, int] = {}
    """the segment that saved each checkpoint"""

    def take(self, event: Event) -> None:
        if isinstance(event, Saved):
            self.saved[PurePath(event.path).name] = event.segment
        elif isinstance(event, RunStarted):
            self.began[event.segment] = event.step
            parent = self.saved.get(event.resumed_from or "", event.segment)
            if parent < event.segment:
                self.parents[event.segment] = parent

    def limits(self, first_steps: Mapping[int, int] | None = None) -> dict[int, int]:
        """Of each segment, the last step that still counts; `NOTHING` if none does.

        `first_steps`: the first measured step of each segment, for one whose beginning was lost.
        """
        lost = {segment: max(step - 1, 0) for segment, step in (first_steps or {}).items()}
        began = lost | self.began
        segments = sorted(began)
        found = dict.fromkeys(segments, NOTHING)
        limit = EVERYTHING
        while segments:
            segment = segments.pop()
            found[segment] = limit
            limit = min(limit, began[segment])
            parent = self.parents.get(segment, segment)
            segments = [one for one in segments if one <= parent]
        return found
