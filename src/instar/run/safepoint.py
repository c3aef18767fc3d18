"""Where ranks meet between pieces of work, so that one rank's trouble is everyone's at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import IntEnum
from typing import Any, TypeVar, cast

from instar.config.budget import Budget
from instar.distributed.agree import Beat, Pulse, Request, agree, gather, together
from instar.distributed.signals import StopSignal
from instar.distributed.world import World
from instar.record.control import Command, Inbox
from instar.run.stop import REACHED, Decision

T = TypeVar("T")


class Wish(IntEnum):
    """Who wants a save that no rank can foresee. Only rank 0 says."""

    NONE = 0
    CLOCK = 1
    PERSON = 2


class GivenUp(Exception):  # noqa: N818
    """On all ranks: a stop was asked for, and one of them has nothing to do this piece of work on."""


class SafePoint:
    """The road that stop requests and rank-local failures take (law 3).

    Each piece of work begins with rank-local things that can fail on one rank alone. The rank
    then `post`s what it has to say without waiting, and all `settle` before the first collective
    that would hang if somebody were missing.
    """

    def __init__(
        self,
        world: World,
        signal: StopSignal,
        time_budget: Budget | None = None,
        inbox: Inbox | None = None,
    ) -> None:
        """
        Args:
            time_budget: seconds from now after which rank 0 asks for the end.
            inbox: where rank 0 looks for requests from outside.
        """
        self.world = world
        self.signal = signal
        self.pulse = Pulse(world)
        self.time_budget = time_budget
        self.started = time.monotonic()
        self.stop_requested = False
        self.save_requested = Wish.NONE
        self.inbox = inbox if world.is_main else None
        self.save_is_due: Callable[[], bool] = lambda: False
        """asked on rank 0 whenever it posts"""
        self.where = "start-up"

    def enter(self, where: str, step: int) -> None:
        """Say what this rank begins; if it fails or hangs, it is named there."""
        self.where = where
        self.world.at(where, step)

    def attempt(self, work: Callable[[], T]) -> tuple[T | None, Exception | None]:
        """Do rank-local work; its failure is returned, to be posted, not raised."""
        try:
            return work(), None
        except Exception as error:
            return None, error

    def post(self, failure: Exception | None = None, *, giving_up: bool = False) -> Beat:
        """Say how this rank stands, without waiting for the others.

        Args:
            giving_up: this rank waited for something until it `wants_to_stop`, and cannot go on.
        """
        sums = float(self._wish_to_save()), float(giving_up)
        if failure is not None:
            return self.pulse.send(Request.ERROR, sums)
        return self.pulse.send(Request.STOP if self.wants_to_stop() else Request.NONE, sums)

    def settle(self, beat: Beat, failure: Exception | None = None) -> None:
        """Hear how all ranks stand; note what is requested, end together on a failure.

        Raises:
            PeerError: some rank failed; names it and its error.
            GivenUp: some rank cannot go on, and all are to stop.
        """
        said = beat.wait()
        if said.errors:
            with together(self.world, f"in {self.where}"):
                if failure is not None:
                    raise failure
        self.stop_requested = self.stop_requested or said.stop > 0
        self.save_requested = max(self.save_requested, Wish(int(said.sums[0])))
        if said.sums[1] > 0:
            raise GivenUp

    def meet(self) -> bool:
        """Post and settle at once; True when somebody asks to stop."""
        self.settle(self.post())
        return self.stop_requested

    def answer(self, command: Command) -> None:
        """What was asked of the run from outside is done."""
        if self.inbox is not None:
            self.inbox.answer(command)

    def decision(self) -> Decision:
        """What the stop request means; rank 0 decides from what all ranks say."""
        told = gather(self.world, self._told_to_stop())
        signals = [name for name in told if name is not None]
        mine: dict[str, str | bool] = (
            {"reason": str(signals[0]), "interrupted": True}
            if signals
            else {"reason": f"{REACHED}{self.time_budget}", "interrupted": False}
        )
        said = cast(dict[str, Any], agree(self.world, mine))
        return Decision(said["reason"], said["interrupted"])

    def wants_to_stop(self) -> bool:
        """Whether this rank, by itself, would stop."""
        return self._told_to_stop() is not None or self._late()

    def _wish_to_save(self) -> Wish:
        if not self.world.is_main:
            return Wish.NONE
        if self._asked("save"):
            return Wish.PERSON
        return Wish.CLOCK if self.save_is_due() else Wish.NONE

    def _told_to_stop(self) -> str | None:
        return self.signal.requested or ("instar control stop" if self._asked("stop") else None)

    def _asked(self, command: Command) -> bool:
        requests = self.inbox.requests() if self.inbox is not None else ()
        return any(request.command == command for request in requests)

    def _late(self) -> bool:
        return (
            self.time_budget is not None
            and self.world.is_main
            and time.monotonic() - self.started > self.time_budget.amount
        )
