"""A live model becomes another one: parameters, optimizer state and moving average by one plan.

Nothing of the old model is changed, so that whatever goes wrong leaves the run as it was.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import Module

from instar.config.operation import Operation
from instar.data.source import Source
from instar.distributed.agree import agree, together
from instar.distributed.parallel import same_everywhere
from instar.distributed.world import World
from instar.growth.apply import Key, Role, apply
from instar.growth.moments import grow_optimizer, moments_mode
from instar.growth.plan import GrowthPlan
from instar.growth.proof import Probe, Proof, compare
from instar.run.rig import rig
from instar.run.state import copy_tensors, load_optimizer_tensors, optimizer_tensors
from instar.run.step import enter, to_device
from instar.run.tell import in_words
from instar.schedule.operations import State
from instar.tasks.task import Task

if TYPE_CHECKING:
    from instar.run.trainer import Trainer

PROBE_OUTPUTS = 1 << 22
"""Numbers that a model may say of the probe, which is one held-out sample at least."""
PROBE_SAMPLES = 8


class LabelBroken(ValueError):  # noqa: N818
    """An operation did to the function what its label denies."""


@dataclass(frozen=True)
class _Samples:
    batch: Mapping[str, torch.Tensor]
    weight: float


@dataclass(frozen=True)
class Draft:
    """Another model on this rank, not yet in use, and what becomes of the function with it."""

    task: Task
    model: Module
    optimizer: Mapping[str, torch.Tensor]
    """what optimizers are to remember, as `run/state.py` names it"""
    ema: Mapping[str, torch.Tensor] | None
    plan: GrowthPlan
    proof: Proof

    def replicated(self) -> dict[str, torch.Tensor]:
        """What all ranks must hold alike."""
        parameters = {name: p.detach() for name, p in self.model.named_parameters()}
        parts = {"model": parameters, "optimizer": self.optimizer, "ema": self.ema or {}}
        return {
            f"{part}/{name}": t for part, tensors in parts.items() for name, t in tensors.items()
        }


def draft(
    trainer: Trainer,
    operation: Operation,
    after: State,
    plan: GrowthPlan,
    *,
    allow_inexact: bool = False,
) -> Draft:
    """Make the model that an operation asks for, and prove that it does what its label says.

    All ranks come here together.

    Args:
        after: what is in force when it is done.
        plan: what becomes of every tensor.

    Raises:
        LabelBroken: the new model is not what the plan's label says.
        PeerError: one rank could not do it.
    """
    world, stepper = trainer.world, trainer.stepper
    key = trainer.config.seed, len(trainer.history)
    with together(world, f"making {operation.name}"):
        task = trainer.task.at(after.architecture, after.settings.context)
        model = task.shell().to(world.device)
        old = {name: p.detach() for name, p in stepper.parameters.items()}
        copy_tensors(dict(model.named_parameters()), apply(plan, old, Role.PARAMETER, key))
        ema = None if stepper.ema is None else apply(plan, stepper.ema, Role.PARAMETER, key)
        memory = grow_optimizer(
            plan,
            optimizer_tensors(stepper.optimizers, stepper.parameters),
            key,
            moments_mode(operation),
        )
        proof = _prove(trainer, task, model, plan, key)
    if not agree(world, proof.holds) and not allow_inexact:
        raise LabelBroken(f"the function is not what it was meant to be: {in_words(proof)}")
    return Draft(task, model, memory, ema, plan, proof)


def _prove(trainer: Trainer, task: Task, model: Module, plan: GrowthPlan, key: Key) -> Proof:
    """Hold the new model against the old one, on held-out samples."""
    old_task, old_model = trainer.task, trainer.stepper.bare_model
    samples = _probe_on(trainer.validation, old_task, old_model, trainer.world)
    for one in (old_model, model):
        enter(one, trainer.progress.step)
    before, after = _measure(old_task, old_model, samples), _measure(task, model, samples)
    proof = compare(plan, before, after)
    if proof.holds:
        return proof
    # deep models round by more than is allowed; in float64 there is no doubt
    old_model, model = copy.deepcopy(old_model).double(), copy.deepcopy(model).double()
    old = {name: p.detach() for name, p in old_model.named_parameters()}
    copy_tensors(dict(model.named_parameters()), apply(plan, old, Role.PARAMETER, key))
    before, after = _measure(old_task, old_model, samples), _measure(task, model, samples)
    return compare(plan, before, after, torch.float64)


def take_shape(trainer: Trainer, drafted: Draft, after: State) -> None:
    """Let the run go on with a draft. All ranks come here together.

    Raises:
        RunFailed: it is not the same on all ranks.
    """
    world = trainer.world
    # before it is wrapped: DDP would send rank 0's over what differs, and nobody would know
    same_everywhere(world, drafted.replicated())
    made = rig(trainer.config, world, drafted.task, drafted.model, after.settings.frozen)
    load_optimizer_tensors(made.optimizers, made.parameters, drafted.optimizer)
    if made.ema is not None and drafted.ema is not None:
        copy_tensors(made.ema, drafted.ema)
    made.scaler = trainer.stepper.scaler
    trainer.stepper, trainer.task = made, drafted.task


def _probe_on(held_out: Source, task: Task, model: Module, world: World) -> _Samples:
    """A few held-out samples, the same on every rank."""
    one = to_device(held_out.read(np.arange(1)), world.device)
    with torch.no_grad():
        most = PROBE_OUTPUTS // task.outputs(model, one).numel()
    indices = np.arange(max(1, min(PROBE_SAMPLES, most, len(held_out))))
    return _Samples(to_device(held_out.read(indices), world.device), held_out.weights(indices))


def _measure(task: Task, stepper_model: Module, samples: _Samples) -> Probe:
    """What a model says of the samples, at full precision and without dropout."""
    training = stepper_model.training
    stepper_model.eval()
    with torch.no_grad():
        loss = task.loss_sum(stepper_model, samples.batch).item() / samples.weight
        measured = Probe(task.outputs(stepper_model, samples.batch), loss)
    stepper_model.train(training)
    return measured
