"""Metrics of a whole evaluation set: the same on any number of ranks, and in everything that a run
says and decides."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import science
import scoring
import torch
from forks import MODULES, Forks, children_as_ranks
from science import evaluations, pointer_target, result, still_since
from tiny_run import codes, events, output_of

from instar.config.errors import ConfigError
from instar.config.load import load_config
from instar.data.columns import Columns
from instar.distributed.world import World
from instar.run.start.preflight import preflight
from instar.run.start.smoke_test_step import run_trial

ALONE = World(0, 0, 1, torch.device("cpu"), "none")
SIZES = [(2, 64), (3, 1), (7, 64), (17, 3), (100, 5), (100, 64), (1500, 40)]
"""samples and batch size: also with fewer samples, and fewer batches, than ranks"""
CASES = [*((*size, False) for size in SIZES), (17, 3, True), (1500, 40, True)]
"""and whether a prediction is NaN"""


def plain(columns: Columns) -> dict[str, float]:
    """What torchmetrics says of all samples at once, in float64."""
    tensors = {name: torch.from_numpy(np.asarray(values)) for name, values in columns.items()}
    batch = {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}
    inputs, metric_values = scoring.inputs(batch), {}
    for name, metric in scoring.metrics().items():
        outputs, true = inputs[name]
        if not len(outputs) or outputs.isnan().any():
            metric_values[name] = math.nan
        elif metric is scoring.largest_gap:
            metric_values[name] = metric(outputs.numpy(), true.numpy())
        else:
            metric.update(*inputs[name])
            metric_values[name] = float(metric.compute())
    return metric_values | {"missed": 1 - metric_values["f1"]}


@pytest.fixture(scope="module")
def server() -> Iterator[Forks]:
    """Forks processes that have imported torchmetrics, which takes seconds."""
    with Forks(*MODULES, "scoring") as forks:
        yield forks


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_any_number_of_ranks_computes_what_one_process_does(tmp_path: Path, server: Forks) -> None:
    expected_values = [plain(scoring.columns(samples, nan)) for samples, _, nan in CASES]
    scores = [scoring.score(ALONE, *case) for case in CASES]
    for ranks in (2, 3):
        arguments = "scoring:score_all", str(tmp_path), CASES
        children = children_as_ranks(server, ranks, *arguments, place=tmp_path)
        assert codes(children) == [0] * ranks, output_of(children)
        texts = {(tmp_path / f"w{ranks}-{rank}").read_text() for rank in range(ranks)}
        assert len(texts) == 1
        scores += json.loads(texts.pop())
    for actual, expected in zip(scores, 3 * expected_values, strict=True):
        assert set(actual) == {"loss", *expected}
        for name, value in expected.items():
            assert actual[name] == pytest.approx(value, rel=1e-6, abs=1e-6, nan_ok=True), name


def test_a_run_follows_them(tmp_path: Path, server: Forks) -> None:
    """Best checkpoint and early stopping by metrics of the whole set; the test's come from the same
    pass as its predictions."""
    place = science.place(tmp_path, server)
    run_dir = tmp_path / "run"
    settings = (
        "task=scoring:Outputs",
        "checkpoint.best_of=[auroc, doubt]",
        "early_stopping.rules=[{metric: auroc, patience: 3}]",
    )
    children = place.train(run_dir, *settings, ranks=2)
    assert codes(children) == [0, 0], output_of(children)
    rows = evaluations(run_dir)
    best = max(rows, key=lambda row: row[1]["auroc"])[0]
    assert pointer_target(run_dir, "best") == f"step-{best}"
    surest = min(rows, key=lambda row: row[1]["doubt"])[0]
    assert pointer_target(run_dir, "best-doubt") == f"step-{surest}"
    aurocs = [metrics["auroc"] for _, metrics in rows]
    assert rows[-1][0] == 60 or still_since(aurocs, better="max") == 3

    metrics_of_test = result(run_dir)["metrics"]
    table = pq.read_table(run_dir / "test" / "predictions.parquet")
    side = table["side"].to_numpy()
    chances = np.array(table["chances"].to_pylist())
    above = chances[side == 1, 1][:, None] - chances[side == 0, 1]
    assert metrics_of_test["auroc"]["value"] == pytest.approx(
        np.mean((above > 0) + (above == 0) / 2), abs=1e-6
    )
    assert metrics_of_test["doubt"]["value"] == pytest.approx(
        np.median(1 - chances.max(1)), abs=1e-6
    )
    assert metrics_of_test["auroc"]["standard_error"] is None
    assert metrics_of_test["auroc"]["weight"] == 23


@pytest.mark.parametrize("limit", [3, 4, 21])
def test_an_evaluation_runs_the_model_once_per_batch(tmp_path: Path, limit: int) -> None:
    science.place(tmp_path)
    settings = ("task=scoring:Outputs", "checkpoint.best_of=[auroc]", f"data.val={limit}")
    with science.trainer(tmp_path / "run", *settings) as run:
        scoring.Once.runs = 0
        run.evaluate()
    assert scoring.Once.runs == min(limit, 8)


REFUSED = {
    "Unknown": "Unknown.better must name auroc of metrics() too",
    "Unnamed": "Unnamed.better must name certain of measure() too, and whether max or min is better",
    "PerClass": "the metric auroc must be one number, not Tensor [2]: choose an average",
    "NoTuple": "measure's auroc must be a tuple of the tensors that metrics()['auroc'] takes",
    "Undeclared": "measure's auroc is a tuple, and metrics() declares no auroc that takes it",
    "Rejecting": "the metric auroc failed: TypeError",
    "NoTensor": "measure's auroc must be a tuple of tensors [samples, …]; number 2 of 2 is of type list",
    "Single": "measure's doubt must be a tuple of tensors [samples, …]; number 1 of 1 is of type Tensor []",
    "Several": "the metric doubt must be one number, not dict: choose an average, or declare a metric",
    "Collected": "not MetricCollection; declare each of its metrics",
    "NoMetric": "the metric auroc must be a torchmetrics.Metric or a function of arrays, not float",
}


@pytest.mark.parametrize("task", REFUSED)
def test_mistakes_are_named_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    science.place(tmp_path)
    monkeypatch.chdir(tmp_path)
    loaded_config = load_config(
        "run.yaml", [f"task=scoring:{task}", "precision=fp32", "checkpoint.best_of=[loss]"]
    )
    with pytest.raises(ConfigError) as caught:
        run_trial(preflight(loaded_config, 1), ALONE)
    assert REFUSED[task] in str(caught.value)


FAILING = {
    "FailsOnAll": (0, "the metric doubt failed: ZeroDivisionError: division by zero"),
    "FailsOnLastRank": (1, "measure's auroc must be a tuple of tensors"),
}


@pytest.mark.parametrize("task", FAILING)
def test_a_metric_that_fails_ends_all_ranks(tmp_path: Path, server: Forks, task: str) -> None:
    place = science.place(tmp_path, server)
    rank, message = FAILING[task]
    children = place.train(tmp_path / "run", f"task=scoring:{task}", ranks=2)
    assert 0 not in codes(children)
    (failure,) = events(tmp_path / "run", "failed")
    assert failure["rank"] == rank, failure
    assert message in failure["message"]
    assert message in output_of(children)
