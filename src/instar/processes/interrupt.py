"""How a command ends: at once on Ctrl-C, and undisturbed when its work is done. Every command imports this, so it
imports little."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import NoReturn

STOP_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,  # the terminal was closed
    signal.SIGUSR1,  # batch systems' warnings: SLURM's --signal, SGE's, LSF's
    signal.SIGUSR2,
    signal.SIGXCPU,
)
"""signals that ask a run to stop"""
PROMPT_S = 0.7
"""how long after Ctrl-C a command may take to end by itself"""


class PromptInterrupt:
    """While open, Ctrl-C ends the process, whatever it is doing: by itself within `limit_s` seconds, else by `leave`.

    Python raises KeyboardInterrupt between two instructions of the main thread, which may be inside
    a library for minutes, or wait for threads that are. If the process has not ended by then,
    `leave` is called from another thread; it ends the process. Code with its own handler of SIGINT,
    such as `StopSignal`, is left alone.
    """

    def __init__(self, leave: Callable[[], NoReturn], limit_s: float = PROMPT_S) -> None:
        self._leave, self._limit_s = leave, limit_s
        self._ended = threading.Event()

    def __enter__(self) -> PromptInterrupt:
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._before = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._forget)
        threading.Thread(target=self._watch, daemon=True, name="interrupt").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        signal.set_wakeup_fd(self._before)
        self._sender.shutdown(socket.SHUT_RDWR)

    def _forget(self) -> None:
        if not self._ended.is_set():  # a forked child would write its signals into our socket
            signal.set_wakeup_fd(-1)

    def _watch(self) -> None:
        with self._receiver, self._sender:
            while numbers := self._receiver.recv(64):
                is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
                if signal.SIGINT not in numbers or not is_default:
                    continue
                if not self._ended.wait(self._limit_s):
                    self._leave()


def ignore_stop_signals() -> None:
    """Ignore stop signals from now on; call it when the work is done."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
