"""Fleets in a real SLURM: tasks that are queued again, warned of their time limit, and cancelled."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import figures
import pytest
from fleets import FleetPlace, first_port, phase_of
from slurm_cluster import cluster

FLEET = """
engine: slurm
matrix: {seed: [0, 1, 2, 3]}
jobs:
  job:
    command: [sh, -c, "trap 'exit 1' TERM; until test -e go; do sleep 0.1; done; echo ${seed} >> done"]
    stop: {grace: 3s}
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    with cluster() as env:
        yield env


@pytest.fixture
def place(
    slurm: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FleetPlace]:
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    yield FleetPlace(tmp_path, first_port())
    subprocess.run(["scancel", "--user", str(os.getuid())], check=True)


def status_of(place: FleetPlace, name: str) -> dict[str, Any]:
    code, output = place.run("status", name, "--json")
    assert code == 0, output
    status: dict[str, Any] = json.loads(output)
    return status


def job_of(place: FleetPlace, name: str) -> str:
    lines = (place.path / "fleets" / name / "slurm/jobs.jsonl").read_text().splitlines()
    return str(json.loads(lines[-1])["job"])


def finished_seeds(place: FleetPlace) -> list[str]:
    return sorted((place.path / "done").read_text().split())


def test_an_array_of_four_of_which_one_is_queued_again(place: FleetPlace) -> None:
    place.write(f"name: four\n{FLEET}")
    launcher = place.start("up", "fleet.yaml")
    place.wait("four", lambda state: all(phase_of(state, "job", i) == "running" for i in range(4)))
    subprocess.run(["scontrol", "requeue", f"{job_of(place, 'four')}_2"], check=True)
    place.wait(
        "four",
        lambda state: (
            phase_of(state, "job", 2) == "running"
            and state["instances"]["2"]["processes"]["job"]["attempt"] == 2
        ),
        timeout_s=120,
    )
    (place.path / "go").touch()
    output, _ = launcher.communicate(timeout=120)
    status = status_of(place, "four")
    attempts = [state["processes"]["job"]["attempt"] for state in status["instances"].values()]
    wrong = [name for name in "0123" if finished_seeds(place).count(name) != 1]
    figures.write(
        "fleet-slurm",
        [
            figures.none_of(4, "task of an array, one queued again: not completed once", wrong),
            figures.none_of(4, "process outlives its task", place.living_pids()),
        ],
    )
    assert launcher.returncode == 0, output
    assert attempts == [1, 1, 2, 1]
    assert status["state"] == "succeeded"


def test_a_task_is_stopped_before_its_time_limit_and_goes_on(place: FleetPlace) -> None:
    command = "trap 'echo saved >> done; exit 1' TERM; test ${attempt} = 2 || sleep 600 & wait"
    place.write(f"""
name: limit
engine: slurm
slurm: {{time: 1m, warning: 50s}}
jobs:
  job: {{command: [bash, -c, "{command}"], stop: {{grace: 3s}}}}
""")
    code, output = place.run("up", "fleet.yaml", timeout_s=240)
    assert code == 0, output
    assert finished_seeds(place) == ["saved"]
    assert status_of(place, "limit")["instances"]["0"]["processes"]["job"]["attempt"] == 2


def test_a_fleet_is_left_in_the_queue_cancelled_and_resumed(place: FleetPlace) -> None:
    place.write(f"name: left\nmax_parallel: 1\n{FLEET}")
    code, output = place.run("up", "fleet.yaml", "--detach")
    assert code == 0, output
    place.wait("left", lambda state: phase_of(state, "job") == "running")
    status = status_of(place, "left")
    assert status["state"] == "running"
    assert status["instances"]["3"]["state"] == "waiting"
    assert "PENDING" in place.run("status", "left")[1]
    assert place.run("stop", "left", "3")[0] == 0
    # a second launcher follows what is in the queue, and submits what is not
    launcher = place.start("resume", "left")
    assert launcher.stdout is not None
    assert any("1 instances submitted as job" in line for line in launcher.stdout)
    launcher.send_signal(signal.SIGINT)
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 75
    assert "its jobs go on" in output
    assert status_of(place, "left")["state"] == "running"
    assert place.run("down", "left")[0] == 0
    assert not place.living_pids()
    status = status_of(place, "left")
    assert status["state"] == "stopped"
    assert {state["state"] for state in status["instances"].values()} == {"stopped"}
    (place.path / "go").touch()
    code, output = place.run("resume", "left")
    assert code == 0, output
    assert finished_seeds(place) == list("0123")
