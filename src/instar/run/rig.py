"""What trains a model of one shape on this rank: its wrapper, its optimizers, its gradients.

When the shape changes, all of it is made anew around the new model; when parameters are frozen,
only the wrapper is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch.nn import Module

from instar.config.schema import RunConfig
from instar.distributed.parallel import wrap
from instar.distributed.world import World
from instar.run.gradients import DataParallel, Gradients, VirtualRanks
from instar.run.optimizer import build_optimizers
from instar.run.step import Stepper
from instar.schedule.settings import is_frozen
from instar.tasks.task import Task


def rig(
    config: RunConfig, world: World, task: Task, bare: Module, frozen: Sequence[str] = ()
) -> Stepper:
    """Optimizers that remember nothing yet, and the model ready for steps on all ranks.

    All ranks come here together; `bare` is on this rank's device. `frozen`: see
    `is_frozen`.
    """
    parameters = dict(bare.named_parameters())
    _freeze(bare, frozen)
    model, gradients = _on_all_ranks(config, world, bare)
    return Stepper(
        config,
        world,
        task,
        model,
        gradients,
        parameters,
        build_optimizers(parameters, config.optimizer),
    )


def freeze(stepper: Stepper, config: RunConfig, frozen: Sequence[str]) -> None:
    """Train other parameters from now on; optimizers forget nothing of those that stand still."""
    bare = stepper.bare_model
    _freeze(bare, frozen)
    # DDP asks which parameters have gradients only once
    stepper.model, stepper.gradients = _on_all_ranks(config, stepper.world, bare)


def _freeze(bare: Module, frozen: Sequence[str]) -> None:
    for name, parameter in bare.named_parameters():
        parameter.requires_grad_(not is_frozen(frozen, name))


def _on_all_ranks(config: RunConfig, world: World, bare: Module) -> tuple[Module, Gradients]:
    """The model that forward passes go through, and how their gradients come together."""
    if config.reproducible == "elastic":
        number = config.parallel.elastic.virtual_ranks
        return bare, VirtualRanks(world, bare.parameters(), number)
    model = bare
    if config.compile:
        # graphs of a shape that is gone count against torch's limit, and make sizes dynamic
        torch.compiler.reset()
        model = cast(Module, torch.compile(bare))
    # wrapped last: DDP must see the model on its device, and compiled
    wrapped = wrap(model, world, config.parallel.ddp)
    return wrapped, DataParallel(world, wrapped)
