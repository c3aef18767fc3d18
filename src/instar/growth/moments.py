"""What an optimizer remembers, under growth.

A parameter times s has a gradient times 1 / s: its first moment is divided by s, its second by s².
Plans say for every old slice by how much its gradient is multiplied, which is not always the
inverse of its value: where a reader shares its weight out over copies, each share is smaller and
its gradient the old one. torch counts the steps of a tensor as a whole, so new slices of an old one
begin with a mean second moment (see `apply`), and wholly new tensors with nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from torch import Tensor

from instar.config.operation import Operation
from instar.growth.apply import Key, Read, Role, apply_one, source_of
from instar.growth.plan import Grown, GrowthPlan

Mode = Literal["asymmetric", "mapped", "reset"]
"""Copies begin with m = 0 and their source's v, so that they part; copies remember what their source
does; nothing is remembered."""

STATES: Mapping[str, Role | None] = {
    "exp_avg": Role.FIRST_MOMENT,
    "exp_avg_sq": Role.SECOND_MOMENT,
    "momentum_buffer": Role.FIRST_MOMENT,
    "step": None,
}
"""Role of each state that AdamW and Muon keep of a parameter; None: a number, kept as it is."""


def moments_mode(operation: Operation) -> Mode:
    """What an operation wants to be remembered."""
    mode: Mode = operation.options.get("moments", "asymmetric")
    return mode


def grow_optimizer(
    plan: GrowthPlan, tensors: Mapping[str, Tensor], key: Key, mode: Mode = "asymmetric"
) -> dict[str, Tensor]:
    """The states of the new model's parameters.

    Args:
        tensors: by ``<parameter>/<state>``, as the result; see `run.state.optimizer_tensors`.

    Raises:
        ValueError: a state that is none of `STATES`.
    """
    names = grown_states(plan, tensors, mode)
    return {name: grow_state(plan, name, tensors.__getitem__, key, mode) for name in names}


def grown_states(plan: GrowthPlan, states: Iterable[str], mode: Mode = "asymmetric") -> list[str]:
    """Names of the states that `grow_optimizer` makes of those of these names; no values needed."""
    if mode == "reset":
        return []
    of: dict[str | None, list[str]] = {}
    for name in states:
        parameter, _, state = name.rpartition("/")
        if state not in STATES:
            raise ValueError(f"{name}: cannot grow this state; known are {', '.join(STATES)}")
        of.setdefault(parameter, []).append(state)
    return [
        f"{name}/{state}"
        for name, made in plan.tensors.items()
        for state in of.get(source_of(made), ())
    ]


def grow_state(
    plan: GrowthPlan, name: str, read: Read, key: Key, mode: Mode = "asymmetric"
) -> Tensor:
    """One of `grown_states`; `read` gives an old state by its name."""
    parameter, _, state = name.rpartition("/")
    role, made = STATES[state], plan.tensors[parameter]
    if role is None:
        count = read(f"{source_of(made)}/{state}")
        return count.clone() if isinstance(made, Grown) and made.copied else count
    copies: Literal["asymmetric", "mapped"] = "mapped" if mode == "mapped" else "asymmetric"
    grown = apply_one(plan, parameter, lambda source: read(f"{source}/{state}"), role, key, copies)
    assert grown is not None
    return grown
