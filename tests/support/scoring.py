"""Tasks with metrics of a whole evaluation set, and evaluations of what samples say of themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from science import Halves, Net
from torch import Tensor, nn
from torchmetrics import MeanSquaredError, Metric, MetricCollection
from torchmetrics.classification import BinaryAUROC, MulticlassAUROC, MulticlassF1Score
from torchmetrics.regression import PearsonCorrCoef, R2Score, SpearmanCorrCoef

from instar.config.schema import ParallelConfig
from instar.custom import Batch
from instar.data.columns import Columns
from instar.data.source import InMemorySource
from instar.data.split import divide_samples
from instar.distributed.signals import StopSignal
from instar.distributed.world import World, join_group
from instar.run.state.sync_point import SyncPoint
from instar.run.step.evaluate import EvaluationOptions, evaluate_source
from instar.tasks.task import Measured, Tally


def largest_gap(predictions: NDArray[Any], true: NDArray[Any]) -> float:
    """Depends on the order of the samples."""
    return float(np.max(np.abs(np.cumsum(predictions - true))))


CLASSES = 3
LAST_VALIDATED = divide_samples(80, val=21, test=23, seed=1337)["val"][-1]
OF_CLASSES, OF_KNOWN = ("f1", "auroc"), ("known", "tail")
NAMES = (*OF_CLASSES, "r2", "pearson", "spearman", "root", "gap", *OF_KNOWN)


def metrics() -> dict[str, Any]:
    return {
        "f1": MulticlassF1Score(CLASSES, average="macro"),
        "auroc": MulticlassAUROC(CLASSES),
        "r2": R2Score(),
        "pearson": PearsonCorrCoef(),
        "spearman": SpearmanCorrCoef(),
        "root": MeanSquaredError() ** 0.5,
        "gap": largest_gap,
        "known": BinaryAUROC(),
        "tail": largest_gap,
    }


def inputs(batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
    """Of few samples for `OF_KNOWN`: of none on some ranks."""
    classes, values = (batch["chances"], batch["label"]), (batch["said"], batch["true"])
    mask = batch["known"]
    return {
        **dict.fromkeys(NAMES, values),
        **dict.fromkeys(OF_CLASSES, classes),
        "known": (batch["said"][mask].sigmoid(), (batch["true"][mask] > 0).long()),
        "tail": (batch["said"][mask], batch["true"][mask]),
    }


@dataclass(frozen=True)
class Scored:
    """A task whose samples say themselves what is predicted of them."""

    metrics: tuple[str, ...] = ("loss", *NAMES)
    cluster: int = 1
    random: bool = False

    def set_metrics(self) -> Mapping[str, object]:
        return metrics()

    def derived(self, metrics: Mapping[str, float]) -> dict[str, float]:
        return {"missed": 1 - metrics["f1"]}

    def measure(self, model: nn.Module, batch: Batch, *, predict: bool) -> Measured:
        del model, predict
        return Measured({"loss": Tally(batch["said"], batch["said"].abs())}, inputs(batch))


def columns(samples: int, nan: bool = False) -> Columns:
    """
    Args:
        nan: whether the last prediction is NaN.
    """
    rng = np.random.default_rng(samples)
    true = rng.normal(0.5, 3, samples).astype(np.float32)
    chances = rng.dirichlet([1] * CLASSES, samples).astype(np.float32)
    predictions = true + rng.normal(0, 1, samples).astype(np.float32)
    if nan:
        chances[-1] = predictions[-1] = np.nan
    return {
        "chances": chances,
        "label": rng.integers(CLASSES, size=samples),
        "true": true,
        "said": predictions,
        "known": np.arange(samples) >= max(samples - 5, 5),
    }


def score(world: World, samples: int, batch_size: int, nan: bool = False) -> dict[str, float]:
    evaluation = evaluate_source(
        Scored(),  # type: ignore[arg-type]
        nn.Identity(),
        InMemorySource(columns(samples, nan)),
        EvaluationOptions(batch_size, seed=0),
        SyncPoint(world, StopSignal()),
    )
    assert evaluation is not None
    return evaluation.values()


def score_all(folder: str, cases: Sequence[tuple[int, int, bool]]) -> int:
    """The body of a rank."""
    with join_group(ParallelConfig(), "cpu") as world:
        scores = [score(world, *case) for case in cases]
        Path(folder, f"w{world.size}-{world.rank}").write_text(json.dumps(scores))
    return 0


class Once(nn.Module):
    """Counts how often it is run."""

    runs = 0

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.up, self.down = net.up, net.down

    def forward(self, x: Tensor) -> Tensor:
        Once.runs += 1
        logits: Tensor = self.down(self.up(x).relu())
        return logits


def doubts(chances: NDArray[Any]) -> float:
    return float(np.median(1 - chances.max(1)))


class Outputs(Halves):
    """One forward pass gives the loss, the metrics and the predictions."""

    better = {"accuracy": "max", "auroc": "max", "doubt": "min"}  # noqa: RUF012

    def module(self, shape: Any) -> nn.Module:
        return Once(Net(shape))

    def loss(self, model: nn.Module, batch: Batch) -> Any:
        logits = model(batch["x"])
        return F.cross_entropy(logits, batch["side"], reduction="none"), logits

    def metrics(self) -> dict[str, Metric | Any]:
        return {"auroc": BinaryAUROC(), "doubt": doubts}

    def measure(self, logits: Tensor, batch: Batch) -> dict[str, Any]:
        chances = logits.softmax(1)
        return {
            "accuracy": logits.argmax(1) == batch["side"],
            "auroc": (chances[:, 1], batch["side"]),
            "doubt": (chances,),
        }

    def predict(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {
            "side": batch["side"],
            "side.predicted": logits.argmax(1),
            "chances": logits.softmax(1),
        }


class Unknown(Outputs):
    better = {"accuracy": "max", "doubt": "min"}  # noqa: RUF012


class Unnamed(Outputs):
    def measure(self, logits: Tensor, batch: Batch) -> dict[str, Any]:
        return super().measure(logits, batch) | {"certain": logits.softmax(1).amax(1)}


class PerClass(Outputs):
    def metrics(self) -> dict[str, Any]:
        f1 = MulticlassF1Score(2, average="none")
        return {"auroc": f1, "doubt": doubts}

    def measure(self, logits: Tensor, batch: Batch) -> dict[str, Any]:
        return super().measure(logits, batch) | {"auroc": (logits, batch["side"])}


class NoTuple(Outputs):
    def measure(self, logits: Tensor, batch: Batch) -> dict[str, Any]:
        return super().measure(logits, batch) | {"auroc": logits[:, 1]}


class Undeclared(Outputs):
    def metrics(self) -> dict[str, Any]:
        return {"doubt": doubts}


class Rejecting(Outputs):
    def measure(self, logits: Tensor, batch: Batch) -> dict[str, Any]:
        return super().measure(logits, batch) | {"auroc": (logits[:, 1],)}


class NoTensor(Outputs):
    def measure(self, logits: Tensor, batch: Batch) -> dict[str, Any]:
        return super().measure(logits, batch) | {"auroc": (logits[:, 1], [1.0])}


class Single(Outputs):
    def measure(self, logits: Tensor, batch: Batch) -> dict[str, Any]:
        return super().measure(logits, batch) | {"doubt": (logits.mean(),)}


class Several(Outputs):
    def metrics(self) -> dict[str, Any]:
        return super().metrics() | {"doubt": lambda chances: {"mean": chances.mean()}}


class Collected(Outputs):
    def metrics(self) -> dict[str, Any]:
        return super().metrics() | {"auroc": MetricCollection([BinaryAUROC()])}


def fail_on_many(chances: NDArray[Any]) -> float:
    """Fails for more samples than one batch has."""
    return 1 / max(0, 9 - len(chances))


class FailsOnAll(Outputs):
    def metrics(self) -> dict[str, Any]:
        return super().metrics() | {"doubt": fail_on_many}


class FailsOnLastRank(Outputs):
    def measure(self, logits: Tensor, batch: Batch) -> dict[str, Any]:
        wrong = {"auroc": (logits.argmax(),)} if LAST_VALIDATED in batch["number"] else {}
        return super().measure(logits, batch) | wrong


class NoMetric(Outputs):
    def metrics(self) -> dict[str, Any]:
        return {"auroc": 0.5, "doubt": doubts}
