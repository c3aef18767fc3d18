"""Successive halving (Jamieson and Talwalkar, arXiv 1502.07943): many candidates are trained a little, and the best
of each rung further."""

from __future__ import annotations

from collections.abc import Mapping

RUNGS = (4, 2, 1)
"""The steps of the last rung are divided by these."""


def rung_steps(steps: int) -> tuple[int, ...]:
    """Return the steps of the trainings of each rung; the last have `steps`."""
    return tuple(steps // divisor for divisor in RUNGS)


def rung_sizes(candidates: int) -> tuple[int, ...]:
    """Return the number of candidates in each rung, if the better half goes on, rounded up."""
    return tuple(-(-candidates // (1 << rung)) for rung in range(len(RUNGS)))


def survivors(losses: Mapping[int, float], count: int) -> tuple[int, ...]:
    """Return the numbers of the candidates with the lowest losses, the best first; of equal ones the first stays first."""
    return tuple(sorted(losses, key=losses.__getitem__)[:count])
