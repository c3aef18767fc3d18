"""torch's elastic agent with Instar's manners: quick when a rank fails, patient when asked to stop.

The stock agent raises from its signal handlers, wherever it happens to be, and waits up to 30
seconds for the peers of a failed rank. This one only looks at flags between two polls.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from instar.config.errors import ConfigError
from instar.distributed.failure import Failure, Interrupted, log_of, read_failure
from instar.distributed.listener import listen
from instar.distributed.signals import StopSignal

POLL_S = 0.05
# With these codes starting again would end the same way.
FINAL = (ConfigError.exit_code, Interrupted.exit_code)


class StoppedBeforeStartError(Exception):
    """A stop was asked for before any rank was started."""


@dataclass(frozen=True)
class Ended:
    """One rank's end: exit status as subprocess gives it (negative: by that signal).

    `by_agent`: the agent ended it. `said`: files in which its last lines are. `log`: the one in the
    run's folder, if it came to open it.
    """

    rank: int
    status: int
    by_agent: bool
    failure: Failure | None
    said: tuple[Path, ...]
    log: Path | None


@dataclass
class _Watched:
    """What the agent knows of its ranks, by local rank."""

    statuses: dict[int, int] = field(default_factory=dict)
    ended_by_agent: set[int] = field(default_factory=set)
    stop_by: float | None = None
    fail_by: float | None = None


class Agent(LocalElasticAgent):
    """Runs `module` in `nproc` ranks on this host and remembers how each ended.

    They meet at `host` and `port` (0: a free one); ConfigError if these cannot be had.
    """

    def __init__(
        self,
        module: str,
        argv: Sequence[str],
        nproc: int,
        scratch: Path,
        stop: StopSignal,
        say: Callable[[str], None],
        on_restart: Callable[[list[Ended]], None],
        *,
        max_restarts: int,
        stop_timeout_s: float,
        grace_s: float,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        descriptor, port = listen(port, host)
        # Kept for as long as the agent lives: the rendezvous below finds it by its port.
        self._server = TCPStore(
            host,
            port,
            is_master=True,
            multi_tenant=True,
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )
        spec = WorkerSpec(
            role="train",
            local_world_size=nproc,
            entrypoint=sys.executable,
            args=("-m", module, *argv),
            rdzv_handler=StaticTCPRendezvous(host, port, 0, 1, f"instar-{os.getpid()}", 60),
            max_restarts=max_restarts,
            monitor_interval=POLL_S,
            master_addr=host,
            master_port=port,
            local_addr=host,
        )
        # Before its log is open, whatever a rank but 0 says is kept aside.
        aside = dict.fromkeys(range(1, nproc), Std.ALL)
        super().__init__(spec, DefaultLogsSpecs(str(scratch), redirects=aside))
        self._stop = stop
        self._say = say
        self._on_restart = on_restart
        self._stop_timeout_s = stop_timeout_s
        self._grace_s = grace_s
        self._watched = _Watched()

    def ended(self) -> list[Ended]:
        """How the ranks of the last start ended, the first to end first."""
        context = self._pcontext
        if context is None:
            return []
        return [
            Ended(
                rank=local,
                status=status,
                by_agent=local in self._watched.ended_by_agent,
                failure=read_failure(Path(context.error_files[local])),
                said=self._said(local),
                log=log_of(Path(context.error_files[local])),
            )
            for local, status in self._watched.statuses.items()
        ]

    def _said(self, local: int) -> tuple[Path, ...]:
        context = self._pcontext
        assert context is not None
        log = log_of(Path(context.error_files[local]))
        if log is not None:
            return (log,)
        return tuple(Path(p) for p in (context.stdouts[local], context.stderrs[local]) if p)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._stop.requested:
            raise StoppedBeforeStartError
        self._watched = _Watched()
        pids: dict[int, Any] = super()._start_workers(worker_group)
        return pids

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._on_restart(self.ended())
        super()._restart_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        alive = self._alive()
        if alive:
            self._hurry(alive)
            return RunResult(state=api.WorkerState.HEALTHY)
        statuses = self._watched.statuses
        if any(statuses.values()):
            # Children that a failed rank has left behind.
            self._kill(statuses)
        if self._stop.requested or any(status in FINAL for status in statuses.values()):
            self._remaining_restarts = 0
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _hurry(self, alive: Sequence[int]) -> None:
        """Pass a stop on, once, and end those who do not leave in the time they have."""
        watched, now = self._watched, time.monotonic()
        statuses = watched.statuses.values()
        if watched.stop_by is None and self._stop.requested:
            watched.stop_by = now + self._stop_timeout_s
            self._say(f"{self._stop.requested}: stopping; once more ends all ranks at once")
            for local in alive:
                self._send(os.kill, local, signal.SIGTERM)
        if watched.stop_by is None and Interrupted.exit_code in statuses:
            watched.stop_by = now + self._stop_timeout_s
        if watched.fail_by is None and self._anyone_failed():
            watched.fail_by = now + self._grace_s
            watched.stop_by = watched.stop_by or now + self._stop_timeout_s
        late = self._stop.insisted or (watched.stop_by is not None and now >= watched.stop_by)
        ending = set(alive if late else ())
        if watched.fail_by is not None and now >= watched.fail_by:
            # who has told how it ends is on its way out, and may be writing the run's report
            ending.update(local for local in alive if not self._has_told(local))
        watched.ended_by_agent |= ending
        self._kill(ending)

    def _anyone_failed(self) -> bool:
        """A rank has failed once its record is there: leaving may take it longer."""
        context = self._pcontext
        assert context is not None
        good = (0, Interrupted.exit_code)
        return any(status not in good for status in self._watched.statuses.values()) or any(
            self._has_told(local) for local in context.error_files
        )

    def _has_told(self, local: int) -> bool:
        context = self._pcontext
        assert context is not None
        return Path(context.error_files[local]).exists()

    def _alive(self) -> list[int]:
        handlers = self._handlers()
        for local, handler in handlers.items():
            status = handler.proc.poll()
            if status is not None:
                self._watched.statuses.setdefault(local, status)
        return [local for local in handlers if local not in self._watched.statuses]

    def _kill(self, ranks: Iterable[int]) -> None:
        # Each rank leads its own session, so its children go with it.
        for local in ranks:
            self._send(os.killpg, local, signal.SIGKILL)

    def _send(self, send: Callable[[int, int], None], local: int, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            send(self._handlers()[local].proc.pid, number)

    def _handlers(self) -> dict[int, Any]:
        return getattr(self._pcontext, "subprocess_handlers", {})

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        alive = self._alive()
        self._watched.ended_by_agent.update(alive)
        self._kill(alive)
        super()._shutdown(death_sig, timeout)

    def _construct_event(self, state: str, *args: Any, **details: Any) -> Event:
        # The stock event asks the name service for this host's full name, which may take seconds.
        del args, details
        return Event(f"train.{state}", EventSource.AGENT)


def silence_elastic() -> None:
    """Elastic's own lines say what Instar says better."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.distributed.elastic") and isinstance(logger, logging.Logger):
            logger.disabled = True
