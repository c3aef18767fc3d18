"""Builds the trainer of a checked config, and compiles the graphs of all stages of its schedule ahead."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from instar.config.budget import parse_budget
from instar.config.schema import RunConfig
from instar.distributed.agree import raise_on_all_ranks
from instar.distributed.rank_log import RankLog
from instar.distributed.signals import StopSignal
from instar.distributed.world import World
from instar.record.console import Console
from instar.record.control import Inbox
from instar.record.progress import track_items
from instar.record.recorder import Sink
from instar.record.rundir import RunDir
from instar.run.changes.scheduled import stages_ahead
from instar.run.components import Components
from instar.run.output.extension import RunPlace, open_extensions
from instar.run.output.inspection import TextSampler, WeightAnalyzer
from instar.run.output.run_logger import RunLogger
from instar.run.output.save import Saver, SaveResult
from instar.run.parallel.choose import begins_on_meta, build_meta_model
from instar.run.start.preflight import Prepared
from instar.run.start.rank_consistency import resolve_precision
from instar.run.start.restore import OpenedWeights
from instar.run.state.data_phase import LoaderFactory
from instar.run.state.early_stopping import MetricTracker
from instar.run.state.generators import generator_states, restore_generators
from instar.run.state.run_state import RunState
from instar.run.state.sync_point import SyncPoint
from instar.run.step.hooks import Hooks
from instar.run.step.stepper import Stepper, build_stepper, set_model_step, to_device
from instar.run.trainer import Trainer
from instar.schedule.operations import State, initial_state
from instar.schedule.triggers import schedule_entries
from instar.tasks.task import Task

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
FILLING: Any = torch.utils.deterministic
"""whose `fill_uninitialized_memory` its type stubs lack"""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunOutputs:
    """What a run is told meanwhile, and where it writes."""

    signal: StopSignal
    sink: Sink
    console: Console
    rank_log: RankLog
    run_dir: RunDir
    extends: bool = True
    """whether extensions take part"""


def build_trainer(
    prepared_run: Prepared,
    world: World,
    outputs: RunOutputs,
    began: State | None = None,
    weights: OpenedWeights | None = None,
    hooks: Sequence[object] = (),
) -> Trainer:
    """Build the trainer of a run at step 0; the caller must close it. A collective.

    Args:
        began: settings and architecture at the run's step 0, if the config has changed since.
        weights: on rank 0, those that the run starts from; None: initial values.
        hooks: see `instar.run.step.hooks`; those of the task are called first.
    """
    config = resolve_precision(prepared_run, world)[0].config
    _set_kernels(config, world.device)
    task = prepared_run.spec.task(config)
    if began is not None:
        task = task.at(began.architecture, began.settings.context)
    first = config if began is None else began.config
    initial = initial_state(first, task.architecture, task.spec.facts)
    stepper, warnings = _build_stepper(config, world, task, initial, weights)
    parts = _connect(config, world, outputs, stepper, initial, hooks)
    for warning in warnings:
        parts.logger.warn(warning, 0)
    phase = parts.loaders.first(task, initial.settings)
    parts.read(phase)
    return Trainer(parts, RunState(initial, phase))


@contextmanager
def as_before() -> Iterator[None]:
    """Context manager that restores torch's process-wide settings, which a run changes."""
    threads = torch.get_num_threads()
    deterministic = torch.get_deterministic_debug_mode()
    fills = FILLING.fill_uninitialized_memory
    workspace = os.environ.get(WORKSPACE)
    products = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(deterministic)
        if "torch._inductor.config" in sys.modules:  # the compiler was told too
            torch.use_deterministic_algorithms(deterministic > 0, warn_only=deterministic == 1)
        FILLING.fill_uninitialized_memory = fills
        torch.set_float32_matmul_precision(products)
        if workspace is None:
            os.environ.pop(WORKSPACE, None)


def compile_stages(state: RunState, parts: Components) -> int:
    """Run a forward and a backward pass of the current and every remaining stage. A collective.

    torch caches compiled graphs on disk, by graph, shapes and settings. A model that grows later loads
    its graphs from the cache, which saves seconds to minutes of compilation.

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


def _set_kernels(config: RunConfig, device: torch.device) -> None:
    """Choose the kernels of this process, by which a run's results can be repeated."""
    elastic = config.parallel.elastic if config.reproducible == "elastic" else None
    if elastic:
        torch.set_num_threads(elastic.threads)  # kernels divide sums among threads
    if elastic or device.type == "cpu":
        _use_deterministic_kernels(device, compiles=config.compile)
    if device.type == "cuda":
        # before the device's peak is measured, with which speed is compared
        tf32 = config.tf32 and elastic is None
        torch.set_float32_matmul_precision("high" if tf32 else "highest")


def _build_stepper(
    config: RunConfig, world: World, task: Task, initial: State, weights: OpenedWeights | None
) -> tuple[Stepper, list[str]]:
    """Build the model, with its values, and its optimizer; return also warnings. A collective."""
    warnings: list[str] = []
    # the layouts are compared next, which no rank may enter alone
    with raise_on_all_ranks(world, "building the model"):
        values = task.initial_values() if weights is None else weights.tensors
        if begins_on_meta(config, world, task):
            model = build_meta_model(config, world, task)
        else:
            model = task.build()
            # the other ranks receive them
            warnings = [] if weights is None else weights.load_into(model)
    return build_stepper(config, world, task, model, initial, values), warnings


def _connect(
    config: RunConfig,
    world: World,
    outputs: RunOutputs,
    stepper: Stepper,
    initial: State,
    hooks: Sequence[object],
) -> Components:
    """Connect all that a run consists of."""
    run_dir, signal = outputs.run_dir, outputs.signal
    budgets = [parse_budget(text) for text in config.train.until]
    seconds = [budget for budget in budgets if budget.kind == "seconds"]
    logger = RunLogger(
        world, outputs.sink, outputs.console, config=config, budgets=budgets, folder=run_dir.path
    )

    inbox = Inbox(run_dir.control)

    def log_save(save: SaveResult) -> None:
        signal.resumable = signal.resumable or save.path is not None
        if save.path is not None and world.is_main:
            inbox.settle(save.snapshot.request_ids)
        logger.log_save(save)

    limit_s = config.parallel.timeout_s
    time_budget = min(seconds, key=lambda budget: budget.amount, default=None)
    sync = SyncPoint(world, signal, time_budget, inbox)
    place = RunPlace(config, world, run_dir.path, logger, limit_s)
    all_hooks = [*stepper.task.hooks(), *hooks]
    return Components(
        config,
        world,
        initial,
        schedule_entries(config),
        budgets,
        stepper,
        LoaderFactory(config, world),
        sync,
        Saver(
            config.checkpoint,
            world,
            run_dir.path,
            log_save,
            limit_s=limit_s,
            better=config.metrics[config.checkpoint.best_of[0]],
        ),
        open_extensions(place) if outputs.extends else (),
        logger,
        outputs.rank_log,
        MetricTracker(config),
        TextSampler(config.record, run_dir.path, world),
        WeightAnalyzer(config.record.analyze_every, world),
        Hooks(all_hooks, world, config, run_dir.path, logger.logged_values, sync.request_stop),
    )


def _use_deterministic_kernels(device: torch.device, *, compiles: bool) -> None:
    """Add in a fixed order. Many kernels of a GPU add in the order in which threads arrive, and on a CPU
    that of the gradient of `x[index]` does, which is no faster."""
    if device.type == "cuda":
        os.environ.setdefault(WORKSPACE, ":4096:8")
    if compiles or device.type == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
    else:
        # the same, without importing the compiler to tell it, which takes a second
        torch.set_deterministic_debug_mode("warn")
    # otherwise every `torch.empty` is filled with NaN
    FILLING.fill_uninitialized_memory = False


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
