"""A graph network of pre-norm residual message-passing blocks; shapes are in `graph_shape`.

Suffixes of tensor names are their dimensions: N nodes of all graphs of a batch, E edges, G graphs,
D width, H attention heads, C channels of a head, S samples (nodes or graphs).

Rows are taken by `index_select`, whose gradient takes two thirds of the time of that of `x[index]` on a CPU, and
always adds in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from instar.extensions.graphs.config import Activation, Layer
from instar.extensions.graphs.shape import GraphShape
from instar.models.gpt import set_parameters
from instar.models.layers import rms_norm
from instar.models.loss import at_least_float32
from instar.models.shape import Parameter

ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
}


class GraphNetwork(nn.Module):
    """Encoder, blocks, pooling, readout, heads.

    The constructor does not initialize parameters: call `init_weights`, or load a checkpoint.
    """

    def __init__(self, shape: GraphShape, *, gradient_checkpointing: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.gradient_checkpointing = gradient_checkpointing
        table = shape.parameters()
        self.encoder = _linear(table, "encoder")
        self.blocks = nn.ModuleList(
            _Block(shape, table, f"blocks.{layer}") for layer in range(shape.layers)
        )
        self.final_norm = _Norm(shape)
        if shape.level == "graph":
            self.pool = _Pool(shape, table)
        self.readout = _linear(table, "readout")
        if shape.graph_features:
            self.graph_readout = _linear(table, "graph_readout")
        for name, _ in shape.outputs:
            self.add_module(f"head_{name}", _linear(table, f"head_{name}"))

    def forward(
        self,
        x_NF: Tensor,
        edges_E2: Tensor,
        offsets: Tensor,
        graph_GF: Tensor | None = None,
        edges_EF: Tensor | None = None,
    ) -> Tensor:
        """Return the concatenated outputs of all heads: (G, outputs), or (N, outputs) per node.

        Args:
            edges_E2: pairs of node indices in the batch, int64; may be empty.
            offsets: graph g has the nodes offsets[g] … offsets[g + 1] - 1, at least one.
            graph_GF: features of graphs, if the shape has any.
            edges_EF: features of edges, if the shape has any.
        """
        dtype = self.encoder.weight.dtype
        flows = _flows(self.shape, edges_E2, len(x_NF), dtype, edges_EF)
        x_ND = at_least_float32(self.encoder(x_NF.to(self.encoder.weight.dtype)))
        for block in self.blocks:
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x_ND = checkpoint(
                    block,
                    x_ND,
                    flows,
                    use_reentrant=False,
                    preserve_rng_state=self.shape.dropout > 0,
                )
            else:
                x_ND = block(x_ND, flows)
        x_SD = self.final_norm(x_ND)
        if self.shape.level == "graph":
            x_SD = self.pool(x_SD, offsets)
        read = self.readout(x_SD)
        if graph_GF is not None and self.shape.graph_features:
            of_graph = self.graph_readout(graph_GF.to(self.encoder.weight.dtype))
            if self.shape.level == "node":
                of_graph = of_graph.repeat_interleave(offsets.diff(), dim=0, output_size=len(x_SD))
            read = read + of_graph
        read = ACTIVATIONS[self.shape.activation](read)
        outputs = [self.get_submodule(f"head_{name}")(read) for name, _ in self.shape.outputs]
        return torch.cat(outputs, dim=-1)

    def init_weights(self, seed: int) -> None:
        """Initialize every parameter (see `set_parameters`)."""
        set_parameters(self, self.shape.parameters(), seed)


class _Block(nn.Module):
    """x ← x + down(act(own h + aggregated h)), h = norm(x)."""

    def __init__(self, shape: GraphShape, table: Mapping[str, Parameter], name: str) -> None:
        super().__init__()
        self.dropout = shape.dropout
        self.activation = ACTIVATIONS[shape.activation]
        self.norm = _Norm(shape)
        self.own = _linear(table, f"{name}.own")
        for flow in shape.flows:
            self.add_module(flow, _Aggregation(shape, table, f"{name}.{flow}"))
        self.down = _linear(table, f"{name}.down")

    def forward(self, x_ND: Tensor, flows: _Flows) -> Tensor:
        h_ND = self.norm(x_ND)
        hidden = self.own(h_ND)
        for flow, edges in flows.items():
            hidden = hidden + self.get_submodule(flow)(h_ND, edges)
        update: Tensor = self.down(self.activation(hidden))
        return x_ND + F.dropout(update, self.dropout, self.training)


class _Aggregation(nn.Module):
    """Aggregates the neighbours of every node along one flow of edges."""

    def __init__(self, shape: GraphShape, table: Mapping[str, Parameter], name: str) -> None:
        super().__init__()
        self.heads = shape.heads
        if self.heads:
            self.sent = _linear(table, f"{name}.sent")
            self.received = _linear(table, f"{name}.received")
            self.score = _linear(table, f"{name}.score")
        if shape.edge_features:
            self.edge = _linear(table, f"{name}.edge")
            self.activation = ACTIVATIONS[shape.activation]
        self.heard = _linear(table, f"{name}.heard")

    def forward(self, h_ND: Tensor, edges: _Edges) -> Tensor:
        if self.heads:
            sums_ND = self._attend(h_ND, edges)
        elif edges.features is None:
            sums_ND = edges.sum(h_ND)
        else:
            sent_ED = self.activation(
                h_ND.index_select(0, edges.sender) + self.edge(edges.features)
            )
            sums_ND = edges.sum_of(at_least_float32(sent_ED), len(h_ND))
        messages: Tensor = self.heard(sums_ND)
        return messages

    def _attend(self, h_ND: Tensor, edges: _Edges) -> Tensor:
        """GATv2 (arXiv 2105.14491, equation 7): Σ_j α_ij s_j, where α is the softmax over the
        senders j of score · LeakyReLU(s_j + r_i)."""
        nodes = len(h_ND)
        sent_NHC = at_least_float32(self.sent(h_ND)).view(nodes, self.heads, -1)
        received_NHC = at_least_float32(self.received(h_ND)).view(nodes, self.heads, -1)
        sent_EHC = sent_NHC.index_select(0, edges.sender)
        met_EHC = sent_EHC + received_NHC.index_select(0, edges.receiver)
        if edges.features is not None:
            met_EHC = met_EHC + self.edge(edges.features).view_as(met_EHC)
        met_EHC = F.leaky_relu(met_EHC, 0.2)
        score_EH = (met_EHC * self.score.weight).sum(-1)
        share_EH = _softmax_by_node(score_EH, edges.receiver, nodes)
        return _sum_by_node(sent_EHC * share_EH[..., None], edges.receiver, nodes).flatten(1)


class _Edges:
    """One flow of edges from node sender[e] to node receiver[e]; its sparse matrices are made once
    for all blocks."""

    def __init__(
        self,
        by_receiver: _SortedEdges,
        by_sender: _SortedEdges,
        layer: Layer,
        dtype: torch.dtype,
        features: Tensor | None,
    ) -> None:
        """The same edges, sorted by receivers and by senders; `features`: (E, F)."""
        self.sender, self.receiver, self.features = by_sender.ends, by_receiver.ends, features
        if layer != "gat":
            self.weight_E = _weights(by_receiver, by_sender, layer, dtype)
            self.of_receivers, self.of_senders = (
                by_receiver.rows(self.weight_E),
                by_sender.rows(self.weight_E),
            )

    def sum(self, h_ND: Tensor) -> Tensor:
        """Sum over the senders of each node, weighted by the layer type."""
        with torch.autocast(h_ND.device.type, enabled=False):
            sums: Tensor = _SparseProduct.apply(h_ND, self.of_receivers, self.of_senders)  # type: ignore[no-untyped-call]
        return sums

    def sum_of(self, sent_ED: Tensor, nodes: int) -> Tensor:
        """Sum what is sent along the edges to each node, weighted by the layer type."""
        weighted_ED = sent_ED * self.weight_E[:, None]
        return _sum_by_node(weighted_ED, self.receiver, nodes)


_Flows = Mapping[str, _Edges]
"""Edges by flow; see `graph_shape.FLOWS`."""


class _Rows(NamedTuple):
    """A sparse CSR matrix: row n has columns[begins[n] : begins[n + 1]] and their weights."""

    begins: Tensor
    columns: Tensor
    weights: Tensor


class _SortedEdges:
    """Edges sorted by one of their ends, which are the rows of a sparse matrix."""

    def __init__(self, ends: Tensor, other_ends: Tensor, nodes: int) -> None:
        self.ends = ends
        rows, self.order = ends.sort(stable=True)
        self.begins = torch.searchsorted(rows, torch.arange(nodes + 1, device=rows.device))
        self.columns = other_ends[self.order]

    def rows(self, weight_E: Tensor) -> _Rows:
        return _Rows(self.begins, self.columns, weight_E[self.order])

    def degrees(self, dtype: torch.dtype) -> Tensor:
        """Return the degree of each edge's end, (E,)."""
        degrees: Tensor = self.begins.diff().to(dtype)[self.ends]
        return degrees


def _weights(
    by_receiver: _SortedEdges, by_sender: _SortedEdges, layer: Layer, dtype: torch.dtype
) -> Tensor:
    """Return the weight of each edge (E,): 1 for a sum (GIN), 1 / degree of the receiver for a
    mean (SAGE), 1 / √(product of both degrees) for a GCN (arXiv 1609.02907; both directions as in
    arXiv 2305.10498)."""
    if layer == "gin":
        return torch.ones(len(by_receiver.ends), dtype=dtype, device=by_receiver.ends.device)
    if layer == "sage":
        return by_receiver.degrees(dtype).reciprocal_()
    return (by_receiver.degrees(dtype) * by_sender.degrees(dtype)).rsqrt_()


class _SparseProduct(torch.autograd.Function):
    """A sparse matrix times a dense one; the gradient uses the transposed matrix.

    `embedding_bag` computes such a product deterministically, and without a row per edge, which
    gather and scatter need.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: _Rows, transpose: _Rows) -> Tensor:
        ctx.transposed = transpose
        return _product(matrix, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return _product(ctx.transposed, grad_outputs[0].contiguous()), None, None


def _product(matrix: _Rows, x: Tensor) -> Tensor:
    return F.embedding_bag(
        matrix.columns,
        x,
        matrix.begins,
        mode="sum",
        per_sample_weights=matrix.weights,
        include_last_offset=True,
    )


def _sum_by_node(messages: Tensor, receiver_E: Tensor, nodes: int) -> Tensor:
    """Sum what arrives at each node: (E, …) → (N, …)."""
    sums = messages.new_zeros(nodes, *messages.shape[1:])
    return sums.scatter_add(0, _like_rows(receiver_E, messages), messages)


def _softmax_by_node(score: Tensor, receiver_E: Tensor, nodes: int) -> Tensor:
    """Softmax over the edges that arrive at the same node: (E, …) → (E, …)."""
    lowest = score.new_zeros(nodes, *score.shape[1:])
    largest = lowest.scatter_reduce(
        0, _like_rows(receiver_E, score), score.detach(), "amax", include_self=False
    )
    powers = (score - largest.index_select(0, receiver_E)).exp()
    return powers / _sum_by_node(powers, receiver_E, nodes).index_select(0, receiver_E)


def _like_rows(index_E: Tensor, rows: Tensor) -> Tensor:
    """Return an index of rows as `scatter_add` wants it, one for each element; a view."""
    return index_E.view(-1, *(1 for _ in rows.shape[1:])).expand_as(rows)


def reduce_by_graph(
    rows: Tensor, offsets: Tensor, reduction: Literal["sum", "mean", "max"]
) -> Tensor:
    """Reduce the rows offsets[g] … offsets[g + 1] - 1 of each graph, at least one: (N, …) → (G, …)."""
    values: Tensor = torch.segment_reduce(rows, reduction, offsets=offsets)
    return values


class _Pool(nn.Module):
    """Pools nodes to graphs by one or more aggregations: (N, D) → (G, ways · D)."""

    def __init__(self, shape: GraphShape, table: Mapping[str, Parameter]) -> None:
        super().__init__()
        self.poolings = shape.pooling
        if "attention" in self.poolings:
            self.attention = _AttentionPool(table)

    def forward(self, x_ND: Tensor, offsets: Tensor) -> Tensor:
        with torch.autocast(x_ND.device.type, enabled=False):
            pools = [
                self.attention(x_ND, offsets)
                if pooling == "attention"
                else reduce_by_graph(x_ND, offsets, pooling)
                for pooling in self.poolings
            ]
        return torch.cat(pools, dim=-1)


class _AttentionPool(nn.Module):
    """Σ_n a_n x_n over the nodes n of a graph, where a is the softmax of gate · x over them: PyTorch
    Geometric's `AttentionalAggregation`."""

    def __init__(self, table: Mapping[str, Parameter]) -> None:
        super().__init__()
        self.gate_nn = _linear(table, "pool.attention.gate_nn")

    def forward(self, x_ND: Tensor, offsets: Tensor) -> Tensor:
        gate_N1 = self.gate_nn(x_ND)
        sizes, nodes = offsets.diff(), len(x_ND)
        largest = reduce_by_graph(gate_N1.detach(), offsets, "max")
        powers = (gate_N1 - largest.repeat_interleave(sizes, dim=0, output_size=nodes)).exp()
        total = reduce_by_graph(powers, offsets, "sum")
        share_N1 = powers / total.repeat_interleave(sizes, dim=0, output_size=nodes)
        return reduce_by_graph(share_N1 * x_ND, offsets, "sum")


class _Norm(nn.Module):
    """LayerNorm or RMSNorm of each node."""

    def __init__(self, shape: GraphShape) -> None:
        super().__init__()
        self.eps, self.rms = shape.norm_eps, shape.norm == "rmsnorm"
        self.weight = nn.Parameter(torch.empty(shape.width))
        self.bias = None if self.rms else nn.Parameter(torch.empty(shape.width))

    def forward(self, x: Tensor) -> Tensor:
        if self.rms:
            return rms_norm(x, self.weight, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def _flows(
    shape: GraphShape, edges_E2: Tensor, nodes: int, dtype: torch.dtype, edges_EF: Tensor | None
) -> _Flows:
    source, target = edges_E2.unbind(1)
    features = edges_EF.to(dtype) if edges_EF is not None and shape.edge_features else None
    if shape.flow == "symmetric":
        source, target = torch.cat((source, target)), torch.cat((target, source))
        features = None if features is None else torch.cat((features, features))
    by_source, by_target = _SortedEdges(source, target, nodes), _SortedEdges(target, source, nodes)
    by_flow = [(by_target, by_source), (by_source, by_target)]
    return {
        flow: _Edges(by_receiver, by_sender, shape.layer, dtype, features)
        for flow, (by_receiver, by_sender) in zip(shape.flows, by_flow, strict=False)
    }


def _linear(table: Mapping[str, Parameter], name: str) -> nn.Linear:
    outputs, inputs = table[f"{name}.weight"].shape
    return nn.Linear(inputs, outputs, bias=f"{name}.bias" in table)
