"""Launches and supervises ranks on this machine: `instar train --nproc N`."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from instar.config import CONFIG_VARIABLE
from instar.config.errors import ConfigError
from instar.distributed.failure import (
    FOLDER_PREFIX,
    LAUNCHER_VARIABLE,
    NOTHING_STARTED,
    STOPPED,
    Interrupted,
    RunFailed,
    StoppedUnsaved,
    stopped_before_start,
)
from instar.distributed.placement import (
    DEVICES_VARIABLE,
    LaunchOptions,
    Placement,
    usable_cores,
)
from instar.distributed.signals import StopSignal
from instar.processes.child import GROUP_SIGNALS, exit_text

if TYPE_CHECKING:
    from instar.distributed.supervisor import RankExit

LAST_LINES = 15


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


def run_ranks(options: LaunchOptions, *, last: bool = False) -> LaunchResult:
    """Run ranks until they exit. Call from the main thread.

    A stop signal is passed on to every rank once, which then has `stop_timeout_s` seconds; a repeated
    one (see `StopSignal`) kills them. Either gives code 75 if the run can be resumed, else 130. If a
    rank fails, the others have `grace_s` seconds to notice before they are killed; the text names
    the failed rank with its step, cause and last lines of output.

    Args:
        last: the process exits with the result (see `StopSignal`).

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
        from instar.distributed.supervisor import Supervisor
        from instar.distributed.world import device_of

        device_of(options.device, Placement(size=ranks, local_size=ranks), devices or ())
        exits = Supervisor(
            options,
            Path(work_dir),
            stop,
            env,
            say=print_stderr,
            on_restart=lambda exits: print_stderr(f"{_failure_text(exits)}\nrestarting all ranks"),
        ).run()
        if not exits:
            code = stopped_before_start(resumable=options.resumable).exit_code
            return LaunchResult(code, NOTHING_STARTED)
        code, text = _conclude(exits, stop, resumable=options.resumable)
        return LaunchResult(code, text, next((end.log for end in exits if end.rank == 0), None))


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


def _conclude(exits: Sequence[RankExit], stop: StopSignal, *, resumable: bool) -> tuple[int, str]:
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
    return code, _failure_text(exits)


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


def _failure_text(exits: Sequence[RankExit]) -> str:
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
