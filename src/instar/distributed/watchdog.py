"""The watchdog: exchanges heartbeats, and ends all ranks when one of them hangs.

A main thread that waits inside a collective can neither raise nor be interrupted. So a second
thread sends its position to the other ranks and receives theirs; when a limit is exceeded, every
living rank writes the same diagnosis to its log and its failure record, and exits at once.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    describe_failure,
    is_secondary,
    may_be_secondary,
    transport_text,
    write_failure,
)
from instar.distributed.heartbeat import (
    Diagnosis,
    Heartbeat,
    Heartbeats,
    HeartbeatStore,
    LastHeartbeat,
    Position,
    StoreClient,
    address_towards,
    diagnose_hang,
    line_of_thread,
    probe_host,
    rank_name,
    silent_ranks,
    stack_of,
    this_host,
    wait_after_stop,
)
from instar.distributed.signals import exit_now, stop_requested
from instar.processes.child import GONE, STATUS_STOPPED, process_state
from instar.processes.identity import kill_stopped_sibling

logger = logging.getLogger(__name__)


# A longer pause between two checks than intended means that this process itself was stopped; up to
# this much of it is attributed to a busy machine.
MARGIN_S = 1.0
# How long a rank that lost a peer searches for the cause. Launchers kill it one second later.
SEARCH_S = 0.6
# How long the host of a silent store may take to accept a connection. TCP retransmits a lost SYN
# after one second.
PROBE_S = 2.0


@dataclass(frozen=True)
class StoreAddress:
    """The address of the store, and the rank that serves it (None: the launcher)."""

    address: str
    rank: int | None


@dataclass(frozen=True)
class WatchdogLimits:
    """`silence_s`: a rank that sends no heartbeat for this long is lost. `wait_s`: how long a rank may
    wait for a living one. `interval_s`: the time between two heartbeats."""

    silence_s: float
    wait_s: float
    interval_s: float

    @classmethod
    def of(cls, silence_s: float, timeout_s: float, size: int) -> WatchdogLimits:
        """The interval grows with the number of ranks, because every rank reads all heartbeats."""
        silence_s = min(silence_s, timeout_s)
        return cls(silence_s, timeout_s, min(silence_s / 4, max(0.5, size / 100)))


@contextmanager
def watch_ranks(
    store: HeartbeatStore,
    address: StoreAddress,
    rank: int,
    size: int,
    limits: WatchdogLimits,
    disconnect: Callable[[], None] = lambda: None,
) -> Iterator[Position]:
    """Monitor all ranks while the body runs; yield the `Position` of the calling thread.

    Args:
        store: a connection used by nobody else, with a key prefix unique to this start.
        disconnect: closes the connections to the other ranks; called once this rank has announced
            why it leaves.

    When a rank hangs, the process exits with code 4, whatever the body does. If the body fails
    because another rank is gone, raises RankMissing or PeerLost naming that rank.
    """
    watch = Watchdog(store, address, rank, size, limits)
    try:
        yield watch.position
    except BaseException as error:
        watch.stop()
        secondary = is_secondary(error)
        if (secondary and not isinstance(error, PeerError)) or may_be_secondary(error):
            better = watch.explain(error, certain=secondary)
            if better is not None:
                watch.leave(str(better), is_lost=True)
                raise better from error
        watch.leave(f"{type(error).__name__}: {error}", is_lost=secondary)
        raise
    else:
        watch.stop()
        watch.leave("")
    finally:
        # Ranks that wait for this one in a collective ask for the cause when its connections close.
        disconnect()
        watch.close()


class Watchdog:
    """One rank's heartbeat and its view of the other ranks', from rendezvous to exit."""

    def __init__(
        self,
        store: HeartbeatStore,
        address: StoreAddress,
        rank: int,
        size: int,
        limits: WatchdogLimits,
    ) -> None:
        self.position = Position()
        self._store, self._rank, self._limits = address, rank, limits
        self._others = [other for other in range(size) if other != rank]
        self._client = StoreClient(store, rank, size)
        self._host, self._pid = this_host(), os.getpid()
        self._host_name = self._host.partition(" ")[0]
        self._address = address_towards(address.address)
        self._search_s = max(SEARCH_S, 1.2 * limits.interval_s)
        self._count = 0
        self._moves = -1
        self._stalled_s = self._longest_still_s = 0.0
        self._beats_seen = {other: LastHeartbeat(None, 0.0) for other in self._others}
        self._answer: Future[Heartbeats] | None = None
        self._unanswered_s = 0.0
        self._probe: threading.Event | None = None
        self._network_due_s = limits.silence_s
        self._store_lost = False
        self._last_beat: Heartbeat | None = None
        self._leaving = threading.Event()
        self._ending = threading.Lock()
        threading.Thread(target=self._watch, daemon=True, name="watch").start()

    def stop(self) -> None:
        """Stop ending this rank on a diagnosis. Never returns if that is already happening."""
        with self._ending:
            self._leaving.set()

    def leave(self, error: str, *, is_lost: bool = False) -> None:
        """Announce to the other ranks that this one leaves, because of `error` unless that is empty."""
        self._last_beat = replace(self._beat(end_reason=error, is_lost=is_lost), has_left=True)
        self._ask(self._last_beat, time.monotonic() + self._search_s)
        if not error:
            # Closing the connections would break a collective that others have not left yet.
            self._serve_until_left()

    def close(self) -> None:
        """Serve the store until the others have left; then end the threads, except one that is blocked in it."""
        self._serve_until_left()
        self._client.close()

    def _serve_until_left(self) -> None:
        """Wait until the other ranks have left, if this one serves the store: they still read from it."""
        deadline = time.monotonic() + self._search_s
        while self._store.rank == self._rank and self._last_beat and time.monotonic() < deadline:
            news = self._ask(self._last_beat, deadline)
            beats = () if news is None else news.beats.values()
            if all(beat.has_left or self._is_gone(beat) for beat in beats):
                return
            time.sleep(0.01)

    def _is_gone(self, beat: Heartbeat) -> bool:
        return beat.host == self._host and process_state(beat.pid) == GONE

    def explain(self, error: BaseException, *, certain: bool = True) -> RunFailed | None:
        """Find the rank whose loss caused `error`; None if it is unknown.

        Args:
            certain: the loss of some rank has caused it; otherwise, an error of this rank's own is
                possible, and a rank that answers is not blamed.
        """
        deadline, cause = time.monotonic() + self._search_s, transport_text(error)
        before = {rank: last.beat.count for rank, last in self._beats_seen.items() if last.beat}
        first: dict[int, int] = {}
        final_beat = self._beat(end_reason=str(error), is_lost=True)
        probe = self._probe
        if probe is None and self._unanswered_s >= self._limits.silence_s / 2:
            probe = probe_host(self._store.address, self._search_s)
        while True:
            news = self._ask(final_beat, deadline)
            if news is None:
                if not certain and self._store.rank in (None, self._rank):
                    return None
                # a rank of this host may have found that the network is lost, and left, just before this one did
                answers = probe is None or probe.wait(max(0.0, deadline - time.monotonic()))
                return self._store_gone(cause, network_is_lost=not answers)
            first = first or {rank: beat.count for rank, beat in news.beats.items()}
            if news.verdict:
                return _missing(news.verdict)
            diagnosis = self._diagnose_ended_ranks(news.beats, cause)
            if diagnosis is not None:
                return diagnosis
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        alive = [rank for rank, beat in news.beats.items() if beat.end is None]
        culprits = silent_ranks(news.beats, before, first, self._host) or (alive if certain else [])
        if not culprits:
            return None
        message = f"{cause}; {self._last_seen(culprits, news.beats)}"
        return _missing(self._decide(Diagnosis(message, tuple(culprits))))

    def _diagnose_ended_ranks(self, beats: Mapping[int, Heartbeat], cause: str) -> RunFailed | None:
        """Return the error for a rank that failed by itself, or whose process is gone."""
        for rank, beat in beats.items():
            if beat.end is not None and not beat.is_loss:
                why = f"failed: {beat.end}" if beat.end else "has left the run"
                return PeerLost(f"{cause}; rank {rank} {why}")
        ranks = [rank for rank, beat in beats.items() if beat.end is None and self._is_gone(beat)]
        if not ranks:
            return None
        places = "; ".join(f"rank {rank} is gone, last seen {beats[rank].place}" for rank in ranks)
        return PeerLost(f"{cause}; {places}")

    def _watch(self) -> None:
        last, pause_s = time.monotonic(), 0.0
        margin_s = min(MARGIN_S, self._limits.silence_s / 4)
        answer_s = min(self._limits.interval_s, margin_s)
        while not self._leaving.wait(pause_s):
            now = time.monotonic()
            # Only time in which this process itself ran counts against others: after Ctrl-Z and fg
            # no rank has moved, and none is at fault.
            awake_s = min(now - last, pause_s + margin_s)
            last = now
            self._measure_progress(awake_s)
            beat = self._beat()
            # At most the margin, or part of the wait would not count.
            self._exchange(beat, awake_s, answer_s)
            verdict, due_s = self._diagnose(beat)
            if verdict is not None:
                self._end(verdict)
            pause_s = min(self._limits.interval_s, max(0.02, due_s / 2))

    def _measure_progress(self, awake_s: float) -> None:
        has_moved = self._moves != self.position.moves
        if has_moved:
            self._longest_still_s = max(self._longest_still_s, self._stalled_s)
        self._moves = self.position.moves
        self._stalled_s = 0.0 if has_moved else self._stalled_s + awake_s

    def _exchange(self, this_beat: Heartbeat, awake_s: float, limit_s: float) -> None:
        """Exchange heartbeats, without waiting longer than `limit_s` for the store's answer."""
        if self._store_lost:
            return
        if self._answer is None:
            self._answer = self._client.exchange(this_beat)
        try:
            news = self._answer.result(limit_s)
        except NoAnswer:
            # No heartbeat could be read: the silence is the store's, not the other ranks'.
            self._unanswered_s += awake_s
            return
        except RuntimeError as error:
            self._lose_store(error)
            return
        self._answer, self._unanswered_s = None, 0.0
        self._probe, self._network_due_s = None, self._limits.silence_s
        for rank, last in self._beats_seen.items():
            beat = news.beats.get(rank)
            same = (beat and beat.count) == (last.beat and last.beat.count)
            self._beats_seen[rank] = LastHeartbeat(beat, last.silent_s + awake_s if same else 0.0)
        if news.verdict:
            self._end(news.verdict)

    def _diagnose(self, beat: Heartbeat) -> tuple[Diagnosis | None, float]:
        limits, last_seen, silence_s = self._limits, self._beats_seen, self._limits.silence_s
        if self._store_lost or self._unanswered_s:
            if (diagnosis := self._diagnose_store(beat)) is not None:
                return diagnosis, 0.0
            if self._store_lost and beat.waits_for and self._stalled_s >= silence_s:
                # Other ranks may have found who is silent and left, and their launcher with the store,
                # just before this one read it: who was half-way there by then is why this one waits.
                silence_s /= 2
            else:
                last_seen = {rank: replace(last, silent_s=0.0) for rank, last in last_seen.items()}
            if self._store_lost:
                # What the others last said of their progress is old: without news they are as still as this one,
                # or this rank would wait for ever in a collective that is not counted, as in a backward pass.
                last_seen = {rank: self._without_news(last) for rank, last in last_seen.items()}
        by_rank, wait_s = {**last_seen, self._rank: LastHeartbeat(beat, 0.0)}, limits.wait_s
        if stop_requested():
            wait_s = wait_after_stop(by_rank, wait_s, self._longest_still_s)
        return diagnose_hang(by_rank, silence_s, wait_s)

    def _without_news(self, last: LastHeartbeat) -> LastHeartbeat:
        if last.beat is None:
            return last
        still_s, silent_s = max(last.beat.still_s, self._stalled_s), last.silent_s
        if last.beat.host == self._host and process_state(last.beat.pid) == STATUS_STOPPED:
            silent_s = max(silent_s, self._stalled_s)  # seen here, though nothing is heard
        return LastHeartbeat(replace(last.beat, still_s=still_s), silent_s)

    def _diagnose_store(self, beat: Heartbeat) -> Diagnosis | None:
        probe_s = min(PROBE_S, self._limits.silence_s / 2)
        if self._probe is None and self._unanswered_s >= self._network_due_s - probe_s:
            self._probe = probe_host(self._store.address, probe_s)
        if self._probe is not None and self._unanswered_s >= self._network_due_s:
            if not self._probe.wait(0.1):
                return self._network_lost()
            self._probe, self._network_due_s = None, self._unanswered_s + self._limits.silence_s
        if self._store.rank is None:
            return None  # ranks keep training while their launcher is stopped
        # A closed connection may also mean that the rank has finished and left.
        waiting = beat.waits_for > 0 and self._stalled_s >= 2
        silent = self._unanswered_s >= self._limits.silence_s
        return self._server_lost() if silent or (self._store_lost and waiting) else None

    def _network_lost(self) -> Diagnosis:
        """The store is on rank 0's host, served by the launcher or by rank 0 itself."""
        beat = self._beats_seen[0].beat if 0 in self._beats_seen else None
        last = f"; {self._name_of(0)} was last seen {beat.place}" if beat else ""
        ranks = (0,) if 0 in self._beats_seen else ()
        return Diagnosis(f"{self._network_text()}{last}", ranks)

    def _network_text(self) -> str:
        silent = f"no answer for {self._unanswered_s:.0f} s"
        return f"the network to rank 0 at {self._store.address} is lost: {silent}"

    def _server_lost(self) -> Diagnosis:
        server = self._store.rank
        assert server is not None
        beat = self._beats_seen[server].beat
        last = f"last seen {beat.place}" if beat else "not seen since the rendezvous"
        serves = f"the store at {self._store.address}, which it serves"
        name = self._name_of(server)
        if beat is not None and beat.end:
            message = f"{name}, which served the store, has left: {beat.end}"
        elif self._store_lost:
            message = f"{name} is gone: {last}; lost {serves}"
        else:
            silent = f"has not answered for {self._unanswered_s:.0f} s"
            message = f"{name} {silent}: {last}; {serves}, is silent too"
        return Diagnosis(message, (server,))

    def _name_of(self, rank: int) -> str:
        hosts = {
            other: last.beat.host_name for other, last in self._beats_seen.items() if last.beat
        }
        return rank_name(rank, {**hosts, self._rank: self._host_name})

    def _last_seen(self, ranks: Sequence[int], beats: Mapping[int, Heartbeat]) -> str:
        return "; ".join(
            f"{self._name_of(rank)} was last seen {beats[rank].place}" for rank in sorted(ranks)
        )

    def _lose_store(self, error: RuntimeError) -> None:
        self._store_lost = True
        address, server = self._store.address, self._store.rank
        if server is not None:
            beat = self._beats_seen[server].beat
            if beat is None or beat.end is None:
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

    def _store_gone(self, cause: str, *, network_is_lost: bool) -> RunFailed:
        if self._store.rank not in (None, self._rank):
            self._store_lost = True
            return PeerLost(f"{cause}; {self._server_lost().message}")
        store = f"lost the store at {self._store.address}"
        message = f"{cause}; {self._network_text() if network_is_lost else store}"
        beats = {rank: last.beat for rank, last in self._beats_seen.items() if last.beat}
        # a launcher serves it on rank 0's host
        host = beats[0].host_name if 0 in beats else self._host_name
        ranks = [rank for rank, beat in beats.items() if beat.host_name == host]
        if host == self._host_name:
            # its launcher has ended before this rank could ask: the connection that broke led to another host
            remote = {*re.findall(r"\[([0-9a-fA-F.:]+)\]:\d+", cause)} - {self._address}
            lost = [r for r, beat in beats.items() if beat.end is None and beat.address in remote]
            return PeerLost("; ".join(filter(None, (message, self._last_seen(lost, beats)))))
        return _missing(Diagnosis(f"{message}; {self._last_seen(ranks, beats)}", tuple(ranks)))

    def _ask(self, beat: Heartbeat, deadline: float) -> Heartbeats | None:
        if self._store_lost:
            return None
        try:
            return self._client.exchange(beat).result(max(0.05, deadline - time.monotonic()))
        except (NoAnswer, RuntimeError):
            return None

    def _beat(self, end_reason: str | None = None, *, is_lost: bool = False) -> Heartbeat:
        self._count += 1
        position = self.position
        line, in_torch = line_of_thread(position.thread) if self._stalled_s >= 1 else ("", False)
        return Heartbeat(
            count=self._count,
            step=position.step,
            where=position.where,
            n_arrived=position.n_arrived,
            waits_for=position.waits_for,
            doing=position.doing,
            still_s=round(self._stalled_s, 2),
            line=line,
            in_torch=in_torch,
            host=self._host,
            pid=self._pid,
            end=end_reason,
            is_loss=is_lost,
            address=self._address,
        )

    def _decide(self, verdict: Diagnosis) -> Diagnosis:
        """Return the verdict of the first rank that posted one; this one if the store does not answer."""
        if self._store_lost:
            return verdict
        with suppress(NoAnswer, RuntimeError):
            return self._client.decide(verdict).result(0.3)
        return verdict

    def _end(self, verdict: Diagnosis) -> None:
        """Exit this process with the verdict, unless the main thread is already exiting."""
        with self._ending:
            if self._leaving.is_set():
                return
            # The main thread may hold the lock of a log handler, or be stuck on a disk.
            reporting = threading.Thread(target=self._report, args=[verdict], daemon=True)
            reporting.start()
            reporting.join(1.0)
            if self._keeps_store():
                self._serve_until_read(verdict)
            exit_now(RunFailed.exit_code)

    def _keeps_store(self) -> bool:
        """Return whether the store ends with this process, which serves it or whose launcher does and ends with its
        ranks, while ranks of other hosts need it."""
        if self._store.rank is not None:
            return self._store.rank == self._rank
        hosts = {rank: last.beat.host for rank, last in self._beats_seen.items() if last.beat}
        hosts[self._rank] = self._host
        return hosts.get(0) == self._host and len(set(hosts.values())) > 1

    def _serve_until_read(self, verdict: Diagnosis) -> None:
        """Stay until the others have read the verdict: otherwise they would only learn that the store is gone."""
        deadline = time.monotonic() + self._search_s
        while any(self._may_read(rank, verdict) for rank in self._others):
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)

    def _may_read(self, rank: int, verdict: Diagnosis) -> bool:
        beat = self._beats_seen[rank].beat
        if beat is None or beat.end is not None or rank in verdict.ranks:
            return False
        return not self._is_gone(beat)

    def _report(self, verdict: Diagnosis) -> None:
        verdict = self._decide(verdict)
        error = _missing(verdict)
        failure = describe_failure(error, self._rank, self.position.step)
        write_failure(failure, error, os.environ)
        launcher = os.environ.get(LAUNCHER_VARIABLE)
        if launcher != str(os.getppid()):  # Instar's launcher, while it lives, kills them itself
            self._kill_stopped()
        if launcher is None:
            with suppress(OSError, ValueError):
                print(failure.sentence(), file=sys.stderr, flush=True)
        logger.error("%s", failure.sentence())
        logger.error("the main thread is at\n%s", stack_of(self.position.thread))

    def _kill_stopped(self) -> None:
        """Kill stopped ranks of this host, whoever is named as late: torchrun would send them SIGTERM and wait 30 s
        for nothing, and without a launcher nobody would end them.

        Anybody who reaches the store can send a heartbeat: what it says of a process is compared.
        """
        for last in self._beats_seen.values():
            if last.beat is not None and last.beat.host == self._host:
                kill_stopped_sibling(last.beat.pid)


def _missing(verdict: Diagnosis) -> RankMissing:
    return RankMissing(verdict.message, verdict.ranks)
