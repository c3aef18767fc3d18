"""Telling a person of an alert through a program or a web address, beside training."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import urllib.request
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from instar.record.events import Alert, to_words
from instar.record.rundir import RunDir

QUEUE_ALERTS = 100
TIMEOUT_S = 30.0
"""for one program or one request"""
CLOSE_WAIT_S = 5.0


class Notifier:
    """Hands alerts to a program and to a web address, in a thread of its own.

    Neither `send` nor anything that they do holds up the caller; what goes wrong is told by
    `troubles`.
    """

    def __init__(
        self,
        run: RunDir,
        argv: Sequence[str] = (),
        webhook: str | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._run = run
        self._ways: list[Callable[[dict[str, Any]], None]] = []
        if argv:
            self._ways.append(lambda told: run_command(argv, told, timeout_s))
        if webhook:
            self._ways.append(lambda told: post(webhook, told, timeout_s))
        self._queue: queue.Queue[Alert | None] = queue.Queue(QUEUE_ALERTS)
        self._troubles: deque[str] = deque()
        self._thread: threading.Thread | None = None

    def send(self, alert: Alert) -> None:
        """Have it told, soon; left out where a hundred are waiting already."""
        if not self._ways:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="alerts", daemon=True)
            self._thread.start()
        with suppress(queue.Full):
            self._queue.put_nowait(alert)

    def troubles(self) -> list[str]:
        """What went wrong since this was last asked."""
        return [self._troubles.popleft() for _ in range(len(self._troubles))]

    def close(self, wait_s: float = CLOSE_WAIT_S) -> None:
        """Wait a little for what is still to be told."""
        if self._thread is not None:
            with suppress(queue.Full):
                self._queue.put_nowait(None)
            self._thread.join(wait_s)
            if self._thread.is_alive():
                self._troubles.append(f"an alert was not yet delivered after {wait_s:g} s")

    def _work(self) -> None:
        while (alert := self._queue.get()) is not None:
            told = as_json(self._run, alert)
            for way in self._ways:
                try:
                    way(told)
                except Exception as error:
                    self._troubles.append(f"an alert could not be delivered: {error}")


def as_json(run: RunDir, alert: Alert) -> dict[str, Any]:
    """What is told of an alert; `text` is a sentence, as chats understand it."""
    return {
        "text": f"{run.path.name}: {alert.message}",
        "run": run.id,
        "folder": str(run.path.absolute()),
        **{
            name: to_words(getattr(alert, name))
            for name in ("name", "message", "step", "tokens", "flops", "wall_s", "active_s")
        },
    }


def run_command(argv: Sequence[str], told: dict[str, Any], timeout_s: float) -> None:
    """Run a program, without a shell, with `told` as JSON on its stdin and in its environment.

    Raises:
        OSError: it cannot be started.
        RuntimeError: it failed, or was killed for taking too long.
    """
    text = json.dumps(told)
    variables = {f"INSTAR_ALERT_{key.upper()}": str(told[key]) for key in ("run", "name", "step")}
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | variables | {"INSTAR_ALERT": text},
        start_new_session=True,
    )
    try:
        process.communicate(text.encode(), timeout=timeout_s)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise RuntimeError(f"{argv[0]} took longer than {timeout_s:g} s and was ended") from None
    if process.returncode:
        raise RuntimeError(f"{argv[0]} ended with exit code {process.returncode}")


def post(address: str, told: dict[str, Any], timeout_s: float) -> None:
    """Send `told` as JSON, by POST.

    Raises:
        OSError: nobody answered in time, or the answer was a failure.
    """
    request = urllib.request.Request(
        address,
        data=json.dumps(told).encode(),
        headers={"Content-Type": "application/json", "User-Agent": "instar"},
        method="POST",
    )
    with urllib.request.urlopen(request, timeout=timeout_s):
        pass
