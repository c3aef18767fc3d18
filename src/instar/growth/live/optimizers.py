"""Growth of an optimizer in place: its groups are refilled and its state is mapped, so that schedulers and
wrappers of it keep working."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from instar.distributed.shards import full_tensor, is_sharded, redistribute_like
from instar.growth.apply import GrowthStep, grow_factor, grow_state, nearest_source, neighbours
from instar.growth.engine import GrownPart
from instar.growth.peers import Peers, run_in_step
from instar.growth.plan import GrowthError, GrowthPlan, sources_of
from instar.growth.proof import verify_states
from instar.growth.states import FACTORS, KNOWN_STATES

_MEANS = {**FACTORS, "exp_avg_sq_row": -1, "exp_avg_sq_col": -2}
"""Means of squared gradients over one dimension, in torch's Adafactor and in transformers'."""


def homes(plan: GrowthPlan, old: Mapping[str, Parameter]) -> dict[str, str]:
    """Return the old parameter that each new one is made from, or else the one next to it."""
    neighbour = neighbours(old)
    return {name: nearest_source(plan, name, neighbour) for name in plan.tensors}


def check_holds(optimizers: Sequence[Optimizer], parameters: Mapping[str, Parameter]) -> None:
    """Raise GrowthError if optimizers are given, and none of them has a parameter of the model: they would not train what
    grows."""
    groups = (group for optimizer in optimizers for group in unwrapped(optimizer).param_groups)
    held = {id(parameter) for group in groups for parameter in group["params"]}
    if optimizers and parameters and not any(id(p) in held for p in parameters.values()):
        raise GrowthError(
            "the optimizer has no parameter of this model: it was made for another; make it of the parameters of "
            "the model that grows"
        )


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer of torch inside one of accelerate or Lightning."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def tensor_states(
    optimizers: Iterable[Optimizer], parameters: Mapping[str, Parameter]
) -> dict[str, Tensor]:
    """Return the states of parameters that are tensors, as ``<parameter>/<state>``."""
    return {
        f"{name}/{field}": value
        for optimizer in map(unwrapped, optimizers)
        for name, parameter in parameters.items()
        for field, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def prepare_optimizer(
    optimizer: Optimizer,
    step: GrowthStep,
    old: Mapping[str, Parameter],
    new: Mapping[str, Parameter],
    name_maps: tuple[Mapping[str, str], Mapping[str, str]],
    peers: Peers,
) -> GrownPart:
    """Return an optimizer's part of a growth. A collective of the peers.

    A parameter belongs to the group of the one that it is made from. Groups list their parameters in the
    model's order, as an optimizer does that is built for the grown model, with those of other modules before and behind
    them as they were; `param_names` as well, if it was given names.

    Args:
        name_maps: names in the old and in the new module, by those in the shape.

    Raises:
        GrowthError: a state is not known, so that no plan says how it grows; nothing has changed.
    """
    optimizer = unwrapped(optimizer)
    before = {name: optimizer.state.get(parameter, {}) for name, parameter in old.items()}
    states: dict[str, dict[str, Any]] = {}

    def grow() -> Iterator[None]:
        for name, tensor_plan in step.plan.tensors.items():
            sources = sources_of(tensor_plan) if step.mode != "reset" else ()
            for field in before[sources[0]] if sources else ():
                if all(field in before[source] for source in sources):
                    values = {source: before[source][field] for source in sources}
                    pair = old[sources[0]], new[name]
                    states.setdefault(name, {})[field] = _grow_state(
                        step, f"{name}/{field}", values, pair
                    )
                    yield

    # a sharded state is gathered: who failed between two would leave the others waiting
    run_in_step(peers, grow(), gathers=any(map(is_sharded, old.values())))
    with peers.phase():
        groups = _refilled_groups(optimizer, step.plan, old, new, name_maps)

    def commit() -> None:
        for parameter in old.values():
            optimizer.state.pop(parameter, None)
        for name, state in states.items():
            optimizer.state[new[name]] = state
        for group, (parameters, names) in zip(optimizer.param_groups, groups, strict=True):
            group["params"][:] = parameters
            if names:
                group["param_names"] = names
            for parameter in group["params"] if isinstance(optimizer, torch.optim.Adagrad) else ():
                if not optimizer.state.get(parameter):
                    optimizer.state[parameter] = adagrad_states(group, parameter)

    return GrownPart(partial(_verify, step, before, states, old), commit)


def adagrad_states(group: Mapping[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    """Return the states of a parameter that Adagrad makes in its constructor, and needs at every step.

    Args:
        group: the parameter's.
    """
    first_sum = torch.full_like(parameter, group["initial_accumulator_value"], requires_grad=False)
    device = parameter.device if group["fused"] else None
    return {"step": torch.zeros((), device=device), "sum": first_sum}


def _refilled_groups(
    optimizer: Optimizer,
    plan: GrowthPlan,
    old: Mapping[str, Parameter],
    new: Mapping[str, Parameter],
    name_maps: tuple[Mapping[str, str], Mapping[str, str]],
) -> list[tuple[list[Parameter], list[str]]]:
    """Return the parameters of each group, and what it calls them, if it was given names."""
    names = {parameter: name for name, parameter in old.items()}
    home, (old_names, new_names) = homes(plan, old), name_maps
    groups = []
    for group in optimizer.param_groups:
        labels = dict(zip(group["params"], group.get("param_names", ()), strict=False))
        is_member = [parameter in names for parameter in group["params"]]
        members = {names[parameter] for parameter in group["params"] if parameter in names}
        member_names = [name for name in new if home[name] in members]
        # a saved state lists them by position, so those of other modules keep their places
        first = is_member.index(True) if members else len(is_member)
        before, others = group["params"][:first], group["params"][first:]
        behind = [parameter for parameter in others if parameter not in names]
        labels_of_group: list[str] = []
        if labels:
            prefix = _prefix({name: labels[old[name]] for name in members}, old_names)
            labels_of_group = [
                *(labels[parameter] for parameter in before),
                *(prefix + new_names.get(name, name) for name in member_names),
                *(labels[parameter] for parameter in behind),
            ]
        groups.append(([*before, *(new[name] for name in member_names), *behind], labels_of_group))
    return groups


def _verify(
    step: GrowthStep,
    before: Mapping[str, Mapping[str, Any]],
    after: Mapping[str, Mapping[str, Any]],
    parameters: Mapping[str, Parameter],
    peers: Peers,
) -> None:
    """Check the states of the grown parameters, by their names, against those of the old ones."""

    def factor(name: str) -> Tensor:
        parameter, _, field = name.rpartition("/")
        sources = sources_of(step.plan.tensors[parameter])
        values = {source: before[source][field] for source in sources}
        return _grown_factor(step, name, values, parameters[sources[0]])

    for is_factor in (False, True):
        old, new = (_tensors(states, is_factor=is_factor) for states in (before, after))
        grow_factor = factor if is_factor else None
        verify_states(step.plan, old, new, step.key, step.mode, peers, grow_other=grow_factor)


def _tensors(states: Mapping[str, Mapping[str, Any]], *, is_factor: bool) -> dict[str, Tensor]:
    """Return the states that are tensors, as ``<parameter>/<state>``: means over one dimension, or all others."""
    return {
        f"{name}/{field}": value
        for name, state in states.items()
        for field, value in state.items()
        if isinstance(value, Tensor) and (field in _MEANS and value.ndim > 0) is is_factor
    }


def _prefix(labels: Mapping[str, str], names: Mapping[str, str]) -> str:
    """Return what an optimizer's names have before those in the module, as that of DDP.

    Raises:
        GrowthError: they are other names.
    """
    prefixes = {labels[name].removesuffix(names.get(name, name)) for name in labels}
    if len(prefixes) > 1 or not all(text == "" or text.endswith(".") for text in prefixes):
        odd = (name for name in labels if not labels[name].endswith(names.get(name, name)))
        name = next(odd, min(labels))
        raise GrowthError(
            f"the optimizer calls {names.get(name, name)} {labels[name]!r}: its names of new parameters are not known; "
            "build it of named_parameters(), or without names"
        )
    return next(iter(prefixes), "")


def _grow_state(
    step: GrowthStep, name: str, values: Mapping[str, Any], parameters: tuple[Parameter, Parameter]
) -> Any:
    """Return a state of a new parameter.

    Args:
        values: that state of each old parameter that it is made from.
        parameters: the first of these, whose shape all have, and the new one.
    """
    parameter, new = parameters
    field = name.rpartition("/")[2]
    value = next(iter(values.values()))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor) and value.is_floating_point():
        if value.shape == parameter.shape and (field in KNOWN_STATES or not value.ndim):
            whole_of = {source: full_tensor(state) for source, state in values.items()}
            new_state = grow_state(
                step.plan,
                name,
                lambda state: whole_of[state.rpartition("/")[0]],
                step.key,
                step.mode,
            )
            return redistribute_like(new_state, new) if value.ndim else new_state
        if not value.ndim:
            return value.clone()
        if field in _MEANS and not is_sharded(value):
            return _grown_factor(step, name, values, parameter)
    kind = (
        f"{value.dtype} of {list(value.shape)}"
        if isinstance(value, Tensor)
        else type(value).__name__
    )
    is_quantised = isinstance(value, Tensor) and value.dtype in (torch.uint8, torch.int8)
    hint = (
        "use an optimizer with states of full precision"
        if is_quantised
        else "choose moments: reset"
    )
    raise GrowthError(
        f"cannot grow the optimizer state {name} ({kind}): it is not known what it is; {hint}"
    )


def _grown_factor(
    step: GrowthStep, name: str, values: Mapping[str, Tensor], parameter: Parameter
) -> Tensor:
    """Return one of `_MEANS` of a grown parameter; `parameter`: the old one."""
    parameter_name, _, field = name.rpartition("/")
    place = _MEANS[field], tuple(parameter.shape)
    return grow_factor(step.plan, parameter_name, values, place, step.key, step.mode)
