"""Builds a grown module from the old one, whole or sharded by `fully_shard`: its tensors, hooks and modes, and DDP around it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel

from instar.growth.apply import GrowthStep, apply_each
from instar.growth.attributes import AttributeComparison, carry_attributes, compare_attributes
from instar.growth.engine import check_shape, fill_buffers, fill_parameters
from instar.growth.live.optimizers import homes
from instar.growth.live.subject import Subject, wrappers
from instar.growth.peers import Peers
from instar.growth.plan import GrowthError, GrowthPlan
from instar.growth.states import Role
from instar.models.module import parameters_on_meta
from instar.models.shape import Growable, layer_of

Wrap = Callable[[Module], Any]
"""Applies `fully_shard` to a module and its blocks, in place."""

_KEPT = ("training", "gradient_checkpointing", "generation_config", "name_or_path")
"""Attributes of a module that remain those of the old one, besides its hooks."""


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
        with parameters_on_meta():
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


def build_unfilled(subject: Subject, shape: Growable) -> Module:
    """Return a new module of a shape, whose tensors have any values, on the CPU."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        return subject.build(shape)


def replace_parameters(module: Module, new: Mapping[Parameter, Parameter]) -> None:
    """Replace parameters in all modules that have them, also where several share one."""
    for submodule in module.modules():
        for name, parameter in submodule._parameters.items():
            if parameter is not None:
                submodule._parameters[name] = new[parameter]


def carry_over(subject: Subject, module: Module, plan: GrowthPlan, *, hooks: bool = True) -> None:
    """Give the submodules of a grown module the hooks, modes and additional attributes of the old ones, and the
    device and dtype of their buffers. New blocks are like those next to them. Attributes of the class that were set by
    hand are carried, too, but not to drawn blocks.

    Args:
        hooks: False: modes only, also of the module itself.
    """
    old = dict(subject.module.named_modules())
    device = next(subject.module.parameters()).device
    modules_done: set[Module] = set()
    for path, new in module.named_modules():
        origin, is_new = _origin(subject, path, plan)
        source = old.get(origin)
        for name, buffer in new._buffers.items():
            was = source._buffers.get(name) if source is not None else None
            if buffer is not None:
                like = (device, buffer.dtype) if was is None else (was.device, was.dtype)
                new._buffers[name] = buffer.to(*like)
        if source is not None and (path or not hooks):
            for name, value in vars(source).items():
                if name in _KEPT or (hooks and (_is_kept(name) or name not in vars(new))):
                    # handles of hooks remove them from the dict of the first module that continues the old one
                    vars(new)[name] = _of(
                        new, source, value, shared=not is_new and source not in modules_done
                    )
            if not is_new:
                modules_done.add(source)
    carry_attributes(module, attributes_of(subject, module, plan).transfers)


def attributes_of(subject: Subject, module: Module, plan: GrowthPlan) -> AttributeComparison:
    """Return what was set by hand on submodules of the old module, and what becomes of it in a grown one."""
    return compare_attributes(
        subject.module,
        subject.reference,
        module,
        lambda path: subject.origin(path, plan),
        with_additional=False,  # `carry_over` does, and `take_over` leaves those of the module itself
    )


def take_over(old: Module, new: Module) -> None:
    """Make a module the grown one; what refers to it keeps working."""
    for name, value in vars(new).items():
        if not _is_kept(name) or name not in vars(old):
            vars(old)[name] = value


def renew(model: Module) -> None:
    """Make DDP, which stays the same object, reduce the gradients of the parameters that its module has now.

    A collective: rank 0's parameters and buffers are sent to all, and their shapes are compared.
    """
    for wrapper in wrappers(model):
        if isinstance(wrapper, DistributedDataParallel):
            settings = {
                name: vars(wrapper)[name]
                for name in signature(type(wrapper)).parameters
                if name in vars(wrapper) and name != "device_mesh"  # whose group it also has
            }
            if not wrapper.bucket_bytes_cap_default:
                settings["bucket_cap_mb"] = wrapper.bucket_bytes_cap / 2**20
            new_wrapper = type(wrapper)(wrapper.module, **settings)
            for hook, state in wrapper._comm_hooks:
                new_wrapper.register_comm_hook(state, hook)
            # the old reducer ends here, and with it its hooks on the parameters that both have
            take_over(wrapper, new_wrapper)


def _empty(
    subject: Subject, larger: Growable, plan: GrowthPlan
) -> tuple[Module, Mapping[str, Parameter]]:
    """Return a new module of the grown shape, and its parameters by their names in the shape."""
    module = build_unfilled(subject, larger)
    parameters = replace(subject, shape=larger).parameters(module)
    if odd := sorted(parameters.keys() ^ plan.tensors.keys()):
        raise GrowthError(f"a module of the grown shape has other parameters: {', '.join(odd[:4])}")
    return module, parameters


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


def _is_kept(name: str) -> bool:
    return name in _KEPT or "_hooks" in name


def _of(new: Module, source: Module, value: Any, *, shared: bool) -> Any:
    if isinstance(value, MethodType) and value.__self__ is source:
        return MethodType(value.__func__, new)
    return value if shared or isinstance(value, Module) else copy.copy(value)


def _origin(subject: Subject, path: str, plan: GrowthPlan) -> tuple[str, bool]:
    """Return the path of the old module that a new one continues; or that is next to it, and True."""
    name, sources = subject.name(path), plan.blocks
    layer = layer_of(f"{name}.") if sources and name.startswith("blocks.") else None
    if layer is None:
        return path, False
    nearest = min(
        (at for at, source in enumerate(sources) if source is not None),
        key=lambda at: abs(at - layer),
    )
    inside = name.split(".", 2)[2:]
    return subject.module_name(
        ".".join(["blocks", str(sources[nearest]), *inside])
    ), nearest != layer
