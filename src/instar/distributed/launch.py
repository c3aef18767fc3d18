"""Launches ranks on this machine and supervises them: `instar train --nproc N`.

It starts them, forwards stop signals, restarts them after a failure, and says whose failure caused those of the
others. The ranks get the same environment variables
as from torchrun, and meet in a TCPStore that this process serves, and which therefore outlives them.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from instar.config import CONFIG_VARIABLE
from instar.config.errors import ConfigError
from instar.distributed.failure import (
    FOLDER_PREFIX,
    LAUNCHER_VARIABLE,
    NOTHING_STARTED,
    RECORD_VARIABLE,
    STOPPED,
    Failure,
    Interrupted,
    RunFailed,
    StoppedUnsaved,
    log_of_failure,
    read_failure,
    stopped_before_start,
)
from instar.distributed.placement import (
    DEVICES_VARIABLE,
    LaunchOptions,
    Placement,
    child_environment,
)
from instar.distributed.rendezvous import listen
from instar.distributed.signals import StopSignal
from instar.processes.child import GROUP_SIGNALS, Child, exit_text
from instar.processes.cores import usable_cores

POLL_S = 0.05
REAP_S = 5.0
LAST_LINES = 15
"""of output that are shown of the rank at fault"""
FINAL = (ConfigError.exit_code, *STOPPED)
"""exit codes after which a restart would be useless"""


@dataclass(frozen=True)
class LaunchResult:
    """The exit code of a launch, its error text ("": already printed or none), and rank 0's log."""

    code: int
    text: str = ""
    log: Path | None = None


def launch_ranks(options: LaunchOptions) -> int:
    """Call `run_ranks`, print its error text to stderr and return the exit code.

    Exit with `signals.exit_now(code)`: while the interpreter shuts down, a late Ctrl-C would reach
    Python's own handler.
    """
    result = run_ranks(options, last=True)
    if result.text:
        print_stderr(result.text)
    return result.code


def run_ranks(
    options: LaunchOptions, *, last: bool = False, watch: Callable[[Path], None] | None = None
) -> LaunchResult:
    """Run ranks until they exit. Call from the main thread.

    A stop signal is passed on to every rank once, which then has `stop_timeout_s` seconds; a repeated
    one (see `StopSignal`) kills them. Either gives code 75 if the run can be resumed, else 130. If a
    rank fails, the others have `grace_s` seconds to notice before they are killed; the text names
    the failed rank with its step, cause and last lines of output.

    Args:
        last: the process exits with the result (see `StopSignal`).
        watch: called with the folder of the run, again and again while it trains; returns soon.

    Raises:
        ConfigError: before any rank is started, if there are fewer `devices` than ranks, a device
            does not exist, or the port is in use.
    """
    ranks, devices = options.ranks, options.devices
    if ranks < 1:
        raise ConfigError.of(f"number of ranks must be at least 1, got {ranks}", where="--nproc")
    if devices is not None and len(devices) < ranks:
        raise ConfigError.of(
            f"{ranks} ranks, but {len(devices)} devices", where="--devices", hint="one per rank"
        )
    env = {
        LAUNCHER_VARIABLE: str(os.getpid()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads_per_rank(ranks))),
    }
    if devices is not None:
        env[DEVICES_VARIABLE] = ",".join(map(str, devices))
    with (
        StopSignal(on_repeat=lambda: None, signals=GROUP_SIGNALS, last=last) as stop,
        tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as work_dir,
    ):
        if options.config:
            config_file = Path(work_dir) / "config.json"
            config_file.write_text(options.config, encoding="utf-8")
            env[CONFIG_VARIABLE] = str(config_file)
        # Importing torch takes a second or two; signals are already handled by then.
        from instar.distributed.world import device_of

        device_of(options.device, Placement(size=ranks, local_size=ranks), devices or ())
        exits = Supervisor(options, Path(work_dir), stop, env, watch).run()
        if not exits:
            code = stopped_before_start(resumable=options.resumable).exit_code
            return LaunchResult(code, NOTHING_STARTED)
        code, text = conclude_launch(exits, stop, resumable=options.resumable)
        return LaunchResult(code, text, next((end.log for end in exits if end.rank == 0), None))


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
        watch: Callable[[Path], None] | None = None,
    ) -> None:
        # not before signals are handled: importing torch takes a second or two
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

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
        self._watch = watch
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
                print_stderr(f"{describe_exits(exits)}\nrestarting all ranks")
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
                    if self._watch is not None and (log := ranks[0].log) is not None:
                        self._watch(log.parents[1])
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
            print_stderr(f"{self._stop.requested}: stopping{hint}")
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
    def log(self) -> Path | None:
        """Its log in the run's folder; None before that is known."""
        return log_of_failure(self._record)

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
        log = self.log
        output = self.child.output if log is None else (log,)
        failure = read_failure(self._record)
        return RankExit(self.rank, self.status, self.is_killed, failure, output, log)


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


def conclude_launch(
    exits: Sequence[RankExit], stop: StopSignal, *, resumable: bool
) -> tuple[int, str]:
    """Return the exit code of the launch, and the error text."""
    late = [str(end.rank) for end in exits if end.is_killed and end.failure is None]
    cause = _first_failure(exits)
    if stop.requested and (cause is None or cause.failure is None or cause.failure.secondary):
        text = f"killed, because it did not stop in time: rank {', '.join(late)}"
        has_checkpoint = resumable or any(_has_checkpoint(end.log) for end in exits)
        exit_code = Interrupted.exit_code if has_checkpoint else StoppedUnsaved.exit_code
        if any(end.status in STOPPED for end in exits) and not late:
            exit_code = min(end.status for end in exits if end.status in STOPPED)
        code = exit_code if any(end.status for end in exits) else 0
        return code, text if late and not stop.insisted else ""
    if cause is None:
        return min((end.status for end in exits if end.status in STOPPED), default=0), ""
    code = _code(cause)
    if code == ConfigError.exit_code and any(e.rank == 0 and e.status == code for e in exits):
        # Rank 0 has printed it.
        return code, ""
    return code, describe_exits(exits)


def _has_checkpoint(log: Path | None) -> bool:
    """Return whether the run that this log belongs to has a checkpoint."""
    return log is not None and any((log.parents[1] / "checkpoints").glob("step-*"))


def _first_failure(exits: Sequence[RankExit]) -> RankExit | None:
    """Return the rank whose failure caused the others'; None if none failed."""
    bad = [
        end
        for end in exits
        if end.failure or (end.status not in (0, *STOPPED) and not end.is_killed)
    ]
    return min(bad, key=_suspicion, default=None)


def _suspicion(end: RankExit) -> tuple[int, float]:
    # A killed rank leaves no record, and the peers that fail because of it leave secondary ones.
    # SIGABRT is how NCCL's watchdog ends a process that has lost its peers.
    if end.failure is None:
        was_killed = end.status < 0 and end.status != -signal.SIGABRT
        return (0 if was_killed else 2, 0.0)
    return (3 if end.failure.secondary else 1, end.failure.time)


def _code(end: RankExit) -> int:
    if end.failure is not None:
        return end.failure.exit_code
    known_codes = (ConfigError.exit_code, 3, RunFailed.exit_code)
    return end.status if end.status in known_codes else RunFailed.exit_code


def describe_exits(exits: Sequence[RankExit]) -> str:
    end = _first_failure(exits)
    if end is None:
        return "the ranks ended without an error message"
    if end.failure is not None:
        text = end.failure.sentence()
    else:
        steps = [peer.failure.step for peer in exits if peer.failure and peer.failure.step]
        around = f" around step {max(steps)}" if steps and end.status < 0 else ""
        text = f"rank {end.rank} {exit_text(end.status)}{around}"
        if end.status == -signal.SIGKILL:
            text += " (the kernel does so when memory runs out)"
    at_fault = [other for other in exits if end.failure and other.rank in end.failure.ranks]
    return "\n".join([text, *_last_lines((at_fault or [end])[0].output)])


def _last_lines(files: Sequence[Path]) -> Iterator[str]:
    for file in files:
        with suppress(OSError):
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
            if lines:
                yield f"  last lines of {file}:"
                yield from (f"    {line}" for line in lines)


def torchrun_line(
    argv: Sequence[str],
    nproc: int,
    devices: Sequence[int] | None = None,
    *,
    max_restarts: int = 0,
    port: int = 0,
) -> str:
    """Return the torchrun command equivalent to `launch` with these arguments."""
    variables = {}
    if "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = str(threads_per_rank(nproc))
    if devices is not None:
        variables[DEVICES_VARIABLE] = ",".join(map(str, devices))
    settings = [f"{name}={value}" for name, value in variables.items()]
    command = ["torchrun", f"--nproc_per_node={nproc}"]
    command += [f"--master-port={port}"] if port else []
    command += [f"--max-restarts={max_restarts}"] if max_restarts else []
    command += ["-m", "instar.train", *argv]
    return " ".join([*settings, shlex.join(command)])


def threads_per_rank(nproc: int) -> int:
    """Return the cores this process may use divided by the number of ranks; at least 1."""
    usable = usable_cores()
    # Two threads of one core share its arithmetic units.
    return max(1, min(usable, psutil.cpu_count(logical=False) or usable) // nproc)


def print_stderr(text: str) -> None:
    """Print a line to stderr."""
    # The terminal may be gone: SIGHUP is one of the stop signals.
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


@contextmanager
def environment(extra: dict[str, str]) -> Iterator[None]:
    """Set these environment variables inside the context."""
    before = {name: os.environ.get(name) for name in extra}
    os.environ.update(extra)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
