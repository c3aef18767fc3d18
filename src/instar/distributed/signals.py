"""Signals ask; they never act. A first one sets a flag, a second one leaves at once.

Python runs a signal handler only between two instructions of the main thread, which may be
waiting inside a collective for minutes. So the signal's number is written to a socket by the
interpreter's C code, and a thread that waits there counts.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any, NoReturn

from instar.distributed.failure import LAUNCHER_VARIABLE, Interrupted

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """While open, SIGINT and SIGTERM set `requested` to the signal's name and do nothing else.

    A second signal sets `insisted` and calls `again`, from a thread of its own; by default that
    leaves with code 75.
    The same Ctrl-C may come twice, from the terminal and from a launcher: whatever follows within
    `moment_s` seconds of the first counts with it.
    """

    def __init__(
        self,
        again: Callable[[], None] | None = None,
        *,
        signals: tuple[signal.Signals, ...] = STOP_SIGNALS,
        moment_s: float | None = None,
    ) -> None:
        self.requested: str | None = None
        self.insisted = False
        self._again = again or leave_interrupted
        self._signals = signals
        self._moment_s = _usual_moment_s(os.environ) if moment_s is None else moment_s
        self._asked = threading.Event()
        self._open = False

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until a stop is asked for; False if `timeout_s` seconds pass before."""
        return self._asked.wait(timeout_s)

    def __enter__(self) -> StopSignal:
        # Unblocking on the writing side only: the C code must never wait for the thread.
        self._listening, self._telling = socket.socketpair()
        self._telling.setblocking(False)
        self._before: dict[signal.Signals, Any] = {}
        for number in self._signals:
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                # Under nohup the run shall outlive its terminal.
                continue
            self._before[number] = signal.signal(number, self._on_signal)
        self._wakeup_before = signal.set_wakeup_fd(
            self._telling.fileno(), warn_on_full_buffer=False
        )
        self._open = True
        os.register_at_fork(after_in_child=self._forget)
        self._counter = threading.Thread(target=self._count, daemon=True, name="signals")
        self._counter.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open = False
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        # Not close alone: a forked child may hold the other end of this socket too.
        self._telling.shutdown(socket.SHUT_RDWR)
        self._counter.join()
        self._telling.close()
        self._listening.close()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._request(number)

    def _request(self, number: int) -> None:
        self.requested = self.requested or signal.Signals(number).name
        self._asked.set()

    def _count(self) -> None:
        first: float | None = None
        while numbers := self._listening.recv(64):
            for number in numbers:
                if number not in self._signals:
                    continue
                now = time.monotonic()
                if first is None:
                    first = now
                    self._request(number)
                elif now - first > self._moment_s:
                    self.insisted = True
                    self._again()

    def _forget(self) -> None:
        # A forked child would write its own signals into the parent's socket.
        if self._open:
            self._open = False
            signal.set_wakeup_fd(-1)
            for number, handler in self._before.items():
                signal.signal(number, handler)


def leave_interrupted() -> NoReturn:
    """End this process at once with code 75: interrupted, resumable."""
    leave(Interrupted.exit_code)


def leave(code: int) -> NoReturn:
    """End this process at once with `code`, after what it said is written.

    No finalizers run: those of a process group may wait for a rank that is gone.
    """
    # A lock of a log may be held by the thread that is stuck; so flush aside, and not for long.
    flushing = threading.Thread(target=_flush, daemon=True)
    flushing.start()
    flushing.join(0.3)
    os._exit(code)


def follow_launcher(environ: Mapping[str, str]) -> None:
    """Ask the kernel for SIGTERM when Instar's launcher dies, so that no rank is orphaned (Linux)."""
    launcher = environ.get(LAUNCHER_VARIABLE)
    if launcher is None or sys.platform != "linux":
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != int(launcher):
        os.kill(os.getpid(), signal.SIGTERM)


def _flush() -> None:
    for handler in logging.getLogger().handlers:
        handler.flush()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _usual_moment_s(environ: Mapping[str, str]) -> float:
    return 1.0 if "TORCHELASTIC_RUN_ID" in environ else 0.2
