"""The model that the schedule leads to next is compiled beside training, so that growth waits less."""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

import torch

from instar.config.schema import RunConfig
from instar.data.reader import MicroBatch, StepBatch
from instar.data.workers import Workers
from instar.distributed.cores import cores
from instar.distributed.placement import placement
from instar.distributed.world import World
from instar.models.mask import mask_of
from instar.run.background import in_background
from instar.run.precompile import Precompiled, Recipe, call_of, namesake
from instar.run.step import DTYPES, to_device
from instar.schedule.entries import next_entry, too_large
from instar.schedule.operations import FOLD, State, carried_out, planned
from instar.schedule.settings import is_frozen

if TYPE_CHECKING:
    from instar.run.trainer import Trainer

logger = logging.getLogger(__name__)

ROOM_BYTES = 2 << 30
"""What a GPU must have free: a process that compiles for it has a context there."""


class Ahead:
    """One process at a time, on the first rank of each host: ranks of a host share the cache."""

    def __init__(self, *, on: bool) -> None:
        self.on = on
        self.looked_at = -1
        """operations that were done when it last looked"""
        self.pending: Future[float] | None = None

    def look_if_due(self, trainer: Trainer, batch: StepBatch) -> None:
        """Begin to compile what comes next, once after each operation.

        Args:
            batch: the step's, of which the next model's will be alike.
        """
        if not self.on:
            return
        if self.pending is not None:
            if not self.pending.done():
                return
            self.tell()
        done = len(trainer.history)
        micro = max(batch.micro_batches, key=lambda micro: micro.samples, default=None)
        if done == self.looked_at or micro is None:
            return
        self.looked_at = done
        try:
            recipe = following(trainer, micro)
        except Exception as error:  # what a user's own model says of being made without memory
            _give_up(error)
            return
        if recipe is not None:
            self.pending = in_background(partial(_compile, recipe), "instar-compiler")

    def tell(self) -> None:
        """Log what came of the one under way; wait for it."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        try:
            logger.info("compiled the next model ahead, in %.1f s", pending.result())
        except Exception as error:  # it is compiled when it is needed, then
            _give_up(error)


def following(trainer: Trainer, micro: MicroBatch) -> Recipe | None:
    """How the model that comes next is compiled; None: none does, or not as far as can be known."""
    after = next_shape(trainer)
    config, device = trainer.config, trainer.world.device
    if after is None or not has_room(device):
        return None
    # which samples it will be called with is not known yet: settings come before it
    was, then = trainer.settings, after.settings
    if (was.batch_size, was.context) != (then.batch_size, then.context):
        return None
    task = trainer.task.at(after.architecture, then.context)
    with torch.device("meta"):
        model = task.shell()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_frozen(then.frozen, name))
    samples = to_device(micro.arrays, torch.device("cpu"))
    return Recipe(
        model,
        call_of(lambda listener: task.loss_sum(listener, samples)),
        device,
        None if config.precision == "fp32" else DTYPES[config.precision],
        torch.get_num_threads(),
        int(config.parallel.ddp.bucket_cap_mb * 2**20) if trainer.world.size > 1 else None,
        namesake(),
    )


def next_shape(trainer: Trainer) -> State | None:
    """What will be in force when the model is next another one."""
    state, step = trainer.in_force, trainer.progress.step
    if (mask := mask_of(state.architecture)) is not None:
        return carried_out(state, FOLD, mask.end)
    first = next_entry(trainer.entries, trainer.history)
    for entry in trainer.entries[first.number :] if first is not None else ():
        after, plan = planned(state, entry.operation, step)
        if too_large(entry, after.architecture):
            continue
        if plan is not None:
            return after
        state = after
    return None


def is_wanted(config: RunConfig, world: World) -> bool:
    """Whether this rank compiles ahead: the first of a host, and by itself only where a processor is
    idle, for else training loses what growth would have waited."""
    if not config.compile or world.local_rank != 0:
        return False
    if config.compile_ahead != "auto":
        return config.compile_ahead
    threads = torch.get_num_threads() if world.device.type == "cpu" else 1
    return cores() > threads * placement(os.environ, config.parallel).local_size


def has_room(device: torch.device) -> bool:
    """Whether a second process may use the device."""
    return device.type != "cuda" or torch.cuda.mem_get_info(device)[0] > ROOM_BYTES


def _give_up(error: Exception) -> None:
    first, *_ = str(error).strip().splitlines() or [""]
    logger.info("the next model is not compiled ahead: %s: %s", type(error).__name__, first)


def _compile(recipe: Recipe) -> float:
    """Returns the seconds that it took."""
    begun = time.monotonic()
    Workers(partial(Precompiled, recipe), 1).close()
    return time.monotonic() - begun
