"""The processes that grow a model together, and the only loop in which they communicate and may fail."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

from instar.growth.plan import GrowthError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_END = object()


class Peers(Protocol):
    """The processes that grow a model together. They must go the same way, whatever a single one of them sees."""

    def phase(self) -> AbstractContextManager[None]:
        """Context for work that may fail on some of them: raises on all, or on none. A collective."""
        ...

    def all_agree(self, holds: bool) -> bool:
        """Return whether something holds on all of them. A collective."""
        ...

    def at(self, what: str) -> Peers:
        """Return the same, doing something else: for the errors of a phase."""
        ...


class Alone:
    """`Peers` of a process that grows a model by itself."""

    def phase(self) -> AbstractContextManager[None]:
        return nullcontext()

    def all_agree(self, holds: bool) -> bool:
        return holds

    def at(self, what: str) -> Alone:  # noqa: ARG002
        return self

    def first(self, value: float) -> float:
        return value


def run_in_step(peers: Peers, work: Iterable[object], *, gathers: bool) -> None:
    """Run a generator to its end; a failure of one process is raised by all.

    Args:
        work: yields after each tensor.
        gathers: whether each tensor is gathered. Then the processes agree after each: one that failed between two of
            them would leave the others waiting in the next.
    """
    steps = iter(work)
    if not gathers:
        with peers.phase():
            for _ in steps:
                pass
        return
    step: object = None
    while step is not _END:
        with peers.phase():
            step = next(steps, _END)


def unless_refused(peers: Peers, name: str, work: Callable[[], T]) -> T | None:
    """Return what `work` returns; None on all, if the model's code refuses float64 on any of them. A collective.

    Args:
        name: of what is compared, for the log.
    """
    value, refusal = None, ""
    with peers.phase():
        try:
            value = work()
        except GrowthError:
            raise
        except (RuntimeError, TypeError, ValueError) as error:
            refusal = str(error) or type(error).__name__
    # a process that alone went on to compare would wait for the others in its next exchange
    if peers.all_agree(not refusal):
        return value
    logger.info(
        "%s is not compared in float64: %s", name, refusal or "another process refuses float64"
    )
    return None
