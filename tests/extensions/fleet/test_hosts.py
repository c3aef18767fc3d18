"""Instances that hosts elsewhere run: here, hosts are processes that a scheduler of this test starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pytest
from fleets import FleetPlace, phase_of, starts

from instar.extensions.fleet.engines.remote import HostStatus, follow_hosts
from instar.extensions.fleet.engines.work import host_command, remaining_work
from instar.extensions.fleet.folder import create_fleet_folder, reopen_fleet
from instar.extensions.fleet.placement import given_gpus
from instar.extensions.fleet.plan import Instance, load_fleet

SRUN = """\
#!/bin/sh
# starts the command behind the options on two nodes
while [ "${1#--}" != "$1" ]; do shift; done
for node in 0 1; do SLURM_NODEID=$node CUDA_VISIBLE_DEVICES=4,5,6 "$@" & done
wait
"""


class Processes:
    """Runs each host in a process of this machine; `on_running` is called once, when one runs."""

    survives = False

    def __init__(self, place: FleetPlace, name: str) -> None:
        self._env, self._folder = place.env(), place.path / "fleets" / name
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def submit(self, instances: Sequence[Instance]) -> None:
        for each in instances:
            words = host_command(self._folder, each.index)
            self.processes[each.index] = subprocess.Popen(words, env=self._env)

    def hosts(self) -> Mapping[int, HostStatus]:
        ends = {index: process.poll() for index, process in self.processes.items()}
        return {index: HostStatus(end is None, f"exit code {end}") for index, end in ends.items()}

    def stop(self, indices: Collection[int], *, kill: bool) -> None:
        for index in indices:
            self.processes[index].send_signal(signal.SIGKILL if kill else signal.SIGTERM)


@pytest.fixture(autouse=True)
def _here(place: FleetPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.path)


def started(place: FleetPlace, text: str) -> Path:
    """The folder of a new fleet of the engine slurm."""
    return create_fleet_folder(load_fleet(str(place.write(f"engine: slurm\n{text}"))), "3").path


def finish(place: FleetPlace, folder: Path, said: list[str]) -> tuple[int, Processes]:
    """Run what is left of it."""
    scheduler = Processes(place, folder.name)
    return follow_hosts(
        remaining_work(reopen_fleet(folder), (), -1), scheduler, said.append
    ), scheduler


def test_each_instance_has_a_host_and_a_part_of_the_state(place: FleetPlace) -> None:
    folder = started(
        place,
        """
name: parts
matrix: {seed: [0, 1, 2]}
stagger: {jobs: 2s}
jobs:
  job:
    command: [sh, -c, "echo ${seed} >> ran; test ${seed} != 1 -o ${attempt} = 2"]
    resources: {gpus: 1}
""",
    )
    said: list[str] = []
    code, _ = finish(place, folder, said)
    assert code == 4
    assert said[0] == "parts-1 failed: job ended with exit code 1"
    first, second, third = starts(folder, "job")
    assert min(second - first, third - second) > 1.9  # the pauses are of all hosts together
    status = place.status("parts")
    assert [each["phase"] for each in status["instances"].values()] == [
        "succeeded",
        "failed",
        "succeeded",
    ]
    assert all(each["host"] for each in status["instances"].values())
    assert all(each["processes"]["job"]["gpus"] for each in status["instances"].values())
    for path in folder.glob("state.*.jsonl"):
        kinds = {json.loads(line)["kind"] for line in path.read_text().splitlines()}
        assert kinds == {"instance", "process"}  # not the start and the end of the fleet
    # only the failed one is run again, as its second attempt
    code, scheduler = finish(place, folder, said)
    assert code == 0
    assert list(scheduler.processes) == [1]
    assert sorted((place.path / "ran").read_text().split()) == ["0", "1", "1", "2"]
    assert place.status("parts")["ended"]["code"] == 0


def test_a_host_that_is_killed_is_noticed_and_leaves_nothing_behind(place: FleetPlace) -> None:
    folder = started(
        place,
        """
name: lost
jobs: {job: {command: [sh, -c, "test -e go || sleep 100"], stop: {grace: 1s}}}
""",
    )

    class Lost(Processes):
        def hosts(self) -> Mapping[int, HostStatus]:
            status = place.status("lost")
            if phase_of(status, "job") == "running" and self.processes[0].poll() is None:
                self.processes[0].kill()
                self.processes[0].wait()
            return super().hosts()

    said: list[str] = []
    work = remaining_work(reopen_fleet(folder), (), -1)
    assert follow_hosts(work, Lost(place, "lost"), said.append) == 4
    assert "ended before it (exit code -9)" in said[0]
    assert place.status("lost")["instances"]["0"]["phase"] == "failed"
    (place.path / "go").touch()
    (folder / "control").mkdir()
    (folder / "control/0.stop").touch()  # of before the start: not obeyed
    assert finish(place, folder, said)[0] == 0
    assert place.status("lost")["instances"]["0"]["processes"]["job"]["attempt"] == 2
    assert not place.living_pids()


def test_a_job_of_two_nodes_is_started_once_on_each(
    place: FleetPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stub of srun sets what SLURM would set on each node."""
    srun = place.path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(SRUN)
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{srun.parent}:{os.environ['PATH']}")
    folder = started(
        place,
        """
name: nodes
services: {server: {command: [sh, -c, "echo >> servers; sleep 100"]}}
jobs:
  job:
    command: [sh, -c, "echo ${node_rank} of ${nodes}, $$NNODES $$NODE_RANK $$CUDA_VISIBLE_DEVICES at ${master_addr}:${master_port} > node${node_rank}; test $$MASTER_PORT = ${ports.master}"]
    resources: {nodes: 2, gpus: 1}
    depends_on: {server: service_started}
""",
    )
    code, _ = finish(place, folder, [])
    assert code == 0
    here = os.uname().nodename
    port = place.status("nodes")["instances"]["0"]["processes"]["job"]["ports"]["master"]
    texts = [(place.path / f"node{rank}").read_text().strip() for rank in (0, 1)]
    assert texts == [f"0 of 2, 2 0 0 at {here}:{port}", f"1 of 2, 2 1 4 at {here}:{port}"]
    assert (place.path / "servers").read_text().count("\n") == 1


def test_a_host_that_cannot_see_the_folder_says_so(place: FleetPlace) -> None:
    code, output = place.run("host", "/on/another/machine", "0")
    assert code == 2
    assert "a file system that all hosts see" in output


def test_the_gpus_of_a_host_are_those_that_its_scheduler_gave() -> None:
    given = {"CUDA_VISIBLE_DEVICES": "2,MIG-1", "SLURM_JOB_GPUS": "0,1"}
    assert [gpu.id for gpu in given_gpus(given, None)] == ["2", "MIG-1"]
    assert [gpu.id for gpu in given_gpus({"SLURM_JOB_GPUS": "7"}, None)] == ["7"]
    assert [gpu.id for gpu in given_gpus(given, "1")] == ["0"]
