"""The one engine of growth: a candidate is built and filled beside what grows, proved, and only then takes its place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

from instar.distributed.shards import GatheredTensors, is_sharded, redistribute_like
from instar.growth.apply import GrowthStep, apply_each, grow_buffers
from instar.growth.peers import Peers, run_in_step
from instar.growth.plan import GrowthError, GrowthPlan
from instar.growth.proof import Doubled, Probe, Proof, prove
from instar.growth.states import Role
from instar.models.module import load_buffers, persistent_buffers

C = TypeVar("C")


class GrownPart(NamedTuple):
    """What grows together, such as the parameters, an optimizer's states, a moving average, or the files of a folder."""

    verify: Callable[[Peers], None]
    """raises a GrowthError if a grown tensor is not what the plan makes of the old ones; a collective of the peers"""
    commit: Callable[[], None]
    """makes it that of the grown model"""


class GrowthSubject(Protocol[C]):
    """What grows, and how a candidate of it is built; nothing of it changes before its parts are committed."""

    @property
    def name(self) -> str:
        """For the log."""
        ...

    def build(self) -> C:
        """Return the candidate, filled with what the plan makes of the old tensors. A collective."""
        ...

    def tensors(self, candidate: C) -> Mapping[str, Tensor]:
        """Return the parameters and persistent buffers of a candidate."""
        ...

    def dtypes(self, candidate: C) -> Collection[torch.dtype]:
        """Return the types of a candidate's parameters."""
        ...

    def outputs(self, candidate: C) -> tuple[Probe, Probe]:
        """Return the outputs before and after, for the same batch."""
        ...

    def in_double(self, candidate: C) -> Doubled | None:
        """Return the outputs of both in float64; None: `outputs` are as exact as can be."""
        ...

    def broken(self, proof: Proof) -> Exception:
        """Return the error of a candidate that breaks the label of its plan."""
        ...

    def parts(self, candidate: C) -> Sequence[GrownPart]:
        """Return all that will train or was written, also optimizers and averages. A collective."""
        ...


@dataclass(frozen=True)
class ProvedGrowth(Generic[C]):
    """A candidate that is proved, and not in use yet."""

    candidate: C
    plan: GrowthPlan
    proof: Proof | None
    """how far the outputs changed; None if they were not compared"""
    parts: Sequence[GrownPart]

    def commit(self) -> None:
        """Put the candidate in the place of what has grown."""
        for part in self.parts:
            part.commit()


def prepare_candidate(
    subject: GrowthSubject[C],
    plan: GrowthPlan,
    peers: Peers,
    *,
    compares: bool = True,
    allow_inexact: bool = False,
) -> ProvedGrowth[C]:
    """Build the candidate of a growth, and check it: its outputs, and all of its tensors. A collective of the peers.

    Args:
        compares: whether to compare outputs.
        allow_inexact: accept a candidate that breaks the label of the plan.

    Raises:
        GrowthError: the outputs are not finite, or a tensor is not what the plan makes.
        Exception: `subject.broken`: the outputs changed more than the label allows.
    """
    candidate = subject.build()
    parts = subject.parts(candidate)
    # first, so that a tensor that is damaged is named, and its outputs are not blamed on the operation
    for part in parts:
        part.verify(peers.at("checking the grown model"))
    proof = None
    if compares:
        proof = prove(
            plan,
            lambda: subject.outputs(candidate),
            subject.dtypes(candidate),
            tensors=subject.tensors(candidate),
            in_double=lambda: subject.in_double(candidate),
            name=subject.name,
            peers=peers.at("comparing the models before and after growth"),
        )
        if not proof.holds and not allow_inexact:
            raise subject.broken(proof)
    return ProvedGrowth(candidate, plan, proof, parts)


def fill_parameters(
    step: GrowthStep, old: Mapping[str, Tensor], new: Mapping[str, Tensor], peers: Peers
) -> None:
    """Fill the parameters of a candidate in place. A collective of the peers.

    Raises:
        GrowthError: the candidate has a parameter of another shape.
    """

    def fill() -> Iterator[None]:
        for name, tensor in apply_each(step.plan, GatheredTensors(old), Role.PARAMETER, step.key):
            check_shape(name, tensor, new[name])
            with torch.no_grad():
                new[name].copy_(redistribute_like(tensor, new[name]))
            yield

    run_in_step(peers, fill(), gathers=any(map(is_sharded, old.values())))


def grow_average(
    step: GrowthStep, old: Mapping[str, Tensor], like: Mapping[str, Tensor], peers: Peers
) -> dict[str, Tensor]:
    """Return a moving average of the parameters, grown, laid out and in order as they are. A collective of the peers."""
    tensors = apply_each(step.plan, GatheredTensors(old), Role.PARAMETER, step.key)
    average = collect_tensors(tensors, old, lambda name: like[name], peers)
    # the plan has the order of the model's table, not of the module, and training loops pair averages by position
    return {name: average[name] for name in like}


def collect_tensors(
    tensors: Iterator[tuple[str, Tensor]],
    old: Mapping[str, Tensor],
    like: Callable[[str], Tensor],
    peers: Peers,
) -> dict[str, Tensor]:
    """Return tensors that are gathered from old ones, each laid out as the parameter of its shape. A collective of
    the peers."""
    tensors_here: dict[str, Tensor] = {}

    def collect() -> Iterator[None]:
        for name, tensor in tensors:
            parameter = like(name)
            fits = tensor.shape == parameter.shape
            tensors_here[name] = redistribute_like(tensor, parameter) if fits else tensor
            yield

    run_in_step(peers, collect(), gathers=any(map(is_sharded, old.values())))
    return tensors_here


def fill_buffers(plan: GrowthPlan, old: Module, new: Module) -> None:
    """Fill the persistent buffers of a module of the grown shape."""
    load_buffers(new, grow_buffers(plan, persistent_buffers(old), new))


def check_shape(name: str, tensor: Tensor, parameter: Tensor) -> None:
    """Raise a GrowthError unless a parameter has the shape of the tensor that was made for it."""
    if tensor.shape != parameter.shape:
        raise GrowthError(
            f"a module of the grown shape has {name} of {tuple(parameter.shape)}, not {tuple(tensor.shape)}"
        )
