"""From a checked config to a trainer: every part of a run is made and joined here."""

from __future__ import annotations

import os

import torch

from instar.config.budget import parse_budget
from instar.distributed.ranklog import RankLog
from instar.distributed.signals import StopSignal
from instar.distributed.world import World
from instar.record.console import Console
from instar.record.control import Inbox
from instar.record.recorder import Sink
from instar.record.rundir import RunDir
from instar.record.system import measure_peak_flops
from instar.run.judge import Judge
from instar.run.narrate import Narrator
from instar.run.preflight import Prepared
from instar.run.rig import rig
from instar.run.safepoint import SafePoint
from instar.run.saving import Saver
from instar.run.step import DTYPES
from instar.run.trainer import Trainer
from instar.run.writer import Writer
from instar.schedule.entries import entries


def build(
    prepared: Prepared,
    world: World,
    signal: StopSignal,
    sink: Sink,
    console: Console,
    log: RankLog,
    run_dir: RunDir,
) -> Trainer:
    """The trainer of a run, at step 0; to be closed."""
    config = prepared.config
    elastic = config.parallel.elastic if config.reproducible == "elastic" else None
    if elastic:
        _round_alike(elastic.threads, world.device)
    task = prepared.blueprint.task(config)
    stepper = rig(config, world, task, task.build().to(world.device))
    budgets = [parse_budget(text) for text in config.train.until]
    seconds = [budget for budget in budgets if budget.kind == "seconds"]
    narrator = Narrator(
        world,
        sink,
        console,
        log_interval=config.record.log_interval,
        budgets=budgets,
        peak_flops=measure_peak_flops(str(world.device), DTYPES[config.precision]) * world.size
        if world.is_main
        else 1.0,
    )
    return Trainer(
        config,
        world,
        task,
        stepper,
        SafePoint(
            world,
            signal,
            min(seconds, key=lambda b: b.amount, default=None),
            Inbox(run_dir.control),
        ),
        Saver(
            config.checkpoint,
            world,
            run_dir.path,
            narrator.saved,
            limit_s=config.parallel.timeout_s,
        ),
        narrator,
        log,
        Judge(config),
        Writer(config.record, run_dir.path),
        entries(config),
    )


def _round_alike(threads: int, device: torch.device) -> None:
    """Kernels divide their sums among threads, and on a GPU some add in the order of arrival."""
    torch.set_num_threads(threads)
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
