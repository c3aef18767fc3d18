"""Growth of an optimizer in place: its groups are refilled and its state is mapped, so that schedulers and
wrappers of it keep working."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from instar.distributed.shards import is_sharded, laid_out, whole
from instar.growth.apply import Key, Mode, grow_state, nearest_source, neighbours
from instar.growth.plan import GrowthError, GrowthPlan, sources_of
from instar.growth.proof import Peers, verify_states

_KNOWN = frozenset(
    {
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "sum",
        "variance",
    }
)
"""States of a parameter's shape that are means of gradients or of their squares: AdamW, SGD, Muon, Adagrad,
RMSprop, Lion, Adafactor."""
_FACTORS = {"row_var": -1, "exp_avg_sq_row": -1, "col_var": -2, "exp_avg_sq_col": -2}
"""Means of squared gradients over one dimension, in torch's Adafactor and in transformers'."""


class Companion(NamedTuple):
    """What grows beside a module: an optimizer, or a moving average."""

    verify: Callable[[Peers], None]
    """raises a GrowthError if a grown tensor is not what the plan makes of the old ones; a collective of the peers"""
    commit: Callable[[], None]
    """makes it that of the grown model"""


def homes(plan: GrowthPlan, old: Mapping[str, Parameter]) -> dict[str, str]:
    """Returns the old parameter that each new one is made from, or else the one next to it."""
    neighbour = neighbours(old)
    return {name: nearest_source(plan, name, neighbour) for name in plan.tensors}


def prepare_optimizer(
    optimizer: Optimizer,
    plan: GrowthPlan,
    old: Mapping[str, Parameter],
    new: Mapping[str, Parameter],
    key: Key,
    mode: Mode,
    named: tuple[Mapping[str, str], Mapping[str, str]] | None = None,
) -> Companion:
    """Returns an optimizer's part of a growth.

    A parameter belongs to the group of the one that it is made from. Groups list their parameters in the
    model's order, as an optimizer does that is built for the grown model; `param_names` as well, if it was given names.

    Args:
        named: names in the old and in the new module, by those in the shape; by default these.

    Raises:
        GrowthError: a state is not known, so that no plan says how it grows; nothing has changed.
    """
    while hasattr(optimizer, "optimizer"):  # accelerate, Lightning
        optimizer = optimizer.optimizer
    states = {}
    for name, made in plan.tensors.items():
        sources = sources_of(made)
        if sources and mode != "reset":
            found = {source: optimizer.state.get(old[source], {}) for source in sources}
            states[name] = {
                field: _grown(
                    plan,
                    f"{name}/{field}",
                    {source: state[field] for source, state in found.items()},
                    (old[sources[0]], new[name]),
                    key,
                    mode,
                )
                for field in found[sources[0]]
                if all(field in state for state in found.values())
            }
    names = {parameter: name for name, parameter in old.items()}
    before = {name: optimizer.state.get(parameter, {}) for name, parameter in old.items()}
    home = homes(plan, old)
    filled, called = [], []
    for group in optimizer.param_groups:
        given = dict(zip(group["params"], group.get("param_names", ()), strict=False))
        members = {names[each] for each in group["params"] if each in names}
        foreign = [each for each in group["params"] if each not in names]
        theirs = [name for name in new if home[name] in members]
        filled.append([*foreign, *(new[name] for name in theirs)])
        if given:
            prefix = _prefix(
                {name: given[old[name]] for name in members}, named[0] if named else {}
            )
            of = named[1] if named else {}
            called.append(
                [*(given[each] for each in foreign), *(prefix + of.get(n, n) for n in theirs)]
            )
        else:
            called.append([])

    def commit() -> None:
        for parameter in old.values():
            optimizer.state.pop(parameter, None)
        for name, state in states.items():
            if state:
                optimizer.state[new[name]] = state
        for group, parameters, theirs in zip(optimizer.param_groups, filled, called, strict=True):
            group["params"][:] = parameters
            if theirs:
                group["param_names"] = theirs

    return Companion(partial(_verify, plan, before, states, old, key, mode), commit)


def _verify(
    plan: GrowthPlan,
    before: Mapping[str, Mapping[str, Any]],
    after: Mapping[str, Mapping[str, Any]],
    parameters: Mapping[str, Parameter],
    key: Key,
    mode: Mode,
    peers: Peers,
) -> None:
    """Checks the states of the grown parameters, by their names, against those of the old ones."""

    def factor(name: str) -> Tensor:
        parameter, _, field = name.rpartition("/")
        sources = sources_of(plan.tensors[parameter])
        values = {source: before[source][field] for source in sources}
        return _grown_factor(plan, name, values, parameters[sources[0]], key, mode)

    for factored in (False, True):
        old, new = (_tensors(each, factored=factored) for each in (before, after))
        verify_states(plan, old, new, key, mode, peers, grown=factor if factored else None)


def _tensors(states: Mapping[str, Mapping[str, Any]], *, factored: bool) -> dict[str, Tensor]:
    """Returns the states that are tensors, as ``<parameter>/<state>``: means over one dimension, or all others."""
    return {
        f"{name}/{field}": value
        for name, state in states.items()
        for field, value in state.items()
        if isinstance(value, Tensor) and (field in _FACTORS and value.ndim > 0) is factored
    }


def _prefix(given: Mapping[str, str], named: Mapping[str, str]) -> str:
    """Returns what an optimizer's names have before those in the module, as that of DDP.

    Raises:
        GrowthError: they are other names.
    """
    found = {given[name].removesuffix(named.get(name, name)) for name in given}
    if len(found) > 1 or not all(text == "" or text.endswith(".") for text in found):
        odd = (name for name in given if not given[name].endswith(named.get(name, name)))
        name = next(odd, min(given))
        raise GrowthError(
            f"the optimizer calls {named.get(name, name)} {given[name]!r}: its names of new parameters are not known; "
            "build it of named_parameters(), or without names"
        )
    return next(iter(found), "")


def _grown(
    plan: GrowthPlan,
    name: str,
    values: Mapping[str, Any],
    parameters: tuple[Parameter, Parameter],
    key: Key,
    mode: Mode,
) -> Any:
    """Returns a state of a new parameter.

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
        if value.shape == parameter.shape and (field in _KNOWN or not value.ndim):
            whole_of = {source: whole(each) for source, each in values.items()}
            grown = grow_state(
                plan, name, lambda each: whole_of[each.rpartition("/")[0]], key, mode
            )
            return laid_out(grown, new) if value.ndim else grown
        if not value.ndim:
            return value.clone()
        if field in _FACTORS and not is_sharded(value):
            return _grown_factor(plan, name, values, parameter, key, mode)
    kind = (
        f"{value.dtype} of {list(value.shape)}"
        if isinstance(value, Tensor)
        else type(value).__name__
    )
    quantised = isinstance(value, Tensor) and value.dtype in (torch.uint8, torch.int8)
    hint = (
        "use an optimizer with states of full precision" if quantised else "choose moments: reset"
    )
    raise GrowthError(
        f"cannot grow the optimizer state {name} ({kind}): it is not known what it is; {hint}"
    )


def _grown_factor(
    plan: GrowthPlan,
    name: str,
    values: Mapping[str, Tensor],
    parameter: Parameter,
    key: Key,
    mode: Mode,
) -> Tensor:
    """Grows a mean over one dimension as the matrix that it stands for, and takes the mean again."""
    parameter_name, _, field = name.rpartition("/")
    dim = _FACTORS[field]
    value = next(iter(values.values()))
    kept = value.ndim == parameter.ndim
    full = {
        f"{source}/exp_avg_sq": (each if kept else each.unsqueeze(dim)).expand(parameter.shape)
        for source, each in values.items()
    }
    grown = grow_state(plan, f"{parameter_name}/exp_avg_sq", full.__getitem__, key, mode)
    return value if any(grown is each for each in full.values()) else grown.mean(dim, keepdim=kept)
