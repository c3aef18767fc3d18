"""A model that is no GPT grows as soon as it names its axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import pytest
import torch
import torch.nn.functional as F
from growing import KEY, operation
from torch import Tensor

from instar.config.sections import Operation
from instar.growth.apply import apply
from instar.growth.operators import plan
from instar.growth.plan import GrowthError, GrowthPlan
from instar.growth.proof import Probe, Proof, compare_outputs
from instar.growth.states import Role
from instar.models.gpt import named_generator
from instar.models.shape import Growable, Parameter
from instar.run.state.gradient_stats import split_grad_norms

Tensors = Mapping[str, Tensor]


class Table:
    """Collects parameters for axes of these sizes."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes, self.entries = sizes, dict[str, Parameter]()

    def linear(self, name: str, output: str, source: str) -> None:
        shape = self.sizes[output], self.sizes[source]
        std = (3 * self.sizes[source]) ** -0.5
        self.entries[f"{name}.weight"] = Parameter((output, source), shape, "matrix", std)
        self.entries[f"{name}.bias"] = Parameter((output,), shape[:1], "bias")

    def norm(self, name: str, axis: str) -> None:
        for part in ("weight", "bias"):
            self.entries[f"{name}.{part}"] = Parameter((axis,), (self.sizes[axis],), "norm")


@dataclass(frozen=True)
class ResidualMlp:
    """x ← x + down(relu(up x)), between an encoder and a decoder."""

    hidden: int = 6
    units: int = 5
    layers: int = 2

    streams = ("hidden",)

    def sizes(self) -> dict[str, int]:
        return {"inputs": 3, "hidden": self.hidden, "units": self.units} | {
            "outputs": 2,
            "layers": self.layers,
        }

    def resized(self, **sizes: int) -> Self:
        return replace(self, **sizes)

    def parameters(self) -> dict[str, Parameter]:
        table = Table(self.sizes())
        table.linear("encoder", "hidden", "inputs")
        for layer in range(self.layers):
            table.linear(f"blocks.{layer}.up", "units", "hidden")
            table.linear(f"blocks.{layer}.down", "hidden", "units")
        table.linear("decoder", "outputs", "hidden")
        return table.entries


def run_mlp(arch: ResidualMlp, p: Tensors) -> Tensor:
    x = torch.randn(8, 3, dtype=torch.float64, generator=named_generator("mlp"))
    x = linear(p, "encoder", x)
    for layer in range(arch.layers):
        inner = linear(p, f"blocks.{layer}.up", x).relu()
        x = x + linear(p, f"blocks.{layer}.down", inner)
    return linear(p, "decoder", x)


@dataclass(frozen=True)
class MessagePassing:
    """Blocks of a graph network: edges from their ends, nodes from the sum of their edges, both
    residual and normed (arXiv 2010.03409)."""

    node: int = 6
    edge: int = 4
    message: int = 5
    update: int = 7
    layers: int = 2

    streams = ("node", "edge")

    def sizes(self) -> dict[str, int]:
        message_sizes = {"node": self.node, "edge": self.edge, "message": self.message}
        update_sizes = {"update": self.update, "layers": self.layers}
        return {"position": 2, "distance": 1, "force": 2} | message_sizes | update_sizes

    def resized(self, **sizes: int) -> Self:
        return replace(self, **sizes)

    def parameters(self) -> dict[str, Parameter]:
        table = Table(self.sizes())
        table.linear("node_encoder", "node", "position")
        table.linear("edge_encoder", "edge", "distance")
        for layer in range(self.layers):
            block = f"blocks.{layer}"
            table.norm(f"{block}.node_norm", "node")
            table.norm(f"{block}.edge_norm", "edge")
            table.linear(f"{block}.message.of_sender", "message", "node")
            table.linear(f"{block}.message.of_receiver", "message", "node")
            table.linear(f"{block}.message.of_edge", "message", "edge")
            table.linear(f"{block}.message.out", "edge", "message")
            table.linear(f"{block}.update.of_node", "update", "node")
            table.linear(f"{block}.update.of_edges", "update", "edge")
            table.linear(f"{block}.update.out", "node", "update")
        table.linear("decoder", "force", "node")
        return table.entries


SENDERS = torch.tensor([0, 1, 2, 3, 4, 0, 2])
RECEIVERS = torch.tensor([1, 2, 3, 4, 0, 3, 0])


def run_graph(arch: MessagePassing, p: Tensors) -> Tensor:
    generator = named_generator("graph")
    nodes = torch.randn(5, 2, dtype=torch.float64, generator=generator)
    edges = torch.randn(7, 1, dtype=torch.float64, generator=generator)
    v, e = linear(p, "node_encoder", nodes), linear(p, "edge_encoder", edges)
    for layer in range(arch.layers):
        block = f"blocks.{layer}"
        v_normed, e_normed = norm(p, f"{block}.node_norm", v), norm(p, f"{block}.edge_norm", e)
        message = linear(p, f"{block}.message.of_sender", v_normed[SENDERS])
        message = message + linear(p, f"{block}.message.of_receiver", v_normed[RECEIVERS])
        message = message + linear(p, f"{block}.message.of_edge", e_normed)
        e = e + linear(p, f"{block}.message.out", F.silu(message))
        arriving = torch.zeros(5, e.shape[1], dtype=e.dtype).index_add(0, RECEIVERS, e)
        update = linear(p, f"{block}.update.of_node", v_normed)
        update = update + linear(p, f"{block}.update.of_edges", arriving)
        v = v + linear(p, f"{block}.update.out", F.silu(update))
    return linear(p, "decoder", v)


def linear(p: Tensors, name: str, x: Tensor) -> Tensor:
    return F.linear(x, p[f"{name}.weight"], p[f"{name}.bias"])


def norm(p: Tensors, name: str, x: Tensor) -> Tensor:
    weight = p[f"{name}.weight"]
    return F.layer_norm(x, weight.shape, weight, p[f"{name}.bias"])


Run = Callable[[Any, Tensors], Tensor]


def random_values(arch: Growable) -> dict[str, Tensor]:
    return {
        name: torch.randn(entry.shape, dtype=torch.float64, generator=named_generator(name)) * 0.5
        for name, entry in arch.parameters().items()
    }


def grow(arch: Growable, run: Run, op: Operation) -> tuple[Growable, GrowthPlan, Proof]:
    new, growth_plan = plan(arch, op)
    old_values = random_values(arch)
    new_values = apply(growth_plan, old_values, Role.PARAMETER, KEY)
    before = Probe(run(arch, old_values), 0.0)
    after = Probe(run(new, new_values), 0.0)
    table = {name: entry.shape for name, entry in new.parameters().items()}
    assert {name: tuple(tensor.shape) for name, tensor in new_values.items()} == table
    return new, growth_plan, compare_outputs(growth_plan, before, after, torch.float64)


def widen(axis: str, size: int | str, **options: Any) -> Operation:
    return operation("widen", {"axis": axis, "size": size}, **options)


def id_of(value: object) -> str:
    """The same in every process."""
    return getattr(value, "__name__", str(value))


POSSIBLE = [
    (ResidualMlp(), run_mlp, widen("hidden", 9)),
    (ResidualMlp(), run_mlp, widen("hidden", "x2", how="split")),
    (ResidualMlp(), run_mlp, widen("units", "x1.5")),
    (ResidualMlp(), run_mlp, widen("units", 13, how="split", share=0.8)),
    (ResidualMlp(), run_mlp, operation("insert_layers", 2)),
    (ResidualMlp(), run_mlp, operation("insert_layers", 1, where="start", **{"from": "normal"})),
    (ResidualMlp(), run_mlp, operation("stack_layers", 2)),
    (MessagePassing(), run_graph, widen("message", 8)),
    (MessagePassing(), run_graph, widen("update", "x2", how="split")),
    (MessagePassing(), run_graph, widen("node", "x2")),
    (MessagePassing(), run_graph, widen("edge", 12, how="split")),
    (MessagePassing(), run_graph, operation("insert_layers", 1, where=[1])),
    (MessagePassing(), run_graph, operation("stack_layers", [0, 1, 1])),
]


@pytest.mark.parametrize(("arch", "run", "op"), POSSIBLE, ids=id_of)
def test_it_grows_as_the_label_says(arch: Growable, run: Run, op: Operation) -> None:
    new, _, measurement = grow(arch, run, op)
    assert new.sizes() != arch.sizes()
    assert measurement.holds
    assert (measurement.max_logit_diff_relative > 1e-3) == (measurement.label == "lossy")


@pytest.mark.parametrize(("arch", "run", "op"), POSSIBLE, ids=id_of)
def test_gradients_reach_what_is_new(arch: Growable, run: Run, op: Operation) -> None:
    new, growth_plan = plan(arch, op)
    tensors = apply(growth_plan, random_values(arch), Role.PARAMETER, KEY)
    parameters = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2)
    largest_norms = dict.fromkeys(parameters, 0.0)
    for _ in range(2):
        optimizer.zero_grad()
        run(new, parameters).square().sum().backward()
        for name, parameter in parameters.items():
            assert parameter.grad is not None
            largest_norms[name] = max(
                largest_norms[name], split_grad_norms(growth_plan, {name: parameter.grad})[1]
            )
        optimizer.step()
    ones = {name: torch.ones_like(tensor) for name, tensor in tensors.items()}
    has_new = {
        name
        for name, ones_tensor in ones.items()
        if split_grad_norms(growth_plan, {name: ones_tensor})[1] > 0
    }
    assert has_new
    assert {name for name in has_new if largest_norms[name] == 0.0} == set()


class Streamless(ResidualMlp):
    streams = ()


class Unsized(ResidualMlp):
    def sizes(self) -> dict[str, int]:
        return {name: size for name, size in super().sizes().items() if name != "layers"}


class Undrawn(ResidualMlp):
    def parameters(self) -> dict[str, Parameter]:
        return {name: replace(entry, std=0.0) for name, entry in super().parameters().items()}


@pytest.mark.parametrize(
    ("arch", "op", "message"),
    [
        (
            ResidualMlp(),
            widen("width", 9),
            "no tensor has an axis 'width'; axes to widen: hidden, units",
        ),
        (
            ResidualMlp(),
            widen("inputs", 9),
            "inputs is an input or output axis.*: hidden, units",
        ),
        (ResidualMlp(), widen("outputs", 9), "outputs is an input or output axis"),
        (ResidualMlp(), widen("layers", 9), "no tensor has an axis 'layers'"),
        (ResidualMlp(), widen("units", 5), "units is 5 already and only grows"),
        (ResidualMlp(), widen("units", 9, how="average"), "how must be zero or split"),
        (ResidualMlp(), widen("units", 9, mask=10), "only a GPT supports masks"),
        (ResidualMlp(), operation("insert_layers", 1, mask=10), "only a GPT supports masks"),
        (
            ResidualMlp(),
            operation("widen_mlp", 9),
            "widen_mlp: applies to decoder-only transformers only; for this",
        ),
        (MessagePassing(), widen("node", 9), "choose a multiple of 6, with how: split"),
        (MessagePassing(), widen("node", 12, how="zero"), "choose a multiple of 6"),
        (Streamless(), operation("insert_layers", 1), "names no stream .* stack_layers"),
        (Unsized(), operation("stack_layers", 2), "no axis called layers"),
        (Undrawn(), widen("units", 9), "no standard deviation for tensors that write units"),
    ],
    ids=str,
)
def test_what_cannot_grow_says_what_could(arch: Growable, op: Operation, message: str) -> None:
    with pytest.raises(GrowthError, match=message):
        plan(arch, op)
