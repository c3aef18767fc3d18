"""The schedule of a live run: what is due, and how it is carried out on all ranks."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from instar.config.errors import ConfigError
from instar.config.operation import Operation
from instar.distributed.agree import agree
from instar.distributed.failure import PeerError, RunFailed
from instar.models.mask import mask_of
from instar.run.alarm import GradientWatch
from instar.run.reshape import Draft, draft, take_shape
from instar.run.rig import freeze
from instar.run.stop import fraction_used
from instar.schedule.entries import Entry, due, last_step, next_entry, too_large
from instar.schedule.operations import FOLD, Change, State, carried_out, planned, when_due
from instar.schedule.triggers import Moment

if TYPE_CHECKING:
    from instar.run.trainer import Trainer


def change_if_due(trainer: Trainer) -> bool:
    """Carry out all that is due between these two steps, one after the other.

    Returns:
        whether it was evaluated anew, so that there is something to decide.

    Raises:
        RunFailed: an operation cannot be made, and its entry does not say that it may be skipped.
    """
    mask = mask_of(trainer.in_force.architecture)
    if mask is not None and trainer.progress.step >= mask.end:
        carry_out(trainer, FOLD, reason=f"open since step {mask.end:,}")
    slow_down_if_due(trainer)
    loss, again = loss_of_now(trainer), False
    while (found := next_due(trainer, loss)) is not None:
        entry, reason = found
        carry_out(trainer, entry.operation, entry=entry, reason=reason, loss=loss)
        if entry.reevaluate:
            trainer.evaluate(judged=False)
            loss, again = loss_of_now(trainer), True
    return again


def slow_down_if_due(trainer: Trainer) -> None:
    """Lower the learning rate where the metric that it watches stands still."""
    reason = trainer.judge.why_slow(trainer.judgement)
    judgement, fallen = trainer.judge.slow_down(trainer.judgement, trainer.settings.lr)
    if judgement == trainer.judgement:
        return
    # it follows from metrics that are the same on all ranks; still, one decides
    told = agree(trainer.world, fallen)
    trainer.judgement = judgement
    if told is not None:
        carry_out(trainer, Operation("set_lr", told), reason=reason)


def check_ahead(trainer: Trainer) -> None:
    """Whether what is still to come can be made of the model as it is now.

    Raises:
        ConfigError: it cannot; names the entry and what would be possible.
    """
    state, step = trainer.in_force, trainer.progress.step
    done = next_entry(trainer.entries, trainer.history)
    for entry in trainer.entries[done.number :] if done is not None else ():
        try:
            state = carried_out(when_due(state, entry.operation), entry.operation, step)
        except ValueError as error:
            raise ConfigError.one(str(error), where=entry.place) from error


def loss_of_now(trainer: Trainer) -> float | None:
    """The validation loss of this very step, also where a run goes on from it; None: there is none."""
    step, loss = trainer.losses[-1] if trainer.losses else (-1, None)
    return loss if step == trainer.progress.step else None


def next_due(trainer: Trainer, loss: float | None) -> tuple[Entry, str] | None:
    """The entry of the schedule that fires now, and why; rank 0 decides."""
    entry = next_entry(trainer.entries, trainer.history)
    if entry is None or trainer.safe.stop_requested:
        return None
    now = moment(trainer, loss)
    reason = due(entry, now, trainer.in_force)
    # between evaluations it follows from counts, which every rank knows alike
    if loss is not None or reason is not None:
        told = agree(trainer.world, reason)
        reason = None if told is None else str(told)
    return None if reason is None else (entry, reason)


def moment(trainer: Trainer, loss: float | None) -> Moment:
    """What triggers look at."""
    progress = trainer.progress
    return Moment(
        step=progress.step,
        tokens=progress.tokens,
        fraction=fraction_used(trainer.budgets, progress, trainer.course.epochs(progress.samples)),
        since_last=progress.step - last_step(trainer.history),
        loss=loss,
        losses=trainer.losses,
    )


def carry_out(
    trainer: Trainer,
    operation: Operation,
    *,
    entry: Entry | None = None,
    reason: str = "",
    loss: float | None = None,
) -> None:
    """Make an operation part of the history and of the run, or leave both as they were.

    Args:
        entry: of the schedule, that asks for it.
        loss: validation loss of this step, to be told.

    Raises:
        RunFailed: it cannot be made, and may not be skipped.
    """
    begun, progress, before = time.perf_counter(), trainer.progress, trainer.in_force
    trainer.safe.enter(f"{operation.name} after step {progress.step}", progress.step)
    number = None if entry is None else entry.number
    change = Change(operation, progress.step, progress.samples, number, reason=reason)
    drafted: Draft | None = None
    try:
        after, plan = planned(before, operation, progress.step)
        if entry is not None and (why := too_large(entry, after.architecture)):
            raise ValueError(why)
        if plan is not None:
            lenient = entry is not None and entry.allow_inexact
            drafted = draft(trainer, operation, after, plan, allow_inexact=lenient)
    except (ValueError, RuntimeError, MemoryError, PeerError) as error:
        # all ranks are here: each failed alike, or heard of it where they met
        _give_up(trainer, change, error, skip=entry is not None and entry.on_failure == "skip")
        return
    if drafted is not None:
        if drafted.plan.label != "exact":
            _leave_measured(trainer)
        take_shape(trainer, drafted, after)
        # rows of positions that no sample has yet can have no gradient
        if drafted.plan.makes_new and operation.name != "extend_context":
            trainer.stepper.watch = GradientWatch(drafted.plan, operation.name)
        trainer.grown_at = progress.step
    trainer.history = (*trainer.history, change)
    trainer.in_force = after
    _settle(trainer, before, after)
    if entry is not None:
        trainer.losses = ()
    trainer.narrator.operated(
        progress,
        change,
        before,
        after,
        proof=drafted.proof if drafted else None,
        seconds=time.perf_counter() - begun,
        loss=loss,
    )


def _leave_measured(trainer: Trainer) -> None:
    """The loss of this step belongs to a model that is about to be another one."""
    if trainer.config.checkpoint.on_best and trainer.best_is_now:
        trainer.save("best so far", wait=True)
    trainer.evaluated_at = trainer.judged_at = -1


def _settle(trainer: Trainer, before: State, after: State) -> None:
    """Let the parts of the run that hold a setting follow it; the others ask at every step."""
    was, now = before.settings, after.settings
    if now.context != was.context:
        trainer.task = trainer.stepper.task = trainer.task.at(after.architecture, now.context)
        cursor = trainer.progress.samples
        trainer.read(trainer.supply.next(trainer.course, trainer.task, now.context, cursor))
    if now.frozen != was.frozen:
        freeze(trainer.stepper, trainer.config, now.frozen)


def _give_up(trainer: Trainer, change: Change, error: Exception, *, skip: bool) -> None:
    """Report an operation that failed, once; end the run there or pass it over for ever."""
    what = f"{change.operation.name} after step {change.step:,} failed: {error}"
    if skip:
        skipped = dataclasses.replace(change, skipped=str(error))
        trainer.history = (*trainer.history, skipped)
        trainer.losses = ()
        trainer.narrator.warn(f"{what}; skipped, the run is as it was", change.step)
        return
    trainer.save("an operation failed", must=True)
    raise RunFailed(
        f"{what}; the run is as it was before, and saved. Correct the schedule, or let the entry say "
        f"on_failure: skip, and go on: instar resume {trainer.saver.root} --set schedule=FILE"
    ) from error
