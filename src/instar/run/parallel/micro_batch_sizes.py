"""The sizes of all micro-batches that a run is known to come to. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from instar.config.schema import RunConfig
from instar.data.order import StepPlan, divide_step, micro_slices
from instar.run.state.data_phase import slices
from instar.schedule.forecast import Forecast


@dataclass(frozen=True)
class Comes:
    """When a size of micro-batches comes, and what to do instead."""

    when: str
    instead: str


def sizes_to_come(config: RunConfig, forecast: Forecast, world_size: int) -> dict[int, Comes]:
    """Return the sizes of the micro-batches of all stages, and of the last steps of their epochs.

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

    for settings in (stage.settings for stage in forecast.stages):
        batch = settings.global_batch
        instead = "raise train.batch_size or gradient_accumulation_steps, or start fewer ranks"
        add(batch, settings.batch_size, Comes(f"as in steps of {batch} on {ranks}", instead))
    for step in forecast.partial_steps:
        when = f"as in an epoch's last step, of {step.samples} of {step.global_batch} samples on {ranks}"
        instead = (
            f"data.drop_last: true leaves out these {step.samples}, or choose another batch size"
        )
        add(step.samples, step.batch_size, Comes(when, instead))
    return sizes
