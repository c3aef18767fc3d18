"""Who lives and where: each rank's heartbeat in the store, and the end of all when one hangs.

A main thread that waits inside a collective can neither raise nor be interrupted. So a thread
beside it tells the others where it is and hears where they are; when a limit has passed, every
living rank writes the same sentence into its log and its record, and leaves at once.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from instar.distributed.failure import (
    LAUNCHER_VARIABLE,
    PeerError,
    PeerLost,
    RankMissing,
    RunFailed,
    describe,
    is_secondary,
    write_failure,
)
from instar.distributed.heartbeat import Heartbeat, Position, Seen, Verdict, judge
from instar.distributed.processes import GONE, STOPPED, line_of, process_state, stack_of, this_host
from instar.distributed.signals import leave
from instar.distributed.storeline import News, Store, StoreLine

logger = logging.getLogger(__name__)

# More time between two looks than was meant is time in which this process itself was stopped;
# so much of it may be the machine's being busy.
MARGIN_S = 1.0
# So long a rank that lost another looks for who it was. Launchers end it one second later.
SEARCH_S = 0.6


@dataclass(frozen=True)
class Served:
    """Where the store is, and the rank that serves it; None: the launcher does."""

    address: str
    rank: int | None


@dataclass(frozen=True)
class Limits:
    """`silence_s`: a rank without a heartbeat for so long is lost. `wait_s`: so long a rank may
    wait for one that lives. `interval_s`: between two heartbeats."""

    silence_s: float
    wait_s: float
    interval_s: float

    @classmethod
    def of(cls, silence_s: float, timeout_s: float, size: int) -> Limits:
        """The more ranks, the rarer the beats: each rank reads those of all."""
        silence_s = min(silence_s, timeout_s)
        return cls(silence_s, timeout_s, min(silence_s / 4, max(0.5, size / 100)))


@contextmanager
def watching(
    store: Store, served: Served, rank: int, size: int, limits: Limits
) -> Iterator[Position]:
    """Watch all ranks while the body runs in this thread, whose position is given.

    `store` is a connection of the watch's own, under a prefix of this start's own.

    When a rank hangs, the process ends here with code 4, whatever the body does. If the body
    fails because another rank is gone, raises RankMissing or PeerLost naming that rank.
    """
    watch = Watch(store, served, rank, size, limits)
    try:
        yield watch.position
    except BaseException as error:
        watch.stop()
        lost = is_secondary(error)
        if lost and not isinstance(error, PeerError):
            better = watch.explain(error)
            if better is not None:
                raise better from error
        watch.part(f"{type(error).__name__}: {error}", lost=lost)
        raise
    else:
        watch.stop()
        watch.part("")
    finally:
        watch.close()


class Watch:
    """One rank's heartbeat and its view of the others', from the meeting to the parting."""

    def __init__(self, store: Store, served: Served, rank: int, size: int, limits: Limits) -> None:
        self.position = Position()
        self._served, self._rank, self._limits = served, rank, limits
        self._others = [other for other in range(size) if other != rank]
        self._line = StoreLine(store, rank, size)
        self._host, self._pid = this_host(), os.getpid()
        self._search_s = max(SEARCH_S, 1.2 * limits.interval_s)
        self._count = 0
        self._moves = -1
        self._still_s = 0.0
        self._seen = {other: Seen(None, 0.0) for other in self._others}
        self._answer: Future[News] | None = None
        self._unanswered_s = 0.0
        self._store_lost = False
        self._leaving = threading.Event()
        self._ending = threading.Lock()
        threading.Thread(target=self._watch, daemon=True, name="watch").start()

    def stop(self) -> None:
        """From here on this rank is not ended by its watch. Never returns if it just is."""
        with self._ending:
            self._leaving.set()

    def part(self, error: str, *, lost: bool = False) -> None:
        """Tell the others that this rank leaves, on `error` if it is not empty."""
        if self._store_lost:
            return
        deadline = time.monotonic() + self._search_s
        # Others that still read here shall not find the store gone with the rank that serves it.
        while news := self._ask(self._beat(ended=error, lost=lost), deadline):
            gone = all(beat.ended is not None for beat in news.beats.values())
            if self._served.rank != self._rank or gone or error or time.monotonic() > deadline:
                return
            time.sleep(0.01)

    def close(self) -> None:
        """End the threads, unless the store keeps one of them waiting."""
        self._line.close()

    def explain(self, error: BaseException) -> RunFailed | None:
        """Who was lost, where `error` says only that somebody was; None: nobody knows."""
        deadline = time.monotonic() + self._search_s
        before = {rank: one.beat.count for rank, one in self._seen.items() if one.beat}
        mine = self._beat(ended=str(error), lost=True)
        while True:
            news = None if self._store_lost else self._ask(mine, deadline)
            if news is None:
                return self._store_gone(error)
            if news.verdict:
                return _missing(news.verdict)
            found = self._ended(news.beats, error)
            if found is not None:
                return found
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        here = [rank for rank, beat in news.beats.items() if beat.ended is None]
        quiet = [rank for rank in here if news.beats[rank].count == before.get(rank)]
        blamed = quiet or here
        if not blamed:
            return None
        told = "; ".join(f"rank {rank} was last seen {news.beats[rank].place}" for rank in blamed)
        return _missing(self._decide(Verdict(f"{error}; {told}", tuple(blamed))))

    def _ended(self, beats: Mapping[int, Heartbeat], error: BaseException) -> RunFailed | None:
        """The rank that failed by itself, or whose process is gone."""
        for rank, beat in beats.items():
            if beat.ended is not None and not beat.lost:
                why = f"failed: {beat.ended}" if beat.ended else "has left"
                return PeerLost(f"{error}; rank {rank} {why}")
        gone = [
            rank
            for rank, beat in beats.items()
            if beat.ended is None and beat.host == self._host and process_state(beat.pid) == GONE
        ]
        if not gone:
            return None
        told = "; ".join(f"rank {rank} is gone, last seen {beats[rank].place}" for rank in gone)
        return PeerLost(f"{error}; {told}")

    def _watch(self) -> None:
        last, pause_s = time.monotonic(), 0.0
        margin_s = min(MARGIN_S, self._limits.silence_s / 4)
        while not self._leaving.wait(pause_s):
            now = time.monotonic()
            # Only time in which this process ran counts against others: after Ctrl-Z and fg
            # nobody has moved, and nobody is to blame.
            awake_s = min(now - last, pause_s + margin_s)
            last = now
            self._look_at_main_thread(awake_s)
            mine = self._beat()
            self._exchange(mine, awake_s)
            verdict, due_s = self._judge(mine)
            if verdict is not None:
                self._end(verdict)
            pause_s = min(self._limits.interval_s, max(0.02, due_s / 2))

    def _look_at_main_thread(self, awake_s: float) -> None:
        moved = self._moves != self.position.moves
        self._moves = self.position.moves
        self._still_s = 0.0 if moved else self._still_s + awake_s

    def _exchange(self, mine: Heartbeat, awake_s: float) -> None:
        """Tell and hear, without waiting for a store that does not answer."""
        if self._store_lost:
            return
        if self._answer is None:
            self._answer = self._line.exchange(mine)
        try:
            news = self._answer.result(self._limits.interval_s)
        except NoAnswer:
            # Nor were others heard: their silence is the store's.
            self._unanswered_s += awake_s
            return
        except RuntimeError as error:
            self._lose_store(error)
            return
        self._answer, self._unanswered_s = None, 0.0
        for rank, seen in self._seen.items():
            beat = news.beats.get(rank)
            same = (beat and beat.count) == (seen.beat and seen.beat.count)
            self._seen[rank] = Seen(beat, seen.silent_s + awake_s if same else 0.0)
        if news.verdict:
            self._end(news.verdict)

    def _judge(self, mine: Heartbeat) -> tuple[Verdict | None, float]:
        limits, heard = self._limits, self._seen
        if self._store_lost or self._unanswered_s:
            if self._served.rank is not None and self._server_is_gone(mine):
                return self._server_lost(), 0.0
            heard = {rank: replace(one, silent_s=0.0) for rank, one in heard.items()}
        return judge({**heard, self._rank: Seen(mine, 0.0)}, limits.silence_s, limits.wait_s)

    def _server_is_gone(self, mine: Heartbeat) -> bool:
        # A connection that is closed may mean that the rank has left with all its work done.
        waiting = mine.waits_for > 0 and self._still_s >= 2
        return self._unanswered_s >= self._limits.silence_s or (self._store_lost and waiting)

    def _server_lost(self) -> Verdict:
        server = self._served.rank
        assert server is not None
        beat = self._seen[server].beat
        last = f"last seen {beat.place}" if beat else "not seen since the ranks met"
        serves = f"the store at {self._served.address}, which it serves"
        if self._store_lost:
            message = f"rank {server} is gone: {last}; lost {serves}"
        else:
            silent = f"has not moved for {self._unanswered_s:.0f} s"
            message = f"rank {server} {silent}: {last}; {serves}, does not answer"
        return Verdict(message, (server,))

    def _lose_store(self, error: RuntimeError) -> None:
        self._store_lost = True
        address, server = self._served.address, self._served.rank
        if server is not None:
            beat = self._seen[server].beat
            if beat is None or beat.ended is None:
                logger.warning("lost the store at %s, which rank %d serves", address, server)
            return
        logger.error(
            "lost the store at %s: its launcher is gone; asking this rank to stop (%s)",
            address,
            str(error).partition("\n")[0],
        )
        if LAUNCHER_VARIABLE not in os.environ or sys.platform != "linux":
            # Instar's launcher has arranged for this signal itself.
            os.kill(self._pid, signal.SIGTERM)

    def _store_gone(self, error: BaseException) -> RunFailed:
        if self._served.rank in (None, self._rank):
            return PeerLost(f"{error}; lost the store at {self._served.address}")
        self._store_lost = True
        return PeerLost(f"{error}; {self._server_lost().message}")

    def _ask(self, mine: Heartbeat, deadline: float) -> News | None:
        try:
            return self._line.exchange(mine).result(max(0.05, deadline - time.monotonic()))
        except (NoAnswer, RuntimeError):
            return None

    def _beat(self, ended: str | None = None, *, lost: bool = False) -> Heartbeat:
        self._count += 1
        position = self.position
        line, in_torch = line_of(position.thread) if self._still_s >= 1 else ("", False)
        return Heartbeat(
            count=self._count,
            step=position.step,
            where=position.where,
            arrived=position.arrived,
            waits_for=position.waits_for,
            doing=position.doing,
            still_s=round(self._still_s, 2),
            line=line,
            in_torch=in_torch,
            host=self._host,
            pid=self._pid,
            ended=ended,
            lost=lost,
        )

    def _decide(self, verdict: Verdict) -> Verdict:
        """The verdict of whoever was first; this one if the store does not answer."""
        if self._store_lost:
            return verdict
        with suppress(NoAnswer, RuntimeError):
            return self._line.decide(verdict).result(0.3)
        return verdict

    def _end(self, verdict: Verdict) -> None:
        """Leave this process with the verdict, unless the main thread is leaving already."""
        with self._ending:
            if self._leaving.is_set():
                return
            # The main thread may be stuck with the lock of a log, or on a disk.
            telling = threading.Thread(target=self._tell, args=[verdict], daemon=True)
            telling.start()
            telling.join(1.0)
            if self._served.rank == self._rank:
                self._outlast_others(verdict)
            leave(RunFailed.exit_code)

    def _outlast_others(self, verdict: Verdict) -> None:
        """Serve the store until the others have left on the verdict: without it they would only
        hear that this rank is gone."""
        deadline = time.monotonic() + self._search_s
        while any(self._may_listen(rank, verdict) for rank in self._others):
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)

    def _may_listen(self, rank: int, verdict: Verdict) -> bool:
        beat = self._seen[rank].beat
        if beat is None or beat.ended is not None or rank in verdict.ranks:
            return False
        return beat.host != self._host or process_state(beat.pid) != GONE

    def _tell(self, verdict: Verdict) -> None:
        verdict = self._decide(verdict)
        error = _missing(verdict)
        failure = describe(error, self._rank, self.position.step)
        write_failure(failure, error, os.environ)
        if LAUNCHER_VARIABLE not in os.environ:
            self._end_stopped(verdict)
            with suppress(OSError, ValueError):
                print(failure.sentence(), file=sys.stderr, flush=True)
        logger.error("%s", failure.sentence())
        logger.error("the main thread is at\n%s", stack_of(self.position.thread))

    def _end_stopped(self, verdict: Verdict) -> None:
        """Torchrun would ask a stopped process to end, and wait 30 s for it to hear."""
        for rank in verdict.ranks:
            beat = self._seen[rank].beat if rank in self._seen else None
            if beat and beat.host == self._host and process_state(beat.pid) == STOPPED:
                with suppress(OSError):
                    os.kill(beat.pid, signal.SIGKILL)


def _missing(verdict: Verdict) -> RankMissing:
    return RankMissing(verdict.message, verdict.ranks)
