"""The shape of the graph network, and the table of its parameters; torch-free.

Blocks add to one stream, `width`. Inside block n, what a node is and what it hears of its
neighbours meet on the axis `mlp`::

    h = norm(x);  x ← x + down(act(own h + Σ_f heard_f (aggregate_f h)))

Where the papers of GIN and GCN have (1 + ε) h and self-loops, a node has a matrix of its own. f runs
over the flows of edges: ``from_sources`` (what edges come from) and ``from_targets`` (what
they lead to), or ``from_any``. Attention (GATv2, arXiv 2105.14491) aggregates on the axis
``heads*channels``, all else on the stream itself; so either way a matrix lies between what is
aggregated and what reads it, and every axis can grow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from instar.config.graph import (
    Activation,
    Flow,
    GraphModelConfig,
    Layer,
    Level,
    Norm,
    Pooling,
)
from instar.models.shape import (
    ArchitectureError,
    Mistake,
    Shape,
    Table,
    axis_size,
    layer_of,
)

FLOWS: Mapping[Flow, tuple[str, ...]] = {
    "both": ("from_sources", "from_targets"),
    "forward": ("from_sources",),
    "symmetric": ("from_any",),
}
"""What a node hears of, each with weights of its own."""


@dataclass(frozen=True)
class GraphShape(Shape):
    """The shape in force.

    `features` and `graph_features` are columns of a node and of a whole graph (0: none); `heads`
    and `channels` are of attention, 0 without; `outputs` names each head and says how many numbers
    it gives. Raises ArchitectureError when no model can have it.
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

    streams: ClassVar[tuple[str, ...]] = ("width",)

    def __post_init__(self) -> None:
        needed = ["features", "width", "mlp", "layers", "readout"]
        needed += ["heads", "channels"] if self.layer == "gat" else []
        mistakes = [
            Mistake(f"model.{name}", f"must be a whole number above 0, not {size!r}")
            for name, size in ((name, getattr(self, name)) for name in needed)
            if type(size) is not int or size < 1
        ]
        if mistakes:
            raise ArchitectureError(*mistakes)

    @property
    def flows(self) -> tuple[str, ...]:
        return FLOWS[self.flow]

    @property
    def heard(self) -> str:
        """The axis on which neighbours are aggregated."""
        return "heads*channels" if self.layer == "gat" else "width"

    def sizes(self) -> dict[str, int]:
        of_heads = {f"outputs.{name}": size for name, size in self.outputs}
        return {**super().sizes(), "poolings": len(self.pooling), "one": 1, **of_heads}

    def table(self, table: Table) -> None:
        # a node whose features are all zero must not be zero where it is normalised
        table.linear("encoder", "width", "features", drawn=True)
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
            table.linear(f"{block}.{flow}.heard", "mlp", self.heard, bias=False)
        table.linear(f"{block}.down", "width", "mlp")

    def _norm(self, table: Table, name: str) -> None:
        table.norm(name, "width", bias=self.norm == "layernorm")

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        lists = {"pooling": list(self.pooling), "outputs": [list(each) for each in self.outputs]}
        return values | lists

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`. Raises ArchitectureError for missing or unknown fields."""
        names = [field.name for field in fields(cls)]
        mistakes = [Mistake(f"model.{name}", "is missing") for name in names if name not in values]
        mistakes += [Mistake(f"model.{name}", "is unknown") for name in values if name not in names]
        if mistakes:
            raise ArchitectureError(*mistakes)
        outputs = tuple((name, size) for name, size in values["outputs"])
        return cls(**{**values, "pooling": tuple(values["pooling"]), "outputs": outputs})


def resolve_graph(model: GraphModelConfig, features: int, graph_features: int = 0) -> GraphShape:
    """The shape that a config asks for, for graphs whose nodes have so many features.

    Args:
        graph_features: of a whole graph, which count where the config asks for them.
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
    )


def flops_per_graph(shape: GraphShape, nodes: float, edges: float) -> float:
    """Floating-point operations of one graph's forward and backward pass, of matrix products and
    sums over neighbours.

    Six for each weight of a matrix and each node (or graph) that it is applied to; six for each
    edge, flow and channel that is summed; with attention as much again for the scores.
    """
    sizes = shape.sizes()
    once = nodes if shape.level == "node" else 1.0
    products = 0.0
    for name, entry in shape.parameters().items():
        if entry.kind == "matrix":
            whole = layer_of(name) is None and not name.startswith(("encoder.", "pool."))
            times = once if whole else nodes
            products += times * axis_size(sizes, "*".join(entry.axes))
    ways = 2 if shape.flow == "symmetric" else len(shape.flows)
    summed = shape.layers * ways * edges * axis_size(sizes, shape.heard)
    return 6.0 * (products + summed * (2 if shape.layer == "gat" else 1))
