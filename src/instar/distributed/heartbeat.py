"""Heartbeats: the position of each rank, their exchange through the store, and the diagnosis of a hang.

A stopped rank sends no heartbeats; one that works, sleeps or loops still does, because a thread
beside its main thread sends them. The first is lost after `silence_s`, the second only when others
have waited for it for `wait_s`.
"""

from __future__ import annotations

import json
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, TypeVar


class Position:
    """The position of this rank's main thread, which writes it; the watchdog's thread reads it.

    Collectives are counted, because all ranks enter the same ones in the same order: a rank that
    has entered fewer than another one waits in is missing there. Only the thread that created the
    position is tracked.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.where = "start-up"
        self.n_arrived = 0
        self.waits_for = 0
        self.doing = ""
        self.moves = 0
        self.thread = threading.get_ident()

    def at(self, where: str, step: int | None = None) -> None:
        """Set the current activity, e.g. "evaluation at step 100", which completes "in …"."""
        self.where = where
        if step is not None:
            self.step = step
        self.waits_for = 0
        self.moves += 1

    def arrive(self, what: str, number: int | None = None) -> None:
        """Enter a collective, or wait for the end of collective `number`, entered earlier."""
        if threading.get_ident() != self.thread:
            return
        if number is None:
            self.n_arrived += 1
            number = self.n_arrived
        self.waits_for, self.doing = number, what
        self.moves += 1

    def expect(self, what: str) -> None:
        """Wait for something that another rank does before the next collective."""
        if threading.get_ident() != self.thread:
            return
        self.waits_for, self.doing = self.n_arrived + 1, what
        self.moves += 1

    def leave(self) -> None:
        """Leave the collective, or continue without waiting for it."""
        if threading.get_ident() != self.thread:
            return
        self.waits_for = 0
        self.moves += 1


@dataclass(frozen=True)
class Heartbeat:
    """The state that one rank sends to the others.

    `count` increases with every heartbeat. `waits_for` is the number of the collective in which the
    main thread waits (0: none) and `doing` its purpose; `still_s` is the time in seconds since the
    main thread last made progress, `line` the line of Python that it is at, and `in_torch` whether
    that line belongs to torch. `end` is None while the rank is alive, "" once it has left, or its
    error; `is_loss` is set if that error only reports the loss of another rank, `has_left` once the
    rank does not ask for its cause any more.
    """

    count: int
    step: int | None
    where: str
    n_arrived: int
    waits_for: int
    doing: str
    still_s: float
    line: str
    in_torch: bool
    host: str
    pid: int
    end: str | None = None
    is_loss: bool = False
    has_left: bool = False
    address: str = ""
    """from which this rank reaches the store's host, as an error of the transport names it"""

    @property
    def host_name(self) -> str:
        """`host` is that of `this_host`."""
        return self.host.partition(" ")[0]

    @property
    def place(self) -> str:
        return f"in {self.where}" + (f", at {self.line}" if self.line else "")

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, data: bytes) -> Heartbeat:
        return cls(**json.loads(data))


def this_host() -> str:
    """Identify this host and PID namespace: in another container a process has another id."""
    with suppress(OSError):
        return f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}"
    return socket.gethostname()


@dataclass(frozen=True)
class LastHeartbeat:
    """A rank's newest heartbeat (None: none yet) and the seconds since it arrived."""

    beat: Heartbeat | None
    silent_s: float


@dataclass(frozen=True)
class Diagnosis:
    """Why the ranks cannot continue, in one sentence, and the ranks at fault."""

    message: str
    ranks: tuple[int, ...]

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, data: bytes) -> Diagnosis:
        fields = json.loads(data)
        return cls(fields["message"], tuple(fields["ranks"]))


STOP_WAIT_S = 20.0
"""How long ranks that hang in a step may go on after a stop signal, at least."""


def wait_after_stop(
    last_seen: Mapping[int, LastHeartbeat], wait_s: float, longest_still_s: float
) -> float:
    """Return how long ranks that were told to stop may wait for each other: less, if all are in a step.

    Schedulers kill what does not stop within half a minute or so, and nobody would say which rank hung. Saves and evaluations
    have the time that they had.

    Args:
        wait_s: without a stop.
        longest_still_s: the longest time without progress that a step has taken until now.
    """
    living = [
        last.beat for last in last_seen.values() if last.beat is None or last.beat.end is None
    ]
    if not all(beat is not None and beat.where.startswith("step ") for beat in living):
        return wait_s
    return min(wait_s, max(STOP_WAIT_S, 3 * longest_still_s))


def diagnose_hang(
    last_seen: Mapping[int, LastHeartbeat], silence_s: float, wait_s: float
) -> tuple[Diagnosis | None, float]:
    """Diagnose a hang from the heartbeats of all ranks.

    Args:
        silence_s: a rank that sends no heartbeat for this long is lost.
        wait_s: how long a rank may wait in a collective for a rank that is alive, and how long all
            ranks may make no progress (as in a backward pass, whose collectives are not counted).

    Returns:
        the diagnosis, if a rank hangs, and the seconds until the next check is due.
    """
    living = {
        rank: last for rank, last in last_seen.items() if last.beat is None or last.beat.end is None
    }
    if any(last.silent_s >= silence_s for last in living.values()):
        # with the others of a lost host, whose last heartbeats were a little later
        silent = [rank for rank, last in living.items() if last.silent_s >= silence_s / 2]
        return _silent(last_seen, silent, [rank for rank in living if rank not in silent]), 0.0
    waiting = {
        rank: last.beat for rank, last in living.items() if last.beat and last.beat.waits_for
    }
    waiting_longest = [rank for rank, beat in waiting.items() if beat.still_s >= wait_s]
    if waiting_longest:
        return _late(last_seen, min(waiting_longest, key=lambda rank: waiting[rank].waits_for)), 0.0
    still_s = [last.beat.still_s if last.beat else 0.0 for last in living.values()]
    if still_s and min(still_s) >= wait_s:
        return _stuck(living, wait_s), 0.0
    due = [silence_s - last.silent_s for last in living.values()]
    due += [wait_s - beat.still_s for beat in waiting.values()]
    due += [wait_s - min(still_s, default=0.0)]
    return None, min(due)


def _silent(
    last_seen: Mapping[int, LastHeartbeat], ranks: Sequence[int], peers: Sequence[int]
) -> Diagnosis:
    """Name the silent ranks, and the position of a living one: ranks advance in lockstep, so it tells
    how far the silent ones got."""
    beats = _beats(last_seen)
    hosts = {rank: beat.host_name for rank, beat in beats.items()}
    silent_hosts, other_hosts = ({hosts[r] for r in of if r in hosts} for of in (ranks, peers))
    parts = []
    for rank in ranks:
        news = last_seen[rank]
        last = f"last seen {news.beat.place}" if news.beat else "not seen since the rendezvous"
        name = rank_name(rank, hosts)
        parts.append(f"{name} has sent no heartbeat for {news.silent_s:.0f} s: {last}")
    parts += [
        f"no heartbeat arrives from host {host}: it is down or frozen, or the network to it is lost"
        for host in sorted(silent_hosts - other_hosts)
    ]
    observer = next((other for other in peers if other in beats), None)
    if observer is not None:
        parts.append(f"rank {observer} is {beats[observer].place}")
    return Diagnosis("; ".join(parts), tuple(ranks))


def rank_name(rank: int, hosts: Mapping[int, str]) -> str:
    """Return e.g. "rank 3", with its host if the ranks in `hosts` are on several."""
    many_hosts = rank in hosts and len(set(hosts.values())) > 1
    return f"rank {rank} on host {hosts[rank]}" if many_hosts else f"rank {rank}"


def _beats(last_seen: Mapping[int, LastHeartbeat]) -> dict[int, Heartbeat]:
    return {rank: last.beat for rank, last in last_seen.items() if last.beat is not None}


def _late(last_seen: Mapping[int, LastHeartbeat], waiting_longest: int) -> Diagnosis:
    """Name the ranks missing in the collective in which rank `waiting_longest` waits."""
    beats = _beats(last_seen)
    hosts = {rank: beat.host_name for rank, beat in beats.items()}
    first = beats[waiting_longest]
    missing = [
        rank
        for rank, beat in beats.items()
        if beat.n_arrived < first.waits_for and beat.waits_for < first.waits_for
    ]
    if not missing:
        return _stuck(last_seen, first.still_s)
    parts = [
        f"{rank_name(rank, hosts)} has not entered a collective ({first.doing}) for {first.still_s:.0f} s: "
        f"{_state(beats[rank])}"
        for rank in missing
    ]
    return Diagnosis("; ".join(parts), tuple(missing))


def _stuck(last_seen: Mapping[int, LastHeartbeat], wait_s: float) -> Diagnosis:
    """All ranks are equally far: the one at fault is the one that does not wait, judging by its line."""
    beats = _beats(last_seen)
    hosts = {rank: beat.host_name for rank, beat in beats.items()}
    busy = [rank for rank, beat in beats.items() if not (beat.in_torch or beat.waits_for)]
    if 0 < len(busy) < len(beats):
        parts = [
            f"all other ranks wait for {rank_name(rank, hosts)}: {_state(beats[rank])}"
            for rank in busy
        ]
        return Diagnosis("; ".join(parts), tuple(busy))
    parts = [f"{rank_name(rank, hosts)} is {beat.place}" for rank, beat in beats.items()]
    return Diagnosis(f"no rank has made progress for {wait_s:.0f} s: {'; '.join(parts)}", ())


def _state(beat: Heartbeat) -> str:
    if beat.end is not None:
        return f"it has left: {beat.end}" if beat.end else "it has left"
    stall_text = f", without progress for {beat.still_s:.0f} s" if beat.still_s >= 1 else ""
    return f"it is {beat.place}{stall_text}"


T = TypeVar("T")

_VERDICT = "verdict"


class HeartbeatStore(Protocol):
    """The methods used of a torch.distributed store, by one thread only."""

    def set(self, key: str, value: str, /) -> None: ...
    def check(self, keys: list[str], /) -> bool: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def compare_set(self, key: str, expected_value: str, desired_value: str, /) -> bytes: ...


@dataclass(frozen=True)
class Heartbeats:
    """The newest heartbeats of the other ranks that have sent one, and the verdict, if there is one."""

    beats: dict[int, Heartbeat]
    verdict: Diagnosis | None


def address_towards(store: str) -> str:
    """Return this host's address on the way to a store at `HOST:PORT`; "" if it is not known."""
    host, _, port = store.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with suppress(OSError, ValueError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host.strip("[]"), int(port)))  # sends nothing
        return str(probe.getsockname()[0])
    return ""


def silent_ranks(
    beats: Mapping[int, Heartbeat],
    before: Mapping[int, int],
    since: Mapping[int, int],
    own_host: str,
) -> list[int]:
    """Return the ranks, in order, that have not left and have sent nothing.

    Args:
        before, since: counts of heartbeats some time ago, and later. Of another host that has a rank
            silent for the longer time, those count too that are silent for the shorter: a host that is
            lost may have sent the last heartbeat of one of them just before.
    """
    alive = {rank: beat for rank, beat in beats.items() if beat.end is None}
    silent = {rank for rank, beat in alive.items() if beat.count == before.get(rank)}
    hosts = {alive[rank].host for rank in silent} - {own_host}
    return [
        rank
        for rank, beat in sorted(alive.items())
        if rank in silent or (beat.host in hosts and beat.count == since.get(rank))
    ]


class StoreClient:
    """Accesses the store from its own thread, because a store whose process is stopped never answers."""

    def __init__(self, store: HeartbeatStore, rank: int, size: int) -> None:
        self._store, self._rank = store, rank
        self._absent = [other for other in range(size) if other != rank]
        self._present: list[int] = []
        self._has_verdict_key = False
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True, name="heartbeat").start()

    def exchange(self, beat: Heartbeat) -> Future[Heartbeats]:
        return self._do(lambda: self._exchange(beat))

    def decide(self, verdict: Diagnosis) -> Future[Diagnosis]:
        return self._do(
            lambda: Diagnosis.decode(self._store.compare_set(_VERDICT, "", verdict.encode()))
        )

    def close(self) -> None:
        self._tasks.put(None)

    def _exchange(self, beat: Heartbeat) -> Heartbeats:
        if not self._has_verdict_key:
            # Reading a key that does not exist would block.
            self._store.compare_set(_VERDICT, "", "")
            self._has_verdict_key = True
        self._store.set(_key(self._rank), beat.encode())
        for rank in [rank for rank in self._absent if self._store.check([_key(rank)])]:
            self._absent.remove(rank)
            self._present.append(rank)
        verdict, *beats = self._store.multi_get([_VERDICT, *map(_key, self._present)])
        return Heartbeats(
            {rank: Heartbeat.decode(b) for rank, b in zip(self._present, beats, strict=True)},
            Diagnosis.decode(verdict) if verdict else None,
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


def probe_host(address: str, limit_s: float) -> threading.Event:
    """Connect to "host:port" for at most `limit_s` seconds; set the returned event if the host answers.

    The kernel answers even if the process that listens there is stopped, or no process listens.
    """
    host, _, port = address.rpartition(":")
    is_answered = threading.Event()

    def connect() -> None:
        with suppress(OSError):
            with suppress(ConnectionRefusedError):
                socket.create_connection((host, int(port)), timeout=limit_s).close()
            is_answered.set()

    threading.Thread(target=connect, daemon=True, name="probe").start()
    return is_answered


def line_of_thread(thread: int) -> tuple[str, bool]:
    """Return the innermost line of Python that a thread is at, and whether it belongs to torch."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "", False
    file, function = Path(frame.f_code.co_filename), frame.f_code.co_name
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    in_torch = torch is not None and file.is_relative_to(Path(torch).parent)
    return f"{file.name}:{frame.f_lineno} in {function}", in_torch


def stack_of(thread: int) -> str:
    """Return the Python stack of a thread of this process, outermost frame first."""
    frame = sys._current_frames().get(thread)
    return "".join(traceback.format_stack(frame)) if frame else "?"
