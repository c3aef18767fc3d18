"""Ranks on this host under torch's elastic agent, in this process: `instar train --nproc N`."""

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

from instar.config.errors import ConfigError
from instar.distributed.cores import cores
from instar.distributed.failure import LAUNCHER_VARIABLE, NOTHING_STARTED, Interrupted, RunFailed
from instar.distributed.placement import DEVICES_VARIABLE, Placement
from instar.distributed.signals import StopSignal

if TYPE_CHECKING:
    from instar.distributed.agent import Ended

LAST_LINES = 15


@dataclass(frozen=True)
class Conclusion:
    """How ranks ended: the exit code of the whole, why if badly ("": it was said), rank 0's log."""

    code: int
    text: str = ""
    log: Path | None = None


def launch(
    argv: Sequence[str],
    nproc: int,
    devices: Sequence[int] | None = None,
    *,
    module: str = "instar.train",
    device: str = "auto",
    host: str = "127.0.0.1",
    port: int = 0,
    max_restarts: int = 0,
) -> int:
    """`run_ranks`, its text said on stderr; returns the exit code.

    End the process with `signals.leave(code)`: while the interpreter tidies up, a late Ctrl-C would
    get Python's own handler.
    """
    conclusion = run_ranks(
        argv,
        nproc,
        devices,
        module=module,
        device=device,
        host=host,
        port=port,
        max_restarts=max_restarts,
    )
    if conclusion.text:
        say(conclusion.text)
    return conclusion.code


def run_ranks(
    argv: Sequence[str],
    nproc: int,
    devices: Sequence[int] | None = None,
    *,
    module: str = "instar.train",
    device: str = "auto",
    host: str = "127.0.0.1",
    port: int = 0,
    max_restarts: int = 0,
    stop_timeout_s: float = 60.0,
    grace_s: float = 1.0,
) -> Conclusion:
    """Run `python -m <module> <argv>` in `nproc` ranks to their end.

    SIGINT or SIGTERM asks every rank once to stop, and gives them `stop_timeout_s` seconds; a
    second one ends them at once; either gives code 75. If a rank fails, the others have `grace_s`
    seconds to notice, then they are ended; the text names the failing rank with its step, cause
    and last lines.

    Args:
        device: what the ranks will be told to work on; its GPUs must be there.
        host: an address of this machine, at whose `port` (0: a free one) they meet.

    Raises ConfigError, before a rank is started, if there are fewer `devices` than ranks, one is not
    there, or the port is in use.

    Call from the main thread.
    """
    if nproc < 1:
        raise ConfigError.one(f"{nproc} ranks cannot run", where="--nproc", hint="give 1 or more")
    if devices is not None and len(devices) < nproc:
        raise ConfigError.one(
            f"{nproc} ranks, but {len(devices)} devices", where="--devices", hint="one per rank"
        )
    extra = {
        LAUNCHER_VARIABLE: str(os.getpid()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads_per_rank(nproc))),
        # Empty: the agent shall not put its own handlers in the place of ours.
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "",
    }
    if devices is not None:
        extra[DEVICES_VARIABLE] = ",".join(map(str, devices))
    asking = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    with (
        StopSignal(again=lambda: None, signals=asking) as stop,
        tempfile.TemporaryDirectory(prefix="instar-") as scratch,
        environment(extra),
    ):
        # Importing torch takes a second or two; a signal in that time is already heard.
        from instar.distributed.agent import Agent, StoppedBeforeStartError, silence_elastic
        from instar.distributed.devices import device_of

        silence_elastic()
        device_of(device, Placement(size=nproc, local_size=nproc), devices or ())
        agent = Agent(
            module,
            argv,
            nproc,
            Path(scratch),
            stop,
            say,
            lambda ended: say(f"{_told(ended)}\nstarting all ranks again"),
            max_restarts=max_restarts,
            stop_timeout_s=stop_timeout_s,
            grace_s=grace_s,
            host=host,
            port=port,
        )
        try:
            agent.run()
        except StoppedBeforeStartError:
            return Conclusion(Interrupted.exit_code, NOTHING_STARTED)
        ended = agent.ended()
        code, text = _conclude(ended, stop)
        return Conclusion(code, text, next((end.log for end in ended if end.rank == 0), None))


def torchrun_line(
    argv: Sequence[str],
    nproc: int,
    devices: Sequence[int] | None = None,
    *,
    max_restarts: int = 0,
    port: int = 0,
) -> str:
    """The torchrun command that does the same as `launch` with these arguments."""
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
    """Cores this process may use, divided among the ranks; at least 1."""
    usable = cores()
    # Two threads of one core share its arithmetic units.
    return max(1, min(usable, psutil.cpu_count(logical=False) or usable) // nproc)


def _conclude(ended: Sequence[Ended], stop: StopSignal) -> tuple[int, str]:
    """The exit code of the whole, and how the ranks ended, if badly."""
    late = [str(end.rank) for end in ended if end.by_agent and end.failure is None]
    cause = _blamed(ended)
    if stop.requested and (cause is None or cause.failure is None or cause.failure.secondary):
        text = f"ended, because it did not stop in time: rank {', '.join(late)}"
        code = Interrupted.exit_code if any(end.status for end in ended) else 0
        return code, text if late and not stop.insisted else ""
    if cause is None:
        interrupted = any(end.status == Interrupted.exit_code for end in ended)
        return Interrupted.exit_code if interrupted else 0, ""
    code = _code(cause)
    if code == ConfigError.exit_code and any(e.rank == 0 and e.status == code for e in ended):
        # Rank 0 has printed it.
        return code, ""
    return code, _told(ended)


def _blamed(ended: Sequence[Ended]) -> Ended | None:
    """The rank whose end was the cause of the others', or None if none ended badly."""
    bad = [
        end
        for end in ended
        if end.failure or (end.status not in (0, Interrupted.exit_code) and not end.by_agent)
    ]
    return min(bad, key=_suspicion, default=None)


def _suspicion(end: Ended) -> tuple[int, float]:
    # A killed rank leaves no record, and the peers it took along leave secondary ones. An abort
    # is how a transport's watchdog ends a process that has lost its peers.
    if end.failure is None:
        killed = end.status < 0 and end.status != -signal.SIGABRT
        return (0 if killed else 2, 0.0)
    return (3 if end.failure.secondary else 1, end.failure.time)


def _code(end: Ended) -> int:
    if end.failure is not None:
        return end.failure.exit_code
    known = (ConfigError.exit_code, 3, RunFailed.exit_code)
    return end.status if end.status in known else RunFailed.exit_code


def _told(ended: Sequence[Ended]) -> str:
    end = _blamed(ended)
    if end is None:
        return "ranks ended without saying why"
    if end.failure is not None:
        text = end.failure.sentence()
    elif end.status < 0:
        steps = [peer.failure.step for peer in ended if peer.failure and peer.failure.step]
        around = f" around step {max(steps)}" if steps else ""
        text = f"rank {end.rank} was killed by {signal.Signals(-end.status).name}{around}"
        if end.status == -signal.SIGKILL:
            text += " (the system does so when memory runs out)"
    else:
        text = f"rank {end.rank} ended with exit code {end.status}"
    blamed = [other for other in ended if end.failure and other.rank in end.failure.ranks]
    return "\n".join([text, *_last_lines((blamed or [end])[0].said)])


def _last_lines(files: Sequence[Path]) -> Iterator[str]:
    for file in files:
        with suppress(OSError):
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
            if lines:
                yield f"  last lines of {file}:"
                yield from (f"    {line}" for line in lines)


def say(text: str) -> None:
    """Print a line on stderr."""
    # The terminal may be gone: SIGHUP is one of the ways to be asked to stop.
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


@contextmanager
def environment(extra: dict[str, str]) -> Iterator[None]:
    """With these variables in this process's environment."""
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
