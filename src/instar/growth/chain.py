"""Several growths one after the other, taken by one tensor at a time.

A model in memory is grown plan by plan (`apply.apply`). What is larger than memory goes the other
way: a tensor of the last model is made of tensors of the model before it, these of those before,
down to what is read. What several tensors are made of is read and made again for each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from instar.checkpoint.stream import Outline
from instar.growth.apply import Key, Read, Role, apply_one, source_of
from instar.growth.moments import Mode, grow_state, grown_states
from instar.growth.plan import GrowthPlan, TensorPlan, Truncated
from instar.models.shape import Parameter


@dataclass(frozen=True)
class Link:
    """One growth: its plan, the table of the model it makes, what new values are drawn from, and
    what of the optimizer's memory is kept."""

    plan: GrowthPlan
    parameters: Mapping[str, Parameter]
    key: Key
    mode: Mode = "asymmetric"


@dataclass(frozen=True)
class Component:
    """Tensors that are known by name, type and shape, and read one at a time."""

    outlines: Mapping[str, Outline]
    read: Read


def grow_parameters(links: tuple[Link, ...], component: Component) -> Component:
    """Parameters of the last model, or their moving average, from those of the first."""
    for link in links:
        outlines, read = component.outlines, component.read
        like = torch.empty(0, dtype=next(iter(outlines.values())).dtype)
        component = Component(
            {
                name: Outline(_type(link.plan.tensors[name], outlines, like), entry.shape)
                for name, entry in link.parameters.items()
            },
            partial(_parameter, link, read, like),
        )
    return component


def grow_states(links: tuple[Link, ...], component: Component) -> Component:
    """What the optimizer remembers of them, by `<parameter>/<state>`."""
    for link in links:
        outlines, read = component.outlines, component.read
        component = Component(
            {
                name: _state_outline(link, name, outlines)
                for name in grown_states(link.plan, outlines, link.mode)
            },
            partial(_state, link, read),
        )
    return component


def _parameter(link: Link, read: Read, like: Tensor, name: str) -> Tensor:
    made = apply_one(link.plan, name, read, Role.PARAMETER, link.key, like=like)
    assert made is not None
    return made


def _state(link: Link, read: Read, name: str) -> Tensor:
    return grow_state(link.plan, name, read, link.key, link.mode)


def _type(made: TensorPlan, outlines: Mapping[str, Outline], like: Tensor) -> torch.dtype:
    source = made.a if isinstance(made, Truncated) else source_of(made)
    return like.dtype if source is None else outlines[source].dtype


def _state_outline(link: Link, name: str, outlines: Mapping[str, Outline]) -> Outline:
    """Of a state that is kept for every element, or of a number that is kept for the whole."""
    parameter, _, state = name.rpartition("/")
    before = outlines[f"{source_of(link.plan.tensors[parameter])}/{state}"]
    return Outline(before.dtype, link.parameters[parameter].shape if before.shape else ())
