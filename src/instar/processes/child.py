"""Child processes: start with captured output, stop with a grace period, end with the parent.

A child that must not outlive a killed parent calls `die_with_parent` first. A child started from a
thread watches an open socket instead, because Linux sends the parent-death signal as soon as that
*thread* ends. There is no subreaper: a program that a rank deliberately starts in another session
(an alert's program, a tracker's service) keeps running after the rank ends.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

STOP_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,  # the terminal was closed
    signal.SIGUSR1,  # batch systems' warnings: SLURM's --signal, SGE's, LSF's
    signal.SIGUSR2,
    signal.SIGXCPU,
)
"""signals that ask a run to stop"""
GROUP_SIGNALS = (*STOP_SIGNALS, signal.SIGQUIT)
"""signals that a terminal or a batch system sends to all processes of a group"""
GONE = "gone"
STATUS_STOPPED = "stopped"
"""psutil's name of the state"""
_PR_SET_PDEATHSIG = 1


class Child:
    """A child process. Exit statuses are those of `subprocess`: negative if a signal ended it."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        output: Path | int | None = None,
        stdin: int | None = None,
        new_session: bool = False,
        pass_fds: Sequence[int] = (),
        blocked_signals: Iterable[signal.Signals] = (),
    ) -> None:
        """Start the process.

        Args:
            output: folder for stdout.log and stderr.log, or `subprocess.DEVNULL`; None: inherit this
                process's streams.
            new_session: make the child the leader of a new session, which `kill` ends as a whole.
            blocked_signals: signals blocked at the start, so that none arrives before the child has
                installed its handlers.
        """
        self.output: tuple[Path, ...] = ()
        """files of the captured output; empty unless captured"""
        self._leads_session = new_session
        with ExitStack() as files:
            stdout: BinaryIO | int | None
            stderr: BinaryIO | int | None
            if isinstance(output, Path):
                self.output = (output / "stdout.log", output / "stderr.log")
                stdout, stderr = (files.enter_context(path.open("wb")) for path in self.output)
            else:
                stdout = stderr = output
            before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked_signals)
            try:
                self._process = subprocess.Popen(
                    argv,
                    env=env,
                    stdin=stdin,
                    start_new_session=new_session,
                    pass_fds=pass_fds,
                    stdout=stdout,
                    stderr=stderr,
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.pid = self._process.pid

    @classmethod
    def connect(
        cls,
        argv: Sequence[str],
        kind: socket.SocketKind = socket.SOCK_STREAM,
        **options: Any,
    ) -> tuple[Self, socket.socket]:
        """Start a process whose last argument is the descriptor of its end of a new pair of sockets;
        return it and the other end."""
        near, far = socket.socketpair(socket.AF_UNIX, kind)
        with far:  # once it is closed here, the near end is told of the process's end
            try:
                descriptor = far.fileno()
                argv = [*argv, str(descriptor)]
                child = cls(argv, stdin=subprocess.DEVNULL, pass_fds=[descriptor], **options)
            except BaseException:
                near.close()
                raise
        return child, near

    def poll(self) -> int | None:
        """Return the exit status; None while the process runs."""
        return self._process.poll()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to this process alone; no effect after it has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the process. With `new_session`, kill its whole session, even after it has ended."""
        if self._leads_session:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        else:
            self._process.kill()

    def wait(self, grace_s: float | None = None) -> int:
        """Wait until the process ends, kill it after `grace_s` seconds; return the exit status."""
        try:
            return self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.wait()


def exit_text(status: int) -> str:
    """Return an exit status in words: "was killed by SIGKILL", "ended with exit code 3"."""
    if status >= 0:
        return f"ended with exit code {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # real-time signals have no name
        return f"was killed by signal {-status}"


def die_with_parent(number: signal.Signals) -> None:
    """Let the kernel send this process a signal when the thread that started it ends (Linux).

    The parent may end before this call: compare `os.getppid()` afterwards.
    """
    if sys.platform == "linux":
        import ctypes  # slow to import, like psutil

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def process_state(pid: int) -> str:
    """Return psutil's state of a process of this host; GONE if it has ended, "" if unreadable."""
    import psutil  # imported late: every command imports this file, and few read a state

    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return GONE
    except (psutil.Error, ValueError, TypeError, OverflowError):  # or it is no process id
        return ""
    return GONE if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else status
