"""Models that grow in tests: every value counts, all of it in float64."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from instar.config.sections import Operation
from instar.growth.apply import Key, Mode, apply, grow_state, grown_states
from instar.growth.operators import plan
from instar.growth.plan import GrowthPlan
from instar.growth.proof import Probe, Proof, compare_outputs
from instar.growth.states import Role
from instar.models.architecture import Architecture
from instar.models.gpt import GPT, named_generator

KEY = (7, 0)


def operation(name: str, value: Any = None, **options: Any) -> Operation:
    """As it comes from a file: through JSON."""
    return Operation(name, *json.loads(json.dumps([value, options])))


def random_gpt(arch: Architecture, seed: int = 0) -> GPT:
    """No gain is one, no bias and no adapter zero, no two values alike."""
    model = GPT(arch).double()
    model.init_weights(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.empty(parameter.shape, dtype=torch.float64)
            parameter += noise.normal_(0.0, 0.15, generator=named_generator(seed, "noise", name))
    return model


def grow_optimizer(
    growth: GrowthPlan, states: Mapping[str, Tensor], key: Key, mode: Mode = "asymmetric"
) -> dict[str, Tensor]:
    """All optimizer states of the grown model, in memory."""
    names = grown_states(growth, states, mode)
    return {name: grow_state(growth, name, states.__getitem__, key, mode) for name in names}


def values(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def build_model(arch: Architecture, tensors: Mapping[str, Tensor]) -> GPT:
    """A model with these values, which must be all that it has."""
    model = GPT(arch).double()
    model.load_state_dict(tensors)
    model.reset_buffers()  # RoPE's, in float64
    return model


def grow_model(model: GPT, op: Operation, number: int = 0, step: int = 0) -> tuple[GPT, GrowthPlan]:
    """The model after an operation, and how it came about."""
    arch, growth = plan(model.arch, op, step=step)
    new = build_model(arch, apply(growth, values(model), Role.PARAMETER, (7, number)))
    new.set_step(step)
    return new, growth


def batch(arch: Architecture, samples: int = 2) -> tuple[Tensor, Tensor]:
    shape = (samples, arch.context + 1)
    tokens = torch.randint(arch.vocab_size, shape, generator=named_generator("batch"))
    return tokens[:, :-1], tokens[:, 1:]


@torch.no_grad()
def probe(model: GPT, data: tuple[Tensor, Tensor]) -> Probe:
    inputs, targets = data
    logits = model(inputs)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    return Probe(logits, loss)


def proof(old: GPT, new: GPT, growth: GrowthPlan) -> Proof:
    """The operation held against its label, on a batch that the old model can read."""
    data = batch(old.arch)
    return compare_outputs(growth, probe(old, data), probe(new, data), torch.float64)
