"""Build a grown module from the tensors of the old one: whole, or sharded by `fully_shard`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.nn.modules.module import register_module_parameter_registration_hook

from instar.growth.apply import GrowthStep, Role, apply_each
from instar.growth.engine.fill import check_shape, fill_buffers, fill_parameters
from instar.growth.engine.peers import Peers
from instar.growth.live.modules import carry_over, replace_parameters
from instar.growth.live.optimizers import homes
from instar.growth.live.subject import Subject
from instar.growth.plan import GrowthError, GrowthPlan
from instar.models.shape import Growable

Wrap = Callable[[Module], Any]
"""Applies `fully_shard` to a module and its blocks, in place."""


def build_whole(subject: Subject, larger: Growable, step: GrowthStep) -> Module:
    """Return a module of the grown shape with the old tensors, transformed by the plan. A tensor that does not
    change is shared by both.

    Raises:
        GrowthError: the module has other parameters than the shape.
    """
    plan = step.plan
    module, parameters_of_shape = _empty(subject, larger, plan)
    old = subject.parameters()
    old_tensors = {name: parameter.detach() for name, parameter in old.items()}
    home = homes(plan, old)
    parameters = {}
    for name, tensor in apply_each(plan, old_tensors, Role.PARAMETER, step.key):
        source = old[home[name]]
        if tensor is old_tensors[home[name]]:
            parameters[name] = source
            continue
        check_shape(name, tensor, parameters_of_shape[name])
        parameters[name] = Parameter(tensor, requires_grad=source.requires_grad)
        vars(parameters[name]).update(vars(source))
    replace_parameters(
        module, {parameters_of_shape[name]: parameter for name, parameter in parameters.items()}
    )
    fill_buffers(plan, subject.module, module)
    carry_over(subject, module, plan)
    return module


def build_sharded(
    subject: Subject, larger: Growable, step: GrowthStep, wrap: Wrap, peers: Peers
) -> Module:
    """Return the same as `build_whole`, sharded by `wrap`. A collective; one tensor at a time is whole.

    Hooks are not taken over: those of `fully_shard` belong to the old shards.
    """
    plan = step.plan
    with peers.phase():
        with _parameters_on_meta():
            module, parameters_of_shape = _empty(subject, larger, plan)
        old = subject.parameters()
        home = homes(plan, old)
        sources = {parameter: old[home[name]] for name, parameter in parameters_of_shape.items()}
        replace_parameters(
            module,
            {
                parameter: Parameter(
                    torch.empty_like(parameter, dtype=source.dtype), source.requires_grad
                )
                for parameter, source in sources.items()
            },
        )
        fill_buffers(plan, subject.module, module)
        carry_over(subject, module, plan, hooks=False)
        wrap(module)
        _allocate(module, next(iter(old.values())).device)
        new = replace(subject, shape=larger).parameters(module)
    fill_parameters(step, old, new, peers)
    return module


def _empty(
    subject: Subject, larger: Growable, plan: GrowthPlan
) -> tuple[Module, Mapping[str, Parameter]]:
    """Return a new module of the grown shape, and its parameters by their names in the shape."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        module = subject.build(larger)
    parameters = replace(subject, shape=larger).parameters(module)
    if odd := sorted(parameters.keys() ^ plan.tensors.keys()):
        raise GrowthError(f"a module of the grown shape has other parameters: {', '.join(odd[:4])}")
    return module, parameters


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules that are built have parameters without memory, and real buffers."""

    def to_meta(_: Module, __: str, parameter: Parameter | None) -> Any:
        if parameter is None or parameter.is_meta:
            return parameter
        return Parameter(parameter.to("meta"), parameter.requires_grad)

    hook = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        hook.remove()


def _allocate(module: Module, device: torch.device) -> None:
    """Give memory to what this rank holds of the parameters."""
    buffers = {
        (submodule, name): buffer
        for submodule in module.modules()
        for name, buffer in submodule._buffers.items()
        if buffer is not None
    }
    module.to_empty(device=device)
    for (owner, name), buffer in buffers.items():
        owner._buffers[name] = buffer
