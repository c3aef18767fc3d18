"""Growth of a live model: one plan for its parameters, optimizer state and moving average.

The old model is never changed, so any failure leaves the run as it was.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import Module

from instar.config.sections import Operation
from instar.data.source import Source
from instar.distributed.agree import agree, raise_on_all_ranks
from instar.distributed.parallel import check_replicas_equal
from instar.growth.apply import (
    Key,
    Mode,
    Role,
    apply,
    grow_buffers,
    grow_optimizer,
    moments_mode,
)
from instar.growth.plan import GrowthPlan
from instar.growth.proof import Probe, Proof, compare
from instar.models.module import (
    evaluating,
    load_buffers,
    model_tensors,
    persistent_buffers,
)
from instar.run.loop.components import Components
from instar.run.loop.generators import EVALUATION, generators_kept, seed_generators
from instar.run.loop.optimizer import (
    check_states,
    copy_tensors,
    load_optimizer_tensors,
    optimizer_tensors,
    shapes_of,
)
from instar.run.loop.state import RunState
from instar.run.loop.step import Stepper, build_stepper, enter, to_device
from instar.run.output.operation_text import in_words
from instar.schedule.operations import State, number_of
from instar.tasks.task import Task

logger = logging.getLogger(__name__)


PROBE_OUTPUTS = 1 << 22
"""Maximum number of output elements on the probe, which has at least one held-out sample."""
PROBE_SAMPLES = 8


class LabelBroken(ValueError):  # noqa: N818
    """An operation changed the model's function in a way that its label excludes."""


@dataclass(frozen=True)
class ProbeSamples:
    """Held-out samples for the comparison of two models, and their loss weight."""

    batch: Mapping[str, torch.Tensor]
    weight: float

    def in_double(self) -> ProbeSamples:
        doubled = {
            name: tensor.double() if tensor.is_floating_point() else tensor
            for name, tensor in self.batch.items()
        }
        return ProbeSamples(doubled, self.weight)


@dataclass(frozen=True)
class Candidate:
    """A grown model on this rank, not in use yet, and the proof of its effect on the function."""

    task: Task
    model: Module
    optimizer: Mapping[str, torch.Tensor]
    """optimizer state, named as by `optimizer_tensors`"""
    ema: Mapping[str, torch.Tensor] | None
    plan: GrowthPlan
    proof: Proof

    def replicated(self) -> dict[str, torch.Tensor]:
        """Return the tensors that must be equal on all ranks, as `<component>/<name>`."""
        model = model_tensors(self.model)
        parts = {"model": model, "optimizer": self.optimizer, "ema": self.ema or {}}
        return {
            f"{part}/{name}": t for part, tensors in parts.items() for name, t in tensors.items()
        }


def make_candidate(
    state: RunState,
    parts: Components,
    operation: Operation,
    after: State,
    plan: GrowthPlan,
    *,
    allow_inexact: bool = False,
) -> Candidate:
    """Build the model after an operation and verify the plan's label. A collective.

    Args:
        after: settings and architecture after the operation.
        plan: the transformation of every tensor.
        allow_inexact: accept a model that breaks the label.

    Raises:
        LabelBroken: the outputs changed more than the plan's label allows.
        PeerError: a rank failed.
    """
    world, stepper = parts.world, parts.stepper
    key = parts.config.seed, number_of(state.history)
    stepper.share_buffers()
    with raise_on_all_ranks(world, f"making {operation.name}"):
        task = parts.task.at(after.architecture, after.settings.context)
        model = task.shell().to(world.device)
        _fill(model, plan, stepper.bare_model, key)
        ema = None if stepper.ema is None else apply(plan, stepper.ema, Role.PARAMETER, key)
        memory = _grown_memory(stepper, plan, key, moments_mode(operation))
        proof = _prove(state.step, parts, task, model, plan, key)
    if not agree(world, proof.holds) and not allow_inexact:
        raise LabelBroken(f"the function changed more than its label allows: {in_words(proof)}")
    return Candidate(task, model, memory, ema, plan, proof)


def _grown_memory(
    stepper: Stepper, plan: GrowthPlan, key: Key, mode: Mode
) -> dict[str, torch.Tensor]:
    """Return the optimizers' state, transformed by the plan."""
    states = optimizer_tensors(stepper.optimizers, stepper.parameters)
    if mode != "reset":
        check_states(shapes_of(states), shapes_of(stepper.parameters))
    return grow_optimizer(plan, states, key, mode)


def _fill(model: Module, plan: GrowthPlan, old: Module, key: Key) -> None:
    """Fill a module of the new shape with the old model's tensors, transformed by the plan."""
    parameters = {name: p.detach() for name, p in old.named_parameters()}
    copy_tensors(dict(model.named_parameters()), apply(plan, parameters, Role.PARAMETER, key))
    load_buffers(model, grow_buffers(plan, persistent_buffers(old), model))


def _prove(
    step: int, parts: Components, task: Task, model: Module, plan: GrowthPlan, key: Key
) -> Proof:
    """Compare the new model with the old one on held-out samples."""
    old_task, old_model = parts.task, parts.stepper.bare_model
    samples = probe_samples(parts.validation, old_task, old_model, parts.world.device)
    for one in (old_model, model):
        enter(one, step)
    before, after = probe(old_task, old_model, samples), probe(task, model, samples)
    proof = compare(plan, before, after, _coarsest(model))
    if proof.holds:
        return proof
    # rounding in deep models can exceed the tolerance; float64 decides
    old_model, model = copy.deepcopy(old_model).double(), copy.deepcopy(model).double()
    samples = samples.in_double()
    try:
        _fill(model, plan, old_model, key)
        before, after = probe(old_task, old_model, samples), probe(task, model, samples)
    except (RuntimeError, TypeError, ValueError) as error:
        # a custom task's code may not accept float64
        logger.info("%s is not compared in float64: %s", type(old_model).__name__, error)
        return proof
    return compare(plan, before, after, torch.float64)


def _coarsest(model: Module) -> torch.dtype:
    """Return the parameters' dtype of lowest precision, to which outputs may be rounded."""
    types = {p.dtype for p in model.parameters()}
    return next((t for t in (torch.bfloat16, torch.float16) if t in types), torch.float32)


def build_candidate_stepper(parts: Components, candidate: Candidate, after: State) -> Stepper:
    """Build the stepper of a candidate; the run is not changed. A collective.

    Raises:
        RunFailed: the candidate differs between ranks.
        PeerError: a rank failed.
    """
    world = parts.world
    # check before wrapping, which broadcasts rank 0's tensors and would hide differences
    check_replicas_equal(world, candidate.replicated())
    made = build_stepper(
        parts.config, world, candidate.task, candidate.model, after.settings.frozen
    )
    with raise_on_all_ranks(world, "filling the optimizers"):
        load_optimizer_tensors(made.optimizers, made.parameters, candidate.optimizer)
        if made.ema is not None and candidate.ema is not None:
            copy_tensors(made.ema, candidate.ema)
    made.scaler = parts.stepper.scaler
    return made


def probe_samples(
    held_out: Source, task: Task, model: Module, device: torch.device
) -> ProbeSamples:
    """Return a few held-out samples, the same on every rank."""
    one = to_device(held_out.read(np.arange(1)), device)
    with evaluating(model), torch.no_grad(), generators_kept(device):
        most = PROBE_OUTPUTS // task.outputs(model, one).numel()
    indices = np.arange(max(1, min(PROBE_SAMPLES, most, len(held_out))))
    return ProbeSamples(to_device(held_out.read(indices), device), held_out.weights(indices))


def probe(task: Task, model: Module, samples: ProbeSamples) -> Probe:
    """Run a model on the samples, without autocast and dropout; return its outputs and mean loss.

    Random generators are seeded, so that the models before and after growth draw the same numbers.
    """
    device = next(model.parameters()).device
    with evaluating(model), torch.no_grad(), generators_kept(device):
        seed_generators(0, EVALUATION, 0)
        loss = task.loss_sum(model, samples.batch).item() / samples.weight
        return Probe(task.outputs(model, samples.batch), loss)
