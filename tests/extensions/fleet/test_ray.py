"""Fleets in a real Ray cluster of two nodes, both on this machine, with four pretended GPUs each."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray_cluster
from fleets import FleetPlace, phase_of

from instar.config.errors import ConfigError
from instar.extensions.fleet.engines.ray import NodeProcess, bundles, misfit, ray_library
from instar.extensions.fleet.engines.spawner import Command
from instar.extensions.fleet.spec import FleetSpec

SERVER = (
    "import socket, sys; s = socket.create_server(('127.0.0.1', int(sys.argv[1])))\n"
    "while True: s.accept()[0].close()"
)
PAIR = """
matrix: {seed: [0, 1, 2, 3]}
services:
  server:
    command: [python3, -I, -S, server.py, "${ports.tcp}"]
    resources: {gpus: 1}
    ports: [tcp]
    healthcheck: {tcp: true, interval: 10s}
    stop: {grace: 2s}
jobs:
  prepare: {command: [sh, -c, "echo ${seed} >> prepared"], stop: {grace: 2s}}
  trainer:
    command: [sh, -c, "until test -e go; do sleep 0.1; done; echo ${seed} >> done"]
    resources: {gpus: 1}
    depends_on: {server: service_healthy, prepare: completed}
    stop: {grace: 2s}
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[ray_cluster.Cluster]:
    with ray_cluster.running_cluster() as running:
        yield running


def write(place: FleetPlace, cluster: ray_cluster.Cluster, text: str, restarts: int = 3) -> None:
    options = f"{{address: '{cluster.address}', restarts: {restarts}}}"
    place.write(f"engine: ray\nray: {options}\n{text}")
    (place.path / "server.py").write_text(SERVER)


def count_of(status: dict[str, Any], phase: str) -> int:
    """How many trainers are in a phase."""
    return [phase_of(status, "trainer", i) for i in range(4)].count(phase)


@pytest.mark.torture
@pytest.mark.timeout(420)  # Ray starts some ten processes per node, slowly on a busy machine
def test_a_job_of_two_nodes_ends_on_both(place: FleetPlace, cluster: ray_cluster.Cluster) -> None:
    """After Ctrl-C, after the death of the driver, and by itself."""
    write(
        place,
        cluster,
        """
name: nodes
jobs:
  job:
    command: [sh, -c, "echo ${node_rank} of ${nodes} on $$CUDA_VISIBLE_DEVICES; until test -e go -a ${master_addr}:$$MASTER_PORT = $$MASTER_ADDR:${ports.master}; do sleep 0.1; done"]
    resources: {nodes: 2, gpus: 1}
    stop: {grace: 2s}
""",
    )
    logs = [
        place.path / "fleets/nodes/logs/nodes-0" / log_name
        for log_name in ("job.log", "job.node1.log")
    ]

    def occurrences(text: str) -> list[int]:
        return [log.read_text().count(text) if log.exists() else 0 for log in logs]

    launcher = place.start("up", "fleet.yaml")
    place.wait("nodes", lambda _: occurrences("of 2 on") == [1, 1], 150)
    # Ray chooses which node is the first
    in_order = occurrences("0 of 2 on 0") + occurrences("1 of 2 on 4")
    assert [1, 0, 0, 1] in (in_order, occurrences("0 of 2 on 4") + occurrences("1 of 2 on 0"))
    launcher.send_signal(signal.SIGINT)
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 75, output
    assert not place.living_pids()
    assert place.status("nodes")["instances"]["0"]["phase"] == "stopped"
    launcher = place.start("resume", "nodes")
    place.wait("nodes", lambda _: occurrences("of 2 on") == [2, 2], 150)
    launcher.kill()
    launcher.communicate()
    deadline = time.monotonic() + 2 + 2 + 2  # the graces of the host's process, and of node 1
    while place.living_pids() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not place.living_pids()
    (place.path / "go").touch()
    code, output = place.run("resume", "nodes")
    assert code == 0, output
    assert occurrences("of 2 on") == [3, 3]
    assert not place.living_pids()


@pytest.mark.torture
@pytest.mark.timeout(420)  # Ray starts some ten processes per node, slowly on a busy machine
def test_a_run_whose_worker_is_killed_begins_again_as_often_as_allowed_and_completes_once(
    place: FleetPlace, cluster: ray_cluster.Cluster
) -> None:
    """The actor that starts the processes of a host."""
    write(
        place,
        cluster,
        """
name: killed
matrix: {seed: [0]}
jobs:
  job:
    command: [sh, -c, "until test -e go; do sleep 0.1; done; echo ${seed} >> done"]
    resources: {gpus: 2}
    stop: {grace: 2s}
""",
        restarts=1,
    )
    launcher = place.start("up", "fleet.yaml")
    for attempt in (1, 2):
        place.wait(
            "killed",
            lambda status, attempt=attempt: (
                phase_of(status, "job") == "running"
                and status["instances"]["0"]["processes"]["job"]["attempt"] == attempt
            ),
            150,
        )
        assert cluster.kill_worker(random.Random(7))
    output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 4, output
    assert output.count("its host was lost, restart 1 of 1") == 1
    (place.path / "go").touch()
    code, output = place.run("resume", "killed")
    assert code == 0, output
    assert (place.path / "done").read_text().split() == ["0"]
    assert not place.living_pids()


def test_what_no_node_has_is_refused_before_a_folder_is_made(
    place: FleetPlace, cluster: ray_cluster.Cluster
) -> None:
    write(place, cluster, "name: large\njobs: {job: {command: 'true', resources: {gpus: 9}}}\n")
    code, output = place.run("up", "fleet.yaml")
    assert code == 2
    assert "an instance needs 1 CPU, 9 GPU on one node; the cluster has 2 nodes, with" in output
    assert "8 CPU, 4 GPU" in output
    assert not (place.path / "fleets").exists()


@pytest.mark.torture
@pytest.mark.timeout(420)  # Ray starts some ten processes per node, slowly on a busy machine
def test_the_instances_of_a_lost_node_begin_again_on_another(
    place: FleetPlace, cluster: ray_cluster.Cluster
) -> None:
    """Their jobs that have succeeded are not run again; the other node's instances go on. The node
    stays dead: this is the last test of the cluster."""
    write(place, cluster, f"name: lost\n{PAIR}")
    launcher = place.start("up", "fleet.yaml")
    status = place.wait("lost", lambda snapshot: count_of(snapshot, "running") == 4, 150)
    used = [
        {gpu for process in instance["processes"].values() for gpu in process["gpus"]}
        for instance in status["instances"].values()
    ]
    assert sorted(map(sorted, used)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    cluster.kill_second_node()
    place.wait("lost", lambda snapshot: count_of(snapshot, "exited") == 2, 60)
    (place.path / "go").touch()
    output, _ = launcher.communicate(timeout=150)
    assert launcher.returncode == 0, output
    assert output.count("its host was lost, restart 1 of 3") == 2
    assert not place.living_pids()
    for name in ("prepared", "done"):
        assert sorted((place.path / name).read_text().split()) == ["0", "1", "2", "3"]
    after = place.status("lost")["instances"]
    assert {instance["phase"] for instance in after.values()} == {"succeeded"}
    attempts = sorted(instance["processes"]["trainer"]["attempt"] for instance in after.values())
    assert attempts == [1, 1, 2, 2]
    assert {
        gpu for instance in after.values() for gpu in instance["processes"]["trainer"]["gpus"]
    } <= {*range(4)}


def spec(**values: Any) -> FleetSpec:
    return FleetSpec.model_validate({"name": "any", **values})


def test_an_instance_reserves_what_its_processes_need_in_total() -> None:
    job = {"command": "true", "resources": {"gpus": 1, "nodes": 2, "memory": "1GB"}}
    server = {"command": "true", "resources": {"gpus": 2, "cpus": 3}}
    demand = bundles(spec(services={"server": server}, jobs={"job": job}), None)
    assert demand == [
        {"CPU": 3.0, "GPU": 3.0, "memory": 1e9},
        {"CPU": 1.0, "GPU": 1.0, "memory": 1e9},
    ]
    small, large = {"CPU": 4, "GPU": 1, "memory": 4e9}, {"CPU": 4, "GPU": 4, "memory": 4e9}
    assert misfit(demand, [small, large]) == ""
    assert "3 GPU, 1.0 GB memory on one of 2 nodes; the cluster has 2 nodes" in misfit(
        demand, [small, small]
    )
    assert misfit(demand, [large])
    assert bundles(spec(services={"server": server}), "0-7") == [{"CPU": 3.0}]


def test_the_plan_prints_what_ray_reserves(place: FleetPlace) -> None:
    place.write(f"name: planned\n{PAIR}")
    code, output = place.run("plan", "fleet.yaml", "--engine", "ray", "--json")
    assert code == 0, output
    assert json.loads(output)["placement_group"] == {
        "strategy": "STRICT_PACK",
        "bundles": [{"CPU": 1, "GPU": 2}],
    }


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"instar\[ray\]"):
        ray_library()


def test_a_process_that_is_stopped_before_it_starts_never_starts(tmp_path: Path) -> None:
    command = Command(("nothing",), {}, tmp_path, tmp_path / "log", tmp_path / "result.json")

    async def stopped_first(*, kill: bool) -> int:
        process = NodeProcess()
        await process.stop(kill)
        return await process.run(command)

    assert asyncio.run(stopped_first(kill=False)) == -signal.SIGTERM
    assert asyncio.run(stopped_first(kill=True)) == -signal.SIGKILL
    assert not list(tmp_path.iterdir())
