"""Batch scripts of fleets, as text; tests/torture/test_slurm.py submits some to a real SLURM."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from fleets import FleetPlace

from instar.extensions.fleet.checks import make_plan
from instar.extensions.fleet.engines.slurm import SlurmArrays, batch_script
from instar.extensions.fleet.plan import ANY_MACHINE, load_fleet

FLEET = """\
name: grpo
engine: slurm
matrix: {seed: [1, 2, 3, 4]}
max_parallel: 2
slurm:
  partition: gpu
  account: physics
  constraint: a100
  time: 90m
  warning: 5m
  setup: [module load cuda, "source venv/bin/activate"]
  sbatch: {qos: high, exclusive: true}
services:
  vllm: {command: vllm serve, resources: {gpus: 1, cpus: 4, memory: 16GiB}}
jobs:
  trainer: {command: train, resources: {gpus: 2, cpus: 8, memory: 512MiB, nodes: 2}}
"""


def options_of(text: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if "#SBATCH" in line]
    return {key: value for key, _, value in (line.partition("=") for line in lines)}


def render_script(folder: Path, text: str = FLEET, gpus: str | None = None) -> str:
    (folder / "fleet.yaml").write_text(text)
    plan = make_plan(load_fleet(str(folder / "fleet.yaml")), ANY_MACHINE)
    return batch_script(plan, folder / "fleets/grpo", gpus, [0, 1, 3])


def test_an_array_of_the_instances_with_what_all_processes_of_one_need(tmp_path: Path) -> None:
    text = render_script(tmp_path)
    logs = tmp_path / "fleets/grpo/slurm"
    assert options_of(text) == {
        "account": "physics",
        "array": "0-1,3%2",
        "constraint": "a100",
        "cpus-per-task": "12",
        "exclusive": "",
        "gpus-per-node": "3",
        "job-name": "grpo",
        "mem": "16896M",
        "nodes": "2",
        "ntasks-per-node": "1",
        "open-mode": "append",
        "output": f"{logs}/%A_%a.log",
        "partition": "gpu",
        "qos": "high",
        "requeue": "",
        "signal": "B:USR1@300",
        "time": "90",
    }
    body = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert body[:2] == ["module load cuda", "source venv/bin/activate"]
    # the launcher takes the place of the batch shell, which gets SLURM's signals
    host = f"exec {sys.executable} -m instar.cli.main fleet host {tmp_path}/fleets/grpo"
    assert body[-1] == f'{host} "$SLURM_ARRAY_TASK_ID"'


def test_what_is_not_given_is_left_to_the_cluster(tmp_path: Path) -> None:
    text = "name: grpo\nengine: slurm\nslurm: {requeue: false}\njobs: {j: {command: x, resources: {gpus: 1}}}\n"
    options = options_of(render_script(tmp_path, text, "8"))
    assert options.keys().isdisjoint({"time", "mem", "partition", "gpus-per-node", "requeue"})
    assert "no-requeue" in options


def test_a_plan_shows_the_script(place: FleetPlace) -> None:
    place.write(FLEET)
    code, output = place.run("plan", "fleet.yaml", "--json")
    assert code == 0, output
    plan = json.loads(output)
    assert plan["instances"][3]["trainer nodes"] == 2
    assert options_of(plan["batch_script"])["array"] == "0-3%2"
    assert "#SBATCH --array=0-3%2" in place.run("plan", "fleet.yaml")[1]


def test_only_slurm_goes_on_without_its_launcher(place: FleetPlace) -> None:
    place.write("name: alone\njobs: {job: {command: 'true'}}\n")
    code, output = place.run("up", "fleet.yaml", "--detach")
    assert code == 2
    assert "the engine local cannot go on alone" in output
    assert not (place.path / "fleets").exists()


def test_the_jobs_in_a_copy_of_a_fleet_are_those_of_the_original(tmp_path: Path) -> None:
    """Which is what `stop` and `down` cancel; a fleet whose folder was moved keeps its jobs."""
    folder = tmp_path / "grpo"
    (folder / "slurm").mkdir(parents=True)
    place = SlurmArrays(folder)._place()
    lines = [{"job": "7", "instances": [0, 1], **place}, {"job": "8", "instances": [1], **place}]
    (folder / "slurm/jobs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert SlurmArrays(folder).jobs() == {0: "7", 1: "8"}
    assert SlurmArrays(Path(shutil.copytree(folder, tmp_path / "copy"))).jobs() == {}
    new_folder = folder.rename(tmp_path / "moved")
    assert SlurmArrays(new_folder).jobs() == {0: "7", 1: "8"}


def test_a_cluster_that_is_not_there_is_named(
    place: FleetPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(place.path))  # where SLURM is installed, too
    place.write(FLEET)
    code, output = place.run("up", "fleet.yaml", "--gpus", "3")
    assert code == 4
    assert "there is no command sbatch" in output
    assert place.status("grpo")["ended"]["code"] == 4
