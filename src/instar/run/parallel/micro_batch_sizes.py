"""The sizes of all micro-batches that a run is known to come to. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from instar.config.budget import Counters, parse_budget
from instar.config.schema import RunConfig
from instar.config.sections import Operation
from instar.data.order import StepPlan, divide_step, micro_slices
from instar.run.state.data_phase import slices
from instar.schedule.forecast import Forecast, legs_of
from instar.schedule.operations import Change, History, State, fold_history
from instar.schedule.settings import Settings
from instar.schedule.timeline import Clock, PartialStep, partial_steps, timeline
from instar.schedule.triggers import remaining, schedule_entries
from instar.tasks.task import TaskSpec


@dataclass(frozen=True)
class Comes:
    """When a size of micro-batches comes, and what to do instead."""

    when: str
    instead: str


def sizes_to_come(config: RunConfig, forecast: Forecast, world_size: int) -> dict[int, Comes]:
    """Return the sizes of the micro-batches of all stages, and of the last steps of their epochs."""
    stages = (stage.settings for stage in forecast.stages)
    return _sizes(config, stages, forecast.partial_steps, world_size)


def sizes_ahead(
    initial: State,
    history: History,
    override: Operation | None,
    progress: Counters,
    spec: TaskSpec,
    world_size: int,
) -> dict[int, Comes]:
    """Return the sizes of the micro-batches that a resumed run comes to.

    Args:
        initial: at step 0.
        override: the settings that the resume changes.
        progress: as saved.
    """
    if override is not None:
        history = (*history, Change(override, progress.step, progress.samples))
    state = fold_history(initial, history)
    config, clock = (
        state.config,
        Clock(progress.step, progress.samples, progress.tokens, in_order=progress.samples),
    )
    legs = legs_of(remaining(schedule_entries(config), history), state, spec, world_size)
    budgets = [parse_budget(text) for text in config.train.until]
    lines = [
        timeline(
            legs,
            budgets,
            evaluated_at_start=True,
            optimistic=optimistic,
            eval_epochs=config.eval.eval_epochs,
            clock=clock,
        )
        for optimistic in (True, False)
    ]
    partial = [step for line in lines for step in partial_steps(line, legs)]
    return _sizes(config, (leg.state.settings for leg in legs), partial, world_size)


def _sizes(
    config: RunConfig, stages: Iterable[Settings], partial: Iterable[PartialStep], world_size: int
) -> dict[int, Comes]:
    """Return the sizes of the micro-batches of whole and of partial steps.

    A slice without samples runs one that does not count, where ranks exchange something in every pass.
    """
    is_sharded = config.parallel.shards_of(world_size) > 1
    is_by_rank = config.parallel.strategy == "diloco" or config.reproducible == "elastic"
    stand_in = int(is_sharded or not is_by_rank)
    number = sum(map(len, slices(config, world_size)))
    ranks = (
        f"{number} {'rank' if number == world_size else 'virtual rank'}{'s' if number > 1 else ''}"
    )
    sizes: dict[int, Comes] = {}

    def add(samples: int, batch_size: int, comes: Comes) -> None:
        for places in divide_step(StepPlan(0, 0, 0, samples), number):
            for first, end in micro_slices(len(places), batch_size) or [(0, stand_in)]:
                if end > first:
                    sizes.setdefault(end - first, comes)

    for settings in stages:
        batch = settings.global_batch
        instead = "raise train.batch_size or gradient_accumulation_steps, or start fewer ranks"
        add(batch, settings.batch_size, Comes(f"as in steps of {batch} on {ranks}", instead))
    for step in partial:
        when = f"as in an epoch's last step, of {step.samples} of {step.global_batch} samples on {ranks}"
        instead = (
            f"data.drop_last: true leaves out these {step.samples}, or choose another batch size"
        )
        add(step.samples, step.batch_size, Comes(when, instead))
    return sizes
