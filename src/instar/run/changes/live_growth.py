"""Growth of a live model: one plan for its parameters, optimizer state and moving average.

The old model is never changed, so any failure leaves the run as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from instar.config.sections import Operation
from instar.data.source import Source
from instar.distributed.agree import gather, raise_on_all_ranks
from instar.distributed.parallel import check_replicas_equal
from instar.distributed.shards import GatheredTensors, is_sharded
from instar.distributed.world import World
from instar.growth.apply import (
    GrowthStep,
    copies_stay_equal,
    grow_buffers,
    grow_state,
    grown_states,
    moments_mode,
)
from instar.growth.attributes import (
    Reference,
    build_reference,
    carry_attributes,
    compare_attributes,
)
from instar.growth.engine import (
    GrownPart,
    collect_tensors,
    fill_buffers,
    fill_parameters,
    grow_average,
)
from instar.growth.peers import Peers
from instar.growth.plan import GrowthPlan
from instar.growth.proof import (
    Doubled,
    Probe,
    Proof,
    verify_parameters,
    verify_rounded,
    verify_states,
)
from instar.models.module import evaluating, load_buffers, persistent_buffers
from instar.run.components import Components
from instar.run.optimizer import check_names, check_states, parameter_of, shapes_of
from instar.run.output.operation_text import format_proof
from instar.run.parallel.choose import build_meta_model, wrap_for_eval, wrap_for_training
from instar.run.parallel.strategy import Evaluable
from instar.run.state.generators import EVALUATION, generators_kept, seed_generators
from instar.run.state.run_state import RunState
from instar.run.step.stepper import Stepper, set_model_step, stepper_of, to_device
from instar.schedule.memory import PROBE_SAMPLES
from instar.schedule.operations import State, number_of
from instar.tasks.task import Task

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
        samples_in_double = {
            name: tensor.double() if tensor.is_floating_point() else tensor
            for name, tensor in self.batch.items()
        }
        return ProbeSamples(samples_in_double, self.weight)


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run as `Peers` of a growth."""

    world: World
    what: str

    def phase(self) -> AbstractContextManager[None]:
        return raise_on_all_ranks(self.world, self.what)

    def all_agree(self, holds: bool) -> bool:
        return all(gather(self.world, holds))

    def at(self, what: str) -> Ranks:
        return replace(self, what=what)


@dataclass(frozen=True)
class Candidate:
    """A grown model on this rank, not in use yet."""

    task: Task
    model: Evaluable
    buffers: Mapping[str, Tensor]
    """copies of the persistent buffers that were planned"""
    states: Mapping[str, Tensor]
    """of the optimizers, named as by `Stepper.states`"""
    average: Mapping[str, Tensor] | None
    samples: ProbeSamples
    """on which it is compared"""
    stays_equal: bool
    """whether copies in it never become different"""
    warning: str
    """what was set by hand on submodules and is not carried, in words"""


@dataclass(frozen=True)
class RunGrowth:
    """The model of a run, which grows on all ranks: see `GrowthSubject`."""

    components: Components
    at_step: int
    after: State
    """settings and architecture after the operation"""
    step: GrowthStep
    peers: Ranks

    @property
    def name(self) -> str:
        return type(self.components.stepper.unwrapped_model).__name__

    def build(self) -> Candidate:
        parts, stepper, step = self.components, self.components.stepper, self.step
        stepper.share_buffers()
        reference = self._reference()
        with self.peers.phase():
            task = parts.task.at(self.after.architecture, self.after.settings.context)
            shell = build_meta_model(parts.config, parts.world, task)
            attributes = compare_attributes(
                stepper.unwrapped_model,
                reference,
                shell,
                step.plan.submodule,
                with_additional=True,
            )
            carry_attributes(shell, attributes.transfers)
            model = wrap_for_eval(parts.config, parts.world, shell)
            check_names(model.parameters, step.plan.tensors)
            states = stepper.states()
            stays_equal = copies_stay_equal(step.plan, states, step.mode)
            if step.mode != "reset":
                check_states(shapes_of(states), shapes_of(stepper.parameters))
            buffers = persistent_buffers(stepper.unwrapped_model)
            planned_buffers = grow_buffers(step.plan, buffers, model.bare)
            copies = {name: buffer.clone() for name, buffer in planned_buffers.items()}
            samples = probe_samples(parts.validation, parts.world.device)
        fill_parameters(step, stepper.parameters, model.parameters, self.peers)
        load_buffers(model.bare, copies)
        average = None
        if stepper.ema is not None:
            average = grow_average(step, stepper.ema, model.parameters, self.peers)
        grown_model = (
            (
                name,
                grow_state(
                    step.plan, name, GatheredTensors(states).__getitem__, step.key, step.mode
                ),
            )
            for name in grown_states(step.plan, states, step.mode)
        )
        memory = collect_tensors(
            grown_model, states, lambda name: model.parameters[parameter_of(name)], self.peers
        )
        return Candidate(
            task, model, copies, memory, average, samples, stays_equal, attributes.warning
        )

    def _reference(self) -> Reference:
        """Return what tells which attributes of the model were set by hand. A collective."""
        parts = self.components
        with self.peers.phase():
            reference = build_reference(
                partial(build_meta_model, parts.config, parts.world, parts.task)
            )
        return reference.if_on_all(self.peers.all_agree(reference.module is not None))

    def tensors(self, candidate: Candidate) -> Mapping[str, Tensor]:
        return _tensors(candidate.model)

    def dtypes(self, candidate: Candidate) -> Collection[torch.dtype]:
        return {parameter.dtype for parameter in candidate.model.bare.parameters()}

    def outputs(self, candidate: Candidate) -> tuple[Probe, Probe]:
        pair = self.components.stepper.strategy, candidate.model
        return self._outputs(candidate, pair, candidate.samples)

    def _outputs(
        self, candidate: Candidate, models: tuple[Evaluable, Evaluable], samples: ProbeSamples
    ) -> tuple[Probe, Probe]:
        old, new = models
        for model in models:
            set_model_step(model.bare, self.at_step)
        with old.evaluating(None), new.evaluating(None):
            return (
                probe(self.components.task, old.bare, samples),
                probe(candidate.task, new.bare, samples),
            )

    def in_double(self, candidate: Candidate) -> Doubled:
        config, world = self.components.config, self.components.world
        strategy: Evaluable = self.components.stepper.strategy
        pairs = (strategy, self.components.task), (candidate.model, candidate.task)
        with self.peers.phase():
            old, new = (
                model.in_double(build_meta_model(config, world, task)) for model, task in pairs
            )
        fill_parameters(self.step, old.parameters, new.parameters, self.peers)
        with self.peers.phase():
            fill_buffers(self.step.plan, old.bare, new.bare)
        before, after = self._outputs(candidate, (old, new), candidate.samples.in_double())
        return Doubled(before, after, torch.float64, _tensors(new))

    def broken(self, proof: Proof) -> Exception:
        return LabelBroken(
            f"the function changed more than its label allows: {format_proof(proof)}"
        )

    def parts(self, candidate: Candidate) -> Sequence[GrownPart]:
        """See `GrowthSubject`. Builds the stepper of a candidate; the run is not changed.

        Raises:
            RunFailed: the candidate differs between ranks.
        """
        parts, world = self.components, self.components.world
        check_replicas_equal(world, _replicated_tensors(candidate))
        with raise_on_all_ranks(world, "preparing the model for training"):
            settings = self.after.settings
            strategy = wrap_for_training(parts.config, candidate.model, settings.frozen)
            stepper = stepper_of(parts.config, world, candidate.task, strategy, self.after)
        with raise_on_all_ranks(world, "filling the optimizers"):
            stepper.load_states(candidate.states)
            if stepper.ema is not None and candidate.average is not None:
                stepper.ema = dict(candidate.average)
        stepper.scaler = parts.stepper.scaler

        def commit() -> None:
            parts.stepper = stepper

        return [GrownPart(partial(self.verify, candidate, stepper), commit)]

    def verify(self, candidate: Candidate, stepper: Stepper, peers: Peers) -> None:
        """Check every tensor of a stepper that will train against the plan. A collective."""
        plan, key, old = self.step.plan, self.step.key, self.components.stepper
        verify_parameters(plan, old.parameters, stepper.parameters, key, peers)
        with peers.phase():
            buffers = persistent_buffers(stepper.unwrapped_model)
            verify_rounded(plan, buffers, candidate.buffers)
        verify_states(plan, old.states(), stepper.states(), key, self.step.mode, peers)
        if old.ema is not None and stepper.ema is not None:
            verify_parameters(plan, old.ema, stepper.ema, key, peers)


def grow_run(
    state: RunState, parts: Components, operation: Operation, after: State, plan: GrowthPlan
) -> RunGrowth:
    """Return what grows by an operation.

    Args:
        after: settings and architecture after the operation.
        plan: the transformation of every tensor.
    """
    key, mode = (parts.config.seed, number_of(state.history)), moments_mode(operation)
    step = GrowthStep(plan, after.architecture.parameters(), key, mode)
    peers = Ranks(parts.world, f"making {operation.name}")
    return RunGrowth(parts, state.step, after, step, peers)


def _replicated_tensors(candidate: Candidate) -> dict[str, Tensor]:
    """Return the tensors that must be equal on all ranks, as `<component>/<name>`."""
    parts = {
        "model": _tensors(candidate.model),
        "optimizer": candidate.states,
        "ema": candidate.average or {},
    }
    return {
        f"{part}/{name}": tensor
        for part, tensors in parts.items()
        for name, tensor in tensors.items()
        if not is_sharded(tensor)
    }


def _tensors(model: Evaluable) -> dict[str, Tensor]:
    return {**model.parameters, **persistent_buffers(model.bare)}


def probe_samples(held_out: Source, device: torch.device) -> ProbeSamples:
    """Return a few held-out samples, the same on every rank."""
    count = min(PROBE_SAMPLES, len(held_out))
    fewer = (n for n in range(1, count) if held_out.weights(np.arange(n)) >= PROBE_WEIGHT)
    indices = np.arange(next(fewer, count))
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
