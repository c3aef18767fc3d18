"""A process with limits for what files of others make a library do: it may panic, abort, take all memory or never end."""

from __future__ import annotations

import json
import os
import signal
import threading
import weakref
from typing import Any, Literal

from instar.data.text.foreign import worker
from instar.processes.child import exit_text
from instar.processes.connection import AnsweringProcess, ProcessLost


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
        self._process: AnsweringProcess | None = None

    @property
    def pid(self) -> int:
        """Of the process; 0: it is not started."""
        return self._process.pid if self._process else 0

    def ask(self, request: dict[str, Any], content: bytes) -> tuple[dict[str, Any], bytes]:
        """Return the reply to a request. Raises RequestFailed if there is none."""
        with self._lock:
            return self._exchange(self._start(), request, content)

    def start(self) -> None:
        """Load the content, unless that is done. Raises RequestFailed if it cannot be loaded."""
        with self._lock:
            self._start()

    def _start(self) -> AnsweringProcess:
        process = self._process
        if process is None or process.is_inherited:
            process = AnsweringProcess(
                worker.serve_limited, self._kind, self._limit_s, env=os.environ, silent=True
            )
            self._process = process
            self._end = weakref.finalize(self, process.end, 0.0)
            self._exchange(process, {"ask": "load"}, self._content)
        return process

    def _exchange(
        self, process: AnsweringProcess, request: dict[str, Any], content: bytes
    ) -> tuple[dict[str, Any], bytes]:
        try:
            head, reply = process.exchange([json.dumps(request).encode(), content])
        except BaseException as error:  # also an interrupt in the middle of a message
            self._process = None
            self._end()
            if isinstance(error, ProcessLost):
                raise RequestFailed(self._cause(error.status)) from None
            raise
        header: dict[str, Any] = json.loads(bytes(head))
        if "error" in header:
            raise RequestFailed(header["error"])
        return header, bytes(reply)

    def _cause(self, status: int) -> str:
        if status == -signal.SIGALRM:
            return f"it takes more than {self._limit_s} s"
        if status == -signal.SIGABRT:
            return f"{worker.TOO_LARGE}, or aborts"
        return f"its process {exit_text(status)}"
