"""What makes an operation fire, as data, and whether it does at a moment of the run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from instar.record.amounts import count_text


@dataclass(frozen=True)
class Moment:
    """A place between two steps at which the schedule is asked."""

    step: int
    """updates made since the run began"""
    tokens: int
    """trained on since the run began"""
    fraction: float | None
    """share used up of the counted budget that is nearest to its end; None: there is none"""
    since_last: int
    """steps since the last operation of the schedule, or since the run began"""
    loss: float | None
    """validation loss, nats, of an evaluation made at this very step, else None"""
    losses: tuple[tuple[int, float], ...] = ()
    """(step, validation loss) of the evaluations so far, this one's too; only the last that
    `losses_needed` asks for need be there"""


@dataclass(frozen=True)
class LossBelow:
    """The validation loss is less than `loss`, nats."""

    loss: float


@dataclass(frozen=True)
class Waited:
    """So many steps have passed since the last operation."""

    steps: int


@dataclass(frozen=True)
class AtStep:
    """So many steps have been made."""

    step: int


@dataclass(frozen=True)
class AtTokens:
    """So many tokens have been trained on."""

    tokens: int


@dataclass(frozen=True)
class AtFraction:
    """A share of the run's budget is used up."""

    fraction: float


@dataclass(frozen=True)
class Plateau:
    """The validation loss fell by at most `slope` nats per 1,000 steps, by the least-squares line
    through `window` evaluations, at each of the last `patience`; all since the last operation."""

    window: int
    slope: float
    patience: int = 1


@dataclass(frozen=True)
class AnyOf:
    """One of these fires."""

    triggers: tuple[Trigger, ...]


@dataclass(frozen=True)
class AllOf:
    """All of these fire."""

    triggers: tuple[Trigger, ...]


Trigger = LossBelow | Waited | AtStep | AtTokens | AtFraction | Plateau | AnyOf | AllOf


def fires(trigger: Trigger, moment: Moment) -> str | None:
    """Why the trigger fires now, in a few words such as "val 3.41 < 3.50"; None: it does not.

    A trigger that `needs_loss` fires only where there is one.
    """
    if needs_loss(trigger) and moment.loss is None:
        return None
    match trigger:
        case LossBelow(bound):
            loss = moment.loss
            return _less(loss, bound) if loss is not None and loss < bound else None
        case Waited(steps):
            return f"waited {steps:,} steps" if moment.since_last >= steps else None
        case AtStep(step):
            return f"step {step:,}" if moment.step >= step else None
        case AtTokens(tokens):
            return f"{count_text(tokens)} tokens" if moment.tokens >= tokens else None
        case AtFraction(fraction):
            return f"{fraction:.4g} of the budget" if _used(moment, fraction) else None
        case Plateau():
            return _flat(trigger, moment)
        case AnyOf(triggers):
            return next((why for each in triggers if (why := fires(each, moment))), None)
        case AllOf(triggers):
            reasons = [fires(each, moment) for each in triggers]
            told = [why for why in reasons if why is not None]
            return " and ".join(told) if len(told) == len(triggers) else None


def needs_loss(trigger: Trigger) -> bool:
    """Whether it can only be asked right after an evaluation."""
    match trigger:
        case AnyOf(triggers) | AllOf(triggers):
            return any(map(needs_loss, triggers))
    return isinstance(trigger, LossBelow | Plateau)


def losses_needed(trigger: Trigger) -> int:
    """How many of the last evaluations it wants to see."""
    match trigger:
        case Plateau(window, _, patience):
            return window + patience - 1
        case AnyOf(triggers) | AllOf(triggers):
            return max(map(losses_needed, triggers), default=0)
        case LossBelow():
            return 1
    return 0


def words(trigger: Trigger) -> str:
    """The trigger as a person would say it: "val < 3.5 or 4,000 steps after the last operation"."""
    match trigger:
        case LossBelow(loss):
            return f"val < {loss:g}"
        case Waited(steps):
            return f"{steps:,} steps after the last operation"
        case AtStep(step):
            return f"at step {step:,}"
        case AtTokens(tokens):
            return f"after {count_text(tokens)} tokens"
        case AtFraction(fraction):
            return f"after {fraction:.4g} of the budget"
        case Plateau(window, slope, patience):
            often = f", {patience} times in a row" if patience > 1 else ""
            return (
                f"val falls by at most {slope:g} per 1,000 steps over {window} evaluations{often}"
            )
        case AnyOf(triggers):
            return " or ".join(_bracketed(each, AllOf) for each in triggers)
        case AllOf(triggers):
            return " and ".join(_bracketed(each, AnyOf) for each in triggers)


def _bracketed(trigger: Trigger, kind: type[AnyOf | AllOf]) -> str:
    text = words(trigger)
    return f"({text})" if isinstance(trigger, kind) and len(trigger.triggers) > 1 else text


def _used(moment: Moment, fraction: float) -> bool:
    # 60 of 400 samples are a twentieth of 3 epochs, and 60 / 400 / 3 is less than 0.05
    share = moment.fraction
    return share is not None and (share >= fraction or math.isclose(share, fraction, rel_tol=1e-12))


def _less(loss: float, bound: float) -> str:
    """Both with as many decimals as tell them apart, two at least."""
    for digits in range(2, 10):
        if f"{loss:.{digits}f}" != f"{bound:.{digits}f}":
            break
    return f"val {loss:.{digits}f} < {bound:.{digits}f}"


def _flat(plateau: Plateau, moment: Moment) -> str | None:
    # what an operation, or the very beginning, did to the loss is no part of a slope
    began = moment.step - moment.since_last
    seen = [point for point in moment.losses if point[0] > began]
    falls = [
        _fall(seen[end - plateau.window : end])
        for end in range(len(seen) - plateau.patience + 1, len(seen) + 1)
        if end >= plateau.window
    ]
    if len(falls) < plateau.patience or not all(fall <= plateau.slope for fall in falls):
        return None
    how = "rose" if falls[-1] < 0 else "fell"
    return f"val {how} {abs(falls[-1]):.2g} per 1,000 steps over {plateau.window} evaluations"


def _fall(points: list[tuple[int, float]]) -> float:
    """Nats per 1,000 steps by which the least-squares line through (step, loss) falls."""
    middle = sum(step for step, _ in points) / len(points)
    mean = sum(loss for _, loss in points) / len(points)
    spread = sum((step - middle) ** 2 for step, _ in points)
    slope = (
        sum((step - middle) * (loss - mean) for step, loss in points) / spread if spread else 0.0
    )
    return -1000 * slope
