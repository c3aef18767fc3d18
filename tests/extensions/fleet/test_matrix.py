"""`instar fleet up CONFIG --matrix data.fold=0-2`: a run config, trained once for each value, and compared."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forks import Forks

import instar
from instar.api import load_run
from instar.cli.main import main
from instar.config.errors import ConfigError
from instar.config.load import load_config
from instar.extensions.fleet.matrix import load_fleet_or_run
from instar.extensions.fleet.plan import instances_of
from instar.logs.text.values import metric_value_text

TASK = """\
import numpy as np
from torch import nn
from instar.custom import CustomTask

class Lines(CustomTask):
    better = {"error": "min"}

    def samples(self):
        x = np.random.default_rng(self.seed).normal(size=(31, 3)).astype("f4")
        return {"x": x, "y": x.sum(1)}

    def module(self, shape):
        return nn.Linear(3, 1)

    def loss(self, model, batch):
        predictions = model(batch["x"])[:, 0]
        return (predictions - batch["y"]).square(), predictions

    def measure(self, predictions, batch):
        return {"error": (predictions - batch["y"]).abs()}
"""
CONFIG = """\
name: lines
task: lines:Lines
data: {test: 0.2}
train: {until: 6it, batch_size: 8}
eval: {eval_interval: 2}
test: {at_end: true}
learning_rate: {warmup_iters: 1}
record: {report: false}
"""


pytestmark = pytest.mark.usefixtures("place")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forks: Forks) -> Path:
    monkeypatch.chdir(tmp_path)
    runs_in = SimpleNamespace(executable=str(forks.python))
    monkeypatch.setattr("instar.extensions.fleet.plan.sys", runs_in)
    (tmp_path / "lines.py").write_text(TASK)
    (tmp_path / "lines.yaml").write_text(CONFIG)
    return tmp_path


def test_folds_are_trained_and_compared_with_two_commands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--matrix", "data.fold=0-2", "--set", "data.folds=3", "--set", "max_parallel=1"]
    assert main(["fleet", "up", "lines.yaml", *words]) == 0
    capsys.readouterr()
    assert main(["logs", "compare", "fleets/lines", "--at", "step=6"]) == 0
    text = capsys.readouterr().out
    runs = [load_run(f"runs/lines-{fold}") for fold in range(3)]
    rows = {line.split("  ")[0]: line for line in text.splitlines() if line}
    assert "0, 1, 2" in rows["lines"] or "0, 1, 2" in text
    results = [json.loads((run.path / "test/result.json").read_text()) for run in runs]
    losses = [result["metrics"]["loss"]["value"] for result in results]
    mean, deviation = statistics.mean(losses), statistics.stdev(losses)
    assert rows["test/loss"].split()[1:] == [
        f"{mean:.4f}",
        f"±{metric_value_text('loss', deviation)}",
    ]
    errors = [min(run.record.series("val/error").value) for run in runs]
    assert rows["best val/error"].split()[2] == f"{statistics.mean(errors):.4f}"
    assert "not comparable" not in text
    # all three hold out other samples, together all that are not for the test
    bases = {json.dumps(result["basis"]) for result in results}
    assert len(bases) == 1

    comparison = instar.compare([run.path for run in runs], by="seed")
    (group,) = comparison.groups
    assert group.folds == (0, 1, 2)
    assert comparison.results["test/loss"][0].mean == pytest.approx(mean)
    assert comparison.results["test/loss"][0].deviation == pytest.approx(deviation)
    assert main(["logs", "compare", "fleets/lines", "--json"]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert facts["arms"][0]["folds"] == [0, 1, 2]
    assert facts["results"]["test/loss"]["lines"]["mean"] == pytest.approx(mean)


def test_two_configs_are_paired_by_their_folds(capsys: pytest.CaptureFixture[str]) -> None:
    for rate in ("1e-3", "1e-2"):
        for fold in "01":
            name = f"record.run_dir=runs/{rate}-{fold}"
            sets = ("data.folds=2", f"data.fold={fold}", f"optimizer.lr={rate}", name)
            words = [word for text in sets for word in ("--set", text)]
            assert main(["train", "lines.yaml", *words]) == 0
    capsys.readouterr()
    assert main(["logs", "compare", "runs/*", "--by", "seed", "--at-loss", "100"]) == 0
    text = capsys.readouterr().out
    assert "optimizer.lr" in text
    assert "not comparable" not in text
    assert "2 pairs of equal seed and fold" in text


def test_the_config_of_the_best_trial_is_a_file(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "rates.yaml").write_text(
        "name: rates\nmax_parallel: 1\n"
        "search: {sampler: grid, pruner: none, space: {optimizer.lr: {choices: [1e-3, 0.1]}, w: {choices: [4]}}}\n"
        "jobs: {train: {run: lines.yaml, set: {train.batch_size: '${w}', name: 'try-${attempt}', optimizer.weight_decay: 0.0}}}\n"
    )
    assert main(["fleet", "up", "rates.yaml"]) == 0
    output = capsys.readouterr().err
    assert "fleets/rates/best.yaml\nnext: instar train fleets/rates/best.yaml" in output
    text = (place / "fleets/rates/best.yaml").read_text()
    assert text.startswith("# written by instar fleet\n# best: trial ")
    trial = text.partition("trial ")[2][0]
    run = load_config(f"runs/rates-{trial}/run.yaml", import_task=False).config
    best = load_config("fleets/rates/best.yaml", import_task=False).config
    assert best.optimizer.lr == run.optimizer.lr
    assert (best.train.batch_size, best.optimizer.weight_decay) == (4, 0.0)
    assert best.name == "try-1"
    assert (best.record.run_dir, best.resume) == (None, "never")
    assert main(["train", "fleets/rates/best.yaml", "--until", "1it"]) == 0
    # somebody's own file stays
    (place / "fleets/rates/best.yaml").write_text("name: mine\n")
    assert main(["fleet", "resume", "rates"]) == 2
    assert (place / "fleets/rates/best.yaml").read_text() == "name: mine\n"


@pytest.mark.parametrize(
    ("dimensions", "values"),
    [
        (["data.fold=0-2"], [{"data.fold": n} for n in range(3)]),
        (["seed=1,2"], [{"seed": 1}, {"seed": 2}]),
        (["seed=1-2,7"], [{"seed": 1}, {"seed": 2}, {"seed": 7}]),
        (["optimizer.lr=[1e-3, 3e-3]"], [{"optimizer.lr": 1e-3}, {"optimizer.lr": 3e-3}]),
        (["optimizer.name=sgd,adamw"], [{"optimizer.name": "sgd"}, {"optimizer.name": "adamw"}]),
        (
            ["data.fold=0-1", "seed=5,6"],
            [{"data.fold": fold, "seed": seed} for fold in (0, 1) for seed in (5, 6)],
        ),
    ],
)
def test_a_matrix_is_the_product_of_its_dimensions(
    dimensions: list[str], values: list[dict[str, object]]
) -> None:
    fleet = load_fleet_or_run("lines.yaml", dimensions, ["data.folds=3", "max_parallel=2"])
    assert [instance.values for instance in instances_of(fleet.spec)] == values
    assert fleet.spec.name == "lines"
    assert fleet.spec.max_parallel == 2
    assert fleet.spec.jobs["train"].set == {"data.folds": 3}


@pytest.mark.parametrize(
    ("file", "dimensions", "message"),
    [
        ("lines.yaml", ["data.fold"], "--matrix: expects KEY=VALUES, not 'data.fold'; e.g."),
        ("lines.yaml", ["=1"], "expects KEY=VALUES"),
        ("lines.yaml", ["seed=1-1,1"], "a number is given twice"),
        ("lines.yaml", ["seed=1", "seed=2"], "a key has two lists of values"),
        ("lines.yaml", ["seed=[1, {]"], "--matrix seed="),
        ("fleet.yaml", ["seed=1,2"], "fleet.yaml is a fleet file (it has jobs)"),
        ("none.yaml", ["seed=1,2"], "no such file"),
    ],
)
def test_what_is_no_matrix_is_refused(
    place: Path, file: str, dimensions: list[str], message: str
) -> None:
    (place / "fleet.yaml").write_text(
        "name: f\nmatrix: {seed: [1]}\njobs: {a: {run: lines.yaml}}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_fleet_or_run(file, dimensions)
    assert message in str(caught.value)


def test_a_key_that_no_run_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "plan", "lines.yaml", "--matrix", "data.fould=0-2"]) == 2
    assert "data.fould" in capsys.readouterr().err


def test_a_key_of_the_matrix_is_not_set_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--matrix", "seed=1-3", "--set", "seed=9"]
    assert main(["fleet", "plan", "lines.yaml", *words]) == 2
    assert "'seed' is in matrix and in jobs.train.set" in capsys.readouterr().err
