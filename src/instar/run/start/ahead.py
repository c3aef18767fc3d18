"""What is left of a run that is resumed: the model that it has now, and the operations that are still to come."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import msgspec

from instar.checkpoint.manifest import CheckpointError
from instar.checkpoint.store import Checkpoint
from instar.config.budget import Counters
from instar.config.errors import ConfigError, ConfigProblem
from instar.config.fields import with_values
from instar.models.shape import mask_of
from instar.run.resume import DERIVES, Continuation
from instar.run.start.preflight import Prepared, sharding_problems
from instar.schedule.forecast import (
    Forecast,
    PastStage,
    ScheduleError,
    decay_end,
    forecast_of,
    legs_of,
    pace_of,
    timelines,
)
from instar.schedule.operations import (
    Change,
    History,
    State,
    effective_changes,
    initial_state,
    plan_operation,
)
from instar.schedule.posted import Cancelled, Posted, Unread, read_unread
from instar.schedule.timeline import Beginning, Clock, Leg
from instar.schedule.triggers import (
    Entry,
    evaluates_at_start,
    last_step,
    remaining,
    schedule_entries,
)
from instar.tasks.task import TaskSpec, spec_class

_LARGEST_EPOCH = 10**9
"""samples, up to which shares of an epoch are exact that are saved as floating-point numbers"""


class _Course(msgspec.Struct, frozen=True):
    since: int = 0
    epochs_before: float = 0.0


class _StateAhead(msgspec.Struct, frozen=True):
    """What a checkpoint's state says of the way ahead; see `RunState.to_json`."""

    progress: Counters = Counters()
    course: _Course = _Course()
    losses: tuple[tuple[int, float], ...] = ()
    reevaluates_at: int = -1
    requests: tuple[Posted, ...] = msgspec.field(default=(), name="posted")
    cancellations: tuple[Cancelled, ...] = msgspec.field(default=(), name="cancelled")
    closed_ids: tuple[str, ...] = msgspec.field(default=(), name="closed")


def _state_of(checkpoint: Checkpoint) -> _StateAhead:
    try:
        return msgspec.convert(checkpoint.state, _StateAhead)
    except (AttributeError, msgspec.MsgspecError) as error:
        what = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{checkpoint.path}: not the state of a run: {what}") from error


def at_step_0(continuation: Continuation, prepared_run: Prepared, world_size: int) -> State:
    """Return the settings and the architecture with which a resumed run began."""
    spec, began = prepared_run.spec, continuation.began
    if began.model != prepared_run.config.model:
        config = prepared_run.config.model_copy(update={"model": began.model})
        loaded_config = replace(continuation.loaded_config, config=config)
        # data that are missing are assumed for the prepared run, too, which has said so
        spec = spec_class(config.task).assume(loaded_config, lambda _: None, world_size)
    return initial_state(began, spec.architecture, spec.facts)


def with_rest(
    prepared_run: Prepared,
    continuation: Continuation,
    checkpoint: Checkpoint | None,
    world_size: int,
    device: str | None = None,
    control: Path | None = None,
) -> Prepared:
    """Return a resumed run with the forecast of its rest, from the checkpoint on, instead of that of its config,
    and with the end of the decay that follows from it where the config leaves it open.

    A history that is not this model's is left to whoever reads the checkpoint, who says what differs.

    Args:
        device: see `preflight`.
        control: folder with what people asked for while the run did not train; None: nothing.

    Raises:
        ConfigError: operations that are left cannot be carried out, or the model cannot be divided among the ranks.
        CheckpointError: the checkpoint does not say how far it is.
    """
    state = _StateAhead() if checkpoint is None else _state_of(checkpoint)
    history, progress = continuation.history, state.progress
    if continuation.operation is not None:
        history = (*history, Change(continuation.operation, progress.step, progress.samples))
    if device is not None:
        continuation = replace(
            continuation, began=with_values(continuation.began, {"device": device})
        )
    initial = at_step_0(continuation, prepared_run, world_size)
    try:
        past = past_stages(initial, history, progress.step)
    except (LookupError, TypeError, ValueError):
        return prepared_run
    present, spec, loaded_config = past[-1].state, prepared_run.spec, continuation.loaded_config
    unread = Unread() if control is None else read_unread(control, present.config, progress.step)
    problems: list[ConfigProblem] = []
    try:
        at_once, later = _entries_left(present, history, continuation, state, unread)
        legs = _legs_left(at_once, later, present, spec, world_size)
    except ScheduleError as error:
        problems = [loaded_config.problem(p.key, p.message, p.hint) for p in error.problems]
    problems += sharding_problems(loaded_config, spec, present.architecture, world_size)
    if problems:
        raise ConfigError(*problems)
    before = past[-2].state if continuation.operation is not None else present
    beginning = _beginning(state, history, before, present, spec, is_new=checkpoint is None)
    lines = timelines(legs, present.config, beginning)
    forecast = forecast_of(legs, lines, spec, world_size, past)
    return _with_decay(replace(prepared_run, forecast=forecast), forecast)


def past_stages(initial: State, history: History, step: int) -> list[PastStage]:
    """Return the stages of a run that has got to a step; the last is the present one.

    Raises:
        LookupError, TypeError, ValueError: the history is that of another run.
    """
    stages, state, plan, begun = list[PastStage](), initial, None, 0
    for change in effective_changes(history):
        stages.append(PastStage(state, plan, has_steps=change.step > begun))
        state, plan = plan_operation(state, change.operation, change.step)
        begun = change.step
    return [*stages, PastStage(state, plan, has_steps=step > begun)]


def _entries_left(
    present: State, history: History, continuation: Continuation, state: _StateAhead, unread: Unread
) -> tuple[list[Entry], list[Entry]]:
    """Return what people asked for that is due at once; and the entries of the schedule that may still fire, followed by
    what people asked for that waits for a trigger."""
    numbers = {entry.number for entry in state.cancellations} | unread.cancel_entries
    if continuation.sets_schedule:
        numbers = set()
    closed_ids = {change.id for change in history} | {*state.closed_ids}
    entries = remaining(schedule_entries(present.config), history)
    requests = unread.left(state.requests, closed_ids)
    return [request.entry for request in requests if request.is_immediate], [
        *(entry for entry in entries if entry.number not in numbers),
        *(request.entry for request in requests if not request.is_immediate),
    ]


def _legs_left(
    at_once: list[Entry], later: list[Entry], present: State, spec: TaskSpec, world_size: int
) -> list[Leg]:
    with suppress(ScheduleError):
        return legs_of([*at_once, *later], present, spec, world_size)
    # the run refuses what would make its schedule impossible
    return legs_of([*later, *at_once], present, spec, world_size)


def _beginning(
    state: _StateAhead,
    history: History,
    before: State,
    present: State,
    spec: TaskSpec,
    *,
    is_new: bool,
) -> Beginning:
    """Return where the rest begins.

    Args:
        before: the state before what the resume changes.
        is_new: nothing was saved yet.
    """
    progress, course = state.progress, state.course
    clock = Clock(
        progress.step,
        progress.samples,
        progress.tokens,
        flops=round(progress.flops),
        in_order=progress.samples - course.since,
        epochs_before=Fraction(course.epochs_before).limit_denominator(_LARGEST_EPOCH),
    )
    pace = pace_of(before, spec)
    if pace_of(present, spec).order != pace.order:
        clock = clock.new_order(pace)
    evaluation_steps = {state.reevaluates_at, *(step for step, _ in state.losses[-1:])}
    mask, last = mask_of(present.architecture), last_step(history)
    return Beginning(
        clock,
        is_evaluated=evaluates_at_start(present.config)
        if is_new
        else progress.step in evaluation_steps,
        since=last or 0,
        has_changed=last is not None,
        masked_until=0 if mask is None else mask.end,
    )


def _with_decay(prepared_run: Prepared, forecast: Forecast) -> Prepared:
    """Return the run with the end of its decay at that of the run, where the config leaves it open."""
    if DERIVES not in prepared_run.derived_values:
        return prepared_run
    end = decay_end(with_values(prepared_run.config, {DERIVES: None}), forecast.steps)
    if end is None:
        return prepared_run
    settings = forecast.stages[0].settings
    end = max(end - settings.lr_start, settings.warmup_iters + 1)
    return replace(
        prepared_run,
        config=with_values(prepared_run.config, {DERIVES: end}),
        derived_values={**prepared_run.derived_values, DERIVES: end},
    )
