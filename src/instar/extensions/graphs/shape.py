"""The shape of the graph network and its parameter table; torch-free.

Blocks add to one residual stream, `width`. A block adds a node's own features and the aggregated
features of its neighbours on the axis `mlp`::

    h = norm(x);  x ← x + down(act(own h + Σ_f heard_f (aggregate_f h)))

A separate matrix for the node itself replaces (1 + ε) h of GIN and the self-loops of GCN. f runs
over the flows of edges: ``from_sources`` (the nodes that edges come from) and ``from_targets`` (the
nodes that they lead to), or ``from_any``. Attention (GATv2, arXiv 2105.14491) aggregates on the
axis ``heads*channels``, all other layers on the stream itself. In both cases a matrix follows the
aggregation, so every axis can grow. With features of edges, what a sender sends along edge e is
act(h + edge e) in place of h (GINE, arXiv 1905.12265), and attention adds edge e to the sum of which
it takes the score.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from instar.config.sections import MOST_HEADS, MOST_LAYERS, MOST_MLP, MOST_WIDTH
from instar.extensions.graphs.config import (
    Activation,
    Flow,
    GraphModelConfig,
    Layer,
    Level,
    Norm,
    Pooling,
)
from instar.models.shape import ArchitectureError, axis_size, check_fields, layer_of, size_problems
from instar.models.table import Shape, Table

FLOWS: Mapping[Flow, tuple[str, ...]] = {
    "both": ("from_sources", "from_targets"),
    "forward": ("from_sources",),
    "symmetric": ("from_any",),
}
"""Flows along which neighbours are aggregated; each has its own weights."""


MOST = {
    "features": MOST_MLP,
    "graph_features": MOST_MLP,
    "edge_features": MOST_MLP,
    "width": MOST_WIDTH,
    "mlp": MOST_MLP,
    "layers": MOST_LAYERS,
    "heads": MOST_HEADS,
    "channels": MOST_WIDTH,
    "readout": MOST_MLP,
}
"""Limits that protect readers of untrusted files."""


@dataclass(frozen=True)
class GraphShape(Shape):
    """The shape of a graph network.

    `features`, `edge_features` and `graph_features` are the numbers of features of a node, an edge
    and a whole graph (0: none); `heads` and `channels` are those of attention, 0 without it; `outputs` has the name and
    the number of outputs of each head.

    Raises:
        ArchitectureError: no model can have this shape.
    """

    features: int
    graph_features: int
    width: int
    mlp: int
    layers: int
    heads: int
    channels: int
    readout: int
    layer: Layer
    flow: Flow
    norm: Norm
    norm_eps: float
    activation: Activation
    dropout: float
    level: Level
    pooling: tuple[Pooling, ...]
    outputs: tuple[tuple[str, int], ...]
    edge_features: int = 0

    streams: ClassVar[tuple[str, ...]] = ("width",)

    def __post_init__(self) -> None:
        sizes_needed = ["features", "width", "mlp", "layers", "readout"]
        sizes_needed += ["heads", "channels"] if self.layer == "gat" else []
        problems = size_problems(self, sizes_needed, MOST)
        if problems:
            raise ArchitectureError(*problems)

    @property
    def flows(self) -> tuple[str, ...]:
        return FLOWS[self.flow]

    @property
    def aggregation_axis(self) -> str:
        """The axis on which neighbours are aggregated."""
        return "heads*channels" if self.layer == "gat" else "width"

    def sizes(self) -> dict[str, int]:
        of_heads = {f"outputs.{name}": size for name, size in self.outputs}
        return {**super().sizes(), "poolings": len(self.pooling), "one": 1, **of_heads}

    def table(self, table: Table) -> None:
        # with a zero bias, a node whose features are all 0 would be 0 at the norm
        table.linear("encoder", "width", "features", random_bias=True)
        for layer in range(self.layers):
            self._block(table, f"blocks.{layer}")
        self._norm(table, "final_norm")
        if self.level == "graph" and "attention" in self.pooling:
            table.linear("pool.attention.gate_nn", "one", "width", bias=False)
        read = "poolings*width" if self.level == "graph" else "width"
        table.linear("readout", "readout", read)
        if self.graph_features:
            table.linear("graph_readout", "readout", "graph_features", bias=False)
        for name, _ in self.outputs:
            table.linear(f"head_{name}", f"outputs.{name}", "readout")

    def _block(self, table: Table, block: str) -> None:
        self._norm(table, f"{block}.norm")
        table.linear(f"{block}.own", "mlp", "width")
        for flow in self.flows:
            if self.layer == "gat":
                table.linear(f"{block}.{flow}.sent", "heads*channels", "width", bias=False)
                table.linear(f"{block}.{flow}.received", "heads*channels", "width")
                table.linear(f"{block}.{flow}.score", "heads", "channels", bias=False)
            if self.edge_features:
                table.linear(
                    f"{block}.{flow}.edge", self.aggregation_axis, "edge_features", bias=False
                )
            table.linear(f"{block}.{flow}.heard", "mlp", self.aggregation_axis, bias=False)
        table.linear(f"{block}.down", "width", "mlp")

    def _norm(self, table: Table, name: str) -> None:
        table.norm(name, "width", bias=self.norm == "layernorm")

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        lists = {"pooling": list(self.pooling), "outputs": [list(head) for head in self.outputs]}
        return values | lists

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`. Raises ArchitectureError for missing or unknown fields."""
        check_fields(cls, values, optional=["edge_features"])
        outputs = tuple((name, size) for name, size in values["outputs"])
        return cls(**{**values, "pooling": tuple(values["pooling"]), "outputs": outputs})


def resolve_graph(
    model: GraphModelConfig, features: int, graph_features: int = 0, edge_features: int = 0
) -> GraphShape:
    """Return the shape that a config describes.

    Args:
        features: number of features of a node.
        graph_features: number of features of a graph; used if the config asks for them.
        edge_features: number of features of an edge; likewise.
    """
    attention = model.layer == "gat"
    return GraphShape(
        features=features,
        graph_features=graph_features if model.graph_features else 0,
        width=model.width,
        mlp=model.n_mlp or 2 * model.width,
        layers=model.n_layer,
        heads=model.n_head if attention else 0,
        channels=model.width // model.n_head if attention else 0,
        readout=model.n_readout or model.width,
        layer=model.layer,
        flow=model.flow,
        norm=model.norm,
        norm_eps=model.norm_eps,
        activation=model.activation,
        dropout=model.dropout,
        level=model.level,
        pooling=model.pooling,
        outputs=tuple((head.name, head.outputs) for head in model.heads),
        edge_features=edge_features if model.edge_features else 0,
    )


def sizes_of(shape: GraphShape) -> dict[str, Any]:
    """Return the keys of `GraphModelConfig` that growth changes, for a shape."""
    of_heads = {"n_head": shape.heads} if shape.layer == "gat" else {}
    return {
        "n_layer": shape.layers,
        "width": shape.width,
        "n_mlp": shape.mlp,
        "n_readout": shape.readout,
        **of_heads,
        "norm_eps": shape.norm_eps,
        "dropout": shape.dropout,
    }


def flops_per_graph(shape: GraphShape, nodes: float, edges: float) -> float:
    """Return floating-point operations per graph of a forward and backward pass, for matrix
    products and sums over neighbours.

    It counts 6 per matrix weight and node (or edge, or graph) that it is applied to, 6 per edge,
    flow and summed channel, and the latter once more for attention scores.
    """
    sizes = shape.sizes()
    n_flows = 2 if shape.flow == "symmetric" else len(shape.flows)
    readouts = nodes if shape.level == "node" else 1.0
    products = 0.0
    for name, entry in shape.parameters().items():
        if entry.kind == "matrix":
            per_output = layer_of(name) is None and not name.startswith(("encoder.", "pool."))
            times = readouts if per_output else nodes
            if name.endswith(".edge.weight"):
                times = edges * n_flows / len(shape.flows)
            products += times * axis_size(sizes, "*".join(entry.axes))
    sum_products = shape.layers * n_flows * edges * axis_size(sizes, shape.aggregation_axis)
    return 6.0 * (products + sum_products * (2 if shape.layer == "gat" else 1))
