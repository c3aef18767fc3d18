"""Child processes: start with captured output, answer over a socket, stop with a grace period, end with the parent.

A child that must not outlive a killed parent calls `die_with_parent` first. A child started from a
thread watches an open socket instead, because Linux sends the parent-death signal as soon as that
*thread* ends. There is no subreaper: a program that a rank deliberately starts in another session
(an alert's program, a tracker's service) keeps running after the rank ends.

A message over a socket is a list of parts, which are bytes; what they mean is for those to say who send them. A
process whose input comes from others must not be believed: its answers are never unpickled.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, Self

from instar.processes.interrupt import STOP_SIGNALS

GROUP_SIGNALS = (*STOP_SIGNALS, signal.SIGQUIT)
"""signals that a terminal or a batch system sends to all processes of a group"""
GONE = "gone"
STATUS_STOPPED = "stopped"
"""psutil's name of the state"""
PATIENCE_S = 5.0
"""how long a process whose socket is closed may take to end"""
_PR_SET_PDEATHSIG = 1
Parts = Sequence[bytes | memoryview]
Allocate = Callable[[int], Any]
"""size → a writable buffer"""


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
        c_library().prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def c_library() -> Any:
    """Return the C library of this process, to call what Python has no function for."""
    import ctypes  # slow to import, like psutil

    return ctypes.CDLL(None)


def process_state(pid: int) -> str:
    """Return psutil's state of a process of this host; GONE if it has ended, "" if unreadable."""
    import psutil  # imported late: lists of runs import this file, and few read a state

    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return GONE
    except (psutil.Error, ValueError, TypeError, OverflowError):  # or it is no process id
        return ""
    return GONE if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else status


class ProcessLost(Exception):  # noqa: N818
    """The process has ended instead of answering."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status
        """as of `Child`"""


class AnsweringProcess:
    """A process of this Python, with the same modules, that answers requests.

    It ignores the signals that reach a whole group, and ends when its socket is closed, also by the
    death of this process, even if it is busy.
    """

    def __init__(
        self,
        serve: Callable[..., None],
        *words: object,
        env: Mapping[str, str],
        silent: bool = False,
        allocate: Allocate = bytearray,
    ) -> None:
        """Start the process.

        Args:
            serve: function of a module that answers, called with the connection of `accept` and `words`.
            silent: discard stdout and stderr.
            allocate: makes the buffers of received parts.
        """
        start = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from {__name__} import accept; from {serve.__module__} import {serve.__name__}; "
            f"{serve.__name__}(accept(int(sys.argv[1])), *{words!r})"
        )
        # blocked: a signal before it ignores them would end it
        self._child, self._socket = Child.connect(
            [sys.executable, "-u", "-c", start],
            env=env,
            output=subprocess.DEVNULL if silent else None,
            blocked_signals=GROUP_SIGNALS,
        )
        self._allocate = allocate
        self._parent = os.getpid()
        self.pid = self._child.pid

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a fork of the one that started it, and must leave it alone."""
        return self._parent != os.getpid()

    def exchange(self, request: Parts) -> list[memoryview]:
        """Return the answer to a request. Raises ProcessLost."""
        try:
            send_parts(self._socket, request)
            return receive_parts(self._socket, self._allocate)
        except (EOFError, OSError):
            raise ProcessLost(self._child.wait(PATIENCE_S)) from None

    def hang_up(self) -> None:
        """Close the connection, also if another thread waits for an answer."""
        with suppress(OSError):  # the process has exited already
            self._socket.shutdown(socket.SHUT_RDWR)

    def end(self, grace_s: float = PATIENCE_S) -> None:
        """End the process, which is killed after `grace_s` seconds. Idempotent."""
        if not self.is_inherited:
            self.hang_up()
            self._child.wait(grace_s)
        self._socket.close()


def accept(descriptor: int) -> socket.socket:
    """Return the connection of an answering process to the one that started it."""
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)
    threading.Thread(target=_leave_when_alone, args=(descriptor,), daemon=True).start()
    return socket.socket(fileno=descriptor)


def _leave_when_alone(descriptor: int) -> NoReturn:
    """Exit when the other end of the socket is closed, also by the death of its process."""
    poll = select.poll()
    poll.register(descriptor, 0)
    poll.poll()
    os._exit(0)


def send_parts(connection: socket.socket, parts: Parts) -> None:
    """Send a message."""
    sizes = [len(parts), *(memoryview(part).nbytes for part in parts)]
    connection.sendall(struct.pack(f"<{len(sizes)}Q", *sizes))
    for part in parts:
        connection.sendall(part)


def receive_parts(connection: socket.socket, allocate: Allocate = bytearray) -> list[memoryview]:
    """Return the next message. Raises EOFError if the other end is closed."""
    (count,) = struct.unpack("<Q", _receive_exactly(connection, 8, bytearray))
    sizes = struct.unpack(f"<{count}Q", _receive_exactly(connection, 8 * count, bytearray))
    return [_receive_exactly(connection, size, allocate) for size in sizes]


def _receive_exactly(connection: socket.socket, size: int, allocate: Allocate) -> memoryview:
    buffer = memoryview(allocate(size))
    free = buffer
    while free:
        count = connection.recv_into(free)
        if not count:
            raise EOFError
        free = free[count:]
    return buffer
