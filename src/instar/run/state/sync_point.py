"""Synchronization of all ranks between pieces of work: failures, stop requests, save requests."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, TypeVar, cast

from instar.config.budget import Budget
from instar.distributed.agree import (
    Flag,
    FlagReducer,
    PendingFlags,
    agree,
    gather,
    raise_on_all_ranks,
)
from instar.distributed.signals import StopSignal
from instar.distributed.world import World
from instar.record.control import Command, Inbox
from instar.run.state.run_state import REACHED, Decision

T = TypeVar("T")


class SaveRequest(IntEnum):
    """Origin of an unscheduled save request. Only rank 0 sends one."""

    NONE = 0
    CLOCK = 1
    PERSON = 2


class Stopped(Exception):  # noqa: N818
    """Raised on all ranks: a stop was requested, and a rank has no input for this piece of work."""


class SyncPoint:
    """Exchanges stop requests, save requests and rank-local failures between ranks (law 3).

    Each piece of work begins with rank-local work that can fail on one rank alone. Each rank then
    `report`s its status without waiting, and all ranks call `finish` before the first collective
    that would hang if a rank were missing.
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
            time_budget: seconds of training, over the whole run, until rank 0 requests the end.
            inbox: external requests, read on rank 0.
        """
        self.world = world
        self.signal = signal
        self.flags_reducer = FlagReducer(world)
        self.time_budget = time_budget
        self.active_s: Callable[[], float] = lambda: 0.0
        """seconds of training so far, including those before a resume; called on rank 0"""
        self.stop_requested = False
        self.save_requested = SaveRequest.NONE
        self.posts_waiting = False
        """whether people have asked for operations that the run has not taken in"""
        self.inbox = inbox if world.is_main else None
        self.save_is_due: Callable[[], bool] = lambda: False
        """called on rank 0 at every report"""
        self.failing: Callable[[], str | None] = lambda: None
        """returns why rank 0 cannot continue, or None; called at every report. A reason makes all
        ranks stop and save."""
        self._failed: str | None = None
        self._user_reason: str | None = None
        """why the user's code requests the end of training"""
        self._training_over = False
        self._reason: dict[str, str | bool] | None = None
        """why this rank has requested the end, since the last decision"""
        self.where = "start-up"
        self.before_other_work: Callable[[], None] = lambda: None
        """called at the beginning of every piece of work that is not a step"""

    def begin(self, where: str, step: int) -> None:
        """Begin a piece of work that is not a step."""
        self.before_other_work()
        self.set_place(where, step)

    def set_place(self, where: str, step: int) -> None:
        """Set the piece of work that this rank begins, for messages about failures and hangs."""
        self.where = where
        self.world.at(where, step)

    def attempt(self, work: Callable[[], T]) -> tuple[T | None, Exception | None]:
        """Call `work`, which is rank-local; return (result, None) or (None, error)."""
        try:
            return work(), None
        except Exception as error:
            return None, error

    def report(
        self, failure: Exception | None = None, *, giving_up: bool = False, weight: float = 0.0
    ) -> PendingFlags:
        """Send this rank's status without waiting for the others.

        Args:
            failure: error of the rank-local work.
            giving_up: this rank cancelled a wait because it `wants_to_stop`, and cannot continue.
            weight: to be summed over ranks, the last of the sums.
        """
        save = self._save_request()  # which looks into the inbox
        has_posts = self.inbox is not None and bool(self.inbox.posts())
        sums = float(save), float(giving_up), float(has_posts), weight
        if failure is not None:
            return self.flags_reducer.send(Flag.ERROR, sums)
        return self.flags_reducer.send(Flag.STOP if self.wants_to_stop() else Flag.NONE, sums)

    def finish(self, pending: PendingFlags, failure: Exception | None = None) -> None:
        """Receive the status of all ranks and store their requests. A collective.

        Args:
            pending: from `report`.
            failure: as passed to `report`.

        Raises:
            PeerError: a rank failed; names it and its error.
            Stopped: a rank cannot continue, and all must stop.
        """
        flags = pending.wait()
        if flags.errors:
            with raise_on_all_ranks(self.world, f"in {self.where}"):
                if failure is not None:
                    raise failure
        self.stop_requested = self.stop_requested or flags.stop > 0
        self.save_requested = max(self.save_requested, SaveRequest(int(flags.sums[0])))
        self.posts_waiting = self.posts_waiting or flags.sums[2] > 0
        if flags.sums[1] > 0:
            raise Stopped

    def sync(self) -> bool:
        """`report` and `finish` at once; return whether a stop is requested. A collective."""
        self.finish(self.report())
        return self.stop_requested

    def request_stop(self, reason: str) -> None:
        """Request the end of training after this step, as for a budget that is used up."""
        if not self._training_over:
            self._user_reason = self._user_reason or reason

    def end_training(self) -> None:
        """Ignore requests of `request_stop` from now on, and one that no rank knows of yet."""
        self._training_over, self._user_reason = True, None

    def answer(self, command: Command) -> None:
        """Acknowledge an external request as done."""
        if self.inbox is not None:
            self.inbox.answer(command)

    def decision(self) -> Decision:
        """Turn the stop request into a decision: rank 0 chooses among the ranks' reasons.

        A collective. Resets the request, so later work stops only for a new one.
        """
        reasons = [cast(dict[str, Any], r) for r in gather(self.world, self._reason) if r]
        choice = next((reason for reason in reasons if reason["interrupted"]), reasons[0])
        agreed_reason = cast(dict[str, Any], agree(self.world, choice))
        if not agreed_reason["interrupted"]:
            self.time_budget = None
        self._reason, self._user_reason, self.stop_requested = None, None, False
        return Decision(
            agreed_reason["reason"], agreed_reason["interrupted"], agreed_reason["failed"]
        )

    def wants_to_stop(self) -> bool:
        """Return whether this rank requests a stop; stays true if the request is withdrawn later."""
        self._reason = self._reason or self._stop_reason()
        return self._reason is not None

    def _save_request(self) -> SaveRequest:
        if not self.world.is_main:
            return SaveRequest.NONE
        if self._is_requested("save"):
            return SaveRequest.PERSON
        return SaveRequest.CLOCK if self.save_is_due() else SaveRequest.NONE

    def _stop_reason(self) -> dict[str, str | bool] | None:
        """Return the arguments of this rank's `Decision` as JSON; None: it requests no stop."""
        self._failed = self._failed or self.failing()
        command = "instar control stop" if self._is_requested("stop") else None
        if reason := self.signal.requested or command or self._failed:
            return {"reason": reason, "interrupted": True, "failed": reason == self._failed}
        if self._user_reason is not None:
            return {"reason": self._user_reason, "interrupted": False, "failed": False}
        if self._is_over_budget():
            reason = f"{REACHED}{self.time_budget}"
            return {"reason": reason, "interrupted": False, "failed": False}
        return None

    def _is_requested(self, command: Command) -> bool:
        return self.inbox is not None and self.inbox.is_requested(command)

    def _is_over_budget(self) -> bool:
        return (
            self.time_budget is not None
            and self.world.is_main
            and self.active_s() >= self.time_budget.amount
        )
