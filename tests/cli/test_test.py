"""`instar test`, and what a run's config and its user's own task may have wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import science
from forks import INSTAR
from science import evaluations, last_step, pointer_target, result
from tiny_run import Place, codes, events, output_of

from instar.extensions import built_in
from instar.record.rundir import RunDir

OWN = """
from science import *

class Mean(Halves):
    def loss(self, model, batch):
        return F.cross_entropy(model(batch["x"]), batch["side"])

class TwiceAsMany(Halves):
    def loss(self, model, batch):
        return super().loss(model, batch).repeat(2)

class MeanAccuracy(Halves):
    def measure(self, model, batch):
        return {name: values.float().mean() for name, values in super().measure(model, batch).items()}

class Silent(Halves):
    def measure(self, model, batch):
        return {}

class Changed(Halves):
    pass  # Changed

class OtherTable(Halves):
    def shape(self):
        return Axes(hidden=self.model.hidden + 1)
    def module(self, shape):
        return Net(Axes(hidden=self.model.hidden))

class Unlisted(Halves):
    def module(self, shape):
        net = Net(shape)
        net.extra = nn.Linear(2, 3)
        return net

class Plain:
    better = Halves.better

class Bare(CustomTask):
    better = Halves.better
    def samples(self):
        return {}

class Uneven(Halves):
    def samples(self):
        found = dict(super().samples())
        return found | {"side": found["side"][:-1]}

class Empty(Halves):
    def samples(self):
        return {}

class Unsure(Halves):
    def measure(self, model, batch):
        return super().measure(model, batch) | {"doubt": batch["x"][:, 0] * float("nan")}
"""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "mine.py").write_text(OWN)
    return science.place(tmp_path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """With a run that has ended early: its best step is not its last one."""
    place = science.place(tmp_path_factory.mktemp("run"))
    children = place.train(place.path / "run", "checkpoint.keep_last=9")
    assert codes(children) == [0], output_of(children)
    return place


def files(run_dir: Path) -> dict[str, bytes]:
    """Of a run's folder, all that testing it must leave as it is."""
    all_files = [file for file in run_dir.rglob("*") if file.is_file()]
    changing_names = "events.jsonl", "lock", "report.html"
    stable_files = [
        f
        for f in all_files
        if f.parent.name not in ("test", "logs") and f.name not in changing_names
    ]
    return {str(file.relative_to(run_dir)): file.read_bytes() for file in stable_files}


def test_a_checkpoint_is_tested_as_it_was_when_it_was_made(run: Place) -> None:
    run_dir = run.path / "run"
    at_end, last, before = result(run_dir), last_step(run_dir, 0), files(run_dir)
    best = at_end["step"]
    assert best < last
    losses = {}
    for start in ("latest", "best", best, 5, last, f"step-{last}"):
        children = run.instar("test", "run", "--from", start)
        assert codes(children) == [0], output_of(children)
        test_result = result(run_dir)
        losses.setdefault(test_result["step"], []).append(test_result["metrics"])  # type: ignore[attr-defined]
        assert test_result["weights"] == f"step-{test_result['step']}"
    assert {step: len(metrics) for step, metrics in losses.items()} == {last: 3, best: 2, 5: 1}
    assert losses[best] == [at_end["metrics"]] * 2
    assert losses[last] == [losses[last][0]] * 3 != [at_end["metrics"]] * 3
    assert codes(run.instar("test", "run")) == [0]
    assert result(run_dir) | {"weights": "best"} == at_end
    assert files(run_dir) == before


def test_a_test_makes_no_step_and_leaves_the_record_of_the_run_as_it_was(run: Place) -> None:
    """It comes after it."""
    run_dir = run.path / "run"
    before, tests = events(run_dir), evaluations(run_dir, "test")
    assert codes(run.instar("test", "run", "--from", "5")) == [0]
    after = events(run_dir)
    assert after[: len(before)] == before
    assert {event["kind"] for event in after[len(before) :]} == {"eval"}
    assert len(evaluations(run_dir, "test")) == len(tests) + 1


def test_ranks_that_are_launched_test_alike(run: Place) -> None:
    """With `--nproc`; a change of the config is for this test only."""
    run_dir = run.path / "run"
    assert codes(run.instar("test", "run")) == [0]
    single_result, before = result(run_dir), files(run_dir)
    argv = ["test", "run", "--nproc", "2", "--set", "test.predictions=false"]
    paths = str(Path(science.__file__).parent), os.environ.get("PYTHONPATH", "")
    where = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    child = run.forks.start(INSTAR, argv, place=run.path, environment=where, launches=True)
    assert child.finish() == 0, child.output()
    assert result(run_dir) == single_result | {
        "confusion": {},
        "predictions": 0,
        "predictions_xxh3_128": "",
    }
    assert files(run_dir) == before


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["run", "--from", 77], 3, "no checkpoint step-77; there are step-5, step-10, step-15"),
        (["run", "--set", "data.test=5"], 2, "data.test was 23 when the run began"),
        (["elsewhere"], 2, "no run"),
    ],
)
def test_what_cannot_be_tested_is_refused(
    run: Place, words: Sequence[object], code: int, message: str
) -> None:
    children = run.instar("test", *words)
    assert codes(children) == [code]
    assert message in output_of(children)


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "unknown metric to stop by": (
        ("early_stopping.rules=[{metric: los}]",),
        "early_stopping.rules[0].metric: this run has no metric 'los'; did you mean 'loss'?",
    ),
    "unknown metric of the plateau": (
        ("learning_rate.plateau.metric=speed",),
        "this run has no metric 'speed'; there are loss, accuracy, doubt",
    ),
    "unknown metric of a best checkpoint": (
        ("checkpoint.best_of=[accurcy]",),
        "checkpoint.best_of[0]: this run has no metric 'accurcy'; did you mean 'accuracy'?",
    ),
    "a best checkpoint twice": (
        ("checkpoint.best_of=[loss, loss]",),
        "checkpoint.best_of must name one metric or several, each once",
    ),
    "no best checkpoint": (
        ("checkpoint.best_of=[]",),
        "checkpoint.best_of must name one metric or several, each once",
    ),
    "no patience": (
        ("early_stopping.rules=[{metric: loss, patience: 0}]",),
        "early_stopping.rules[0].patience must be a whole number greater than 0, got 0",
    ),
    "no patience on the plateau": (
        ("learning_rate.plateau.patience=0",),
        "learning_rate.plateau.patience must be a whole number greater than 0, got 0",
    ),
    "shares over 1": (
        ("data.val=0.6", "data.test=0.7"),
        "the shares of val and test sum to 1.3, which is more than 1",
    ),
    "nothing to train on": (("data.val=60", "data.test=30"), "nothing is left to train on"),
    "nothing to validate on": (("data.val=0",), "data.val: the val split is empty"),
    "nothing to test on": (("data.test=0",), "data.test: the test split is empty"),
    "another table than the module's": (
        ("task=mine:OtherTable",),
        "OtherTable: the shape's table says that up.weight is 25×2, and in the model it is 24×2",
    ),
    "a parameter that the table does not name": (
        ("task=mine:Unlisted",),
        "the shape's table says that extra.weight is not there, and in the model it is 3×2",
    ),
    "methods that are missing": (("task=mine:Bare",), "mine:Bare lacks module, loss"),
    "no subclass": (("task=mine:Plain",), "mine:Plain is no subclass of CustomTask"),
    "unequal lengths": (
        ("task=mine:Uneven",),
        "mine:Uneven.samples(): columns must have the same number of samples, got x 80, side 79",
    ),
    "no columns": (("task=mine:Empty",), "columns must have the same number of samples, got no"),
    "a mean loss": (
        ("task=mine:Mean",),
        "Mean.loss must be [samples], one for each of 8, not []: say reduction='none'",
    ),
    "too many losses": (
        ("task=mine:TwiceAsMany",),
        "TwiceAsMany.loss must be [samples], one for each of 8, not [16]",
    ),
    "a mean metric": (
        ("task=mine:MeanAccuracy",),
        "MeanAccuracy.measure's accuracy must be [samples], one for each of ",
    ),
    "metrics that are missing": (("task=mine:Silent",), "Silent.measure gave no accuracy, doubt"),
    "no module": (("task=nowhere:Task",), "there is no module 'nowhere'; it was looked for in"),
    "no class": (("task=mine:Halfs",), "the module mine has no 'Halfs'; did you mean 'Halves'?"),
    "not a class": (("task=mine:forks",), "mine:forks is not a class"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_told_before_anything_is_started(place: Place, case: str) -> None:
    settings, message = REFUSED[case]
    run_dir = place.path / "run"
    children = place.train(run_dir, *settings)
    assert codes(children) == [2], output_of(children)
    assert message in output_of(children)
    assert "Nothing was started." in output_of(children)
    assert not run_dir.exists()


def test_an_evaluation_that_fails_since_the_code_was_changed_is_told_before_a_resume_trains(
    place: Place,
) -> None:
    run_dir, module = place.path / "run", place.path / "mine.py"
    children = place.train(run_dir, "task=mine:Changed", "train.until=[3it]")
    assert codes(children) == [0], output_of(children)
    before = (run_dir / "events.jsonl").read_bytes()
    measure = "def measure(self, model, batch):\n        return super().measure(model, batch) | "
    f1 = '{"f1": batch["x"][:, 0]}'
    module.write_text(OWN.replace("pass  # Changed", f"{measure}{f1}"))
    children = place.resume(run_dir, "--until", "9it")
    assert codes(children) == [2], output_of(children)
    assert "Changed.better must name f1 of measure() too" in output_of(children)
    assert (run_dir / "events.jsonl").read_bytes() == before


def test_a_metric_that_never_improves_ends_the_run_and_says_so(place: Place) -> None:
    """Not once below its start, and never a number."""
    rules = "{metric: loss, patience: 4, start: 0.001}", "{metric: doubt, patience: 3, grace: 2}"
    why = (
        "loss has not been better than 0.001 (the start) for 4 evaluations",
        "doubt has not been finite for 3 evaluations",
    )
    for number, (rule, reason, count) in enumerate(zip(rules, why, (4, 5), strict=True)):
        run_dir = place.path / f"run-{number}"
        children = place.train(run_dir, "task=mine:Unsure", f"early_stopping.rules=[{rule}]")
        assert codes(children) == [0], output_of(children)
        assert [step for step, _ in evaluations(run_dir)] == [5 * n for n in range(1, count + 1)]
        assert events(run_dir, "stop")[-1]["reason"] == reason
        assert f"stopped: {reason}  {5 * count} steps" in output_of(children)
        assert result(run_dir)["metrics"]["doubt"]["value"] == "NaN"
        assert pointer_target(run_dir, "best").startswith("step-")


def test_a_metric_that_is_never_a_number_leaves_no_best_checkpoint_which_is_said(
    place: Place,
) -> None:
    run_dir = place.path / "run"
    settings = ("task=mine:Unsure", "checkpoint.best_of=[doubt]", "train.until=10it")
    children = place.train(run_dir, *settings, ranks=2)
    assert set(codes(children)) == {0}, output_of(children)
    warning = "there is no best checkpoint by doubt: the last weights take its place"
    assert output_of(children).count(warning) == 1
    assert [event["message"] for event in events(run_dir, "warning")].count(warning) == 1
    assert result(run_dir)["weights"] == "last"


def test_a_split_that_is_not_needed_may_be_empty(place: Place) -> None:
    run_dir = place.path / "run"
    children = place.train(run_dir, "data.test=0", "test.at_end=false")
    assert codes(children) == [0], output_of(children)
    assert not (run_dir / "test").exists()
    children = place.instar("test", "run")
    assert codes(children) == [2]
    assert "the test split is empty" in output_of(children)


def test_a_result_of_other_weights_of_the_same_step_is_not_kept(place: Place) -> None:
    """The run goes back, trains to the same step again, and finds the test of the branch it left."""
    run_dir = place.path / "run"
    settings = ("checkpoint.every_steps=4", "checkpoint.keep_last=9", "test.weights=last")
    children = place.train(run_dir, *settings, "train.until=[8it]", "eval.eval_epochs=null")
    assert codes(children) == [0], output_of(children)
    before = result(run_dir)
    file = run_dir / "test" / "result.json"
    assert json.loads(file.read_text())["checkpoint"]["name"] == "step-8"
    words = ("--from", "4", "--set", "optimizer.lr=0.3", "--set", "test.at_end=false")
    children = place.instar("resume", run_dir, *words)
    assert codes(children) == [0], output_of(children)
    if "board" in built_in():
        from instar.extensions.board.ending import read_final_test

        test = read_final_test(RunDir(run_dir))
        assert test is not None
        assert "branch that the run left at step 4" in test.notes[0]
    children = place.instar("resume", run_dir, "--set", "test.at_end=true")
    assert codes(children) == [0], output_of(children)
    after = result(run_dir)
    assert json.loads(file.read_text())["checkpoint"]["name"] == "step-8.1"
    assert after["metrics"]["loss"]["value"] != before["metrics"]["loss"]["value"]
    words = ("--from", "latest")
    assert codes(place.instar("test", run_dir, *words)) == [0]
    assert result(run_dir)["metrics"] == after["metrics"]

    # kept where nothing has changed, and not where another test would be made
    original = file.read_bytes()
    command = ("resume", run_dir, "--set", "test.at_end=true")
    assert codes(place.instar(*command)) == [0]
    assert file.read_bytes() == original
    for key in ("checkpoint", "basis"):
        content = json.loads(original)
        content[key] |= dict.fromkeys(content[key], "damaged")
        file.write_text(json.dumps(content))
        assert codes(place.instar(*command)) == [0]
        assert json.loads(file.read_text())[key] == json.loads(original)[key]
