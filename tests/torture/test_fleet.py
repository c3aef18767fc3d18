"""Fleets at scale: hundreds of servers, a thousand short runs, launchers killed at any moment."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import figures
import psutil
import pytest
from fleets import FleetPlace, first_port, phase_of

from instar.extensions.fleet.placement import LOCKS_VARIABLE, Gpu, Taken, lock_gpus

INSTANCES = figures.times(10, 200)
RUNS = figures.times(40, 1000)
KILLS = figures.times(4, 100)
KILLS_IN_PHASE = figures.times(1, 20)
ACQUISITIONS = figures.times(600, 10_000)
GPUS = tuple(Gpu(index, str(index), f"pretended-{index}") for index in range(8))
GRACE_S = 2.0

WORK = "trap 'sleep 0.5; exit 1' TERM; sleep 1 & wait $$!; trap '' TERM; echo ${seed} >> done"
LISTENER = (
    "import socket, sys; s = socket.create_server(('127.0.0.1', int(sys.argv[1])))\n"
    "while True: s.accept()[0].close()"
)


def place_in(folder: Path, *, new_interpreters: bool = False) -> FleetPlace:
    return FleetPlace(folder, first_port(), new_interpreters=new_interpreters or figures.FULL)


def pairs(name: str, count: int, command: list[str]) -> str:
    """A fleet file: instances of a server and a job that needs it."""
    return f"""
name: {name}
matrix: {{seed: {list(range(count))}}}
max_parallel: {count}
services:
  server:
    command: [python3, -I, -S, listener.py, "${{ports.tcp}}"]
    ports: [tcp]
    healthcheck: {{tcp: true}}
    stop: {{grace: {GRACE_S}s}}
jobs:
  job:
    command: {json.dumps(command)}
    depends_on: {{server: service_healthy}}
    stop: {{grace: {GRACE_S}s}}
"""


def start_pairs(place: FleetPlace, count: int) -> tuple[subprocess.Popen[str], float]:
    """Start a fleet of services and jobs; return its launcher, and the seconds until all run."""
    (place.path / "listener.py").write_text(LISTENER)
    place.write(pairs("many", count, ["sleep", "600"]))
    began = time.monotonic()
    launcher = place.start("up", "fleet.yaml")

    def ready(status: dict[str, Any]) -> bool:
        return all(phase_of(status, "job", n) == "running" for n in range(count))

    place.wait("many", ready, timeout_s=150)
    return launcher, time.monotonic() - began


def processor_share(process: psutil.Process, seconds: float) -> float:
    """The share of one core that a process uses, in percent."""
    before, began = sum(process.cpu_times()[:2]), time.monotonic()
    time.sleep(seconds)
    return 100 * (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - began)


@pytest.mark.torture
def test_the_launcher_of_eight_instances_needs_little(tmp_path: Path) -> None:
    launcher, _ = start_pairs(place_in(tmp_path, new_interpreters=True), 8)
    share = processor_share(psutil.Process(launcher.pid), figures.times(3, 60))
    launcher.send_signal(signal.SIGINT)
    launcher.communicate()
    bar = figures.times(5, 1)  # short trials count ticks of 10 ms
    figures.write(
        "fleet-eight", [figures.at_most("launcher's processor, 8 instances", [share], "%", bar)]
    )


@pytest.mark.torture
def test_many_pairs_are_ready_soon_and_end_with_their_launcher(tmp_path: Path) -> None:
    place = place_in(tmp_path, new_interpreters=True)
    launcher, ready_s = start_pairs(place, INSTANCES)
    process = psutil.Process(launcher.pid)
    memory = process.memory_info().rss
    share = processor_share(process, figures.times(3, 20))
    zombies = [
        child.pid
        for child in process.children(recursive=True)
        if child.status() == psutil.STATUS_ZOMBIE
    ]
    launcher.kill()
    kill_s = time.monotonic()
    launcher.communicate()
    while place.living_pids() and time.monotonic() < kill_s + 30:
        time.sleep(0.05)
    gone_s = time.monotonic() - kill_s
    # 200 pairs of processes start on two cores; few of them must not take longer
    figures.write(
        "fleet-many",
        [
            figures.at_most(f"{INSTANCES} × service and job: all ready", [ready_s], "s", 30),
            figures.at_most("launcher's memory", [memory / 1e6], "MB", 300),
            figures.at_most(f"launcher's processor, {INSTANCES} instances", [share], "%", 25),
            figures.none_of(2 * INSTANCES, "process is a zombie", zombies),
            figures.none_of(2 * INSTANCES, "process outlives its launcher", place.living_pids()),
            figures.at_most("launcher killed: all have ended", [gone_s], "s", GRACE_S + 2),
        ],
    )


def test_the_overhead_of_an_empty_run(tmp_path: Path) -> None:
    place = place_in(tmp_path)
    place.write(f"""
name: empty
matrix: {{seed: {list(range(RUNS))}}}
max_parallel: 2
jobs: {{job: {{command: ["true"]}}}}
""")
    place.run("plan", "fleet.yaml")
    began = time.monotonic()
    code, output = place.run("up", "fleet.yaml", timeout_s=600)
    took = time.monotonic() - began
    assert code == 0, output
    overhead_ms = 1000 * took / RUNS
    bar = 40 if figures.FULL else 400  # the start of the launcher itself is in it
    figures.write(
        "fleet-empty", [figures.at_most(f"{RUNS:,} empty runs, each", [overhead_ms], "ms", bar)]
    )


def test_a_launcher_killed_at_any_moment_and_resumed_runs_everything_once(tmp_path: Path) -> None:
    rng = random.Random(7)
    repeats: list[str] = []
    missing: list[str] = []
    untrue: list[str] = []
    for trial in range(KILLS):
        folder = tmp_path / str(trial)
        folder.mkdir()
        place = place_in(folder)
        place.write("""
name: killed
matrix: {seed: [0, 1, 2, 3]}
max_parallel: 2
jobs:
  job:
    command: [sh, -c, "trap 'exit 1' TERM; sleep 0.2 & wait $$!; trap '' TERM; echo ${seed} >> done"]
    stop: {grace: 2s}
""")
        launcher = place.start("up", "fleet.yaml")
        time.sleep(rng.uniform(0.3, 2.0))
        launcher.kill()
        launcher.communicate()
        if not (folder / "fleets/killed/fleet.json").exists():
            code, output = place.run("up", "fleet.yaml")  # killed before anything was kept
        else:
            code, output = place.run("resume", "killed")
        if code != 0:
            untrue.append(f"trial {trial}: {output}")
        if place.living_pids():
            untrue.append(f"trial {trial}: processes survive")
        finished_seeds = (folder / "done").read_text().split()
        repeats += [
            f"trial {trial}: {n}" for n in set(finished_seeds) if finished_seeds.count(n) > 1
        ]
        missing += [f"trial {trial}: {n}" for n in "0123" if n not in finished_seeds]
    figures.write(
        "fleet-killed",
        [
            figures.none_of(KILLS, "killed and resumed: a run completed twice", repeats),
            figures.none_of(KILLS, "killed and resumed: a run never completed", missing),
            figures.none_of(KILLS, "killed and resumed: something else", untrue),
        ],
    )


def _in_start_up(place: FleetPlace, launcher: subprocess.Popen[str]) -> None:  # noqa: ARG001
    place.wait("phases", lambda status: phase_of(status, "server") in ("starting", "running"))


def _in_training(place: FleetPlace, launcher: subprocess.Popen[str]) -> None:  # noqa: ARG001
    place.wait("phases", lambda status: phase_of(status, "job") == "running")


def _in_shutdown(place: FleetPlace, launcher: subprocess.Popen[str]) -> None:
    _in_training(place, launcher)
    launcher.send_signal(signal.SIGINT)
    place.wait("phases", lambda status: phase_of(status, "job") in ("stopping", "exited"))


@pytest.mark.torture
def test_a_launcher_killed_in_start_up_training_or_shutdown(tmp_path: Path) -> None:
    rng = random.Random(11)
    wrong: list[str] = []
    late: list[float] = []
    for when in (_in_start_up, _in_training, _in_shutdown):
        for trial in range(KILLS_IN_PHASE):
            folder = tmp_path / f"{when.__name__}{trial}"
            folder.mkdir()
            (folder / "listener.py").write_text("import time; time.sleep(0.4)\n" + LISTENER)
            place = place_in(folder)
            place.write(pairs("phases", 2, ["sh", "-c", WORK]))
            launcher = place.start("up", "fleet.yaml")
            when(place, launcher)
            time.sleep(rng.uniform(0.0, 0.3))
            launcher.kill()
            launcher.communicate()
            kill_s = time.monotonic()
            while place.living_pids() and time.monotonic() < kill_s + 30:
                time.sleep(0.05)
            late.append(time.monotonic() - kill_s)
            _, status = place.run("status", "phases")
            over = when is _in_shutdown and "phases: stopped" in status  # it was quicker
            alive = any(word in status for word in ("running", "healthy"))
            if alive or not ("launcher died" in status or over):
                wrong.append(f"{folder.name}: status is {status}")
            code, output = place.run("resume", "phases")
            finished_seeds = sorted((folder / "done").read_text().split())
            if code != 0 or finished_seeds != ["0", "1"] or place.living_pids():
                wrong.append(f"{folder.name}: code {code}, done {finished_seeds}: {output}")
    count = 3 * KILLS_IN_PHASE
    figures.write(
        "fleet-phases",
        [
            figures.none_of(count, "killed in a phase: untrue state, or not run once", wrong),
            figures.at_most("launcher killed in a phase: ended", late, "s", GRACE_S + 2),
        ],
    )


def _acquire_often(folder: str, seed: int, count: int, counts: multiprocessing.Queue[int]) -> None:
    """Hold random GPUs; a file per GPU that exists already means that somebody else holds it."""
    rng, double = random.Random(seed), 0
    for _ in range(count):
        try:
            locks = lock_gpus(GPUS, rng.randint(1, 4), (rng.randrange(8),), "test")
        except Taken:
            continue
        for gpu, _ in locks:
            try:
                os.close(os.open(f"{folder}/{gpu.key}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                double += 1
        time.sleep(0.0005)
        for gpu, lock in locks:
            Path(folder, gpu.key).unlink()
            lock.close()
    counts.put(double)


def test_two_launchers_never_hold_one_gpu_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOCKS_VARIABLE, str(tmp_path / "locks"))
    counts: multiprocessing.Queue[int] = multiprocessing.Queue()
    claims = tmp_path / "claims"
    claims.mkdir()
    processes = [
        multiprocessing.Process(
            target=_acquire_often, args=(str(claims), seed, ACQUISITIONS // 2, counts)
        )
        for seed in (1, 2)
    ]
    for process in processes:
        process.start()
    double = sum(counts.get(timeout=600) for _ in processes)
    for process in processes:
        process.join()
    figures.write(
        "fleet-gpus",
        [figures.none_of(ACQUISITIONS, "a GPU was held by two at once", [1] * double)],
    )
