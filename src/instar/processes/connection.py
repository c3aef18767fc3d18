"""Processes that answer over a socket: both of its ends.

A message is a list of parts, which are bytes; what they mean is for those to say who send them. A process
whose input comes from others must not be believed: its answers are never unpickled.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from instar.processes.child import GROUP_SIGNALS, Child

Parts = Sequence[bytes | memoryview]
Allocate = Callable[[int], Any]
"""size → a writable buffer"""

PATIENCE_S = 5.0
"""how long a process whose socket is closed may take to end"""


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
