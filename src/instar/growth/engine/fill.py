"""Fills the tensors of a candidate with what a plan makes of the old ones: whole, or one gathered at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import Module

from instar.distributed.shards import Wholes, is_sharded, redistribute_like
from instar.growth.apply import GrowthStep, Role, apply_each, grow_buffers
from instar.growth.engine.peers import Peers, run_in_step
from instar.growth.plan import GrowthError, GrowthPlan
from instar.models.module import load_buffers, persistent_buffers


def fill_parameters(
    step: GrowthStep, old: Mapping[str, Tensor], new: Mapping[str, Tensor], peers: Peers
) -> None:
    """Fill the parameters of a candidate in place. A collective of the peers.

    Raises:
        GrowthError: the candidate has a parameter of another shape.
    """

    def fill() -> Iterator[None]:
        for name, tensor in apply_each(step.plan, Wholes(old), Role.PARAMETER, step.key):
            check_shape(name, tensor, new[name])
            with torch.no_grad():
                new[name].copy_(redistribute_like(tensor, new[name]))
            yield

    run_in_step(peers, fill(), gathers=any(map(is_sharded, old.values())))


def grow_average(
    step: GrowthStep, old: Mapping[str, Tensor], like: Mapping[str, Tensor], peers: Peers
) -> dict[str, Tensor]:
    """Return a moving average of the parameters, grown, laid out and in order as they are. A collective of the peers."""
    tensors = apply_each(step.plan, Wholes(old), Role.PARAMETER, step.key)
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
