"""Supervises the ranks of this machine: starts them, forwards stop signals, restarts after a failure.

The ranks get the same environment variables as from torchrun, and meet in a TCPStore that this
process serves, and which therefore outlives them.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from instar.config.errors import ConfigError
from instar.distributed.failure import (
    RECORD_VARIABLE,
    STOPPED,
    Failure,
    log_of_failure,
    read_failure,
)
from instar.distributed.placement import LaunchOptions, child_environment
from instar.distributed.rendezvous import listen
from instar.distributed.signals import StopSignal
from instar.processes.child import Child

POLL_S = 0.05
REAP_S = 5.0
FINAL = (ConfigError.exit_code, *STOPPED)
"""exit codes after which a restart would be useless"""


@dataclass(frozen=True)
class RankExit:
    """How one rank ended; `status` as in `Child`."""

    rank: int
    status: int
    is_killed: bool
    """whether the supervisor killed it"""
    failure: Failure | None
    output: tuple[Path, ...]
    """files with its last lines of output"""
    log: Path | None
    """its log in the run's folder, if it was opened"""


class Supervisor:
    """Runs `python -m module` in ranks on this machine, which meet at an address and a port.

    Raises:
        ConfigError: the address or port (0: any free one) cannot be bound.
    """

    def __init__(
        self,
        options: LaunchOptions,
        work_dir: Path,
        stop: StopSignal,
        env: Mapping[str, str],
        *,
        say: Callable[[str], None],
        on_restart: Callable[[Sequence[RankExit]], None],
    ) -> None:
        host = options.host
        descriptor, port = listen(options.port, host)
        # The store is served as long as this object lives.
        self._store = TCPStore(
            host,
            port,
            is_master=True,
            multi_tenant=True,
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )
        self._command = [sys.executable, "-m", options.module, *options.argv]
        self._options = options
        self._work_dir = work_dir
        self._stop = stop
        self._say = say
        self._on_restart = on_restart
        size = str(options.ranks)
        self._env = {
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            **child_environment(os.environ),
            **env,
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "ROLE_WORLD_SIZE": size,
            "ROLE_NAME": "train",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": f"instar-{os.getpid()}",
            "TORCHELASTIC_MAX_RESTARTS": str(options.max_restarts),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    def run(self) -> Sequence[RankExit]:
        """Return the ends of the ranks of the last start, in order of time; () if none was started."""
        exits: Sequence[RankExit] = ()
        for restart in range(self._options.max_restarts + 1):
            if self._stop.requested:
                break
            if restart:
                self._on_restart(exits)
            exits = self._run_once(restart)
            statuses = [end.status for end in exits]
            if not any(statuses) or any(status in FINAL for status in statuses):
                break
        return exits

    def _run_once(self, restart: int) -> Sequence[RankExit]:
        ranks: list[_Rank] = []
        exited_ranks: list[_Rank] = []
        try:
            # one by one, so that those already started are killed if one cannot be started
            ranks.extend(
                _Rank(self._command, self._env, self._work_dir, number, restart)
                for number in range(self._options.ranks)
            )
            limits = _Limits()
            while len(exited_ranks) < len(ranks):
                exited_ranks += [rank for rank in ranks if rank not in exited_ranks and rank.poll()]
                running = [rank for rank in ranks if rank not in exited_ranks]
                if running:
                    self._enforce(limits, ranks, running)
                    time.sleep(POLL_S)
            if any(rank.status for rank in ranks):
                # kill child processes that a failed rank has left behind in its session
                for rank in ranks:
                    rank.child.kill()
        finally:
            for rank in ranks:
                if rank not in exited_ranks:
                    rank.kill()
                    rank.child.wait(REAP_S)
        return [rank.exit() for rank in exited_ranks]

    def _enforce(self, limits: _Limits, ranks: Sequence[_Rank], running: Sequence[_Rank]) -> None:
        """Forward a stop signal once, and kill the ranks that exceed their limits."""
        now = time.monotonic()
        if limits.stop_by is None and self._stop.requested:
            limits.stop_by = now + self._options.stop_timeout_s
            hint = "; press again to kill all ranks" if self._stop.requested == "SIGINT" else ""
            self._say(f"{self._stop.requested}: stopping{hint}")
            for rank in running:
                rank.child.send_signal(signal.SIGTERM)
        if limits.stop_by is None and any(rank.status in STOPPED for rank in ranks):
            limits.stop_by = now + self._options.stop_timeout_s
        if limits.fail_by is None and any(rank.has_failed for rank in ranks):
            limits.fail_by = now + self._options.grace_s
            limits.stop_by = limits.stop_by or now + self._options.stop_timeout_s
        late = limits.stop_by is not None and now >= limits.stop_by
        is_overdue = limits.fail_by is not None and now >= limits.fail_by
        for rank in running:
            # a rank that has written its failure record is exiting, and may be writing the report
            if self._stop.insisted or late or (is_overdue and not rank.has_reported):
                rank.kill()


@dataclass
class _Limits:
    """Deadlines by `time.monotonic`: for all ranks after a stop, and for peers after a failure."""

    stop_by: float | None = None
    fail_by: float | None = None


class _Rank:
    """The process of one rank and its failure record."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        work_dir: Path,
        rank: int,
        restart: int,
    ) -> None:
        folder = work_dir / f"start-{restart}" / str(rank)
        folder.mkdir(parents=True)
        self._record = folder / "error.json"
        self.rank = rank
        self.status: int | None = None
        self.is_killed = False
        number = str(rank)
        self.child = Child(
            command,
            env={
                **env,
                "RANK": number,
                "LOCAL_RANK": number,
                "ROLE_RANK": number,
                "TORCHELASTIC_RESTART_COUNT": str(restart),
                RECORD_VARIABLE: str(self._record),
            },
            # rank 0 has the terminal; output of the others before their logs are open is captured
            output=folder if rank else None,
            new_session=True,
        )

    def poll(self) -> bool:
        """Return whether the process has ended."""
        self.status = self.child.poll()
        return self.status is not None

    @property
    def has_reported(self) -> bool:
        """Whether the failure record is written; the process may take longer to exit."""
        return self._record.exists()

    @property
    def has_failed(self) -> bool:
        return self.status not in (None, 0, *STOPPED) or self.has_reported

    def kill(self) -> None:
        self.is_killed = True
        self.child.kill()

    def exit(self) -> RankExit:
        assert self.status is not None
        log = log_of_failure(self._record)
        output = self.child.output if log is None else (log,)
        failure = read_failure(self._record)
        return RankExit(self.rank, self.status, self.is_killed, failure, output, log)
