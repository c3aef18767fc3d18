"""Where ranks meet between pieces of work, so that one rank's trouble is everyone's at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from instar.config.budget import Budget
from instar.distributed.agree import Beat, Pulse, Request, agree, gather, together
from instar.distributed.signals import StopSignal
from instar.distributed.world import World
from instar.run.stop import Decision

T = TypeVar("T")


class SafePoint:
    """The road that stop requests and rank-local failures take (law 3).

    Each piece of work begins with rank-local things that can fail on one rank alone. The rank
    then `post`s what it has to say without waiting, and all `settle` before the first collective
    that would hang if somebody were missing.
    """

    def __init__(self, world: World, signal: StopSignal, time_budget: Budget | None = None) -> None:
        """`time_budget`: seconds from now after which rank 0 asks for the end."""
        self.world = world
        self.signal = signal
        self.pulse = Pulse(world)
        self.time_budget = time_budget
        self.started = time.monotonic()
        self.stop_requested = False
        self.where = "start-up"

    def attempt(self, work: Callable[[], T]) -> tuple[T | None, Exception | None]:
        """Do rank-local work; its failure is returned, to be posted, not raised."""
        try:
            return work(), None
        except Exception as error:
            return None, error

    def post(self, failure: Exception | None = None) -> Beat:
        """Say how this rank stands, without waiting for the others."""
        if failure is not None:
            return self.pulse.send(Request.ERROR)
        return self.pulse.send(Request.STOP if self._wants_to_stop() else Request.NONE)

    def settle(self, beat: Beat, failure: Exception | None = None) -> None:
        """Hear how all ranks stand; note a stop request, end together on a failure.

        Raises:
            PeerError: some rank failed; names it and its error.
        """
        said = beat.wait()
        if said.errors:
            with together(self.world, f"in {self.where}"):
                if failure is not None:
                    raise failure
        self.stop_requested = self.stop_requested or said.stop > 0

    def meet(self) -> bool:
        """Post and settle at once; True when somebody asks to stop."""
        self.settle(self.post())
        return self.stop_requested

    def decision(self) -> Decision:
        """What the stop request means; rank 0 decides from what all ranks say."""
        told = gather(self.world, self.signal.requested)
        signals = [name for name in told if name is not None]
        mine: dict[str, str | bool] = (
            {"reason": str(signals[0]), "interrupted": True}
            if signals
            else {"reason": f"reached {self.time_budget}", "interrupted": False}
        )
        said = cast(dict[str, Any], agree(self.world, mine))
        return Decision(said["reason"], said["interrupted"])

    def _wants_to_stop(self) -> bool:
        return self.signal.requested is not None or self._late()

    def _late(self) -> bool:
        return (
            self.time_budget is not None
            and self.world.is_main
            and time.monotonic() - self.started > self.time_budget.amount
        )
