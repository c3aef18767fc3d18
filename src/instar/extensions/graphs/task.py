"""Graph-level or node-level prediction with a graph network of several heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from instar.data.columns import Column, Ragged
from instar.extensions.graphs.config import GraphConfig, HeadConfig, HeadMetric
from instar.extensions.graphs.network import GraphNetwork, reduce_by_graph
from instar.extensions.graphs.shape import GraphShape
from instar.extensions.graphs.spec import GraphSpec
from instar.extensions.graphs.survey import NO_CLASS
from instar.models.gpt import InitialValues
from instar.models.loss import at_least_float32
from instar.tasks.task import Batch, Measured, Tally, Task


class GraphTask(Task):
    """`Task` of a graph network. A sample is one graph; its weight is 1, or at level "node" its
    number of nodes."""

    spec: GraphSpec
    config: GraphConfig
    architecture: GraphShape

    @property
    def random(self) -> bool:
        return self.architecture.dropout > 0

    def build(self) -> GraphNetwork:
        model = self.shell()
        model.init_weights(self.config.seed)
        return model

    def shell(self) -> GraphNetwork:
        return GraphNetwork(
            self.architecture, gradient_checkpointing=self.config.train.gradient_checkpointing
        )

    def initial_values(self) -> Mapping[str, Tensor]:
        return InitialValues(self.architecture.parameters(), self.config.seed)

    def loss_sum(self, model: torch.nn.Module, batch: Batch) -> Tensor:
        return self.loss_and_outputs(model, batch)[0]

    def loss_and_outputs(self, model: torch.nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """See `Task`; a single forward pass."""
        outputs = self.outputs(model, batch)
        losses = [
            head.weight * _loss(head, of_head, target).sum()
            for head, of_head, target in self._heads(outputs, batch)
        ]
        return torch.stack(losses).sum(), outputs

    def set_metrics(self) -> dict[str, object]:
        return {
            f"{head.name}/{metric}": _set_metric(metric, head.classes or 1)
            for head in self.config.model.heads
            for metric in head.metrics
        }

    def measure(self, model: torch.nn.Module, batch: Batch, *, predict: bool = False) -> Measured:
        outputs = self.outputs(model, batch)
        offsets = _ragged_column(batch, "x")[1]
        mask = self._mask(batch)
        everywhere = outputs.new_ones(len(outputs)) if mask is None else mask.to(outputs.dtype)
        total = outputs.new_zeros(len(outputs))
        values = {"loss": (total, everywhere)}
        inputs: dict[str, tuple[Tensor, Tensor]] = {}
        for head, of_head, target in self._heads(outputs, batch):
            loss = _loss(head, of_head, target)
            total += head.weight * loss
            is_counted = everywhere
            if head.kind == "classification":
                has_class = target != NO_CLASS
                is_counted = has_class.float()
                right = (of_head.argmax(-1) == target).float()
                values[f"{head.name}/loss"] = loss, is_counted
                values[f"{head.name}/accuracy"] = right * is_counted, is_counted
                pair = of_head[has_class].softmax(-1), target[has_class]
            else:
                predictions, actual = of_head.squeeze(-1), target.to(outputs.dtype)
                values[f"{head.name}/mae"] = (predictions - actual).abs(), is_counted
                values[f"{head.name}/mse"] = loss, is_counted
                pair = (predictions, actual) if mask is None else (predictions[mask], actual[mask])
            inputs |= {f"{head.name}/{metric}": pair for metric in head.metrics}
        if self.architecture.level == "node":
            values = {
                name: (reduce_by_graph(v, offsets, "sum"), reduce_by_graph(w, offsets, "sum"))
                for name, (v, w) in values.items()
            }
        tallies = {name: Tally(*tally) for name, tally in values.items()}
        return Measured(tallies, inputs, self._predictions(outputs, batch) if predict else {})

    def _predictions(self, outputs: Tensor, batch: Batch) -> dict[str, Column]:
        columns: dict[str, Tensor] = {}
        for head, of_head, target in self._heads(outputs, batch):
            columns[head.name] = target
            if head.kind == "regression" and (mask := self._mask(batch)) is not None:
                columns[head.name] = torch.where(mask, target, torch.nan)
            if head.kind == "classification":
                columns[f"{head.name}.predicted"] = of_head.argmax(-1)
                columns[f"{head.name}.probabilities"] = of_head.softmax(-1)
            else:
                columns[f"{head.name}.predicted"] = of_head.squeeze(-1)
        arrays = {name: values.cpu().numpy() for name, values in columns.items()}
        if self.architecture.level == "graph":
            return dict(arrays)
        offsets = _ragged_column(batch, "x")[1].cpu().numpy()
        return {name: Ragged(values, offsets) for name, values in arrays.items()}

    def outputs(self, model: torch.nn.Module, batch: Batch) -> Tensor:
        x_NF, offsets = _ragged_column(batch, "x")
        edges_E2, edge_offsets = _ragged_column(batch, "edges")
        first_of_graph = offsets[:-1].repeat_interleave(
            edge_offsets.diff(), output_size=len(edges_E2)
        )
        graph_GF = batch["graph"] if self.architecture.graph_features else None
        edges_EF = (
            _ragged_column(batch, "edge_attr")[0] if self.architecture.edge_features else None
        )
        # torch adds unsigned numbers of more than a byte to no others
        edges_E2 = edges_E2.long() + first_of_graph[:, None]
        outputs: Tensor = model(x_NF, edges_E2, offsets, graph_GF, edges_EF)
        return at_least_float32(outputs)

    def flops(self, weight: float) -> float:
        graphs = weight / self.spec.weight(self.context)
        return graphs * self.spec.flops_per_graph(self.architecture)

    def _heads(self, outputs: Tensor, batch: Batch) -> Iterator[tuple[HeadConfig, Tensor, Tensor]]:
        """Yield each head, its outputs [units, outputs], and its targets [units]. Where the mask is
        false, the loss is 0: there is no class, or the number is the one predicted."""
        mask = self._mask(batch)
        heads = self.config.model.heads
        parts = torch.split(outputs, [head.outputs for head in heads], dim=-1)
        for head, of_head in zip(heads, parts, strict=True):
            target = batch[head.column]
            if self.architecture.level == "node":
                target = _ragged_column(batch, head.column)[0]
            if head.kind == "classification":
                # numbers without a sign have no NO_CLASS
                target = target.long()
                target = target if mask is None else target.masked_fill(~mask, NO_CLASS)
            elif mask is not None:
                target = torch.where(mask, target.to(outputs.dtype), of_head.squeeze(-1).detach())
            yield head, of_head, target

    def _mask(self, batch: Batch) -> Tensor | None:
        """Return where losses and metrics count, [nodes]; None: everywhere."""
        name = self.config.model.mask
        return None if name is None else _ragged_column(batch, name)[0]


def _set_metric(name: HeadMetric, classes: int) -> object:
    import torchmetrics.classification as of_classes
    import torchmetrics.regression as of_values

    match name:
        case "f1":
            return of_classes.MulticlassF1Score(classes, average="macro")
        case "auroc":
            return of_classes.MulticlassAUROC(classes, average="macro")
        case "average_precision":
            return of_classes.MulticlassAveragePrecision(classes, average="macro")
        case "mcc":
            return of_classes.MulticlassMatthewsCorrCoef(classes)
        case "r2":
            return of_values.R2Score()
        case "pearson":
            return of_values.PearsonCorrCoef()
        case "spearman":
            return of_values.SpearmanCorrCoef()


def _loss(head: HeadConfig, of_head: Tensor, target: Tensor) -> Tensor:
    """Return the loss per unit, [units]; 0 without a target."""
    if head.kind == "classification":
        return F.cross_entropy(of_head, target, ignore_index=NO_CLASS, reduction="none")
    return F.mse_loss(of_head.squeeze(-1), target.to(of_head.dtype), reduction="none")


def _ragged_column(batch: Batch, name: str) -> tuple[Tensor, Tensor]:
    """Return a column's concatenated values and its offsets [samples + 1], ragged or not."""
    values = batch[name]
    offsets = batch.get(f"{name}.offsets")
    if offsets is None:
        samples, size = values.shape[:2]
        return values.flatten(0, 1), torch.arange(samples + 1, device=values.device) * size
    return values, offsets
