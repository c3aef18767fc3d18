"""Alerts: rules over the events of a run, and their delivery to a program or a web address.

A rule alerts once, and again only after its condition has ended. A resume resets all rules.
"""

from __future__ import annotations

import base64
import json
import math
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from statistics import median
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from instar.config.errors import redacted_error
from instar.config.sections import AlertsConfig
from instar.distributed.placement import child_environment
from instar.processes.child import Child, exit_text
from instar.record.events import (
    AXES,
    Alert,
    Event,
    OperationEvent,
    Placed,
    RecordError,
    RunStarted,
    Skip,
    Train,
    Warn,
    to_words,
)
from instar.record.recorder import Sink
from instar.record.rundir import RunDir

SMOOTHING_WINDOW = 5
"""Records; two outliers in a row never alert."""
NOISE_WINDOW = 100
MIN_RECORDS = 10
"""Records without alerts at the start and after an operation."""
NOISE_FACTOR = 10.0
"""Multiple of the noise by which a smoothed loss may exceed its minimum."""

SPEED_WINDOW = 100
SLOW_RECORDS = 5
MIN_SPEEDS = 5
QUEUE_ALERTS = 100
TIMEOUT_S = 30.0
"""for one program or one request"""
CLOSE_WAIT_S = 5.0


class Rules:
    """All alert rules of a run."""

    def __init__(
        self, config: AlertsConfig, comparable: Callable[[str, Any], bool] = lambda *_: True
    ) -> None:
        """`comparable`: whether losses after an operation, given by name and value, can be compared
        with earlier ones."""
        self._config = config
        self._comparable = comparable
        self._reset()

    def _reset(self) -> None:
        config = self._config
        self._divergence = Divergence(config.divergence) if config.divergence else None
        self._stall = Stall(config.stall) if config.stall else None
        self._skips = 0

    def update(self, event: Event) -> list[Alert]:
        """Return the alerts that an event raises."""
        alerts: list[tuple[str, str]] = []
        if isinstance(event, RunStarted):
            self._reset()
        elif isinstance(event, Train):
            if self._divergence and (message := self._divergence.update(event.loss)):
                alerts.append(("divergence", message))
            speed = event.tokens_per_s
            if self._stall and speed is not None and (message := self._stall.update(speed)):
                alerts.append(("stall", message))
        elif isinstance(event, OperationEvent):
            if self._divergence:
                self._divergence.restart(comparable=self._comparable(event.name, event.value))
            if self._stall:
                self._stall.restart()
        elif isinstance(event, Skip) and (message := self._skip(event.consecutive)):
            alerts.append(("nan_skips", message))
        if not isinstance(event, Placed):
            return []
        return [_alert(event, name, f"step {event.step:,}: {text}") for name, text in alerts]

    def _skip(self, consecutive: int) -> str:
        max_skips = self._config.nan_skips
        # a series that is not longer than the last one is a new one
        was_told = max_skips is not None and max_skips <= self._skips < consecutive
        self._skips = consecutive
        if max_skips is None or consecutive < max_skips or was_told:
            return ""
        if consecutive == 1:
            return "a step was skipped: its gradients were not finite"
        return f"{consecutive} steps in a row were skipped: their gradients were not finite"


def _alert(event: Placed, name: str, message: str) -> Alert:
    where = {field: getattr(event, field) for field in ("step", *AXES)}
    return Alert(**where, name=name, message=message)


class Divergence:
    """Alerts when the training loss has lost a fraction of its decrease.

    `smooth` is the median of the last 5 recorded losses, `highest` and `lowest` are its first and
    its smallest value, and `noise` is the standard deviation of one record: 1.4826 / √2 × the
    median of |difference of successive records| over the last 100, which is robust to drift. The
    loss diverges while

        smooth > lowest + max(share × (highest − lowest), 10 × noise)

    and until it is less than half as far above. The loss may be near 0 or negative; NaN counts as
    infinite. There are no alerts in the first 10 records and in the 10 after an operation; `lowest`
    stays, unless the operation changed the samples.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._diverges = False
        self._begin()

    def _begin(self) -> None:
        self._recent: deque[float] = deque(maxlen=SMOOTHING_WINDOW)
        self._steps: deque[float] = deque(maxlen=NOISE_WINDOW)
        self._highest = -math.inf
        self._lowest = math.inf
        self._records = 0

    def restart(self, *, comparable: bool) -> None:
        """Start over after an operation; keep the minimum if losses are still comparable."""
        lowest, highest = self._lowest, self._highest
        self._begin()
        if comparable:
            self._lowest, self._highest = lowest, highest

    def update(self, loss: float) -> str:
        """Return the message of an alert after one more recorded loss, or an empty string."""
        loss = loss if math.isfinite(loss) else math.inf
        if self._recent and math.isfinite(step := loss - self._recent[-1]):
            self._steps.append(abs(step))
        self._recent.append(loss)
        self._records += 1
        if len(self._recent) < SMOOTHING_WINDOW:
            return ""
        smooth = median(self._recent)
        if math.isfinite(smooth):
            self._lowest = min(self._lowest, smooth)
            if self._highest == -math.inf:
                self._highest = smooth
        if self._records <= MIN_RECORDS:
            return ""
        noise = 1.4826 / math.sqrt(2) * median(self._steps) if self._steps else 0.0
        decrease = max(0.0, self._highest - self._lowest)
        margin = max(self._share * decrease, NOISE_FACTOR * noise)
        before = self._diverges
        above = smooth - (self._lowest if math.isfinite(self._lowest) else 0.0)
        self._diverges = above > (margin / 2 if before else margin)
        if before or not self._diverges:
            return ""
        if not math.isfinite(smooth):
            return "the training loss is not finite"
        return (
            f"the training loss diverges: about {smooth:.4g} over the last {SMOOTHING_WINDOW} records, "
            f"{self._lowest:.4g} at its lowest"
        )


class Stall:
    """Alerts when training is slower than a fraction of its usual speed.

    The usual speed is the median of the last 100 records that were not slow (at least 5) since the
    start or the last operation. 5 slow records in a row are a stall, one that is not ends it.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._slow = 0
        self.restart()

    def restart(self) -> None:
        """Forget the usual speed, because a step may take longer from here on."""
        self._speeds: deque[float] = deque(maxlen=SPEED_WINDOW)

    def update(self, speed: float) -> str:
        """Return the message of an alert after one more speed (tokens/s), or an empty string."""
        usual = median(self._speeds) if len(self._speeds) >= MIN_SPEEDS else None
        if usual is None or speed >= self._share * usual:
            self._slow = 0
            if math.isfinite(speed):
                self._speeds.append(speed)
            return ""
        self._slow += 1
        if self._slow != SLOW_RECORDS:
            return ""
        return (
            f"training has slowed down to {speed / usual:.0%} of its usual speed, for "
            f"{SLOW_RECORDS} records in a row"
        )


class Notifier:
    """Delivers alerts to a program and to a web address in a separate thread.

    `send` never blocks; `failures` returns failed deliveries.
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
        self._targets: list[Callable[[dict[str, Any]], None]] = []
        if argv:
            self._targets.append(lambda payload: run_alert_command(argv, payload, timeout_s))
        if webhook:
            self._targets.append(lambda payload: post_alert(webhook, payload, timeout_s))
        self._queue: queue.Queue[Alert | None] = queue.Queue(QUEUE_ALERTS)
        self._failures: deque[str] = deque()
        self._thread: threading.Thread | None = None

    def send(self, alert: Alert) -> None:
        """Queue an alert; it is dropped if `QUEUE_ALERTS` are waiting."""
        if not self._targets:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="alerts", daemon=True)
            self._thread.start()
        with suppress(queue.Full):
            self._queue.put_nowait(alert)

    def failures(self) -> list[str]:
        """Return the failed deliveries since the last call."""
        return [self._failures.popleft() for _ in range(len(self._failures))]

    def close(self, wait_s: float = CLOSE_WAIT_S) -> None:
        """Wait up to `wait_s` seconds for queued alerts."""
        if self._thread is not None:
            with suppress(queue.Full):
                self._queue.put_nowait(None)
            self._thread.join(wait_s)
            if self._thread.is_alive():
                self._failures.append(f"an alert was not yet delivered after {wait_s:g} s")

    def _work(self) -> None:
        while (alert := self._queue.get()) is not None:
            payload = alert_payload(self._run, alert)
            for deliver in self._targets:
                try:
                    deliver(payload)
                except Exception as error:
                    self._failures.append(f"an alert could not be delivered: {error}")


def alert_payload(run: RunDir, alert: Alert) -> dict[str, Any]:
    """Return the payload of an alert; `text` is a sentence, as chat webhooks expect."""
    return {
        "text": f"{run.path.name}: {alert.message}",
        "run": run.id,
        "folder": str(run.path.absolute()),
        **{
            name: to_words(getattr(alert, name))
            for name in ("name", "message", "step", "tokens", "flops", "wall_s", "active_s")
        },
    }


def run_alert_command(argv: Sequence[str], payload: dict[str, Any], timeout_s: float) -> None:
    """Run a program without a shell, with `payload` as JSON on its stdin and in its environment.

    Raises:
        RuntimeError: it cannot be started, failed, or was killed after `timeout_s` seconds; no word of
            the command is in its message.
    """
    text = json.dumps(payload)
    variables = {
        f"INSTAR_ALERT_{key.upper()}": str(payload[key]) for key in ("run", "name", "step")
    }
    start_s = time.monotonic()
    with tempfile.TemporaryFile() as stdin:
        stdin.write(text.encode())
        stdin.seek(0)
        environment = child_environment(os.environ) | variables | {"INSTAR_ALERT": text}
        try:
            child = Child(
                argv,
                env=environment,
                stdin=stdin.fileno(),
                output=subprocess.DEVNULL,
                new_session=True,
            )
        except OSError as error:
            raise RuntimeError(f"its program cannot be started: {error.strerror}") from None
    status = child.wait(timeout_s)
    if status == -signal.SIGKILL and time.monotonic() - start_s >= timeout_s:
        raise RuntimeError(f"its program took longer than {timeout_s:g} s and was killed")
    if status:
        raise RuntimeError(f"its program {exit_text(status)}")


def post_alert(address: str, payload: dict[str, Any], timeout_s: float) -> None:
    """Send `payload` as JSON by POST, with `user:password@` of the address as Basic authentication.

    Raises:
        OSError: there was no response in time, or it was an error; the message holds no part of the
            address that may be secret.
    """
    try:
        parts = urlsplit(address)
        userinfo, _, host = parts.netloc.rpartition("@")  # which urllib would take for the host
        request = urllib.request.Request(
            urlunsplit(parts._replace(netloc=host)),
            data=json.dumps(payload).encode(),
            headers={"Content-Type": "application/json", "User-Agent": "instar"},
            method="POST",
        )
        if userinfo:
            user, _, password = userinfo.partition(":")
            login = base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
            # not to where a redirect leads
            request.add_unredirected_header("Authorization", f"Basic {login}")
        with urllib.request.urlopen(request, timeout=timeout_s):
            pass
    except Exception as error:  # of several kinds, if the address is malformed
        raise OSError(redacted_error(error, (address,))) from None


class AlertSink:
    """Writes events to another sink; alerts go to that sink, to `warn` and to the notifier."""

    def __init__(
        self, sink: Sink, rules: Rules, notifier: Notifier, warn: Callable[[str], None]
    ) -> None:
        self._sink, self._rules, self._notifier, self._warn = sink, rules, notifier, warn

    def write(self, event: Event) -> None:
        self._sink.write(event)
        for alert in self._rules.update(event):
            self._sink.write(alert)
            self._warn(alert.message)
            self._notifier.send(alert)
        self._report_failures()

    def sync(self) -> None:
        self._sink.sync()

    def close(self) -> None:
        """Wait for queued alerts and close the other sink."""
        try:
            self._notifier.close()
            with suppress(RecordError):
                self._report_failures()
        finally:
            self._sink.close()

    def _report_failures(self) -> None:
        for failure in self._notifier.failures():
            self._sink.write(Warn(message=failure))
            self._warn(failure)
