"""Scheduled operations of a live run: find the one that is due and carry it out on all ranks."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from instar.config.budget import fraction_used
from instar.config.errors import ConfigError
from instar.config.fields import with_values
from instar.config.sections import Operation
from instar.distributed.agree import agree, raise_on_all_ranks
from instar.distributed.failure import Interrupted, PeerLost, RankMissing, RunFailed
from instar.growth.apply import STAY_EQUAL
from instar.growth.engine import ProvedGrowth, prepare_candidate
from instar.models.shape import mask_of
from instar.record.events import RecordError
from instar.record.rundir import RunDir
from instar.run.changes.average import average_weights
from instar.run.changes.batch_fit import fit_batch
from instar.run.changes.branching import publish_branch
from instar.run.changes.live_growth import grow_run
from instar.run.changes.requests import (
    Asking,
    check_possible,
    log,
    log_waiting,
    skip_cancelled,
    take_in,
    write_waiting,
)
from instar.run.checkpointing import best_is_now, save_checkpoint
from instar.run.components import Components
from instar.run.output.operation_text import ChangeOutcome
from instar.run.state.data_phase import begins_phase
from instar.run.state.gradient_stats import GradientWatch
from instar.run.state.run_state import RunState
from instar.run.state.sync_point import Stopped
from instar.run.step.stepper import freeze_parameters
from instar.run.validation import evaluate_validation, is_comparable
from instar.schedule.branches import BRANCH
from instar.schedule.config_operations import CONFIG_OPERATIONS, changed_config
from instar.schedule.driver import attempt_change, next_due
from instar.schedule.forecast import check_data
from instar.schedule.operations import (
    FOLD,
    Change,
    State,
    carried_out,
    plan_operation,
    set_lr,
    when_due,
)
from instar.schedule.posted import Posted
from instar.schedule.settings import ADJUST_BATCH, AVERAGE, is_frozen, patterns_of
from instar.schedule.triggers import Entry, Moment, due, last_step, too_large


def change_if_due(state: RunState, parts: Components) -> tuple[RunState, bool]:
    """Carry out all operations that are due between two steps, in order. A collective.

    Returns:
        the new state, and whether the model was re-evaluated, which may end the run.

    Raises:
        RunFailed: an operation failed, and its entry does not set `on_failure: skip`.
    """
    mask = mask_of(state.in_force.architecture)
    if mask is not None and state.step >= mask.end:
        state = carry_out(state, parts, FOLD, reason=f"open since step {mask.end:,}")
    state = lower_lr_if_due(state, parts)
    if is_new_loss := state.reevaluates_at == state.step:
        state = _reevaluate(state, parts)
    loss, has_posts = state.loss, parts.sync.posts_waiting
    earlier_ids = state.request_ids if has_posts else set[str]()
    if has_posts:
        state = take_in(state, parts)
    while due_now := _next_due(state := skip_cancelled(state, parts), parts, loss):
        entry, reason, post = due_now
        state = carry_out(
            state, parts, entry.operation, entry=entry, reason=reason, loss=loss, post=post
        )
        if loss is not None and not is_comparable(state, parts):
            loss = None  # the next entry's trigger is not about what was measured before
        if entry.reevaluate:
            state = _reevaluate(state, parts)
            loss, is_new_loss = state.loss, True
    write_waiting(state, parts)
    if has_posts:
        log_waiting(state, parts, state.request_ids - earlier_ids)
    return state, is_new_loss


def _reevaluate(state: RunState, parts: Components) -> RunState:
    """Evaluate after an operation; what a stop request cuts short is due at the resume. A collective."""
    state = replace(state, reevaluates_at=state.step)
    after = evaluate_validation(state, parts, counts=False)
    # of the same step there may be an evaluation before the operation
    return state if after is state else replace(after, reevaluates_at=-1)


def _next_due(
    state: RunState, parts: Components, loss: float | None
) -> tuple[Entry, str, Posted | None] | None:
    """Return the operation that is due, and why: of those that people asked for, or the schedule's next."""
    for post in state.posted:
        if reason := reason_due(state, parts, loss, post.entry, since=post.step):
            asked = f"asked for by {post.by}"
            return post.entry, asked if post.is_immediate else f"{asked}: {reason}", post
    due_now = next_due(parts.entries, state.history, partial(reason_due, state, parts, loss))
    return None if due_now is None else (*due_now, None)


def lower_lr_if_due(state: RunState, parts: Components) -> RunState:
    """Lower the learning rate if the metric of `learning_rate.plateau` does not improve."""
    reason = parts.tracker.plateau_reason(state.metrics)
    metrics, new_lr = parts.tracker.lower_lr(state.metrics, state.settings.lr)
    if metrics == state.metrics:
        return state
    # metrics are the same on all ranks; still, rank 0 decides
    agreed_lr = agree(parts.world, new_lr)
    state = replace(state, metrics=metrics)
    if agreed_lr is None:
        return state
    return carry_out(state, parts, set_lr(agreed_lr), reason=reason)


def check_ahead(state: RunState, parts: Components) -> None:
    """Check that the rest of the schedule is possible for the current model.

    Raises:
        ConfigError: it is not; names the entry and what would be possible.
    """
    for _ in stages_ahead(state, parts):
        pass


def stages_ahead(state: RunState, parts: Components) -> Iterator[State]:
    """Yield the current settings and architecture, and those after each remaining operation.

    A mask stays open while settings change; it is folded before the next growth, or at the end.

    Raises:
        ConfigError: see `check_ahead`.
    """
    stage = state.in_force
    yield stage
    for entry in state.ahead(parts.entries):
        try:
            folded_stage = when_due(stage, entry.operation)
            after = carried_out(folded_stage, entry.operation, state.step)
        except ValueError as error:
            if entry.on_failure == "skip":
                continue
            raise ConfigError.of(str(error), where=entry.place) from error
        if folded_stage is not stage:
            yield folded_stage
        is_skipped = entry.on_failure == "skip" and too_large(entry, after.architecture)
        stage = folded_stage if is_skipped else after
        if not is_skipped:
            yield stage
    if (mask := mask_of(stage.architecture)) is not None:
        yield carried_out(stage, FOLD, mask.end)


def reason_due(
    state: RunState, parts: Components, loss: float | None, entry: Entry, *, since: int = 0
) -> str | None:
    """Return why an entry fires now, or None; rank 0 decides.

    Args:
        since: the step since which it waits.
    """
    if parts.sync.stop_requested:
        return None
    now = moment(state, parts, loss)
    now = replace(now, since_last=min(now.since_last, state.step - since))
    reason = due(entry, now, state.in_force)
    # between evaluations the reason depends only on counts, which are the same on every rank
    if loss is None and reason is None:
        return None
    agreed_reason = agree(parts.world, reason)
    return None if agreed_reason is None else str(agreed_reason)


def moment(state: RunState, parts: Components, loss: float | None) -> Moment:
    """Return the values that triggers depend on."""
    last, noise = last_step(state.history), state.noise.settled
    return Moment(
        counters=state.progress,
        fraction=fraction_used(parts.budgets, state.progress, state.epochs),
        since_last=state.step - (last or 0),
        loss=loss,
        losses=state.losses,
        has_changed=last == state.step,
        noise=None if noise is None else noise / state.settings.global_batch,
        flops_per_step=0.0 if loss is None else _flops_per_step(state, parts),
    )


def _flops_per_step(state: RunState, parts: Components) -> float:
    settings, spec = state.settings, parts.task.spec
    per_token = spec.flops(state.in_force.architecture, settings.context)
    return float(settings.global_batch * spec.weight(settings.context) * per_token)


def carry_out(
    state: RunState,
    parts: Components,
    operation: Operation,
    *,
    entry: Entry | None = None,
    reason: str = "",
    loss: float | None = None,
    post: Posted | None = None,
) -> RunState:
    """Carry out an operation and add it to the history; if it fails, the run is unchanged.

    A collective.

    Args:
        entry: the operation's entry in the schedule, or of `post`, if any.
        reason: why it is carried out, for the history and the log.
        loss: validation loss of this step, for the log.
        post: the request, if somebody asked for the operation.

    Raises:
        RunFailed: the operation failed, and `entry` does not allow skipping it.
    """
    before, step = state.in_force, state.step
    parts.sync.begin(f"{operation.name} after step {step}", step)
    start = time.perf_counter()
    number = None if entry is None else entry.number
    change = Change(operation, step, state.progress.samples, number, reason=reason)
    if post is not None:
        change = replace(change, id=post.id, by=post.by)
    change, candidate = attempt_change(
        change,
        entry,
        partial(_carry_out, state, parts, change, entry),
        stop=partial(_stop, state, parts, change),
        fatal=(PeerLost, RankMissing, Interrupted, Stopped, RecordError),
    )
    if candidate is None:
        return _skip(state, parts, change)
    if candidate.measured is not None:
        operation, how = candidate.measured
        change = replace(change, operation=operation, reason=f"{reason}; {how}")
    growth, after = candidate.growth, candidate.after
    if growth is not None:
        state = _put_in_use(state, parts, operation.name, growth)
    changed_state, has_grown = state.with_change(change, after), growth is not None
    state = _apply_settings(changed_state, parts, before, has_grown=has_grown)
    if growth is not None:
        parts.logger.flush_interval(state.progress, has_grown=True)
    proof, seconds = growth.proof if growth else None, time.perf_counter() - start
    # before the event: whoever reads that it is done may list what waits
    write_waiting(state, parts)
    outcome = ChangeOutcome(change, before, after, seconds, proof, candidate.folder)
    parts.logger.log_operation(state.progress, outcome, loss)
    if growth is not None:
        for warning in candidate.warnings(operation.name):
            parts.logger.warn(warning, step)
        parts.hooks.call("on_growth_end", state, parts.stepper, operation=operation.name)
    return state


def _skip(state: RunState, parts: Components, change: Change) -> RunState:
    """Log that an operation failed and is skipped, and add it to the history."""
    what, operation = _failure_text(change, change.skipped), change.operation
    parts.logger.warn(f"{what}; skipped, the run is unchanged", state.step)
    if change.id:
        asking = Asking(change.id, change.by, operation.name, operation.value)
        log(state, parts, asking, "refused", change.skipped)
    return state.with_change(change, state.in_force)


class _Carried(NamedTuple):
    """An operation as far as it leaves the run unchanged."""

    after: State
    growth: ProvedGrowth[Any] | None = None
    folder: Path | None = None
    """of a branch"""
    measured: tuple[Operation, str] | None = None
    """the operation with what was measured, and how"""
    stays_equal: bool = False
    """whether copies in the model never become different"""
    attributes: str = ""
    """what was set by hand on submodules and is not carried, in words"""

    def warnings(self, operation: str) -> Iterator[str]:
        """Yield what to tell whoever trains the grown model."""
        if self.stays_equal:
            yield f"the copies that {operation} made {STAY_EQUAL}"
        if self.attributes:
            yield f"{operation}: {self.attributes}"


def _carry_out(state: RunState, parts: Components, change: Change, entry: Entry | None) -> _Carried:
    """Carry out as much of an operation as leaves the run unchanged. A collective, which fails on all ranks or on
    none, and for one reason."""
    with raise_on_all_ranks(parts.world, f"carrying out {change.operation.name}"):
        return _prepared(state, parts, change, entry)


def _prepared(state: RunState, parts: Components, change: Change, entry: Entry | None) -> _Carried:
    operation = change.operation
    if entry is not None and entry.number is None:
        check_possible(state, parts, entry)  # others may have changed the run since it was taken in
    if operation.name in CONFIG_OPERATIONS:
        _check_optimizers(parts, operation)
    measured = None
    if operation.name == ADJUST_BATCH:
        measured = fit_batch(state, parts, operation)
        operation = measured[0]
    after, plan = plan_operation(state.in_force, operation, change.step)
    folder = publish_branch(state, parts, change) if operation.name == BRANCH else None
    if entry is not None:
        if why := too_large(entry, after.architecture):
            raise ValueError(why)
        check_data(after, entry, parts.task.spec, parts.world.size)
    if operation.name == AVERAGE:
        averaging, measured = average_weights(state, parts, operation)
        return _Carried(after, averaging, measured=measured)
    if plan is None:
        return _Carried(after, folder=folder, measured=measured)
    parts.saver.free()  # two models need memory now, and the next copy has another layout
    allow_inexact = entry is not None and entry.allow_inexact
    subject = grow_run(state, parts, operation, after, plan)
    growth = prepare_candidate(subject, plan, subject.peers, allow_inexact=allow_inexact)
    candidate = growth.candidate
    return _Carried(after, growth, stays_equal=candidate.stays_equal, attributes=candidate.warning)


def _check_optimizers(parts: Components, operation: Operation) -> None:
    """Raise ValueError if an operation sets what the task's own optimizers do not read."""
    keys = CONFIG_OPERATIONS[operation.name].keys
    if not any(key.startswith("optimizer.") for key in keys):
        return
    with raise_on_all_ranks(parts.world, "asking for the task's optimizers"):
        own = parts.task.optimizer(parts.stepper.unwrapped_model)
    if own is not None:
        raise ValueError(f"{operation.name}: optimizer() of the task gives its own optimizers")


def _put_in_use(
    state: RunState, parts: Components, operation: str, growth: ProvedGrowth[Any]
) -> RunState:
    """Make the grown model, or the averaged weights, those of the run."""
    plan = growth.plan
    if plan.label != "exact":
        state = _discard_evaluation(state, parts)
    growth.commit()
    if parts.stepper.strategy.forward_is_collective:
        gc.collect()  # a sharded module is in cycles of references, and would keep its weights
    if plan.makes_new and not plan.waits:
        table = parts.task.architecture.parameters()
        parts.stepper.watch = GradientWatch(plan, operation, table)
    return replace(state, grown_at=state.step)


def _discard_evaluation(state: RunState, parts: Components) -> RunState:
    """Discard this step's evaluation before the model is replaced; save first if it is a best."""
    if parts.config.checkpoint.on_best and best_is_now(state, parts):
        save_checkpoint(state, parts, "best so far", wait=True)
    return replace(state, evaluated_at=-1, judged_at=-1)


def _apply_settings(
    state: RunState, parts: Components, before: State, *, has_grown: bool
) -> RunState:
    """Update the components that store a setting; the others read the settings at every step."""
    was, after = before.settings, state.in_force
    now = after.settings
    if changes := changed_config(before.config, after.config):
        with raise_on_all_ranks(parts.world, "changing the optimizers"):
            parts.config = with_values(parts.config, changes)
            of_optimizers = any(key.startswith("optimizer.") for key in changes)
            parts.stepper.set_config(parts.config, after, optimizers=of_optimizers)
    if now.context != was.context:
        parts.stepper.task = parts.task.at(after.architecture, now.context)
    if begins_phase(was, now):
        before_step, cursor = state.before.samples, state.progress.samples
        phase = parts.loaders.next(state.phase, parts.task, now, cursor, before_step)
        parts.read(phase)
        state = replace(state, phase=phase)
    # a grown model is built with its parameters frozen
    if now.frozen != was.frozen and not has_grown:
        freeze_parameters(parts.stepper, now.frozen)
        module_frozen = after.facts(after.architecture).frozen
        thawed_names = [
            n for n in sorted(module_frozen) if is_frozen(was.frozen, n) > is_frozen(now.frozen, n)
        ]
        if thawed_names:
            patterns = ", ".join(patterns_of(thawed_names, after.architecture.parameters()))
            parts.logger.warn(
                f"{patterns} is trained from now on, although the task's module froze it",
                state.step,
            )
    return state


def _failure_text(change: Change, error: object) -> str:
    return f"{change.operation.name} after step {change.step:,} failed: {error}"


def _stop(state: RunState, parts: Components, change: Change, error: Exception) -> NoReturn:
    """Save, and raise RunFailed."""
    save_checkpoint(state, parts, "an operation failed", must=True)
    raise RunFailed(
        f"{_failure_text(change, error)}; the run is unchanged and saved. Correct the schedule, or set on_failure: skip in "
        f"the entry, then resume with: instar resume {RunDir(parts.saver.root).shell_word} --set schedule=FILE"
    ) from error
