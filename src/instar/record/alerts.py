"""When a person should look at a run: pure rules over its events.

A rule tells once, and again only after what it told of was over. All of them begin anew where a run
goes on from a checkpoint.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from instar.config.record import AlertsConfig
from instar.record.events import Alert, Event, Operation, Placed, RunStarted, Skip, Train

SMOOTHED_OVER = 5
"""Records: two wild ones in a row never alert."""
NOISE_OVER = 100
FEWEST = 10
"""Records before which nothing is judged, at the start and after an operation."""
NOISES = 10.0
"""How far above its lowest noise alone never takes a smoothed loss."""
OTHER_SAMPLES = frozenset({"set_context", "resize_vocab", "override"})
"""Operations after which losses do not compare with those before."""

SPEEDS_OVER = 100
SLOW_RECORDS = 5
FEWEST_SPEEDS = 5


class Rules:
    """All rules of a run; its only state is what it has seen."""

    def __init__(self, config: AlertsConfig) -> None:
        self._config = config
        self._forget()

    def _forget(self) -> None:
        config = self._config
        self._divergence = Divergence(config.divergence) if config.divergence else None
        self._stall = Stall(config.stall) if config.stall else None
        self._skipping = False

    def see(self, event: Event) -> list[Alert]:
        """What is to be told now that this has happened."""
        said: list[tuple[str, str]] = []
        if isinstance(event, RunStarted):
            self._forget()
        elif isinstance(event, Train):
            if self._divergence and (message := self._divergence.see(event.loss)):
                said.append(("divergence", message))
            speed = event.tokens_per_s
            if self._stall and speed is not None and (message := self._stall.see(speed)):
                said.append(("stall", message))
        elif isinstance(event, Operation):
            if self._divergence:
                self._divergence.changed(comparable=event.name not in OTHER_SAMPLES)
            if self._stall:
                self._stall.changed()
        elif isinstance(event, Skip) and (message := self._skip(event.consecutive)):
            said.append(("nan_skips", message))
        if not isinstance(event, Placed):
            return []
        return [_alert(event, name, f"step {event.step:,}: {text}") for name, text in said]

    def _skip(self, consecutive: int) -> str:
        most = self._config.nan_skips
        before, self._skipping = self._skipping, most is not None and consecutive >= most
        if before or not self._skipping:
            return ""
        return f"{consecutive} steps in a row were skipped: their gradients were not finite"


def _alert(event: Placed, name: str, message: str) -> Alert:
    return Alert(
        step=event.step,
        samples=event.samples,
        tokens=event.tokens,
        epoch=event.epoch,
        flops=event.flops,
        wall_s=event.wall_s,
        active_s=event.active_s,
        name=name,
        message=message,
    )


class Divergence:
    """The training loss has given back a share of what it had fallen.

    `smooth` is the median of the last 5 recorded losses, `highest` and `lowest` its first and its
    smallest value, and `noise` the standard deviation of one record about its neighbours:
    1.4826 / √2 × the median of |difference of successive records| over the last 100, which a drift
    hardly moves. It diverges while

        smooth > lowest + max(share × (highest − lowest), 10 × noise)

    and is over when it is half as far above. No term asks how large the loss itself is, so it may
    be near 0 or negative. A loss that is no number counts as infinitely high. Nothing is judged
    in the first 10 records, and in the 10 after an operation; the lowest stays, unless the
    operation changed what the loss is of.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._diverges = False
        self._begin()

    def _begin(self) -> None:
        self._recent: deque[float] = deque(maxlen=SMOOTHED_OVER)
        self._steps: deque[float] = deque(maxlen=NOISE_OVER)
        self._highest = -math.inf
        self._lowest = math.inf
        self._records = 0

    def changed(self, *, comparable: bool) -> None:
        """An operation was carried out."""
        lowest, highest = self._lowest, self._highest
        self._begin()
        if comparable:
            self._lowest, self._highest = lowest, highest

    def see(self, loss: float) -> str:
        """What to tell after one more recorded loss; empty: nothing."""
        loss = loss if math.isfinite(loss) else math.inf
        if self._recent and math.isfinite(step := loss - self._recent[-1]):
            self._steps.append(abs(step))
        self._recent.append(loss)
        self._records += 1
        if len(self._recent) < SMOOTHED_OVER:
            return ""
        smooth = median(self._recent)
        if math.isfinite(smooth):
            self._lowest = min(self._lowest, smooth)
            if self._highest == -math.inf:
                self._highest = smooth
        if self._records <= FEWEST:
            return ""
        noise = 1.4826 / math.sqrt(2) * median(self._steps) if self._steps else 0.0
        fallen = max(0.0, self._highest - self._lowest)
        margin = max(self._share * fallen, NOISES * noise)
        before = self._diverges
        above = smooth - (self._lowest if math.isfinite(self._lowest) else 0.0)
        self._diverges = above > (margin / 2 if before else margin)
        if before or not self._diverges:
            return ""
        if not math.isfinite(smooth):
            return "the training loss is not finite"
        return (
            f"the training loss diverges: about {smooth:.4g} over the last {SMOOTHED_OVER} records, "
            f"{self._lowest:.4g} at its lowest"
        )


class Stall:
    """Training runs at less than a share of its usual speed.

    The usual speed is the median of the last 100 records that were not slow, at least 5, since the
    start or the last operation; 5 slow records in a row are a stall, one that is not ends it.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._slow = 0
        self.changed()

    def changed(self) -> None:
        """What a step costs may be otherwise from here on."""
        self._speeds: deque[float] = deque(maxlen=SPEEDS_OVER)

    def see(self, speed: float) -> str:
        """What to tell after one more recorded speed, in tokens per second; empty: nothing."""
        usual = median(self._speeds) if len(self._speeds) >= FEWEST_SPEEDS else None
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
