"""The task of predicting graphs: losses, metrics and predictions by graph, however they are batched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import parametrize_first
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from instar.data.columns import Columns, Ragged, as_ragged, cut, pick, stack
from instar.data.order import Int64Array, Order, Shuffled
from instar.data.source import Source
from instar.distributed.world import World
from instar.extensions.graphs.config import (
    ClassMetric,
    GraphConfig,
    GraphModelConfig,
    HeadConfig,
    ValueMetric,
)
from instar.extensions.graphs.shape import flops_per_graph, resolve_graph
from instar.extensions.graphs.spec import GraphSpec
from instar.extensions.graphs.survey import GraphSurvey
from instar.extensions.graphs.task import GraphTask
from instar.run.step.stepper import to_device
from instar.tasks.metrics import compute, set_metrics, update
from instar.tasks.task import Task

CPU = torch.device("cpu")
KIND = HeadConfig(name="kind", target="class", kind="classification", classes=3, weight=0.5)
SIZE = HeadConfig(name="size", kind="regression", weight=2.0)
ROLE = HeadConfig(name="role", kind="classification", classes=2, level="node")
CHARGE = HeadConfig(name="charge", kind="regression", level="node")


@dataclass(frozen=True, eq=False)
class Graphs:
    """Graphs in memory; the same to train on and held out."""

    columns: Columns
    fingerprint: str = "graphs"

    def __len__(self) -> int:
        return len(self.columns["size"])

    def read(self, indices: Int64Array, epoch: int = 0) -> Columns:
        del epoch
        return pick(self.columns, indices)

    def weights(self, indices: Int64Array) -> float:
        return float(len(indices))

    def train(self, seed: int) -> tuple[Source, Order]:
        return self, Shuffled(len(self), seed)

    def held_out(self, split: str) -> Source:
        del split
        return self


def graphs(count: int, seed: int = 0) -> Graphs:
    """Half the nodes of a graph are at +1 and half at -1; edges begin at the ones or at the others,
    which is its class (that of every third graph is not known), and lead anywhere."""
    generator = np.random.default_rng(seed)
    samples = []
    for number in range(count):
        half, edges = generator.integers(2, 6), generator.integers(4, 12)
        position = np.repeat([-1.0, 1.0], half).astype(np.float32)
        side = int(generator.integers(2))
        source = generator.integers(half, size=edges) + side * half
        target = generator.integers(2 * half, size=edges)
        samples.append(
            {
                "x": np.stack([position, generator.normal(size=2 * half)], 1).astype(np.float32),
                "edges": np.stack([source, target], 1).astype(np.int64),
                "graph": generator.normal(size=2).astype(np.float32),
                "class": np.int64(-1 if number % 3 == 2 else side),
                "size": np.float32(half / 4),
                "role": np.where(generator.random(2 * half) < 0.3, -1, position > 0).astype(
                    np.int64
                ),
                "charge": generator.normal(size=2 * half).astype(np.float32),
                "known": np.arange(2 * half) < 1 + number % 3,
            }
        )
    return Graphs(stack(samples))


def task_on(samples: Graphs, *heads: HeadConfig, **model: Any) -> GraphTask:
    sizes = {"n_layer": 2, "width": 8}
    config = GraphConfig(model=GraphModelConfig(**{**sizes, **model, "heads": heads}))
    x, edges = as_ragged(samples.columns["x"]), as_ragged(samples.columns["edges"])
    nodes = float(x.sizes.mean())
    survey = GraphSurvey(2, 2, nodes, float(edges.sizes.mean()), nodes)
    shape = resolve_graph(config.model, survey.features, survey.graph_features)
    return GraphSpec(config, shape, samples, survey).task(config)  # type: ignore[arg-type]


def batch(samples: Graphs, begin: int = 0, end: int | None = None) -> dict[str, torch.Tensor]:
    columns = cut(samples.columns, begin, len(samples) if end is None else end)
    return dict(to_device(columns, CPU))


TWELVE = graphs(12)


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_it_is_a_task() -> None:
    task: Task = task_on(TWELVE, KIND, SIZE, dropout=0.1)
    assert task.random
    assert not task_on(TWELVE, KIND).random
    assert task.spec.fingerprints == {"data": "graphs"}
    assert task.architecture.to_dict()["outputs"] == [["kind", 3], ["size", 1]]
    larger_shape = task.architecture.resized(mlp=40)
    assert task.at(larger_shape, 1).build().shape == larger_shape
    assert task.train_samples()[1] != task.train_samples(course=1)[1]


def test_a_model_is_drawn_from_the_seed() -> None:
    first, other = (task_on(TWELVE, KIND).build().state_dict() for _ in range(2))
    assert all(torch.equal(first[name], other[name]) for name in first)


def test_metrics_are_those_of_plain_numpy() -> None:
    task = task_on(TWELVE, KIND, SIZE)
    model = task.build()
    with torch.no_grad():
        tallies = task.measure(model, batch(TWELVE)).tallies
        outputs = task.outputs(model, batch(TWELVE)).double().numpy()
    classes, sizes = np.asarray(TWELVE.columns["class"]), np.asarray(TWELVE.columns["size"])
    mask = classes >= 0
    entropy = np.zeros(12)
    entropy[mask] = -np.log(softmax(outputs[:, :3])[mask, classes[mask]])
    difference = outputs[:, 3] - sizes
    right = (outputs[:, :3].argmax(1) == classes) & mask
    everywhere = np.ones(12)
    expected = {
        "loss": (0.5 * entropy + 2.0 * difference**2, everywhere),
        "kind/loss": (entropy, mask),
        "kind/accuracy": (right, mask),
        "size/mse": (difference**2, everywhere),
        "size/mae": (np.abs(difference), everywhere),
    }
    assert tallies.keys() == expected.keys() == task.config.metrics.keys()
    for name, (tally_values, weights) in expected.items():
        np.testing.assert_allclose(tallies[name].values, tally_values, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(tallies[name].weights, weights)
    assert task.loss_sum(model, batch(TWELVE)).item() == pytest.approx(expected["loss"][0].sum())


def test_masked_nodes_do_not_count() -> None:
    mask = as_ragged(TWELVE.columns["known"])
    charge = as_ragged(TWELVE.columns["charge"])
    missing = Ragged(np.where(mask.flat, charge.flat, np.nan), charge.offsets)
    charge_head = CHARGE.model_copy(update={"metrics": ("r2",)})
    task = task_on(Graphs({**TWELVE.columns, "charge": missing}), ROLE, charge_head, mask="known")
    model = task.build()
    full_batch = batch(task.spec.data)  # type: ignore[arg-type]
    loss = task.loss_sum(model, full_batch)
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    outputs = task.outputs(model, full_batch)
    where = torch.from_numpy(mask.flat)
    role = torch.from_numpy(as_ragged(TWELVE.columns["role"]).flat)
    entropy = F.cross_entropy(outputs[where, :2], role[where], ignore_index=-1, reduction="sum")
    true = torch.from_numpy(charge.flat)[where]
    square = (outputs[where, 2] - true).square().sum()
    torch.testing.assert_close(loss, entropy + square)
    measurement = task.measure(model, full_batch)
    torch.testing.assert_close(measurement.inputs["charge/r2"], (outputs[where, 2], true))
    tallies = measurement.tallies
    torch.testing.assert_close(tallies["charge/mse"].values.sum(), square)
    assert tallies["loss"].weights.tolist() == [1 + number % 3 for number in range(12)]
    assert torch.equal(tallies["charge/mae"].weights, tallies["loss"].weights)
    assert tallies["role/loss"].weights.sum() == (role[where] >= 0).sum()
    with torch.no_grad():
        predictions = task.measure(model, full_batch, predict=True).predictions
    np.testing.assert_array_equal(np.isnan(as_ragged(predictions["charge"]).flat), ~mask.flat)
    assert (as_ragged(predictions["role"]).flat[~mask.flat] == -1).all()


def values_of(name: str) -> NDArray[Any]:
    column = TWELVE.columns[name]
    return column.flat if isinstance(column, Ragged) else np.asarray(column)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("heads", [(KIND, SIZE), (ROLE, CHARGE)], ids=["of graphs", "of nodes"])
def test_further_metrics_of_heads_are_of_the_whole_set(
    heads: tuple[HeadConfig, HeadConfig],
) -> None:
    classes, values = heads
    task = task_on(
        TWELVE,
        classes.model_copy(update={"metrics": get_args(ClassMetric)}),
        values.model_copy(update={"metrics": get_args(ValueMetric)}),
    )
    model, kind, size = task.build(), classes.name, values.name
    accumulators = set_metrics(task.set_metrics, CPU, 12)
    with torch.no_grad():
        for part in (batch(TWELVE, 0, 5), batch(TWELVE, 5)):
            update(accumulators, task.measure(model, part).inputs)
        outputs = task.outputs(model, batch(TWELVE)).double().numpy()
    metrics = compute(World(0, 0, 1, CPU, "none"), accumulators)
    assert {"loss", *metrics} < task.config.metrics.keys()
    target, truth = (values_of(head.column) for head in heads)
    mask, predictions = target >= 0, outputs[:, :-1].argmax(1)
    hits = [
        2
        * np.sum(mask & (target == c) & (predictions == c))
        / max(1, np.sum(mask & (target == c)) + np.sum(mask & (predictions == c)))
        for c in range(outputs.shape[1] - 1)
    ]
    present_classes = np.unique(np.concatenate([target[mask], predictions[mask]]))
    assert metrics[f"{kind}/f1"] == pytest.approx(np.sum(hits) / len(present_classes), abs=1e-6)
    difference, spread = outputs[:, -1] - truth, truth - truth.mean()
    assert metrics[f"{size}/r2"] == pytest.approx(
        1 - np.sum(difference**2) / np.sum(spread**2), rel=1e-4
    )
    assert metrics[f"{size}/pearson"] == pytest.approx(
        np.corrcoef(outputs[:, -1], truth)[0, 1], abs=1e-5
    )


def test_classes_without_a_sign_may_be_masked() -> None:
    role = as_ragged(TWELVE.columns["role"])
    mask = Ragged(as_ragged(TWELVE.columns["known"]).flat & (role.flat >= 0), role.offsets)
    losses = []
    for dtype in (np.int64, np.uint8):
        columns = {"known": mask, "role": Ragged(role.flat.astype(dtype), role.offsets)}
        task = task_on(Graphs({**TWELVE.columns, **columns}), ROLE, mask="known")
        full_batch = batch(task.spec.data)  # type: ignore[arg-type]
        losses.append(task.measure(task.build(), full_batch).tallies["role/loss"])
    torch.testing.assert_close(losses[0].values, losses[1].values)
    assert torch.equal(losses[0].weights, losses[1].weights)


def test_edges_may_be_of_any_whole_numbers() -> None:
    edges = as_ragged(TWELVE.columns["edges"])
    losses = []
    for dtype in (np.int64, np.int32, np.uint8, np.uint16, np.uint32, np.uint64):
        column = Ragged(edges.flat.astype(dtype), edges.offsets)
        task = task_on(Graphs({**TWELVE.columns, "edges": column}), ROLE)
        full_batch = batch(task.spec.data)  # type: ignore[arg-type]
        losses.append(task.loss_sum(task.build(), full_batch))
    assert all(torch.equal(loss, losses[0]) for loss in losses)


def test_metrics_of_nodes_are_sums_over_each_graph() -> None:
    task = task_on(TWELVE, ROLE, CHARGE)
    model = task.build()
    with torch.no_grad():
        tallies = task.measure(model, batch(TWELVE)).tallies
        outputs = task.outputs(model, batch(TWELVE)).double().numpy()
    role, charge = TWELVE.columns["role"], TWELVE.columns["charge"]
    assert isinstance(role, Ragged)
    assert isinstance(charge, Ragged)
    begins, mask = role.offsets[:-1], role.flat >= 0
    entropy = np.zeros(len(mask))
    entropy[mask] = -np.log(softmax(outputs[:, :2])[mask, role.flat[mask]])
    square = (outputs[:, 2] - charge.flat) ** 2
    np.testing.assert_allclose(
        tallies["loss"].values, np.add.reduceat(entropy + square, begins), rtol=1e-5
    )
    np.testing.assert_array_equal(tallies["loss"].weights, role.sizes)
    np.testing.assert_array_equal(
        tallies["role/loss"].weights, np.add.reduceat(mask.astype(float), begins)
    )
    right = (outputs[:, :2].argmax(1) == role.flat) & mask
    np.testing.assert_array_equal(
        tallies["role/accuracy"].values, np.add.reduceat(right.astype(float), begins)
    )
    assert task.loss_sum(model, batch(TWELVE)).item() == pytest.approx((entropy + square).sum())


@settings(max_examples=20, deadline=None)
@given(
    cuts=st.sets(st.integers(1, 11)),
    heads=st.sampled_from([(KIND, SIZE), (ROLE, CHARGE)]),
    layer=st.sampled_from(["gin", "sage", "gcn", "gat"]),
)
def test_sums_do_not_depend_on_batches(
    cuts: set[int], heads: tuple[HeadConfig, ...], layer: str
) -> None:
    task = task_on(TWELVE, *heads, layer=layer)
    model = task.build()
    ends = [*sorted(cuts), 12]
    parts = [batch(TWELVE, a, b) for a, b in zip([0, *ends], ends, strict=False)]
    with torch.no_grad():
        full_loss = task.loss_sum(model, batch(TWELVE)).item()
        assert sum(task.loss_sum(model, part).item() for part in parts) == pytest.approx(
            full_loss, rel=1e-5
        )
        full_tallies = task.measure(model, batch(TWELVE)).tallies
        split = [task.measure(model, part).tallies for part in parts]
    for name, tally in full_tallies.items():
        values = torch.cat([part[name].values for part in split])
        torch.testing.assert_close(values, tally.values, rtol=1e-4, atol=1e-5)
        assert torch.equal(torch.cat([part[name].weights for part in split]), tally.weights)


def test_a_class_that_is_not_known_teaches_nothing() -> None:
    unknown = {**TWELVE.columns, "class": np.full(12, -1)}
    task = task_on(Graphs(unknown), KIND)
    model = task.build()
    task.loss_sum(model, batch(Graphs(unknown))).backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_predictions_stand_beside_their_targets() -> None:
    task = task_on(TWELVE, KIND, SIZE)
    with torch.no_grad():
        predictions = task.measure(task.build(), batch(TWELVE), predict=True).predictions
        outputs = task.outputs(task.build(), batch(TWELVE)).numpy()
    columns = ["kind", "kind.predicted", "kind.probabilities", "size", "size.predicted"]
    assert list(predictions) == columns
    np.testing.assert_array_equal(predictions["kind"], TWELVE.columns["class"])
    np.testing.assert_array_equal(predictions["kind.predicted"], outputs[:, :3].argmax(1))
    np.testing.assert_allclose(
        predictions["kind.probabilities"], softmax(outputs[:, :3]), rtol=1e-5
    )
    np.testing.assert_array_equal(predictions["size.predicted"], outputs[:, 3])


def test_targets_keep_the_digits_of_float64() -> None:
    sizes = 1 + 2.0**-40 * np.arange(12)
    samples = Graphs({**TWELVE.columns, "size": sizes})
    task = task_on(samples, SIZE)
    model = task.build()
    with torch.no_grad():
        predictions = task.measure(model, batch(samples), predict=True).predictions
        np.testing.assert_array_equal(predictions["size"], sizes)
        # the loss is the model's: it decides in what it is computed
        assert task.loss_sum(model, batch(samples)).dtype == torch.float32
        double_batch = dict(batch(samples)) | {"x": batch(samples)["x"].double()}
        tallies = task.measure(model.double(), double_batch).tallies
    assert {tally.values.dtype for tally in tallies.values()} == {torch.float64}


def test_predictions_of_nodes_are_ragged() -> None:
    task = task_on(TWELVE, ROLE)
    with torch.no_grad():
        predictions = task.measure(task.build(), batch(TWELVE), predict=True).predictions
    role = TWELVE.columns["role"]
    assert isinstance(role, Ragged)
    for column in predictions.values():
        assert isinstance(column, Ragged)
        np.testing.assert_array_equal(column.sizes, role.sizes)
    probabilities = predictions["role.probabilities"]
    assert isinstance(probabilities, Ragged)
    assert probabilities.values.shape[1:] == (2,)


def test_graphs_of_one_size_may_come_as_dense_arrays() -> None:
    generator = np.random.default_rng(0)
    dense = {
        "x": generator.normal(size=(3, 4, 2)).astype(np.float32),
        "edges": generator.integers(4, size=(3, 5, 2)),
        "size": np.zeros(3, dtype=np.float32),
    }
    in_ragged = {
        name: Ragged(dense[name].reshape(-1, 2), np.arange(4) * size)
        for name, size in (("x", 4), ("edges", 5))
    }
    task = task_on(Graphs(dense), SIZE)
    model = task.build()
    torch.testing.assert_close(
        task.outputs(model, batch(Graphs(dense))),
        task.outputs(model, batch(Graphs({**dense, **in_ragged}))),
    )


def test_features_of_graphs_are_read_if_asked() -> None:
    task = task_on(TWELVE, SIZE, graph_features=True)
    model = task.build()
    other = batch(TWELVE) | {"graph": torch.zeros(12, 2)}
    assert not torch.equal(task.outputs(model, batch(TWELVE)), task.outputs(model, other))
    plain = task_on(TWELVE, SIZE)
    assert plain.architecture.graph_features == 0


def test_flops_follow_from_the_mean_graph() -> None:
    task, survey = task_on(TWELVE, SIZE), task_on(TWELVE, SIZE).spec.survey
    graph_flops = flops_per_graph(task.architecture, survey.mean_nodes, survey.mean_edges)
    assert task.flops(10.0) == pytest.approx(10 * graph_flops)
    of_nodes = task_on(TWELVE, ROLE)
    per_graph = flops_per_graph(of_nodes.architecture, survey.mean_nodes, survey.mean_edges)
    assert of_nodes.flops(survey.mean_nodes) == pytest.approx(per_graph)


def test_bfloat16_losses_are_float32() -> None:
    task = task_on(TWELVE, KIND, SIZE)
    model = task.build()
    exact = task.loss_sum(model, batch(TWELVE)).item()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = task.loss_sum(model, batch(TWELVE))
        tallies = task.measure(model, batch(TWELVE)).tallies
    assert loss.dtype == torch.float32
    assert {tally.values.dtype for tally in tallies.values()} == {torch.float32}
    assert loss.item() == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize("layer", ["gin", "sage", "gcn", "gat"])
@parametrize_first("heads", [(KIND, SIZE), (ROLE,)], first=1, ids=["graph", "node"])
def test_every_layer_learns(layer: str, heads: tuple[HeadConfig, ...]) -> None:
    samples, unseen = graphs(96), graphs(48, seed=1)
    # means and maxima cannot tell how many nodes there are
    task = task_on(samples, *heads, layer=layer, width=16, pooling=("mean", "sum"))
    model = task.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    full_batch = batch(samples)
    for _ in range(60):
        optimizer.zero_grad()
        (task.loss_sum(model, full_batch) / len(samples)).backward()
        optimizer.step()
    with torch.no_grad():
        means = mean(task.measure(model, batch(unseen)).tallies)
    assert means[f"{heads[0].name}/accuracy"] > 0.9
    if SIZE in heads:
        assert means["size/mse"] < 0.3 * np.var(unseen.columns["size"])


def mean(tallies: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: (tally.values.sum() / tally.weights.sum()).item() for name, tally in tallies.items()
    }
