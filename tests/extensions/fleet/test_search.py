"""Searches: what is drawn, pruned and kept, with a synthetic objective and with real runs."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from fleets import FleetPlace, fleet_error, plan_fleet
from forks import Forks
from tiny_run import TEXT

from instar.config.errors import ConfigError
from instar.extensions.fleet.plan import FleetPlan, Instance
from instar.extensions.fleet.spec import Search
from instar.extensions.fleet.state import (
    FleetEvent,
    InstanceChanged,
    Phase,
    StateLog,
    TrialDrawn,
    fold_events,
    now,
    read_fleet_events,
)
from instar.extensions.fleet.study import STUDY_FILE
from instar.extensions.fleet.trials import METRICS_FILE, Evaluations, Trials
from instar.extensions.fleet.view.rows import best_trial
from instar.record.events import Eval, Train, encode_event
from instar.record.rundir import RunDir

FLEET = """\
name: bowl
search:
  trials: 12
  pruner: {name: successive_halving, reduction_factor: 2}
  space:
    rate: {low: 1e-4, high: 1.0, log: true}
    layers: {low: 2, high: 8, step: 2}
    kind: {choices: [a, b]}
jobs: {job: {command: "true ${rate} ${layers} ${kind} ${output_dir}"}}
"""
EVALUATIONS = 4


def bowl(values: dict[str, Any], evaluation: int = EVALUATIONS) -> float:
    """The least value is at rate 0.01, 4 layers, kind b."""
    off = abs(math.log10(values["rate"]) + 2) + abs(values["layers"] - 4) / 4
    return off + (values["kind"] == "a") + 1 / evaluation


class Player:
    """Plays the launcher and the runs of a search, one trial at a time."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        folder.mkdir(exist_ok=True)
        self.plan: FleetPlan = plan_fleet(folder, FLEET, *overrides)
        assert self.plan.spec.search is not None
        self.search: Search = self.plan.spec.search
        self.folder = folder / "bowl"
        self.folder.mkdir(exist_ok=True)
        self.messages: list[str] = []

    def instance(self, index: int) -> Instance:
        return replace(self.plan.instances[index], output_dir=self.folder / f"runs/{index}")

    def events(self) -> list[FleetEvent]:
        return read_fleet_events(self.folder) if (self.folder / "state.jsonl").exists() else []

    def launch(self, todo: range | list[int], play: Callable[..., float] = bowl) -> None:
        """Run these trials as a launcher does."""
        trials = Trials(
            self.search, self.folder, self.plan.instances, self.events(), todo, self.messages.append
        )
        trials.log = log = StateLog(self.folder)
        for index in todo:
            if trials.is_given_up(index):
                self.conclude(trials, log, self.instance(index), "pruned")
                continue
            instance = trials.begin(self.instance(index))
            assert instance.variables["rate"] == instance.values["rate"]
            instance.output_dir.mkdir(parents=True, exist_ok=True)
            phase: Phase = "succeeded"
            with (instance.output_dir / METRICS_FILE).open("a") as file:
                for n in range(1, EVALUATIONS + 1):
                    value = play(instance.values, n)
                    file.write(json.dumps({"step": 10 * n, "val/loss": value}) + "\n")
                    file.flush()
                    if trials.look(instance):
                        phase = "pruned"
                        break
            self.conclude(trials, log, instance, phase)
        log.close()
        trials.close()

    def conclude(self, trials: Trials, log: StateLog, instance: Instance, phase: Phase) -> None:
        phase, reason = trials.end(instance, phase, "")
        log.write(InstanceChanged(now(), instance.index, phase, reason))

    def values(self) -> dict[int, Any]:
        return {
            i: dict(instance.values) for i, instance in fold_events(self.events()).instances.items()
        }

    def phases(self) -> list[Phase]:
        return [
            instance.phase for _, instance in sorted(fold_events(self.events()).instances.items())
        ]


@pytest.mark.torture
def test_a_sampler_learns_and_a_pruner_stops_what_falls_behind(tmp_path: Path) -> None:
    player = Player(tmp_path / "tpe", "search.trials=40", "search.seed=1")
    player.launch(range(40))
    best = best_trial(player.search, fold_events(player.events()))
    assert best is not None
    assert best.value < 0.2 + 1 / EVALUATIONS
    assert best.value == pytest.approx(bowl(dict(best.values)))
    scores = [bowl(values) for _, values in sorted(player.values().items())]
    assert median(scores[-10:]) < median(scores[:10])  # the first ten are drawn at random
    phases = player.phases()
    assert 10 < phases.count("pruned") < 38
    assert set(phases) == {"pruned", "succeeded"}
    assert not player.messages


@pytest.mark.torture
def test_what_is_drawn_depends_on_seed_index_and_results_alone(tmp_path: Path) -> None:
    """Wherever a launcher is killed: the next one draws what it would have drawn."""
    reference, parts, other = (Player(tmp_path / name) for name in ("whole", "parts", "other"))
    reference.launch(range(12))
    for begin in range(0, 12, 3):
        parts.launch(range(begin, begin + 3))
    assert parts.values() == reference.values()
    assert parts.phases() == reference.phases()
    other.search = other.search.model_copy(update={"seed": 1})
    other.launch(range(3))
    assert other.values()[0] != reference.values()[0]


def test_a_trial_that_was_cut_short_goes_on_with_its_values(tmp_path: Path) -> None:
    reference, cut = Player(tmp_path / "whole"), Player(tmp_path / "cut")
    reference.launch(range(12))

    class Killed(Exception):  # noqa: N818
        pass

    def dies(values: dict[str, Any], n: int) -> float:
        if n == 2 and len(cut.values()) > 4:
            raise Killed
        return bowl(values, n)

    with pytest.raises(Killed):
        cut.launch(range(12), dies)
    draw_count = len(cut.values())
    assert cut.values() == {index: reference.values()[index] for index in range(draw_count)}
    (cut.folder / STUDY_FILE).write_bytes(b"SQLite format 3\0 but not really")
    cut.launch(range(draw_count - 1, 12))
    assert cut.values() == reference.values()
    drawn_events = [event.instance for event in cut.events() if isinstance(event, TrialDrawn)]
    assert drawn_events == list(range(12))
    assert cut.phases() == reference.phases()


@pytest.mark.parametrize("before", [b"", b"not a database", None])
def test_the_study_file_is_made_anew_and_never_read(tmp_path: Path, before: bytes | None) -> None:
    """`before`: what is in its place; None: a link to another file."""
    import optuna

    player = Player(tmp_path / "there")
    player.launch(range(4))
    path = player.folder / STUDY_FILE
    path.unlink()
    (tmp_path / "precious").write_text("kept")
    if before is None:
        path.symlink_to(tmp_path / "precious")
    else:
        path.write_bytes(before)
    player.launch(range(4, 6))
    assert (tmp_path / "precious").read_text() == "kept"
    storage = optuna.storages.RDBStorage(f"sqlite:///{path}")
    trials = optuna.load_study(study_name="bowl", storage=storage).trials
    assert [trial.params for trial in trials] == [player.values()[index] for index in range(6)]
    states = {"succeeded": "COMPLETE", "pruned": "PRUNED"}
    assert [trial.state.name for trial in trials] == [states[phase] for phase in player.phases()]
    assert [trial.user_attrs["run"] for trial in trials] == [f"bowl-{index}" for index in range(6)]
    storage.engine.dispose()


def test_a_study_file_that_cannot_be_written_is_named_and_the_search_goes_on(
    tmp_path: Path,
) -> None:
    player = Player(tmp_path / "there")
    (player.folder / STUDY_FILE).mkdir()
    player.launch(range(3))
    assert len(player.phases()) == 3
    (line,) = player.messages
    assert "study.db is not written" in line


def test_a_pruned_trial_that_is_run_again_is_not_pruned_again(tmp_path: Path) -> None:
    player = Player(tmp_path / "there")
    player.launch(range(12))
    index = player.phases().index("pruned")
    player.launch([index])
    assert player.phases()[index] == "succeeded"
    assert fold_events(player.events()).instances[index].metric == bowl(player.values()[index])


def test_a_trial_without_a_number_has_failed_and_the_search_goes_on(tmp_path: Path) -> None:
    player = Player(tmp_path / "there", "search.pruner=none")
    player.launch([0], lambda _, n: math.nan if n == EVALUATIONS else 1.0)
    player.search = player.search.model_copy(update={"metric": "val/accuracy"})
    player.launch([1])
    player.search = player.search.model_copy(update={"metric": "val/loss"})
    player.launch([2])
    instances = fold_events(player.events()).instances
    assert [instances[index].phase for index in range(3)] == ["failed", "failed", "succeeded"]
    assert instances[0].reason == "val/loss is not a number at step 40"
    assert instances[1].reason == "it recorded no val/accuracy, only val/loss"


def test_values_that_were_tampered_with_are_drawn_anew(tmp_path: Path) -> None:
    player = Player(tmp_path / "there")
    log = StateLog(player.folder)
    for values in ({"rate": 5.0, "layers": 2, "kind": "a"}, {"rate": 0.1, "os": "a; rm"}):
        log.write(TrialDrawn(now(), 0, values))
    log.write(TrialDrawn(now(), 99, {"rate": 0.1, "layers": 2, "kind": "a"}))
    log.close()
    player.launch([0])
    assert player.search.space["rate"].holds(player.values()[0]["rate"])
    assert player.phases()[0] == "succeeded"


def test_a_folder_with_another_run_is_not_taken_for_a_trial(tmp_path: Path) -> None:
    player = Player(tmp_path / "there")
    player.launch([0])
    other = RunDir(player.folder / "runs/1")
    other.path.mkdir()
    other.config.write_text("name: other\n")
    player.plan = replace(player.plan, instances=tuple(player.instance(i) for i in range(12)))
    with pytest.raises(ConfigError, match="1 trials have folders with other runs"):
        player.launch([1, 2])
    player.launch([2])


def test_a_grid_is_every_combination_once(tmp_path: Path) -> None:
    text = FLEET.replace("trials: 12", "sampler: grid").replace("rate: {low: 1e-4, high: 1.0, log: true}", "rate: {choices: [0.1, 0.01]}")  # fmt: skip
    assert len(plan_fleet(tmp_path, text).instances) == 2 * 4 * 2
    player = Player(tmp_path / "there")
    search = plan_fleet(tmp_path, text).spec.search
    assert search is not None
    player.search, player.plan = search, plan_fleet(tmp_path, text)
    player.launch(range(16))
    assert len({tuple(trial_values.values()) for trial_values in player.values().values()}) == 16


def test_evaluations_are_read_once_as_they_are_appended(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    reader = Evaluations(tmp_path, "val/loss")
    assert list(reader.new()) == []

    def line(step: int, loss: float) -> bytes:
        return encode_event(
            Eval(step=step, split="val", loss=loss, extra={"accuracy": 0.5}), 1.0, 1
        )

    first = encode_event(Train(step=1, loss=9.0), 1.0, 1) + line(0, 5.0) + line(4, 4.0)
    run.events.write_bytes(first + line(8, 3.0)[:-9])
    assert list(reader.new()) == [(4, 4.0)]
    run.events.write_bytes(first + line(8, 3.0))
    assert list(reader.new()) == [(8, 3.0)]
    # a resumed run repeats an evaluation; a damaged line is passed over
    run.events.write_bytes(
        first + line(8, 3.0) + line(8, 3.1) + b'{"v":1,"kind":"eval","\n' + line(12, math.nan)
    )
    ((step, value),) = reader.new()
    assert step == 12
    assert math.isnan(value)
    assert reader.names == {"val/loss", "val/accuracy"}


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("trials: 12", "trails: 12", ":3:", "did you mean 'trials'"),
        ("trials: 12", "seed: 1", ":3:", "trials is missing"),
        ("successive_halving", "succesive_halving", ":4:", "did you mean 'successive_halving'"),
        ("{name: successive_halving, reduction_factor: 2}", "medain", ":4:", "did you mean 'median'"),
        ("successive_halving", "median", ":4:", "median has no reduction_factor"),
        ("reduction_factor: 2", "reduction_factr: 2", ":4:", "did you mean 'reduction_factor'"),
        ("{name: successive_halving, reduction_factor: 2}", "{max_resource: 2, min_resource: 3}", ":4:", "max_resource is smaller"),
        ("low: 1e-4", "low: 0.0", ":6:", "low must be positive"),
        ("low: 1e-4", "low: 2.0", ":6:", "low is larger than high"),
        ("low: 1e-4", "lwo: 1e-4", ":6:", "did you mean 'low'"),
        ("low: 1e-4, ", "", ":6:", "write low and high, or choices"),
        ("log: true", "log: true, step: 0.1", ":6:", "log: true has no step"),
        ("choices: [a, b]", "choices: []", ":8:", "there are no choices"),
        ("choices: [a, b]", "choices: [a, b], low: 1", ":8:", "choices have no low"),
        ("trials: 12", "sampler: grid", ":3:", "a grid needs choices or a step of rate"),
        ("trials: 12", "sampler: gird\n  trials: 12", ":3:", "did you mean 'grid'"),
        ("name: bowl", "name: bowl\nmatrix: {seed: [1]}", ":2:", "a fleet with a search has no matrix"),
        ("name: bowl", "name: bowl\nrun_name: a${rate}-${index}", ":2:", "use ${index}"),
        ("name: bowl", "name: bowl\nrun_name: a", ":2:", "the same run_name"),
        ("${rate} ", "", ":6:", "no text uses 'rate'"),
        (" ${output_dir}", "", "", "${output_dir}/metrics.jsonl"),
        ("kind: {", "index: {", ":8:", "has a meaning of its own"),
    ],
)  # fmt: skip
def test_a_mistake_is_refused_with_its_line(
    tmp_path: Path, old: str, new: str, line: str, words: str
) -> None:
    assert old in FLEET
    text = fleet_error(tmp_path, FLEET.replace(old, new, 1))
    assert line in text
    assert words in text


RUN = """\
model: {n_layer: 1, n_head: 2, n_embd: 16, context: 16}
data: {source: squares.txt, path: tokens, tokenizer: char}
train: {until: 300it, batch_size: 4}
eval: {eval_interval: 10, eval_iters: 1}
record: {log_interval: 50, sample_tokens: 0, report: false}
"""
RATES = """\
name: rates
max_parallel: 1
search:
  sampler: grid
  seed: 1
  pruner: {name: successive_halving, reduction_factor: 2}
  space: {optimizer.lr: {choices: [1e-2, 1e-9]}}
jobs: {train: {run: run.yaml, retry: {max: 1}, stop: {grace: 30s}}}
"""


def test_mistakes_of_the_runs_are_found_all_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    assert len(plan_fleet(tmp_path, RATES).instances) == 2
    text = fleet_error(
        tmp_path,
        RATES.replace("seed: 1", "direction: maximize").replace(
            "{choices: [1e-2, 1e-9]}}",
            "{choices: [-1.0, 1e-9]}, model.n_layr: {choices: [1]}, model.n_head: {choices: [2, 0]}, "
            "model.dropout: {low: 0, high: 1}, model.n_mlp: {low: 8, high: 16}}",
        ),
    )
    for words in (
        "write direction: minimize",
        "optimizer.lr must be",
        "did you mean 'model.n_layer'",
        "model.n_head must be",
        "model.dropout is a real number",
        "write low: 0.0",
    ):
        assert words in text
    assert "model.n_mlp is" not in text
    assert text.count(":7:") == 5
    metric = RATES.replace("seed: 1", "metric: val/los")
    assert "did you mean 'val/loss'" in fleet_error(tmp_path, metric)


@pytest.mark.torture
def test_runs_are_pruned_and_can_be_resumed(place: FleetPlace, forks: Forks) -> None:
    place = replace(place, python=forks.python)
    (place.path / "squares.txt").write_text(TEXT)
    (place.path / "run.yaml").write_text(RUN)
    place.write(RATES)
    code, output = place.run("up", "fleet.yaml", timeout_s=300)
    assert code == 0, output
    instances = place.status("rates")["instances"]
    assert [instances[index]["phase"] for index in "01"] == ["succeeded", "pruned"], output
    assert instances["1"]["processes"]["train"]["attempt"] == 1  # it is not retried
    assert "best: trial 0, val/loss" in output
    latest = (place.path / "runs/rates-1/checkpoints/latest").read_text().strip()
    assert 10 <= int(latest.removeprefix("step-")) < 300
    code, output = place.run("resume", "rates", "--only", "1")
    assert code == 0, output
    instance = place.status("rates")["instances"]["1"]
    assert instance["phase"] == "succeeded"
    assert instance["values"] == instances["1"]["values"]
    assert (place.path / "runs/rates-1/checkpoints/step-300").exists()


LATE = """\
import json, pathlib, sys, time

folder, rate = pathlib.Path(sys.argv[1]), float(sys.argv[2])
folder.mkdir(parents=True)
(folder / "run.yaml").touch()  # a run, which is asked to stop
with open(folder / "metrics.jsonl", "a") as file:
    file.write(json.dumps({"step": 1, "val/loss": rate}) + "\\n")
while rate > 1 and not list(folder.glob("control/*.stop")):
    time.sleep(0.02)
"""


def test_a_run_that_succeeds_before_it_can_be_pruned_is_not_called_pruned(
    place: FleetPlace,
) -> None:
    (place.path / "late.py").write_text(LATE)
    place.write("""
name: late
max_parallel: 1
search:
  seed: 1
  sampler: grid
  pruner: {name: successive_halving, reduction_factor: 2}
  space: {rate: {choices: [1, 2]}}
jobs: {job: {command: [python3, -I, -S, late.py, "${output_dir}", "${rate}"]}}
""")
    code, output = place.run("up", "fleet.yaml")
    assert code == 0, output
    instances = place.status("late")["instances"]
    assert [instances[index]["phase"] for index in "01"] == ["succeeded", "succeeded"], output
    assert "is pruned" not in output


JOB = """\
import json, os, pathlib, sys, time

folder, x = pathlib.Path(sys.argv[1]), float(sys.argv[2])
folder.mkdir(parents=True, exist_ok=True)
with open("began", "a") as file:
    file.write(f"{folder.name} {x}\\n")
for step in range(1, 4):
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "val/loss": (x - 3) ** 2 + 1 / step}) + "\\n")
    while not os.path.exists("go") and folder.name.endswith("3"):
        time.sleep(0.02)
with open("done", "a") as file:
    file.write(f"{folder.name} {x}\\n")
"""


def test_a_killed_launcher_goes_on_with_the_same_values_and_runs_nothing_twice(
    place: FleetPlace,
) -> None:
    (place.path / "job.py").write_text(JOB)
    place.write("""
name: killed
max_parallel: 1
search: {trials: 6, pruner: none, space: {x: {low: -5.0, high: 5.0}}}
jobs:
  job: {command: [python3, -I, -S, job.py, "${output_dir}", "${x}"], stop: {grace: 2s}}
""")
    launcher = place.start("up", "fleet.yaml")
    place.wait("killed", lambda status: status["instances"]["3"]["metric"] is not None)
    launcher.send_signal(signal.SIGKILL)
    launcher.communicate()
    drawn_values = {
        i: instance["values"] for i, instance in place.status("killed")["instances"].items()
    }
    (place.path / "fleets/killed" / STUDY_FILE).write_bytes(b"damaged")
    (place.path / "go").touch()
    code, output = place.run("resume", "killed")
    assert code == 0, output
    instances = place.status("killed")["instances"]
    assert {i: instances[i]["values"] for i in drawn_values} == drawn_values
    done_lines = (place.path / "done").read_text().split("\n")[:-1]
    assert done_lines == [f"killed-{i} {instances[str(i)]['values']['x']}" for i in range(6)]
    began = (place.path / "began").read_text().split("\n")[:-1]
    assert began == sorted([*done_lines, done_lines[3]])
    assert "best: trial" in output
