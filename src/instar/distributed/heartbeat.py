"""Where each rank is, and what to conclude when one does not move. Plain data, without a clock.

A rank that is stopped gives no sign of life at all; one that works, sleeps or loops still does,
because a thread beside the main thread tells where that one is. The first is lost after a short
silence, the second only when others have waited for it as long as they may.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass


class Position:
    """Where this rank's main thread is. It writes; the watch, a thread beside it, reads.

    Meetings are counted, because all ranks make the same exchanges in the same order: who has
    come to fewer of them than another waits in is missing there. Only the thread that made the
    position is followed; others may exchange what they like.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.where = "start-up"
        self.arrived = 0
        self.waits_for = 0
        self.doing = ""
        self.moves = 0
        self.thread = threading.get_ident()

    def at(self, where: str, step: int | None = None) -> None:
        """The main thread begins `where`, e.g. "evaluation at step 100"; it completes "in …"."""
        self.where = where
        if step is not None:
            self.step = step
        self.waits_for = 0
        self.moves += 1

    def arrive(self, what: str, number: int | None = None) -> None:
        """It comes to an exchange of all ranks, or waits for the end of one it came to before."""
        if threading.get_ident() != self.thread:
            return
        if number is None:
            self.arrived += 1
            number = self.arrived
        self.waits_for, self.doing = number, what
        self.moves += 1

    def expect(self, what: str) -> None:
        """It waits for something that another rank does on its way to the next exchange."""
        if threading.get_ident() != self.thread:
            return
        self.waits_for, self.doing = self.arrived + 1, what
        self.moves += 1

    def go_on(self) -> None:
        """The exchange is over, or under way without this thread."""
        if threading.get_ident() != self.thread:
            return
        self.waits_for = 0
        self.moves += 1


@dataclass(frozen=True)
class Heartbeat:
    """What one rank tells the others.

    `count` grows with every beat. `waits_for` is the number of the exchange that the main thread
    waits in (0: none) and `doing` its purpose; `still_s` the seconds since it moved, `line` its
    line of Python then, and `in_torch` whether that is torch's. `ended` is None in a living rank, "" in one that left, else its error;
    `lost` says that the error is only another rank's absence.
    """

    count: int
    step: int | None
    where: str
    arrived: int
    waits_for: int
    doing: str
    still_s: float
    line: str
    in_torch: bool
    host: str
    pid: int
    ended: str | None = None
    lost: bool = False

    @property
    def place(self) -> str:
        return f"in {self.where}" + (f", at {self.line}" if self.line else "")

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, data: bytes) -> Heartbeat:
        return cls(**json.loads(data))


@dataclass(frozen=True)
class Seen:
    """A rank's newest heartbeat (None: there was none yet) and the seconds since it came."""

    beat: Heartbeat | None
    silent_s: float


@dataclass(frozen=True)
class Verdict:
    """Why no rank can go on, in one sentence, and the ranks that are to blame."""

    message: str
    ranks: tuple[int, ...]

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, data: bytes) -> Verdict:
        said = json.loads(data)
        return cls(said["message"], tuple(said["ranks"]))


def judge(
    seen: Mapping[int, Seen], silence_s: float, wait_s: float
) -> tuple[Verdict | None, float]:
    """What the heartbeats of all ranks mean, and in how many seconds they would mean more.

    Args:
        silence_s: a rank without a heartbeat for so long is lost.
        wait_s: so long a rank may wait in an exchange for one that lives, and so long all ranks
            may stand still: they wait then where nobody counts, in a backward pass.
    """
    living = {rank: one for rank, one in seen.items() if one.beat is None or one.beat.ended is None}
    silent = [rank for rank, one in living.items() if one.silent_s >= silence_s]
    if silent:
        return _silent(seen, silent, [rank for rank in living if rank not in silent]), 0.0
    waiting = {rank: one.beat for rank, one in living.items() if one.beat and one.beat.waits_for}
    patient = [rank for rank, beat in waiting.items() if beat.still_s >= wait_s]
    if patient:
        return _late(seen, min(patient, key=lambda rank: waiting[rank].waits_for)), 0.0
    still_s = [one.beat.still_s if one.beat else 0.0 for one in living.values()]
    if still_s and min(still_s) >= wait_s:
        return _stuck(living, wait_s), 0.0
    due = [silence_s - one.silent_s for one in living.values()]
    due += [wait_s - beat.still_s for beat in waiting.values()]
    due += [wait_s - min(still_s, default=0.0)]
    return None, min(due)


def _silent(seen: Mapping[int, Seen], ranks: Sequence[int], others: Sequence[int]) -> Verdict:
    """All go in step, so where a living rank is tells more exactly how far the silent ones came."""
    told = []
    for rank in ranks:
        one = seen[rank]
        last = f"last seen {one.beat.place}" if one.beat else "not seen since the ranks met"
        told.append(f"rank {rank} has not moved for {one.silent_s:.0f} s: {last}")
    witness = next((other for other in others if seen[other].beat), None)
    beat = seen[witness].beat if witness is not None else None
    if beat is not None:
        told.append(f"rank {witness} is {beat.place}")
    return Verdict("; ".join(told), tuple(ranks))


def _late(seen: Mapping[int, Seen], patient: int) -> Verdict:
    """Of those who waited as long as they may, `patient` waits in the earliest exchange."""
    beats = {rank: one.beat for rank, one in seen.items() if one.beat is not None}
    host = beats[patient]
    missing = [
        rank
        for rank, beat in beats.items()
        if beat.arrived < host.waits_for and beat.waits_for < host.waits_for
    ]
    if not missing:
        return _stuck(seen, host.still_s)
    told = [
        f"rank {rank} has not come for {host.still_s:.0f} s to where others wait ({host.doing}): "
        f"{_state(beats[rank])}"
        for rank in missing
    ]
    return Verdict("; ".join(told), tuple(missing))


def _stuck(seen: Mapping[int, Seen], wait_s: float) -> Verdict:
    """All have come as far: to blame is who is not in a wait, as far as its line tells."""
    beats = {rank: one.beat for rank, one in seen.items() if one.beat is not None}
    busy = [rank for rank, beat in beats.items() if not (beat.in_torch or beat.waits_for)]
    if 0 < len(busy) < len(beats):
        told = [f"rank {rank} keeps all others waiting: {_state(beats[rank])}" for rank in busy]
        return Verdict("; ".join(told), tuple(busy))
    told = [f"rank {rank} is {beat.place}" for rank, beat in beats.items()]
    return Verdict(f"no rank has moved for {wait_s:.0f} s: {'; '.join(told)}", ())


def _state(beat: Heartbeat) -> str:
    if beat.ended is not None:
        return f"it has left: {beat.ended}" if beat.ended else "it has left"
    still = f", unmoved for {beat.still_s:.0f} s" if beat.still_s >= 1 else ""
    return f"it is {beat.place}{still}"
