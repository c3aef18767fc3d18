"""Compiles the graphs of all stages of a schedule before the first step.

torch caches compiled graphs on disk, by graph, shapes and settings. A model that grows later loads
its graphs from the cache, which saves seconds to minutes of compilation.
"""

from __future__ import annotations

import logging
import time

import numpy as np
import torch

from instar.distributed.agree import raise_on_all_ranks
from instar.record.progress import track_items
from instar.run.changes.scheduled import stages_ahead
from instar.run.loop.components import Components
from instar.run.parallel.choose import build_meta_model
from instar.run.state.generators import generator_states, restore_generators
from instar.run.state.run_state import RunState
from instar.run.step.stepper import Stepper, build_stepper, set_model_step, to_device
from instar.schedule.operations import State

logger = logging.getLogger(__name__)


def compile_stages(state: RunState, parts: Components) -> int:
    """Run a forward and a backward pass of the current and every remaining stage. A collective.

    The run is unchanged afterwards. The stages' models are built one at a time, in addition to the
    run's own.

    Returns:
        the number of stages; 0 unless the config sets `compile_stages: true`.

    Raises:
        PeerError: a rank failed, e.g. because it has no compiler.
    """
    config, world, device = parts.config, parts.world, parts.world.device
    if not (config.compile and config.compile_stages):
        return 0
    started_s, generators = time.monotonic(), generator_states(device)
    stepper: Stepper | None = None
    before: State | None = None
    number = 0
    stages = track_items(stages_ahead(state, parts), "compiling", "stages")
    for number, stage in enumerate(stages, start=1):
        parts.sync.begin(f"compiling stage {number}", state.step)
        task = parts.task.at(stage.architecture, stage.settings.context)
        # the same model is recompiled only if the shape of its samples changes
        if stepper is None or before is None or _model(before) != _model(stage):
            with raise_on_all_ranks(world, "building the model"):
                bare = build_meta_model(config, world, task)
            stepper = build_stepper(config, world, task, bare, stage)
        stepper.task = task
        _run_once(stepper, stage, f"compiling stage {number}")
        before = stage
    del stepper
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    restore_generators(generators, device)
    seconds = time.monotonic() - started_s
    parts.logger.console.say(f"compiled the graphs of {number} stages in {seconds:.1f} s")
    logger.info("compiled the graphs of %d stages in %.1f s", number, seconds)
    return number


def _model(stage: State) -> object:
    """Return the parts of a stage that require a new model."""
    return stage.architecture, stage.settings.frozen


def _run_once(stepper: Stepper, stage: State, what: str) -> None:
    """Run a micro-batch of held-out samples, which every rank can read, forward and backward.

    A collective. Gradients are not reduced: a rank that cannot compile would keep the others
    waiting for its own.
    """
    settings, task, world = stage.settings, stepper.task, stepper.world
    source = task.spec.held_out("val", task.context)
    with stepper.strategy.without_reduction():
        with raise_on_all_ranks(world, what):
            size = min(settings.batch_size, -(-settings.global_batch // world.size))
            # the last sample of a text may be shorter
            indices = np.resize(np.arange(max(1, len(source) - 1)), size)
            batch = to_device(source.read(indices), world.device)
            set_model_step(stepper.unwrapped_model, 0)
            with stepper.autocast():
                loss = stepper.task.loss_sum(stepper.strategy.model, batch)
        # apart from the forward pass: DDP always reduces the first gradients of a static graph
        with raise_on_all_ranks(world, what):
            torch.autograd.backward(loss)
