"""Instar runs as instances: seeds, one group in the logs, resume after a kill."""

from __future__ import annotations

import hashlib
import shutil
import signal
import subprocess
import sys
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import pytest
from fleets import FleetPlace
from forks import Forks
from tiny_run import TEXT

from instar.extensions.fleet.folder import create_fleet_folder
from instar.extensions.fleet.plan import load_fleet
from instar.record.rundir import RunDir

RUN = """\
model: {n_layer: 1, n_head: 2, n_embd: 16, context: 16, dropout: 0.1}
data: {source: squares.txt, path: tokens, tokenizer: char, seed: 1}
train: {until: 12it, batch_size: 4}
eval: {eval_interval: 4, eval_iters: 1}
checkpoint: {every_steps: 4}
record: {log_interval: 1, sample_tokens: 0, report: false}
"""
FLEET = """\
name: seeds
matrix: {seed: [42, 1337], copy: [a, b]}
exclude: [{seed: 1337, copy: b}]
run_name: s${seed}${copy}
max_parallel: 1
jobs:
  train: {run: run.yaml, stop: {grace: 30s}}
"""


@pytest.fixture
def place(place: FleetPlace, forks: Forks) -> FleetPlace:
    """With `run.yaml` and `fleet.yaml` in it."""
    (place.path / "squares.txt").write_text(TEXT)
    (place.path / "run.yaml").write_text(RUN)
    place.write(FLEET)
    return replace(place, python=forks.python)


def _weights(run: Path) -> str:
    (checkpoint,) = (run / "checkpoints").glob("step-12")
    return hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.torture
def test_a_killed_fleet_goes_on_and_the_same_seed_gives_the_same_weights(
    place: FleetPlace,
) -> None:
    """The launcher is killed while the second run trains; the first is not run again."""
    code, output = place.run("up", "fleet.yaml", "--only", "0")
    assert code == 0, output
    launcher = place.start("resume", "seeds")
    log = place.path / "runs/s42b/events.jsonl"
    place.wait("seeds", lambda _: '"step":5' in log.read_text())
    launcher.send_signal(signal.SIGKILL)
    launcher.communicate()
    first = (place.path / "runs/s42a/events.jsonl").read_text()
    code, output = place.run("resume", "seeds")
    assert code == 0, output
    assert (place.path / "runs/s42a/events.jsonl").read_text() == first
    assert _weights(place.path / "runs/s42b") == _weights(place.path / "runs/s42a")
    assert _weights(place.path / "runs/s1337a") != _weights(place.path / "runs/s42a")
    code, output = place.run("status", "seeds")
    assert output.count("succeeded") == 1 + 3
    assert " 12 " in output  # the step of each run
    result = subprocess.run(
        [sys.executable, "-m", "instar.cli.main", "logs", "compare", "runs", "--by", "seed"],
        cwd=place.path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "±" in result.stdout


def test_a_fleet_goes_on_from_another_folder_and_after_it_was_moved(place: FleetPlace) -> None:
    """What was copied is run, also if the config that it was copied from has gone."""
    code, output = place.run("up", "fleet.yaml", "--only", "0")
    assert code == 0, output
    (place.path / "run.yaml").unlink()
    project = place.path / "project"
    project.mkdir()
    for entry in [*place.path.iterdir()]:
        if entry.name in ("fleets", "runs", "squares.txt", "tokens"):
            entry.rename(project / entry.name)
    code, output = place.run("status", "project/fleets/seeds")
    assert " 12 " in output  # the step of the run that was moved
    code, output = place.run("resume", "project/fleets/seeds", "--only", "1")
    assert code == 0, output
    assert (project / "runs/s42b/checkpoints/step-12").is_dir()
    assert not (place.path / "runs").exists()


def test_a_new_fleet_takes_no_runs_of_another_for_its_own(place: FleetPlace) -> None:
    """Nor those of an earlier one whose folder was deleted. An imported model waits to be trained."""
    run = RunDir(place.path / "runs/s42b")
    run.path.mkdir(parents=True)
    run.config.write_text("name: s42b\n")
    run.await_start()
    with chdir(place.path):
        shutil.rmtree(create_fleet_folder(load_fleet("fleet.yaml"), None).path)
    run.events.write_text("{}\n")
    for words in ([], ["--only", "0"]):  # `resume` runs the others
        code, output = place.run("up", "fleet.yaml", *words)
        assert code == 2
        assert "1 of 3 instances have folders with other runs, the first is runs/s42b" in output
        assert "move them elsewhere, or write ${name} in run_name or output_dir" in output
    run.path.rename(place.path / "runs/seeds-s42b")
    code, output = place.run("up", "fleet.yaml", "--set", "output_dir=runs/${name}-${run_name}")
    assert "move them elsewhere, or --set name=…" in output
    assert not [*(place.path / "fleets").iterdir()]


def test_a_job_with_a_working_directory_has_its_run_where_the_fleet_looks(
    place: FleetPlace,
) -> None:
    inside = place.path / "inside"
    inside.mkdir()
    (place.path / "squares.txt").rename(inside / "squares.txt")
    place.write(FLEET.replace("{run: run.yaml,", "{run: run.yaml, cwd: inside,"))
    code, output = place.run("up", "fleet.yaml", "--only", "0")
    assert code == 0, output
    code, output = place.run("status", "seeds")
    assert " 12 " in output
    assert (place.path / "runs/s42a").is_dir()


def test_paths_of_a_run_that_begin_elsewhere_are_told_before_the_start(place: FleetPlace) -> None:
    project = place.path / "project"
    project.mkdir()
    for name in ("run.yaml", "fleet.yaml", "squares.txt"):
        (place.path / name).rename(project / name)
    code, output = place.run("up", "project/fleet.yaml")
    assert code == 2
    assert f"squares.txt is in {project}, and relative paths begin in {place.path}" in output
    assert not (place.path / "fleets").exists()


def test_a_quick_test_has_folders_of_its_own(place: FleetPlace) -> None:
    code, output = place.run("up", "fleet.yaml", "--only", "0", "--max-steps", "2")
    assert code == 0, output
    events = (place.path / "runs/test_s42a/events.jsonl").read_text()
    assert '"step":2' in events
    assert '"step":3' not in events
    assert not (place.path / "runs/s42a").exists()
    assert place.status("seeds-test")["instances"]["0"]["phase"] == "succeeded"
