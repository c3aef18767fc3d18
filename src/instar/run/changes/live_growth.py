"""Growth of a live model: one plan for its parameters, optimizer state and moving average.

The old model is never changed, so any failure leaves the run as it was.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from instar.config.sections import Operation
from instar.data.source import Source
from instar.distributed.agree import gather, raise_on_all_ranks
from instar.distributed.parallel import check_replicas_equal
from instar.distributed.shards import Wholes, is_sharded, part
from instar.distributed.world import World
from instar.growth.apply import (
    Key,
    Mode,
    Role,
    applied,
    copies_stay_equal,
    grow_buffers,
    grow_state,
    grown_states,
    moments_mode,
)
from instar.growth.plan import GrowthPlan
from instar.growth.proof import (
    Doubled,
    Probe,
    Proof,
    prove,
    verify_parameters,
    verify_rounded,
    verify_states,
)
from instar.models.module import evaluating, load_buffers, persistent_buffers
from instar.run.loop.components import Components
from instar.run.optim.optimizer import (
    check_names,
    check_states,
    copy_tensors,
    parameter_of,
    shapes_of,
)
from instar.run.output.operation_text import format_proof
from instar.run.parallel.choose import build_meta_model, wrap_for_eval, wrap_for_training
from instar.run.parallel.strategy import Evaluable
from instar.run.state.generators import EVALUATION, generators_kept, seed_generators
from instar.run.state.run_state import RunState
from instar.run.step.stepper import Stepper, set_model_step, stepper_of, to_device
from instar.schedule.memory import PROBE_SAMPLES
from instar.schedule.operations import State, number_of
from instar.tasks.task import Task

logger = logging.getLogger(__name__)


PROBE_WEIGHT = 256
"""Loss weight, such as tokens, that the samples of a probe have together, if `PROBE_SAMPLES` have it."""


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
class Ranks:
    """The ranks of a run as `Peers` of a growth."""

    world: World
    what: str

    def phase(self) -> AbstractContextManager[None]:
        return raise_on_all_ranks(self.world, self.what)

    def agreed(self, holds: bool) -> bool:
        return all(gather(self.world, holds))


@dataclass(frozen=True)
class Candidate:
    """A grown model on this rank, not in use yet, and the proof of its effect on the function."""

    task: Task
    model: Evaluable
    buffers: Mapping[str, torch.Tensor]
    """copies of the persistent buffers that were planned"""
    optimizer: Mapping[str, torch.Tensor]
    """optimizer state, named as by `Stepper.states`"""
    ema: Mapping[str, torch.Tensor] | None
    plan: GrowthPlan
    key: Key
    mode: Mode
    proof: Proof
    stays_equal: bool
    """whether copies in it never become different"""

    def replicated(self) -> dict[str, torch.Tensor]:
        """Return the tensors that must be equal on all ranks, as `<component>/<name>`."""
        parts = {"model": _tensors(self.model), "optimizer": self.optimizer, "ema": self.ema or {}}
        return {
            f"{part}/{name}": tensor
            for part, tensors in parts.items()
            for name, tensor in tensors.items()
            if not is_sharded(tensor)
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
        GrowthError: the outputs are not finite, or a tensor is not what was planned.
        PeerError: a rank failed.
    """
    world, stepper = parts.world, parts.stepper
    key, mode = (parts.config.seed, number_of(state.history)), moments_mode(operation)
    what = f"making {operation.name}"
    stepper.share_buffers()
    with raise_on_all_ranks(world, what):
        task = parts.task.at(after.architecture, after.settings.context)
        model = wrap_for_eval(parts.config, world, build_meta_model(parts.config, world, task))
        check_names(model.parameters, plan.tensors)
        states = stepper.states()
        stays_equal = copies_stay_equal(plan, states, mode)
        if mode != "reset":
            check_states(shapes_of(states), shapes_of(stepper.parameters))
        planned = grow_buffers(plan, persistent_buffers(stepper.unwrapped_model), model.bare)
        buffers = {name: buffer.clone() for name, buffer in planned.items()}
    agreed = partial(_agreed, world, what, together=model.together)
    for name, tensor in agreed(applied(plan, Wholes(stepper.parameters), Role.PARAMETER, key)):
        copy_tensors({name: model.parameters[name]}, {name: tensor})
    load_buffers(model.bare, buffers)
    ema = None
    if stepper.ema is not None:
        averages = applied(plan, Wholes(stepper.ema), Role.PARAMETER, key)
        ema = {name: part(tensor, model.parameters[name]) for name, tensor in agreed(averages)}
    memory = {
        name: part(tensor, model.parameters[parameter_of(name)])
        for name, tensor in agreed(_grown_states(stepper, plan, key, mode))
    }
    proof = _prove(state.step, parts, task, model, plan, key)
    if not proof.holds and not allow_inexact:
        raise LabelBroken(f"the function changed more than its label allows: {format_proof(proof)}")
    return Candidate(task, model, buffers, memory, ema, plan, key, mode, proof, stays_equal)


def _agreed(
    world: World, what: str, tensors: Iterator[tuple[str, Tensor]], *, together: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield grown tensors; a failure of one rank is raised on all.

    If tensors are gathered, this is checked after each, and only one is whole at a time.
    """
    if not together:
        with raise_on_all_ranks(world, what):
            made = list(tensors)
        yield from made
        return
    while True:
        with raise_on_all_ranks(world, what):
            made = list(islice(tensors, 1))
        if not made:
            return
        yield made.pop()


def _grown_states(
    stepper: Stepper, plan: GrowthPlan, key: Key, mode: Mode
) -> Iterator[tuple[str, Tensor]]:
    """Yield the optimizers' state, transformed by the plan."""
    states = stepper.states()
    for name in grown_states(plan, states, mode):
        yield name, grow_state(plan, name, Wholes(states).__getitem__, key, mode)


def _fill(model: Evaluable, plan: GrowthPlan, old: Evaluable, key: Key) -> None:
    """Fill a model of the new shape with the old model's tensors, transformed by the plan."""
    for name, tensor in applied(plan, Wholes(old.parameters), Role.PARAMETER, key):
        copy_tensors({name: model.parameters[name]}, {name: tensor})
    load_buffers(model.bare, grow_buffers(plan, persistent_buffers(old.bare), model.bare))


def _prove(
    step: int,
    parts: Components,
    task: Task,
    model: Evaluable,
    plan: GrowthPlan,
    key: Key,
) -> Proof:
    """Compare the new model with the old one on held-out samples. A collective."""
    old_task, world = parts.task, parts.world
    old: Evaluable = parts.stepper.strategy
    samples = probe_samples(parts.validation, world.device)

    def probed(old: Evaluable, model: Evaluable, samples: ProbeSamples) -> tuple[Probe, Probe]:
        for one in (old, model):
            set_model_step(one.bare, step)
        with old.evaluating(None), model.evaluating(None):
            return probe(old_task, old.bare, samples), probe(task, model.bare, samples)

    def doubled() -> Doubled | None:
        pairs = ((old, old_task), (model, task))
        old_64, model_64 = (
            each.doubled(build_meta_model(parts.config, world, its_task))
            for each, its_task in pairs
        )
        try:
            _fill(model_64, plan, old_64, key)
            before, after = probed(old_64, model_64, samples.in_double())
        except (RuntimeError, TypeError, ValueError) as error:
            # a custom task's code may not accept float64
            logger.info("%s is not compared in float64: %s", type(old.bare).__name__, error)
            return None
        return Doubled(before, after, torch.float64, _tensors(model_64))

    return prove(
        plan,
        partial(probed, old, model, samples),
        {p.dtype for p in model.bare.parameters()},
        tensors=_tensors(model),
        doubled=doubled,
        peers=Ranks(world, "comparing the models before and after growth"),
    )


def _tensors(model: Evaluable) -> dict[str, Tensor]:
    return {**model.parameters, **persistent_buffers(model.bare)}


def build_candidate_stepper(parts: Components, candidate: Candidate, after: State) -> Stepper:
    """Build the stepper of a candidate, and check that it has what was planned; the run is not changed. A collective.

    Raises:
        GrowthError: a tensor that will train is not what the plan makes of those that train now.
        RunFailed: the candidate differs between ranks.
        PeerError: a rank failed.
    """
    world = parts.world
    check_replicas_equal(world, candidate.replicated())
    with raise_on_all_ranks(world, "preparing the model for training"):
        strategy = wrap_for_training(parts.config, candidate.model, after.settings.frozen)
        made = stepper_of(parts.config, world, candidate.task, strategy, after)
    with raise_on_all_ranks(world, "filling the optimizers"):
        made.load_states(candidate.optimizer)
        if made.ema is not None and candidate.ema is not None:
            copy_tensors(made.ema, candidate.ema)
    made.scaler = parts.stepper.scaler
    _check(parts.stepper, made, candidate)
    return made


def _check(old: Stepper, new: Stepper, candidate: Candidate) -> None:
    """Check every tensor of a stepper that will train against the plan. A collective."""
    plan, key = candidate.plan, candidate.key
    ranks = Ranks(new.world, "checking the grown model")
    verify_parameters(plan, old.parameters, new.parameters, key, ranks)
    with ranks.phase():
        verify_rounded(plan, persistent_buffers(new.unwrapped_model), candidate.buffers)
    verify_states(plan, old.states(), new.states(), key, candidate.mode, ranks)
    if old.ema is not None and new.ema is not None:
        verify_parameters(plan, old.ema, new.ema, key, ranks)


def probe_samples(held_out: Source, device: torch.device) -> ProbeSamples:
    """Return a few held-out samples, the same on every rank."""
    most = min(PROBE_SAMPLES, len(held_out))
    fewer = (n for n in range(1, most) if held_out.weights(np.arange(n)) >= PROBE_WEIGHT)
    indices = np.arange(next(fewer, most))
    return ProbeSamples(to_device(held_out.read(indices), device), held_out.weights(indices))


def probe(task: Task, model: Module, samples: ProbeSamples) -> Probe:
    """Run a model on the samples, without autocast and dropout; return its outputs and mean loss.

    Random generators are seeded, so that the models before and after growth draw the same numbers.
    """
    device = next(model.parameters()).device
    with evaluating(model), torch.no_grad(), generators_kept(device):
        seed_generators(0, EVALUATION, 0, device)
        loss_sum, outputs = task.loss_and_outputs(model, samples.batch)
        return Probe(outputs, loss_sum.item() / samples.weight)
