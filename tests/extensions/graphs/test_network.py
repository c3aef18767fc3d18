"""The graph network: its table, its function, and how it grows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from growing import KEY, operation, values
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_geometric.nn import GATv2Conv, GINEConv, aggr
from torch_geometric.utils import scatter, softmax

from instar.config.sections import Operation
from instar.extensions.graphs.config import GraphModelConfig, HeadConfig
from instar.extensions.graphs.network import (
    ACTIVATIONS,
    GraphNetwork,
    _flows,
    _softmax_by_node,
    _sum_by_node,
    reduce_by_graph,
)
from instar.extensions.graphs.shape import GraphShape, flops_per_graph, resolve_graph
from instar.growth.apply import apply
from instar.growth.operators import plan
from instar.growth.plan import GrowthError
from instar.growth.proof import Probe, compare_outputs
from instar.growth.states import Role
from instar.models.gpt import named_generator
from instar.models.shape import ArchitectureError, count_parameters
from instar.run.state.gradient_stats import split_grad_norms

LAYERS = ("gin", "sage", "gcn", "gat")
FLOWS = ("both", "forward", "symmetric")
ALL_POOLINGS = ("mean", "sum", "max", "attention")
HEADS = (
    HeadConfig(name="kind", kind="classification", classes=3),
    HeadConfig(name="size", kind="regression"),
)
OF_NODES = (HeadConfig(name="role", kind="classification", classes=2, level="node"),)


def shape(of_graph: int = 0, of_edges: int = 0, **model: Any) -> GraphShape:
    sizes = {"n_layer": 2, "width": 8, "n_mlp": 12, "n_readout": 6, "n_head": 2}
    config = GraphModelConfig(**{**sizes, "heads": HEADS, "pooling": ALL_POOLINGS, **model})
    return resolve_graph(config, 3, of_graph, of_edges)


def network(of: GraphShape, dtype: torch.dtype = torch.float64) -> GraphNetwork:
    """No gain is one, no bias zero."""
    model = GraphNetwork(of).to(dtype)
    model.init_weights(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.empty(parameter.shape, dtype=torch.float64)
            parameter += noise.normal_(0.0, 0.2, generator=named_generator("noise", name))
    return model


def graphs(*sizes: tuple[int, int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Graphs of so many nodes and edges: features (nodes, 3), edges, offsets."""
    generator = named_generator("graphs", seed)
    offsets = torch.tensor([0, *(nodes for nodes, _ in sizes)]).cumsum(0)
    edges = [
        torch.randint(nodes, (count, 2), generator=generator) + first
        for (nodes, count), first in zip(sizes, offsets.tolist(), strict=False)
    ]
    x = torch.randn(int(offsets[-1]), 3, dtype=torch.float64, generator=generator)
    return x, torch.cat(edges), offsets


BATCH = graphs((5, 9), (1, 0), (7, 20), (3, 0))


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm": "rmsnorm", "graph_features": True},
        {"heads": OF_NODES, "graph_features": True},
        {"edge_features": True},
    ],
    ids=["graph", "features", "node", "edges"],
)
def test_the_table_is_what_the_module_has(layer: str, flow: str, options: dict[str, Any]) -> None:
    of = shape(of_graph=2, of_edges=4, layer=layer, flow=flow, **options)
    shapes = {name: tuple(p.shape) for name, p in GraphNetwork(of).named_parameters()}
    table = {name: entry.shape for name, entry in of.parameters().items()}
    assert shapes == table
    assert count_parameters(of).total == sum(p.numel() for p in GraphNetwork(of).parameters())
    assert GraphShape.from_dict(of.to_dict()) == of


def test_a_shape_of_a_checkpoint_without_edge_features_is_read() -> None:
    older = {key: value for key, value in shape().to_dict().items() if key != "edge_features"}
    assert GraphShape.from_dict(older) == shape()


def test_a_shape_that_no_model_can_have() -> None:
    with pytest.raises(ArchitectureError, match=r"model\.width: must be .*\n.*model\.mlp"):
        shape().resized(width=0, mlp=-1)
    values = {key: value for key, value in shape().to_dict().items() if key != "flow"}
    with pytest.raises(ArchitectureError, match=r"flow: is missing\nmodel\.hue: is unknown"):
        GraphShape.from_dict({**values, "hue": 1})


def dense_forward(of: GraphShape, p: dict[str, Tensor], x: Tensor, pairs: Tensor) -> Tensor:
    """The network on one graph of which every pair of nodes has a number of edges."""

    def linear(name: str, h: Tensor) -> Tensor:
        return F.linear(h, p[f"{name}.weight"], p.get(f"{name}.bias"))

    def norm(name: str, h: Tensor) -> Tensor:
        return F.layer_norm(h, (of.width,), p[f"{name}.weight"], p[f"{name}.bias"], of.norm_eps)

    n = len(x)
    counts = torch.zeros(n, n, dtype=x.dtype)  # [hearing, heard]
    for source, target in pairs.tolist():
        counts[target, source] += 1
    ways = {
        "from_sources": counts,
        "from_targets": counts.T,
        "from_any": counts + counts.T,
    }
    activation = ACTIVATIONS[of.activation]
    x = linear("encoder", x)
    for block in (f"blocks.{layer}" for layer in range(of.layers)):
        h = norm(f"{block}.norm", x)
        update = linear(f"{block}.own", h)
        for flow in of.flows:
            hears, name = ways[flow], f"{block}.{flow}"
            if of.layer == "gat":
                source_states = linear(f"{name}.sent", h).view(n, of.heads, of.channels)
                target_states = linear(f"{name}.received", h).view(n, of.heads, of.channels)
                pair_states = F.leaky_relu(target_states[:, None] + source_states[None], 0.2)
                scores = torch.einsum("ijhc,hc->ijh", pair_states, p[f"{name}.score.weight"])
                share = scores.exp() * hears[..., None]
                share = share / share.sum(1, keepdim=True).clamp(min=1e-300)
                aggregate = torch.einsum("ijh,jhc->ihc", share, source_states).flatten(1)
            else:
                degree, sent_to = hears.sum(1).clamp(min=1), hears.sum(0).clamp(min=1)
                weights = {
                    "gin": hears,
                    "sage": hears / degree[:, None],
                    "gcn": hears / (degree[:, None] * sent_to).sqrt(),
                }
                aggregate = weights[of.layer] @ h
            update = update + linear(f"{name}.heard", aggregate)
        x = x + linear(f"{block}.down", activation(update))
    x = norm("final_norm", x)
    gate = linear("pool.attention.gate_nn", x).softmax(0)
    graph_state = torch.cat([x.mean(0), x.sum(0), x.amax(0), (gate * x).sum(0)])
    read = activation(linear("readout", graph_state))
    return torch.cat([linear(f"head_{name}", read) for name, _ in of.outputs])


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("flow", FLOWS)
def test_it_is_message_passing_on_dense_matrices(layer: str, flow: str) -> None:
    of = shape(layer=layer, flow=flow)
    model = network(of)
    x, edges, offsets = BATCH
    outputs = model(x, edges, offsets)
    for graph in range(len(offsets) - 1):
        begin, end = offsets[graph : graph + 2].tolist()
        own_edges = edges[(edges[:, 0] >= begin) & (edges[:, 0] < end)] - begin
        expected = dense_forward(of, values(model), x[begin:end], own_edges)
        torch.testing.assert_close(outputs[graph], expected, rtol=1e-10, atol=1e-10)


def of_edges(layer: str) -> tuple[GraphNetwork, Tensor, Tensor, Tensor]:
    """A network that reads features of edges, states of nodes, edges, and their features."""
    generator = named_generator("of edges")
    _, edges, _ = BATCH
    h = torch.randn(16, 8, dtype=torch.float64, generator=generator)
    features = torch.randn(len(edges), 4, dtype=torch.float64, generator=generator)
    model = shape(of_edges=4, layer=layer, flow="forward", edge_features=True, activation="relu")
    return network(model), h, edges, features


def pass_messages(model: GraphNetwork, h: Tensor, edges: Tensor, features: Tensor) -> Tensor:
    (flow,) = _flows(model.shape, edges, len(h), h.dtype, features).values()
    output: Tensor = model.get_submodule("blocks.0.from_sources")(h, flow)
    return output


def test_messages_with_features_of_edges_are_those_of_gine() -> None:
    model, h, edges, features = of_edges("gin")
    block = model.get_submodule("blocks.0.from_sources")
    conv = GINEConv(nn.Identity(), eps=-1.0)  # without the node itself
    expected = block.heard(conv(h, edges.T, block.edge(features)))
    torch.testing.assert_close(pass_messages(model, h, edges, features), expected)


def test_attention_with_features_of_edges_is_that_of_gatv2() -> None:
    model, h, edges, features = of_edges("gat")
    block = model.get_submodule("blocks.0.from_sources")
    conv = GATv2Conv(8, 4, heads=2, edge_dim=4, add_self_loops=False).double()
    with torch.no_grad():
        conv.lin_l.weight.copy_(block.sent.weight)
        conv.lin_l.bias.zero_()
        conv.lin_r.weight.copy_(block.received.weight)
        conv.lin_r.bias.copy_(block.received.bias)
        conv.lin_edge.weight.copy_(block.edge.weight)
        conv.att.copy_(block.score.weight[None])
        conv.bias.zero_()
    expected = block.heard(conv(h, edges.T, features))
    torch.testing.assert_close(pass_messages(model, h, edges, features), expected)


@pytest.mark.parametrize(
    ("layer", "flow"), [("sage", "both"), ("gcn", "symmetric"), ("gat", "both")]
)
@pytest.mark.parametrize(
    "op", [("widen", {"axis": "width", "size": 16}), ("insert_layers", 1)], ids=str
)
def test_a_network_that_reads_edges_grows(layer: str, flow: str, op: tuple[str, Any]) -> None:
    of = shape(of_edges=4, layer=layer, flow=flow, edge_features=True)
    x, edges, offsets = BATCH
    features = torch.randn(len(edges), 4, dtype=torch.float64)
    model = network(of)
    larger_shape, growth_plan = plan(of, operation(*op))
    larger = GraphNetwork(larger_shape).double()
    larger.load_state_dict(apply(growth_plan, values(model), Role.PARAMETER, KEY))
    before, after = (net(x, edges, offsets, None, features) for net in (model, larger))
    torch.testing.assert_close(after, before, rtol=1e-9, atol=1e-9)
    other = model(x, edges, offsets, None, features + 1)
    assert not torch.allclose(other, before)


@pytest.mark.parametrize("layer", LAYERS)
def test_gradients_are_those_of_the_function(layer: str) -> None:
    model = network(shape(layer=layer, n_layer=1, activation="silu"))
    x, edges, offsets = graphs((4, 6), (2, 0), (3, 5))
    assert torch.autograd.gradcheck(
        lambda features: model(features, edges, offsets), x.requires_grad_()
    )


SIZES = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=5)


@settings(max_examples=25, deadline=None)
@given(sizes=SIZES, layer=st.sampled_from(LAYERS), seed=st.integers(0, 99))
def test_what_is_said_of_a_graph_is_the_same_whatever_is_beside_it(
    sizes: list[tuple[int, int]], layer: str, seed: int
) -> None:
    model = network(shape(layer=layer), torch.float32)
    x, edges, offsets = graphs(*sizes, seed=seed)
    outputs = model(x, edges, offsets)
    for graph in range(len(sizes)):
        begin, end = offsets[graph : graph + 2].tolist()
        own_edges = edges[(edges[:, 0] >= begin) & (edges[:, 0] < end)] - begin
        lone_output = model(x[begin:end], own_edges, torch.tensor([0, end - begin]))[0]
        torch.testing.assert_close(outputs[graph], lone_output, rtol=1e-5, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(size=st.tuples(st.integers(1, 6), st.integers(0, 9)), seed=st.integers(0, 99))
def test_names_of_nodes_and_order_of_edges_do_not_matter(size: tuple[int, int], seed: int) -> None:
    model = network(shape())
    x, edges, offsets = graphs(size, seed=seed)
    generator = named_generator("names", seed)
    new_name = torch.randperm(size[0], generator=generator)
    edge_order = torch.randperm(size[1], generator=generator)
    new_x = torch.empty_like(x)
    new_x[new_name] = x
    torch.testing.assert_close(
        model(new_x, new_name[edges][edge_order], offsets), model(x, edges, offsets)
    )


@pytest.mark.parametrize("layer", LAYERS)
def test_graphs_without_edges_have_values_and_gradients(layer: str) -> None:
    model = network(shape(layer=layer))
    x, edges, offsets = graphs((3, 0), (1, 0))
    outputs = model(x, edges, offsets)
    outputs.sum().backward()
    assert outputs.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for _, p in model.named_parameters())


@pytest.mark.parametrize("layer", LAYERS)
def test_bfloat16_is_near(layer: str) -> None:
    model = network(shape(layer=layer), torch.float32)
    x, edges, offsets = BATCH
    exact = model(x, edges, offsets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        near = model(x, edges, offsets)
    near.float().sum().backward()
    assert near.dtype == torch.bfloat16
    assert (near - exact).abs().max() < 0.05 * exact.abs().max()


def test_heads_for_nodes_speak_of_every_node() -> None:
    x, edges, offsets = BATCH
    assert network(shape(heads=OF_NODES))(x, edges, offsets).shape == (len(x), 2)


@pytest.mark.parametrize("heads", [HEADS, OF_NODES], ids=["graph", "node"])
def test_features_of_a_graph_count_for_that_graph_only(heads: tuple[HeadConfig, ...]) -> None:
    model = network(shape(of_graph=2, heads=heads, graph_features=True))
    x, edges, offsets = BATCH
    graph = torch.zeros(4, 2, dtype=torch.float64)
    before = model(x, edges, offsets, graph)
    graph[2, 1] = 1.0
    changes = (model(x, edges, offsets, graph) != before).any(1)
    units = torch.arange(4) if heads is HEADS else torch.arange(4).repeat_interleave(offsets.diff())
    assert torch.equal(changes, units == 2)


def test_first_values_follow_from_seed_name_and_shape() -> None:
    first, other = GraphNetwork(shape()), GraphNetwork(shape(layer="gin"))
    first.init_weights(3)
    other.init_weights(3)
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, first.get_parameter(name))
    other.init_weights(4)
    assert not torch.equal(other.encoder.weight, first.encoder.weight)
    assert first.encoder.weight.std().item() == pytest.approx((3 * 3) ** -0.5, rel=0.4)


def test_recomputed_blocks_have_the_same_gradients() -> None:
    of = shape(dropout=0.3)
    plain, recomputing = GraphNetwork(of), GraphNetwork(of, gradient_checkpointing=True)
    x, edges, offsets = BATCH
    for model in (plain, recomputing):
        model.init_weights(0)
        torch.manual_seed(0)
        model(x, edges, offsets).sum().backward()
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter.grad, recomputing.get_parameter(name).grad)  # type: ignore[arg-type]


def test_dropout_is_for_training_only() -> None:
    model = network(shape(dropout=0.5))
    outputs = [model(*BATCH), model(*BATCH), model.eval()(*BATCH), model(*BATCH)]
    assert not torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[2], outputs[3])


def widen(axis: str, size: int | str, **options: Any) -> Operation:
    return operation("widen", {"axis": axis, "size": size}, **options)


EVERY = [
    widen("width", "x2"),
    widen("width", 24, how="split"),
    widen("mlp", 20),
    widen("mlp", 20, how="split"),
    widen("readout", 9),
    operation("insert_layers", 1),
    operation("insert_layers", 2, where="start", **{"from": "normal"}),
]
OF_ATTENTION = [
    widen("heads", 3),
    widen("heads", "x2", how="split"),
    widen("channels", 7),
    widen("channels", "x2", how="split"),
]
GROWN = [(layer, op) for layer in LAYERS for op in EVERY] + [("gat", op) for op in OF_ATTENTION]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("layer", "op"), GROWN, ids=str)
def test_it_grows_exactly(layer: str, op: Operation, dtype: torch.dtype) -> None:
    model = network(shape(layer=layer), dtype)
    new_shape, growth_plan = plan(model.shape, op)
    larger = GraphNetwork(new_shape).to(dtype)
    larger.load_state_dict(apply(growth_plan, values(model), Role.PARAMETER, KEY))
    before, after = (Probe(net(*BATCH).detach(), 0.0) for net in (model, larger))
    proof = compare_outputs(growth_plan, before, after, dtype)
    assert proof.label == "exact"
    assert proof.holds, proof
    assert new_shape.sizes() != model.shape.sizes()


@pytest.mark.parametrize(("layer", "op"), GROWN, ids=str)
def test_gradients_reach_what_is_new(layer: str, op: Operation) -> None:
    model = network(shape(layer=layer))
    new_shape, growth_plan = plan(model.shape, op)
    larger = GraphNetwork(new_shape).double()
    larger.load_state_dict(apply(growth_plan, values(model), Role.PARAMETER, KEY))
    optimizer = torch.optim.AdamW(larger.parameters(), lr=1e-2)
    grad_norms: dict[str, float] = {}
    for _ in range(2):
        optimizer.zero_grad()
        larger(*BATCH).square().sum().backward()
        for name, parameter in larger.named_parameters():
            assert parameter.grad is not None
            new = split_grad_norms(growth_plan, {name: parameter.grad})[1]
            grad_norms[name] = max(grad_norms.get(name, 0.0), new)
        optimizer.step()
    unit_grads = {name: torch.ones_like(p) for name, p in larger.named_parameters()}
    has_new = {
        name
        for name, grad in unit_grads.items()
        if split_grad_norms(growth_plan, {name: grad})[1] > 0
    }
    assert has_new
    assert {name for name in has_new if grad_norms[name] == 0.0} == set()


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (widen("features", 9), "features is an input or output axis.*: width, mlp, readout"),
        (widen("heads", 4), "no tensor has an axis 'heads'"),
        (widen("width", 9), "choose a multiple of 8"),
    ],
    ids=str,
)
def test_what_cannot_grow_says_what_could(op: Operation, message: str) -> None:
    with pytest.raises(GrowthError, match=message):
        plan(shape(), op)


def test_flops_are_counted_by_hand() -> None:
    of = shape(layer="sage", flow="forward", pooling=("mean",), n_layer=1)
    of_node = 3 * 8 + 3 * 8 * 12  # encoder; own, heard, down
    of_graph = 8 * 6 + 6 * (3 + 1)  # readout, heads
    assert flops_per_graph(of, 10, 40) == 6 * (10 * of_node + of_graph + 40 * 8)
    of_nodes = shape(layer="sage", flow="forward", n_layer=1, heads=OF_NODES)
    assert flops_per_graph(of_nodes, 10, 40) == 6 * (10 * (of_node + 8 * 6 + 6 * 2) + 40 * 8)


def test_reductions_are_those_of_pytorch_geometric() -> None:
    x, edges, offsets = graphs((5, 40), (1, 0), (30, 200))
    messages, receiver = x[edges[:, 0]], edges[:, 1]
    assert torch.equal(
        _sum_by_node(messages, receiver, 36), scatter(messages, receiver, 0, 36, "sum")
    )
    shares = _softmax_by_node(messages, receiver, 36)
    torch.testing.assert_close(shares, softmax(messages, receiver, num_nodes=36))
    for reduction, ready in (
        ("sum", aggr.SumAggregation()),
        ("mean", aggr.MeanAggregation()),
        ("max", aggr.MaxAggregation()),
    ):
        assert torch.equal(reduce_by_graph(x, offsets, reduction), ready(x, ptr=offsets, dim=0))
    of = shape(pooling=("attention",), width=3)
    pool = network(of).pool
    reference_pool = aggr.AttentionalAggregation(pool.attention.gate_nn)
    torch.testing.assert_close(pool(x, offsets), reference_pool(x, ptr=offsets, dim=0))
