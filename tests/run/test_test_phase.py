"""The final test on real ranks: every sample once, by the weights that were best."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import science
from cases import parametrize_first
from needed import needs
from numpy.typing import NDArray
from safetensors.numpy import load_file
from science import evaluations, last_step, pointer_target, result
from tiny_run import Place, codes, events, output_of

from instar.checkpoint.manifest import encode_json, read_json
from instar.data.split import divide_samples
from instar.logs.query.summary import summarize
from instar.logs.read.record import read_record
from instar.logs.text.summary import best_held_out
from instar.record.events import Eval, RunFinished, read_events
from instar.record.format import eval_line, finished_line
from instar.record.rundir import RunDir
from instar.run.output.predictions import MAX_CLASSES, confusion_matrices

SEED = 1337
FOREVER = ("early_stopping.rules=[]",)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return science.place(tmp_path)


def train_run(place: Place, *settings: str, name: str = "run", ranks: int = 1) -> Path:
    run_dir = place.path / name
    children = place.train(run_dir, *settings, ranks=ranks)
    assert codes(children) == [0] * ranks, output_of(children)
    return run_dir


def outcome(place: Place, run_dir: Path, *words: object, ranks: int = 1) -> dict[str, Any]:
    children = place.instar("test", run_dir, *words, ranks=ranks)
    assert codes(children) == [0] * ranks, output_of(children)
    return result(run_dir)


def predictions(run_dir: Path) -> dict[str, NDArray[Any]]:
    table = pq.read_table(run_dir / "test" / "predictions.parquet")
    return {name: np.array(table[name].to_pylist()) for name in table.column_names}


def chances(run_dir: Path, step: str, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
    """What a checkpoint's file of weights says of points, in plain numpy."""
    weights = load_file(run_dir / "checkpoints" / step / "model.safetensors")
    rng = np.random.default_rng(SEED)
    x = 3 * rng.normal(size=(80, 2)).astype(np.float32)[numbers]
    hidden = np.maximum(x @ weights["up.weight"].T + weights["up.bias"], 0)
    logits = (hidden @ weights["down.weight"].T + weights["down.bias"]).astype(np.float64)
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(powers / powers.sum(1, keepdims=True))


about = partial(pytest.approx, abs=1e-5)


@parametrize_first("samples", [23, 2], first=1)
def test_any_number_of_ranks_tests_every_sample_once_and_alike(place: Place, samples: int) -> None:
    """At the end of a run of two ranks, and of its best checkpoint on one, two and three; also
    where there are more ranks than samples."""
    run_dir = train_run(place, f"data.test={samples}", ranks=2)
    at_end, file = result(run_dir), run_dir / "test" / "predictions.parquet"
    bytes_at_end = file.read_bytes()
    assert at_end["weights"] == "best"
    for ranks in (1, 2, 3):
        file.unlink()
        test_result = outcome(place, run_dir, ranks=ranks)
        assert test_result | {"weights": "best"} == at_end
        assert file.read_bytes() == bytes_at_end
    assert {path.name for path in file.parent.iterdir()} == {"result.json", file.name}

    columns = predictions(run_dir)
    splits = divide_samples(80, val=21, test=samples, seed=SEED)
    assert columns["sample"].tolist() == columns["number"].tolist() == splits["test"].tolist()
    metrics = {name: metric["value"] for name, metric in at_end["metrics"].items()}
    side, guesses, chance = columns["side"], columns["side.predicted"], columns["chances"]
    assert metrics["accuracy"] == np.mean(side == guesses)
    assert metrics["loss"] == about(-np.mean(np.log(chance[np.arange(samples), side])))
    assert metrics["doubt"] == about(np.mean(1 - chance.max(1)))
    classes = range(max(*side, *guesses) + 1)
    counts = [[int(np.sum((side == a) & (guesses == b))) for b in classes] for a in classes]
    assert at_end["confusion"] == {"side": counts}


@pytest.mark.torture
def test_ranks_on_hosts_without_a_shared_disk_are_refused(place: Place) -> None:
    host = place.path / "host"
    shutil.copytree(place.path, host, ignore=shutil.ignore_patterns("host"))
    children = Place(host, place.forks).train(
        Path("run"), ranks=2, body="failures:rank_1_on_another_host"
    )
    assert codes(children) == [2, 2], output_of(children)
    assert "is not seen by" in output_of(children)
    assert not (host / "run").exists()


def test_the_mark_best_means_the_metric_that_the_pointer_best_follows(place: Place) -> None:
    run_dir = train_run(place, "checkpoint.best_of=[accuracy, loss]", "checkpoint.keep_best=9")
    all_events = list(read_events(run_dir / "events.jsonl"))
    evals = [e for e in all_events if isinstance(e, Eval) and e.split == "val"]
    best_steps = [f"step-{e.step}" for e in evals if e.best]
    best_loss_steps = [f"step-{e.step}" for e in evals if "loss" in e.best_of]
    assert best_steps != best_loss_steps, "the two metrics must differ in this run"
    assert best_steps[-1] == pointer_target(run_dir, "best")
    assert best_loss_steps[-1] == pointer_target(run_dir, "best-loss")
    accuracies = {f"step-{e.step}": e.extra["accuracy"] for e in evals}
    assert accuracies[best_steps[-1]] == max(accuracies.values())

    first_best = next(e for e in evals if e.best)
    only_loss = next(e for e in evals if e.best_of == ("loss",))
    assert "best accuracy" in eval_line(first_best)
    assert not only_loss.best
    assert "best loss" in eval_line(only_loss)

    summary = summarize(read_record(RunDir(run_dir)))
    name, value = best_held_out(summary) or ("", None)
    assert name == "val/accuracy"
    assert value is not None
    assert f"step-{value.step}" == best_steps[-1]
    end = next(e for e in all_events if isinstance(e, RunFinished))
    best_text = f"best accuracy {accuracies[best_steps[-1]]:.4g} at {value.step:,}"
    assert best_text in finished_line(end, run_dir, stop_reason="")


def test_the_best_weights_are_tested_though_the_last_are_worse(place: Place) -> None:
    run_dir = train_run(place)
    best, last = pointer_target(run_dir, "best"), pointer_target(run_dir, "latest")
    losses = dict(evaluations(run_dir))
    steps = [int(name.removeprefix("step-")) for name in (best, last)]
    assert losses[steps[0]]["loss"] < losses[steps[1]]["loss"]
    assert result(run_dir)["step"] == steps[0] < steps[1] == last_step(run_dir, 0)
    of = predictions(run_dir)
    assert of["chances"] == about(chances(run_dir, best, of["number"]))
    assert of["chances"] != about(chances(run_dir, last, of["number"]))
    metrics = {"loss": result(run_dir)["metrics"]["loss"]["value"]}
    assert evaluations(run_dir, "test")[0][1]["loss"] == metrics["loss"]


GROWTH = [
    {"name": "widen", "value": {"axis": "hidden", "size": 40}, "when": {"at_step": 31}},
    {"name": "set_lr", "value": 3.0, "when": {"at_step": 31}},
]


def test_the_best_is_tested_in_the_shape_that_it_had(place: Place) -> None:
    """Two ranks grow after it, and learn nothing more; the last weights have another shape."""
    settings = *FOREVER, f"schedule={json.dumps(GROWTH)}", "train.until=[45it]"
    run_dir = train_run(place, *settings, ranks=2)
    best, last = pointer_target(run_dir, "best"), pointer_target(run_dir, "latest")
    sizes = [
        load_file(run_dir / "checkpoints" / step / "model.safetensors")["up.bias"].size
        for step in (best, last)
    ]
    assert sizes == [24, 40]
    of = predictions(run_dir)
    assert of["chances"] == about(chances(run_dir, best, of["number"]))
    at_end = result(run_dir)
    assert outcome(place, run_dir, "--from", "best") | {"weights": "best"} == at_end
    outcome(place, run_dir, "--from", "latest", ranks=2)
    of = predictions(run_dir)
    assert of["chances"] == about(chances(run_dir, last, of["number"]))


def test_the_last_weights_are_tested_where_the_config_says_so(place: Place) -> None:
    run_dir = train_run(place, "test.weights=last", *FOREVER, "train.until=[22it]")
    assert (result(run_dir)["step"], result(run_dir)["weights"]) == (22, "last")
    of = predictions(run_dir)
    assert of["chances"] == about(chances(run_dir, "step-22", of["number"]))


def test_the_best_weights_are_not_promised_where_nothing_saves_them(place: Place) -> None:
    children = place.train(place.path / "run", "checkpoint.on_best=false")
    assert codes(children) == [2]
    assert "set checkpoint.on_best: true, or test.weights: last" in output_of(children)


@pytest.mark.parametrize("weights", ["best", "last"])
def test_an_average_of_the_weights_is_what_is_tested(place: Place, weights: str) -> None:
    run_dir = train_run(place, "train.ema=0.9", f"test.weights={weights}")
    at_end = result(run_dir)
    start = {"best": "best", "last": "latest"}[weights]
    assert outcome(place, run_dir, "--from", start) | {"weights": weights} == at_end
    step = f"step-{at_end['step']}"
    assert predictions(run_dir)["chances"] != about(
        chances(run_dir, step, predictions(run_dir)["number"])
    )


@needs("graphs")
def test_graphs_are_tested_once_each_on_any_number_of_ranks(place: Place) -> None:
    run_dir = place.path / "run"
    words = "train", "graphs.yaml", "--set", f"record.run_dir={run_dir}"
    children = place.instar(*words, ranks=2)
    assert codes(children) == [0, 0], output_of(children)
    at_end, file = result(run_dir), run_dir / "test" / "predictions.parquet"
    bytes_at_end = file.read_bytes()
    for ranks in (1, 3):
        assert outcome(place, run_dir, ranks=ranks) | {"weights": "best"} == at_end
        assert file.read_bytes() == bytes_at_end
    of, graphs = predictions(run_dir), science.graphs()
    numbers = divide_samples(64, val=13, test=11, seed=SEED)["test"]
    assert of["sample"].tolist() == numbers.tolist()
    assert of["side"].tolist() == graphs["side"][numbers].tolist()  # type: ignore[index, call-overload]
    metrics = {name: metric["value"] for name, metric in at_end["metrics"].items()}
    assert metrics["side/accuracy"] == np.mean(of["side"] == of["side.predicted"])
    assert metrics["size/mae"] == about(np.mean(np.abs(of["size"] - of["size.predicted"])))
    assert np.sum(at_end["confusion"]["side"]) == 11


def test_predictions_are_not_written_where_nobody_wants_them(place: Place) -> None:
    run_dir = train_run(place, "test.predictions=false")
    assert {path.name for path in (run_dir / "test").iterdir()} == {"result.json"}
    assert result(run_dir)["confusion"] == {}
    assert events(run_dir, "stop")


def test_whole_numbers_that_are_no_classes_have_no_confusion_matrix(tmp_path: Path) -> None:
    table = {
        "kind": [0, 1, 1, -1],
        "kind.predicted": [0, 1, 0, 1],
        "id": [5, 2**40, 7, 8],
        "id.predicted": [5, 2**40, 7, 8],
        "change": [1, 2, 3, 4],
        "change.predicted": [-1, 2, 3, 4],
    }
    pq.write_table(pa.table(table), tmp_path / "predictions.parquet")
    assert confusion_matrices(tmp_path / "predictions.parquet") == {"kind": [[1, 0], [1, 1]]}
    pq.write_table(pa.table(table).slice(0, 0), tmp_path / "empty.parquet")
    assert confusion_matrices(tmp_path / "empty.parquet") == {}


@pytest.mark.parametrize(
    ("target", "matrix"),
    [
        (np.array([0, 1, 1], np.uint8), [[1, 0], [1, 1]]),
        (np.array([False, True, True]), [[1, 0], [1, 1]]),
        (np.array([0.0, 1.0, 1.0], np.float32), [[1, 0], [1, 1]]),
        (np.array([0.0, np.nan, 1.0]), [[1, 0], [0, 1]]),
        (np.array([0.0, 0.5, 1.0]), None),
        (np.array([0.0, 1e300, 1.0]), None),
        (["a", "b", "c"], None),
        ([[1, 0], [0, 1], [0, 1]], None),
        ([0, 1, 10**4], None),
    ],
    ids=str,
)
def test_a_target_of_any_type_has_a_matrix_if_it_is_classes(
    tmp_path: Path, target: object, matrix: list[list[int]] | None
) -> None:
    """And never ends the test of a run that is trained."""
    table = pa.table({"kind": pa.array(target), "kind.predicted": pa.array([0, 0, 1], pa.uint8())})
    pq.write_table(table, tmp_path / "predictions.parquet")
    matrices = confusion_matrices(tmp_path / "predictions.parquet")
    assert matrices == ({} if matrix is None else {"kind": matrix})


def test_the_largest_matrices_can_be_read_again(tmp_path: Path) -> None:
    classes = np.arange(MAX_CLASSES)
    columns = {f"{name}{end}": classes for name in "abcd" for end in ("", ".predicted")}
    pq.write_table(pa.table(columns), tmp_path / "predictions.parquet")
    matrices = confusion_matrices(tmp_path / "predictions.parquet")
    assert [*matrices] == ["a", "b"]
    (tmp_path / "result.json").write_bytes(encode_json({"confusion": matrices}))
    assert read_json(tmp_path / "result.json")["confusion"] == matrices
