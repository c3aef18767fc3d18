"""Tasks of a user's own with one mistake each, and some that give their samples in another form."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from science import Axes, Halves, Net
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch_geometric.data import Data as Graph

from instar.custom import Batch, CustomTask, Ragged, Shape, Table


def points(task: Halves) -> dict[str, Any]:
    return dict(Halves.samples(task))


def tensors(task: Halves) -> list[Tensor]:
    columns = points(task)
    return [torch.from_numpy(columns[name]) for name in ("x", "side", "number")]


# ---- samples in another form, which are as good ----


class Tensors(Halves):
    def samples(self) -> Any:
        return {name: torch.from_numpy(values) for name, values in points(self).items()}


class Lists(Halves):
    def samples(self) -> Any:
        columns = points(self)
        return {
            "x": list(columns["x"]),
            "side": columns["side"].tolist(),
            "number": columns["number"],
        }


class Rows(Halves):
    def samples(self) -> Any:
        columns = points(self)
        rows = range(len(columns["x"]))
        return [{name: values[row] for name, values in columns.items()} for row in rows]


class Tupled(Halves):
    fields = ("x", "side", "number")

    def samples(self) -> Any:
        return TensorDataset(*tensors(self))


class Arrays(Tupled):
    def samples(self) -> Any:
        return tuple(points(self)[name] for name in self.fields)


class Items(Dataset[Any]):
    def __init__(self, task: Halves) -> None:
        self.parts = tensors(task)

    def __len__(self) -> int:
        return len(self.parts[0])

    def __getitem__(self, number: int) -> Any:
        x, side, place = (part[number] for part in self.parts)
        return {"x": x, "side": int(side), "number": place}


class Mapped(Halves):
    def samples(self) -> Any:
        return Items(self)


class Batched(Halves):
    def samples(self) -> Any:
        return {"train": DataLoader(Items(self), batch_size=5), "val": Items(self)}


class Graphs(CustomTask[Any, Any]):
    """Graphs of PyTorch Geometric: is the mean of the nodes' features positive?"""

    def samples(self) -> Any:
        generator, graphs = torch.Generator().manual_seed(self.seed), []
        for number in range(40):
            x = torch.randn(2 + number % 3, 3, generator=generator)
            edges = torch.stack([torch.arange(len(x) - 1), torch.arange(1, len(x))])
            graphs.append(Graph(x=x, edge_index=edges, y=(x.mean() > 0).long()[None]))
        return graphs

    def module(self, shape: Any) -> nn.Module:  # noqa: ARG002
        return nn.Linear(3, 2)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        offsets, edges = batch["x.offsets"], batch["edges"]
        assert edges.shape == (batch["edges.offsets"][-1], 2)
        outputs = model(batch["x"])
        of_graph = torch.segment_reduce(outputs, "mean", offsets=offsets, initial=0.0)
        return F.cross_entropy(of_graph, batch["y"], reduction="none")


# ---- samples that cannot be read ----


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield {"x": torch.zeros(2)}


class Streamed(Halves):
    def samples(self) -> Any:
        return Endless()


class OtherwiseHeldOut(Halves):
    def samples(self) -> Any:
        return {"train": Items(self), "val": [{"x": [0, 1], "side": 1, "number": 2}]}


class Shuffling(IterableDataset[Any]):
    """Gives its items in another order at every pass."""

    def __iter__(self) -> Iterator[Any]:
        yield from ({"x": torch.rand(2), "side": 0, "number": 0} for _ in range(9))


class Unseeded(Halves):
    def samples(self) -> Any:
        return {"train": Shuffling(), "val": points(self), "test": points(self)}


class Short(Items):
    """Says that it has more items than it has."""

    def __len__(self) -> int:
        return super().__len__() + 1


class TooLong(Halves):
    def samples(self) -> Any:
        return Short(self)


class Collating(Halves):
    def samples(self) -> Any:
        return DataLoader(Items(self), collate_fn=lambda items: items)


class Nothing(Halves):
    def samples(self) -> Any:
        points(self)


class NoSamples(Halves):
    def samples(self) -> Any:
        return {name: values[:0] for name, values in points(self).items()}


class Words(Halves):
    def samples(self) -> Any:
        return points(self) | {"side": np.array(["left", "right"] * 40)}


class WordsInRows(Halves):
    def samples(self) -> Any:
        return [{"x": np.zeros(2), "side": "left"} for _ in range(80)]


class Unnamed(Halves):
    def samples(self) -> Any:
        return TensorDataset(*tensors(self))


class Alone(Halves):
    def samples(self) -> Any:
        return tensors(self)[0]


class Sparse(Halves):
    def samples(self) -> Any:
        return points(self) | {"x": tensors(self)[0].to_sparse()}


class SparseMatrix(Halves):
    def samples(self) -> Any:
        from scipy.sparse import csr_matrix

        return points(self) | {"x": csr_matrix(points(self)["x"])}


class Meant(Halves):
    def samples(self) -> Any:
        return points(self) | {"number": 3}


class OtherKeys(Halves):
    def samples(self) -> Any:
        return [{"x": np.zeros(2)}, {"y": np.zeros(2)}]


class Failing(Halves):
    def samples(self) -> Any:
        return np.load("nowhere.npy")


class Leaving(Halves):
    def samples(self) -> Any:
        sys.exit()


class Augmented(Items):
    def __getitem__(self, number: int) -> Any:
        return super().__getitem__(number) | {"x": torch.tensor([random.random(), 0.0])}


class Drawn(Halves):
    def samples(self) -> Any:
        return Augmented(self)


class Weightless(Items):
    fingerprint = "weightless"

    def read(self, indices: Any, epoch: int = 0) -> Any:  # noqa: ARG002
        return {
            name: part[indices].numpy()
            for name, part in zip(Tupled.fields, self.parts, strict=True)
        }

    def weights(self, indices: Any) -> float:
        return -float(len(indices))


class Negative(Halves):
    def samples(self) -> Any:
        return Weightless(self)


class HasNaN(Halves):
    def samples(self) -> Any:
        columns = points(self)
        columns["x"][:] = np.nan
        return columns


class SomeNaN(Halves):
    def samples(self) -> Any:
        columns = points(self)
        columns["x"][70] = np.nan
        return columns


# ---- models and shapes ----


class Double(Halves):
    def samples(self) -> Any:
        return points(self) | {"x": points(self)["x"].astype("f8")}


class Lazy(Halves):
    def shape(self) -> Any:
        return None

    def module(self, shape: Any) -> nn.Module:  # noqa: ARG002
        return nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(2))


class SparseRows(Halves):
    def shape(self) -> Any:
        return None

    def module(self, shape: Any) -> nn.Module:  # noqa: ARG002
        return nn.EmbeddingBag(80, 2, sparse=True)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["number"][:, None])
        return F.cross_entropy(logits, batch["side"], reduction="none")


class Cached(Halves):
    def module(self, shape: Any) -> nn.Module:
        if not hasattr(self, "net"):
            self.net = Net(shape)
        return self.net


class Backbone(Halves):
    """A part of the model is kept."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.body = nn.Linear(2, 8)

    def shape(self) -> Any:
        return None

    def module(self, shape: Any) -> nn.Module:  # noqa: ARG002
        return nn.Sequential(self.body, nn.Linear(8, 2))


class NoModule(Halves):
    def module(self, shape: Any) -> Any:
        return Net(shape).state_dict()


class NoParameters(Halves):
    def shape(self) -> Any:
        return None

    def module(self, shape: Any) -> nn.Module:  # noqa: ARG002
        return nn.ReLU()


class Frozen(Halves):
    def module(self, shape: Any) -> nn.Module:
        return Net(shape).requires_grad_(False)


class Unused(Halves):
    def shape(self) -> Any:
        return None

    def module(self, shape: Any) -> nn.Module:  # noqa: ARG002
        net = Net(Axes())
        net.spare = nn.Linear(3, 3)
        return net


class Routed(Net):
    """Which parameters it uses depends on the samples."""

    def __init__(self) -> None:
        super().__init__(Axes())
        self.right = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        return output + self.right(x) if bool((x[:, 0] > 5).any()) else output


class Depending(Halves):
    """Of the samples in their order, those of all ranks use all parameters, but for rank 1's in the third step."""

    def samples(self) -> Any:
        columns = super().samples()
        x = np.full((24, 2), 9.0, np.float32)
        x[20:24] = 1.0
        held_out = {name: column[:8] for name, column in columns.items()}
        return {
            "train": {n: c[:24] for n, c in columns.items()} | {"x": x},
            "val": held_out,
            "test": held_out,
        }

    def shape(self) -> Any:
        return None

    def module(self, shape: Any) -> nn.Module:  # noqa: ARG002
        return Routed()


@dataclass(frozen=True)
class OtherAxes(Shape):
    hidden: int = 24

    def table(self, table: Table) -> None:
        table.linear("up", "hiden", "inputs")


class NoField(Halves):
    def shape(self) -> Any:
        return OtherAxes()


class NoShape(Halves):
    def shape(self) -> Any:
        return {"hidden": 24}


class FixedSize(Halves):
    """Its module is not made of the shape that it is given."""

    def module(self, shape: Any) -> nn.Module:  # noqa: ARG002
        return Net(Axes(hidden=24))


class Pair(Net):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


class PairOut(Halves):
    def module(self, shape: Any) -> nn.Module:
        return Pair(shape)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"])[0], batch["side"], reduction="none")

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        return super().measure(lambda x: model(x)[0], batch)  # type: ignore[arg-type]

    def predict(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:  # noqa: ARG002
        return {}


# ---- losses and metrics ----


class NoLoss(Halves):
    def loss(self, model: nn.Module, batch: Batch) -> Any:
        F.cross_entropy(model(batch["x"]), batch["side"], reduction="none")


class WideLoss(Halves):
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(batch["x"]), torch.ones(len(batch["x"]), 2), reduction="none")


class DictLoss(Halves):
    def loss(self, model: nn.Module, batch: Batch) -> Any:
        return {"loss": super().loss(model, batch)}


class MeanLoss(Halves):
    def loss(self, model: nn.Module, batch: Batch) -> Any:
        return super().loss(model, batch).mean()


class NumberLoss(Halves):
    def loss(self, model: nn.Module, batch: Batch) -> Any:
        return super().loss(model, batch).mean().item()


class Detached(Halves):
    def loss(self, model: nn.Module, batch: Batch) -> Any:
        return super().loss(model, batch).detach()


class Around(Halves):
    """Its loss is not computed by the model's own forward()."""

    def loss(self, model: Any, batch: Batch) -> Tensor:
        logits = model.down(torch.relu(model.up(batch["x"])))
        return F.cross_entropy(logits, batch["side"], reduction="none")


class Listed(nn.Module):
    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Penalty(Halves):
    """Its loss has parameters outside the model's forward(), also those of a list."""

    def shape(self) -> Any:
        return None

    def module(self, shape: Any) -> nn.Module:  # noqa: ARG002
        net = Net(Axes())
        blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        return nn.Sequential(Listed(blocks), net)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        loss: Tensor = super().loss(model, batch)
        return loss + sum(parameter.square().sum() for parameter in model.parameters())


class Infinite(Halves):
    def loss(self, model: nn.Module, batch: Batch) -> Any:
        return super().loss(model, batch) / 0


class NoColumn(Halves):
    def loss(self, model: nn.Module, batch: Batch) -> Any:
        return F.cross_entropy(model(batch["x"]), batch["label"])


class DoubleWithoutColumn(Halves):
    """Samples in float64, which is not what fails."""

    def samples(self) -> Any:
        return points(self) | {"x": points(self)["x"].astype("f8")}

    def loss(self, model: nn.Module, batch: Batch) -> Any:
        return F.cross_entropy(model(batch["x"].float()), batch["label"])


class ListMeasure(Halves):
    def measure(self, model: nn.Module, batch: Batch) -> Any:
        return list(super().measure(model, batch).values())


class NumberMeasure(Halves):
    def measure(self, model: nn.Module, batch: Batch) -> Any:
        return {
            name: values.float().mean().item()
            for name, values in super().measure(model, batch).items()
        }


class TensorPredict(Halves):
    def predict(self, model: nn.Module, batch: Batch) -> Any:
        return model(batch["x"])


class LeavesLater(Halves):
    """As a script does that has seen enough."""

    steps = 0

    def loss(self, model: nn.Module, batch: Batch) -> Any:
        if model.training:
            LeavesLater.steps += 1
        if LeavesLater.steps > 4:
            sys.exit(0)
        return super().loss(model, batch)


_countdown = [150]


def leave(sample: dict[str, Any], generator: np.random.Generator) -> Any:
    _countdown[0] -= 1
    if _countdown[0] < 0:
        sys.exit(0)
    return sample | {"x": sample["x"] + generator.normal(0, 0.01, 2).astype("f4")}


class Uneven(Halves):
    """One sample is of length 0: ragged arrays may be empty."""

    def samples(self) -> Any:
        sizes = np.arange(80) % 4
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        values = np.random.default_rng(0).normal(size=(int(offsets[-1]), 2)).astype("f4")
        return {"side": points(self)["side"], "bag": Ragged(values, offsets)}

    def loss(self, model: nn.Module, batch: Batch) -> Any:
        logits = torch.segment_reduce(
            model(batch["bag"]), "mean", offsets=batch["bag.offsets"], initial=0.0
        )
        return F.cross_entropy(logits, batch["side"], reduction="none")

    def measure(self, model: nn.Module, batch: Batch) -> Any:
        losses = self.loss(model, batch)
        return {"accuracy": losses < 0.7, "doubt": losses}

    def predict(self, model: nn.Module, batch: Batch) -> Any:
        return {"side": batch["side"], "loss": self.loss(model, batch)}
