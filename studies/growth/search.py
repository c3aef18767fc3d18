"""Coordinate descent over a few dials, each of which is a list of values: which of them trains best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

Choice = tuple[object, ...]
"""A value of each dial, in the order of the dials."""


def descend(
    dials: Sequence[Sequence[object]],
    start: Choice,
    losses_of: Callable[[Sequence[Choice]], Sequence[float]],
    max_trials: int,
) -> dict[Choice, float]:
    """Try the neighbours of the best choice, one dial after the other, until no dial helps or `max_trials` were tried.

    Args:
        losses_of: returns the losses of choices, which may be trained at the same time.

    Returns:
        the loss of every choice that was tried, in the order of the trials.

    Raises:
        ValueError: a value of `start` is not one of its dial.
    """
    for values, value in zip(dials, start, strict=True):
        if value not in values:
            raise ValueError(f"{value} is none of {', '.join(map(str, values))}")
    losses = dict(zip([start], losses_of([start]), strict=True))
    best, without_gain = start, 0
    for number in count():
        if without_gain == len(dials) or len(losses) >= max_trials:
            return losses
        dial = number % len(dials)
        candidates = [near for near in _neighbours(dials[dial], best, dial) if near not in losses]
        candidates = candidates[: max_trials - len(losses)]
        losses |= zip(candidates, losses_of(candidates), strict=True)
        lowest = min(losses, key=losses.__getitem__)
        best, without_gain = lowest, without_gain + 1 if lowest == best else 0
    raise AssertionError


def _neighbours(values: Sequence[object], choice: Choice, dial: int) -> list[Choice]:
    place = values.index(choice[dial])
    near = [*values[max(0, place - 1) : place], *values[place + 1 : place + 2]]
    return [(*choice[:dial], value, *choice[dial + 1 :]) for value in near]
