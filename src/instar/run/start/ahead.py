"""What is left of a run that is resumed: the model that it has now, and the operations that are still to come."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from instar.checkpoint.manifest import CheckpointError
from instar.checkpoint.store import Checkpoint
from instar.config.budget import Counters
from instar.config.errors import ConfigError
from instar.config.fields import with_values
from instar.run.resume import Continuation
from instar.run.start.preflight import Prepared
from instar.schedule.forecast import ScheduleError, forecast_ahead
from instar.schedule.operations import Change, State, initial_state
from instar.tasks.task import spec_class


def saved_counters(checkpoint: Checkpoint) -> Counters:
    """Return what the run of a checkpoint had done; nothing of one that was imported.

    Raises:
        CheckpointError: its state does not say it.
    """
    try:
        return msgspec.convert(checkpoint.state.get("progress", {}), Counters)
    except (AttributeError, msgspec.MsgspecError) as error:
        what = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{checkpoint.path}: not the state of a run: {what}") from error


def at_step_0(continuation: Continuation, prepared_run: Prepared, world_size: int) -> State:
    """Return the settings and the architecture with which a resumed run began."""
    spec, began = prepared_run.spec, continuation.began
    if began.model != prepared_run.config.model:
        config = prepared_run.config.model_copy(update={"model": began.model})
        loaded_config = replace(continuation.loaded_config, config=config)
        spec = spec_class(config.task).open(loaded_config, world_size)
    return initial_state(began, spec.architecture, spec.facts)


def with_rest(
    prepared_run: Prepared,
    continuation: Continuation,
    checkpoint: Checkpoint | None,
    world_size: int,
    device: str | None = None,
) -> Prepared:
    """Return a resumed run with the forecast of its rest, from the checkpoint on, instead of that of its config.

    A history that is not this model's is left to whoever reads the checkpoint, who says what differs.

    Args:
        device: see `preflight`.

    Raises:
        ConfigError: operations that are left cannot be carried out.
        CheckpointError: the checkpoint does not say how far it is.
    """
    progress = Counters() if checkpoint is None else saved_counters(checkpoint)
    history = continuation.history
    if continuation.operation is not None:
        history = (*history, Change(continuation.operation, progress.step, progress.samples))
    if device is not None:
        continuation = replace(
            continuation, began=with_values(continuation.began, {"device": device})
        )
    initial = at_step_0(continuation, prepared_run, world_size)
    try:
        forecast = forecast_ahead(initial, history, progress, prepared_run.spec, world_size)
    except ScheduleError as error:
        loaded_config = continuation.loaded_config
        problems = (loaded_config.problem(p.key, p.message, p.hint) for p in error.problems)
        raise ConfigError(*problems) from None
    except (LookupError, TypeError, ValueError):
        return prepared_run
    return replace(prepared_run, forecast=forecast)
