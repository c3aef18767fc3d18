"""Stop signals set a flag; a repeated one ends the process at once.

Python runs signal handlers only between two instructions of the main thread, which may wait inside
a collective for minutes. So the interpreter's C code writes the signal's number to a socket
(`signal.set_wakeup_fd`), which a second thread reads.
"""

from __future__ import annotations

import logging
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, NoReturn, TextIO

from instar.distributed.failure import (
    LAUNCHER_VARIABLE,
    Interrupted,
    StoppedUnsaved,
    remove_orphaned,
)
from instar.processes.child import die_with_parent
from instar.processes.interrupt import PROMPT_S, STOP_SIGNALS

_INTERACTIVE = (signal.SIGINT, signal.SIGQUIT)
_leaving = threading.RLock()
_training = threading.Event()
_stopped = threading.Event()
"""whether a stop signal has come, perhaps because the launcher has died"""
SAVE_S = 5.0
"""how long after the first signal a second SIGTERM still lets the run save"""


def stop_requested() -> bool:
    """Return whether this process was told to stop."""
    return _stopped.is_set()


class StopSignal:
    """While open, a stop signal only sets `requested` to its name; the first one counts.

    A repeated signal sets `insisted` and calls `on_repeat` from another thread; by default that exits
    with code 75 if `resumable` is set, else 130. A second SIGINT or SIGQUIT, which a person sends,
    counts as repeated; of SIGTERM, which schedulers send several times, a third one, or a second
    one `SAVE_S` seconds after the first signal. Other signals never do. The same signal may arrive
    twice, from the terminal and from a launcher: signals within `moment_s` seconds count as one.

    A signal that was ignored before stays ignored (SIGHUP under nohup), and existing handlers of
    SIGUSR1, SIGUSR2 and SIGXCPU stay.
    """

    def __init__(
        self,
        on_repeat: Callable[[], None] | None = None,
        *,
        signals: tuple[signal.Signals, ...] = STOP_SIGNALS,
        moment_s: float | None = None,
        last: bool = False,
        before_start: Callable[[], None] | None = None,
    ) -> None:
        """
        Args:
            last: the process exits afterwards; after a stop or an exception, ignore further signals.
            before_start: unless None, a process that has not ended `PROMPT_S` seconds after the first
                signal, and has not set `started`, calls this from another thread and exits.
        """
        self.resumable = False
        """whether the run could be resumed if this process ended now"""
        self.started = False
        """whether there may be something to save"""
        self.requested: str | None = None
        self.insisted = False
        self._on_repeat = on_repeat or self._leave
        self._signals = signals
        self._last = last
        self._before_start = before_start
        self._moment_s = _usual_moment_s(os.environ) if moment_s is None else moment_s
        self._requested = threading.Event()
        self._open = False

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for a stop signal; return False after `timeout_s` seconds without one."""
        return self._requested.wait(timeout_s)

    def __enter__(self) -> StopSignal:
        # Only the writing side is non-blocking: the C code must never wait for the thread.
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._before: dict[signal.Signals, Any] = {}
        for number in self._signals:
            if _is_taken(number):
                continue
            self._before[number] = signal.signal(number, self._on_signal)
        self._wakeup_before = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
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
        # The exception may be the loss of a launcher that is killed, whose signal comes a moment later.
        ends = self._last and (self.requested is not None or error is not None)
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if ends else handler)
        # close() is not enough: a forked child may hold this end of the socket too.
        self._sender.shutdown(socket.SHUT_RDWR)
        self._counter.join()
        self._sender.close()
        self._receiver.close()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        # The thread sets the event: the main thread, in which handlers run, may hold its lock, in `wait`.
        self.requested = self.requested or signal.Signals(number).name

    def _count(self) -> None:
        first = last = -math.inf
        terms = 0
        while numbers := self._receiver.recv(64):
            for number in numbers:
                if number not in self._before:
                    continue
                if number == signal.SIGHUP:
                    detach_closed_streams()
                now = time.monotonic()
                if first == -math.inf:
                    first = last = now
                    self.requested = self.requested or signal.Signals(number).name
                    self._requested.set()
                    _stopped.set()
                    if self._before_start is not None:
                        threading.Thread(target=self._give_up, daemon=True, name="give-up").start()
                elif now - last > self._moment_s:
                    last = now
                    terms += number == signal.SIGTERM
                    is_repeat = number == signal.SIGTERM and (terms > 1 or now - first > SAVE_S)
                    if is_repeat or number in _INTERACTIVE:
                        self.insisted = True
                        self._on_repeat()

    def _give_up(self) -> None:
        time.sleep(PROMPT_S)
        if self._open and not self.started and self._before_start is not None:
            self._before_start()
            self._leave()

    def _leave(self) -> NoReturn:
        exit_now((Interrupted if self.resumable else StoppedUnsaved).exit_code)

    def _forget(self) -> None:
        # A forked child would write its signals into the parent's socket.
        if self._open:
            self._open = False
            signal.set_wakeup_fd(-1)
            for number, handler in self._before.items():
                signal.signal(number, handler)


def exit_now(code: int) -> NoReturn:
    """Flush logs and streams and exit with `code`, without running finalizers.

    Those of a process group may wait for a lost rank. The first call ends the process; others wait.
    """
    # never released: another thread's exit would interrupt the removal of files
    _leaving.acquire()
    # The stuck thread may hold the lock of a log handler: flush in another thread, with a limit.
    flushing = threading.Thread(target=_flush, daemon=True)
    flushing.start()
    flushing.join(0.3)
    remove_orphaned(os.environ, 0.3 if _stopped.is_set() else 0.0)
    os._exit(code)


def exit_with_parent(environ: Mapping[str, str]) -> None:
    """Exit when the launcher dies, so that no rank is orphaned.

    Until training starts (`training_started`) there is nothing to save, and the process may be
    waiting for ranks that will not come: it exits at once. Afterwards the kernel sends SIGTERM when
    Instar's launcher dies (Linux), and the ranks stop and save together.
    """
    launcher = environ.get(LAUNCHER_VARIABLE)
    if launcher is not None:
        die_with_parent(signal.SIGTERM)
    if launcher is not None or "TORCHELASTIC_RUN_ID" in environ:
        parent = os.getppid() if launcher is None else int(launcher)
        threading.Thread(target=_leave_without, args=[parent], daemon=True, name="launcher").start()


def training_started() -> None:
    """From now on a stop is agreed on by all ranks, also if the launcher dies."""
    _training.set()


def _leave_without(parent: int) -> None:
    while not _training.is_set():
        if os.getppid() != parent:
            exit_now(StoppedUnsaved.exit_code)
        _training.wait(0.1)


def detach_closed_streams() -> None:
    """Redirect stdout and stderr to /dev/null if their reader is gone (a closed terminal or pipe),
    so that the next print does not fail."""
    for stream, number in ((sys.__stdout__, 1), (sys.__stderr__, 2)):
        if stream is None:
            continue
        with suppress(OSError):
            poller = select.poll()
            poller.register(number, 0)
            if any(flags & (select.POLLHUP | select.POLLERR) for _, flags in poller.poll(0)):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, number)
                os.close(null)


def _is_taken(number: signal.Signals) -> bool:
    """Return whether this process already uses the signal for something else."""
    before = signal.getsignal(number)
    if number in (signal.SIGINT, signal.SIGTERM):
        return False
    if number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU):
        return before is not signal.SIG_DFL
    return before is signal.SIG_IGN


def _flush() -> None:
    flush(*logging.getLogger().handlers, sys.stdout, sys.stderr)


def flush(*streams: logging.Handler | TextIO | None) -> None:
    """Flush streams; one that fails is passed over."""
    for stream in streams:
        if stream is not None:
            with suppress(OSError, ValueError):
                stream.flush()


def _usual_moment_s(environ: Mapping[str, str]) -> float:
    return 1.0 if "TORCHELASTIC_RUN_ID" in environ else 0.2
