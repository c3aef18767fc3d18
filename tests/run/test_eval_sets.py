"""`eval.sets` and the parts of a mixture: each held-out text has its own loss, interval, best checkpoint and early stopping."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import science
import tiny_run
import torch

import instar
from instar.config.errors import ConfigError
from instar.config.load import load_config
from instar.config.schema import RunConfig
from instar.data.source import Source
from instar.data.text.dataset import create_dataset_files
from instar.logs.plot.compose import ChartRequest, compose
from instar.logs.read.record import read_record
from instar.record.rundir import RunDir
from instar.run.load_config import load_run_config
from instar.run.start.preflight import preflight
from instar.run.state.early_stopping import MetricState, MetricTracker

BOOKS = [f"the {n}th book tells of {n * n} things" for n in range(300)]
CODE = [f"def f{n}(x): return x + {n}" for n in range(300)]
GERMAN = "".join(f"{n} zum Quadrat ist {n * n}.\n" for n in range(60))
CONFIG = """\
name: several
model: {n_layer: 1, n_head: 2, n_embd: 32, context: 32}
data:
  path: tokens
  tokenizer: byte
  mixture:
    - {source: books.jsonl, name: books, weight: 1}
    - {source: code.jsonl, name: code, weight: 3}
train: {until: 12it, batch_size: 4}
eval:
  eval_interval: 2
  sets:
    - {name: german, source: german.txt}
    - {name: rare, source: german.txt, eval_interval: 6}
checkpoint: {best_of: [loss, german/loss, books/loss], keep_last: 20}
learning_rate: {warmup_iters: 2, lr_decay_iters: 12}
record: {log_interval: 1, sample_tokens: 0, report: false}
device: cpu
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tiny_run.Place:
    monkeypatch.chdir(tmp_path)
    for name, texts in (("books", BOOKS), ("code", CODE)):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        Path(f"{name}.jsonl").write_text(lines)
    Path("german.txt").write_text(GERMAN)
    Path("run.yaml").write_text(CONFIG)
    return tiny_run.Place(tmp_path, science.forks())


def train_run(place: tiny_run.Place, name: str, *keys: str, ranks: int = 1) -> Path:
    children = place.train(place.path / name, *keys, ranks=ranks)
    assert tiny_run.codes(children) == [0] * ranks, tiny_run.output_of(children)
    return place.path / name


def evaluations(run: Path) -> dict[str, dict[int, float]]:
    """The loss of each split at each step; of a part of the validation split, as `val/<part>`."""
    losses: dict[str, dict[int, float]] = {}
    for event in tiny_run.course(run, "eval"):
        losses.setdefault(event["split"], {})[event["step"]] = event["loss"]
        for name, value in event["extra"].items():
            if name.endswith("/loss"):
                losses.setdefault(f"val/{name[:-5]}", {})[event["step"]] = value
    return losses


@torch.no_grad()
def mean_loss(model: torch.nn.Module, source: Source, samples: range) -> float:
    columns = source.read(np.arange(samples.start, samples.stop))
    inputs, targets = (torch.from_numpy(columns[name]) for name in ("inputs", "targets"))
    return model(inputs, targets, per_sample=True).sum().item() / int((targets >= 0).sum())


def test_sets_and_parts_have_the_losses_of_their_texts(place: tiny_run.Place) -> None:
    run = train_run(place, "one")
    losses = evaluations(run)
    assert {name: [*steps] for name, steps in losses.items()} == {
        "val": [2, 4, 6, 8, 10, 12],
        "val/books": [2, 4, 6, 8, 10, 12],
        "val/code": [2, 4, 6, 8, 10, 12],
        "german": [2, 4, 6, 8, 10, 12],
        "rare": [6, 12],
    }
    prepared_run = preflight(load_run_config("run.yaml"), 1)
    task, model = prepared_run.spec.task(prepared_run.config), instar.load_model(run, "cpu")
    german, val = task.held_out("german"), task.held_out("val")
    text = german.read(np.arange(len(german)))["inputs"].flatten()
    assert bytes(text[: len(GERMAN) - 1].tolist()).decode() == GERMAN[:-1]
    parts = task.held_out_parts()
    assert [len(members) for members in parts.values()] == [18, 13]
    expected = {
        "german": mean_loss(model, german, range(len(german))),
        "val": mean_loss(model, val, range(len(val))),
        **{f"val/{name}": mean_loss(model, val, members) for name, members in parts.items()},
    }
    expected["rare"] = expected["german"]
    last = {name: steps[12] for name, steps in losses.items()}
    assert last == pytest.approx(expected, rel=1e-6)
    assert len({round(loss, 3) for loss in expected.values()}) == 4, (
        "texts that no loss tells apart"
    )
    pointers = {path.name for path in (run / "checkpoints").glob("best*")}
    assert pointers == {"best", "best-german%2Floss", "best-books%2Floss"}

    two = train_run(place, "two", ranks=2)
    for name, steps in evaluations(two).items():
        assert steps == pytest.approx(losses[name], rel=1e-6)
    records = [read_record(RunDir(folder)) for folder in (run, two)]
    sets = ["german/loss", "rare/loss", "val/books/loss", "val/code/loss"]
    (panel,) = compose(records[:1], ChartRequest()).panels
    assert {curve.metric for curve in panel.curves} == {"loss", "val/loss", *sets}
    comparison = instar.compare([run, two]).metrics
    assert {*comparison} == {"val/loss", *sets, "val/bits_per_byte", "loss"}


def test_files_that_are_trained_on_too_are_said(place: tiny_run.Place) -> None:
    messages: list[str] = []
    config = load_run_config("run.yaml").config
    sets = config.eval.sets
    create_dataset_files(config.data, config.data_seed, say=messages.append, sets=sets)
    assert not [text for text in messages if "eval.sets" in text]
    (place.path / "link.txt").symlink_to("code.jsonl")
    wider_set = sets[0].model_copy(update={"source": "*.txt"})
    create_dataset_files(config.data, config.data_seed, say=messages.append, sets=(wider_set,))
    assert [text for text in messages if "eval.sets" in text] == [
        "warning: 1 of 2 files of eval.sets german are files of code.jsonl too: their text is trained on"
    ]


def test_a_resumed_run_evaluates_its_sets_where_it_would_have(place: tiny_run.Place) -> None:
    full_run, parts = train_run(place, "whole"), train_run(place, "parts", "train.until=[5it]")
    children = place.resume(parts, "--until", "12it")
    assert tiny_run.codes(children) == [0], tiny_run.output_of(children)
    losses = evaluations(parts)
    # where it ended, it was evaluated once more
    for name, steps in evaluations(full_run).items():
        assert {n: loss for n, loss in losses[name].items() if n in steps} == steps


def test_a_set_stops_the_run(place: tiny_run.Place) -> None:
    rules = "early_stopping.rules=[{metric: rare/loss, patience: 2, delta: 100}]"
    run = train_run(place, "stopped", rules, "train.until=[40it]", ranks=2)
    # the first evaluation is the best so far; two more of this set are not better
    assert tiny_run.events(run, "stop")[-1]["step"] == 18


def test_what_was_not_measured_is_not_judged() -> None:
    class Watched(RunConfig):
        @property
        def metrics(self) -> dict[str, str]:  # type: ignore[override]
            return {"loss": "min", "code/loss": "min"}

    config = Watched.model_validate(
        {
            "checkpoint": {"best_of": ["loss", "code/loss"]},
            "early_stopping": {"rules": [{"metric": "code/loss", "patience": 1}]},
        }
    )
    tracker = MetricTracker(config)
    state = tracker.update(MetricState(), {"loss": 3.0, "code/loss": 2.0}, 1)
    later = tracker.update(state, {"loss": 2.9}, 2)
    assert tracker.best_at(later, 2) == ("loss",)
    assert tracker.stop_reason(later) is None
    assert later.best["code/loss"] == state.best["code/loss"]
    assert tracker.stop_reason(tracker.update(later, {"loss": 2.8, "code/loss": 2.0}, 3))


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ("[{name: val, source: german.txt}]", r"sets\[0\].name: there is another 'val' in records"),
        (
            "[{name: a, source: german.txt}, {name: a, source: german.txt}]",
            r"sets\[1\].name: there is another 'a'",
        ),
        ("[{name: code, source: german.txt}]", "a part of data.mixture has the name 'code'"),
        (
            "[{name: a, source: german.txt, eval_interval: 3}]",
            r"\(3\) must be a multiple of eval.eval_interval \(2\)",
        ),
        ("[{name: a/b, source: german.txt}]", r"sets\[0\].name"),
        ("[{name: a}]", "source"),
    ],
)
@pytest.mark.usefixtures("place")
def test_sets_that_cannot_be_told_apart_are_refused(sets: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("run.yaml", [f"eval.sets={sets}", "checkpoint.best_of=[loss]"])


def test_a_set_without_text_is_named(place: tiny_run.Place) -> None:
    (child,) = place.train(
        place.path / "none", "eval.sets=[{name: a, source: none.txt}]", "checkpoint.best_of=[loss]"
    )
    assert child.finish() == 2
    assert "eval.sets[0].source" in child.output()
    train_run(place, "first", "train.until=[1it]")
    Path("german.txt").write_text(GERMAN.replace("zum", "zu"))
    (child,) = place.train(place.path / "second", "train.until=[1it]")
    assert child.finish() == 2
    assert "eval.sets[0].source" in child.output()
    assert "changed" in child.output()
