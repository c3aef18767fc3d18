"""From a checked config to a trainer: every part of a run is made and joined here."""

from __future__ import annotations

from typing import cast

import torch

from instar.config.budget import parse_budget
from instar.data.feed import Feed
from instar.distributed.parallel import wrap
from instar.distributed.ranklog import RankLog
from instar.distributed.signals import StopSignal
from instar.distributed.world import World
from instar.record.console import Console
from instar.record.recorder import Sink
from instar.record.system import measure_peak_flops
from instar.run.narrate import Narrator
from instar.run.optimizer import build_optimizers
from instar.run.preflight import Prepared
from instar.run.safepoint import SafePoint
from instar.run.step import DTYPES, Stepper
from instar.run.trainer import Trainer
from instar.tasks.language import LanguageTask


def build(
    prepared: Prepared,
    world: World,
    signal: StopSignal,
    sink: Sink,
    console: Console,
    log: RankLog,
) -> Trainer:
    """The trainer of a run, at step 0. Its `feed` wants to be closed."""
    config = prepared.config
    task = LanguageTask(config, prepared.architecture, prepared.dataset)
    bare = task.build().to(world.device)
    parameters = dict(bare.named_parameters())
    model = cast(torch.nn.Module, torch.compile(bare)) if config.compile else bare
    stepper = Stepper(
        config,
        world,
        task,
        # wrapped last: DDP must see the model on its device, and compiled
        wrap(model, world, config.distributed.ddp),
        parameters,
        build_optimizers(parameters, config.optimizer),
    )
    source, order = task.train_samples()
    budgets = [parse_budget(text) for text in config.train.until]
    seconds = [budget for budget in budgets if budget.kind == "seconds"]
    narrator = Narrator(
        world,
        sink,
        console,
        log_interval=config.record.log_interval,
        samples_per_epoch=order.samples_per_epoch,
        budgets=budgets,
        peak_flops=measure_peak_flops(str(world.device), DTYPES[config.precision]) * world.size
        if world.is_main
        else 1.0,
    )
    return Trainer(
        config,
        world,
        task,
        Feed(source, order, world.rank, world.size, prefetch=config.data.prefetch),
        task.held_out("val"),
        stepper,
        SafePoint(world, signal, min(seconds, key=lambda b: b.amount, default=None)),
        narrator,
        log,
        order.samples_per_epoch,
    )
