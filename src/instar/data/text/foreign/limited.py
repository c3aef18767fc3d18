"""A process with limits for what files of others make a library do: it may panic, abort, take all memory or never end."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import weakref
from contextlib import suppress
from typing import Any, Literal

from instar.data.text.foreign import worker
from instar.processes.child import Child, exit_text

_OF_GROUPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""signals that reach a process of this one's too; it ends when this one does"""


class RequestFailed(Exception):  # noqa: N818
    """What was asked took too much, or failed; the message says how in one line."""


class LimitedProcess:
    """Runs `worker.py` for a file's content; a request may take `limit_s` and `worker.LIMIT_BYTES`.

    The process is started when it is asked something, anew after it has failed, and apart in a fork.
    """

    def __init__(
        self, kind: Literal["tokenizer", "template"], content: bytes, limit_s: int
    ) -> None:
        self._kind, self._content, self._limit_s = kind, content, limit_s
        self._lock = threading.Lock()
        self._link: Any = None
        self._end: Any = None
        self.pid = 0
        """of the process"""
        self._owner = 0

    def ask(self, request: dict[str, Any], content: bytes) -> tuple[dict[str, Any], bytes]:
        """Return the reply to a request. Raises RequestFailed if there is none."""
        with self._lock:
            if self._link is None or self._owner != os.getpid():
                self._start()
            return self._exchange(request, content)

    def start(self) -> None:
        """Load the content, unless that is done. Raises RequestFailed if it cannot be loaded."""
        with self._lock:
            if self._link is None:
                self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            limits = [str(descriptor), str(self._limit_s)]
            child = Child(
                [sys.executable, "-P", worker.__file__, self._kind, *limits],
                env=os.environ,
                silent=True,
                pass_fds=[descriptor],
                blocked=_OF_GROUPS,
            )
        with ours:  # the file keeps it open
            self._link = ours.makefile("rwb")
        self._owner = os.getpid()
        self._child = child
        self.pid = child.pid
        self._end = weakref.finalize(self, _end, self._link, child, self._owner)
        self._exchange({"ask": "load"}, self._content)

    def _exchange(self, request: dict[str, Any], content: bytes) -> tuple[dict[str, Any], bytes]:
        try:
            worker.send(self._link, request, content)
            reply = worker.receive(self._link)
        except OSError:
            reply = None
        except BaseException:  # an interrupt in the middle of a message
            self._stop()
            raise
        if reply is None:
            raise RequestFailed(self._cause(self._stop()))
        if "error" in reply[0]:
            raise RequestFailed(reply[0]["error"])
        return reply

    def _stop(self) -> int:
        """End the process; return its status."""
        status = self._child.wait(1)
        self._link = None
        self._end()
        return status

    def _cause(self, status: int) -> str:
        if status == -signal.SIGALRM:
            return f"it takes more than {self._limit_s} s"
        if status == -signal.SIGABRT:
            return f"{worker.TOO_LARGE}, or aborts"
        return f"its process {exit_text(status)}"


def _end(link: Any, child: Child, pid: int) -> None:
    if os.getpid() == pid:
        child.kill()
        child.wait(1)
    with suppress(OSError):
        link.close()
