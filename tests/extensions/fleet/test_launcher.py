"""Fleets of real processes: what happens when servers and jobs fail, hang, and are stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fleets import FleetPlace, phase_of, plan_fleet
from forks import forks

from instar.extensions.fleet import placement
from instar.extensions.fleet.launcher import Launcher
from instar.extensions.fleet.placement import Gpu
from instar.extensions.fleet.state import FleetStatus

SERVICE = """
services:
  server:
    command: [python3, server.py, "${ports.http}"]
    ports: [http]
    healthcheck: {http: /health, probe: completion, interval: 0.4s, timeout: 0.4s, start_period: 60s}
    stop: {grace: 2s}
"""
PAIR = """
    depends_on: {server: service_healthy}
    on_dependency_failure: restart_pair
    stop: {grace: 2s}
"""
ASK = (
    "import sys, urllib.request as u; "
    "u.urlopen('http://127.0.0.1:' + sys.argv[1] + '/health').read(); print('seed', sys.argv[2])"
)


def test_jobs_start_when_their_server_answers_and_all_end_together(place: FleetPlace) -> None:
    place.write(f"""
name: pairs
matrix: {{seed: [42, 1337]}}
run_name: seed${{seed}}
{SERVICE}
    resources: {{gpus: 1}}
jobs:
  trainer:
    command: [python3, -c, "{ASK}", "${{services.server.ports.http}}", "${{seed}}"]
    resources: {{gpus: 1}}
{PAIR}
""")
    code, output = place.run("up", "fleet.yaml", "--gpus", "4")
    assert code == 0, output
    status = place.status("pairs")
    assert [instance["phase"] for instance in status["instances"].values()] == ["succeeded"] * 2
    gpus = {
        gpu
        for instance in status["instances"].values()
        for process in instance["processes"].values()
        for gpu in process["gpus"]
    }
    assert gpus == {0, 1, 2, 3}
    ports = {
        instance["processes"]["server"]["ports"]["http"]
        for instance in status["instances"].values()
    }
    assert len(ports) == 2
    for seed in (42, 1337):
        log = (place.path / f"fleets/pairs/logs/seed{seed}/trainer.log").read_text()
        assert f"seed {seed}" in log
    assert not place.living_pids()
    # a second start of the same fleet is refused, and nothing is left to resume
    assert place.run("up", "fleet.yaml", "--gpus", "4")[0] == 2
    assert place.run("resume", "pairs")[0] == 0


def test_python_in_a_command_is_that_of_the_launcher(
    place: FleetPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.defpath)  # as where no environment is activated
    place.write("""
name: unactivated
jobs: {task: {command: [python, -c, import instar]}}
""")
    code, output = place.run("up", "fleet.yaml")
    assert code == 0, output


def test_a_server_that_dies_is_noticed_and_restarted_with_its_job(place: FleetPlace) -> None:
    place.write(f"""
name: dies
{SERVICE}
    restart: {{policy: on-failure, max: 2, backoff: 0.1s}}
jobs:
  trainer:
    command: [sh, -c, "test -e again && exit 0; touch again; sleep 100"]
{PAIR}
  other:
    command: [sh, -c, "until test -e finish; do sleep 0.1; done"]
""")
    launcher = place.start("up", "fleet.yaml")
    marker = place.path / "again"
    status = place.wait(
        "dies", lambda snapshot: phase_of(snapshot, "trainer") == "running" and marker.exists()
    )
    server = status["instances"]["0"]["processes"]["server"]["pid"]
    killed_at = time.time()
    os.kill(server, signal.SIGKILL)
    status = place.wait(
        "dies", lambda snapshot: snapshot["instances"]["0"]["processes"]["server"]["attempt"] == 2
    )
    server_events = [line for line in _events(place, "dies") if line.get("process") == "server"]
    exit_time = next(event["time"] for event in server_events if event["phase"] == "exited")
    assert exit_time - killed_at < 1.0
    (place.path / "finish").touch()
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, output
    processes = place.status("dies")["instances"]["0"]["processes"]
    assert processes["trainer"]["attempt"] == 2
    assert processes["other"]["attempt"] == 1


def test_a_server_that_hangs_is_unhealthy_after_its_retries(place: FleetPlace) -> None:
    place.write(f"""
name: hangs
{SERVICE}
jobs:
  trainer:
    command: [sleep, "100"]
    depends_on: {{server: service_healthy}}
""")
    launcher = place.start("up", "fleet.yaml")
    status = place.wait("hangs", lambda snapshot: phase_of(snapshot, "trainer") == "running")
    stopped_at = time.time()
    os.kill(status["instances"]["0"]["processes"]["server"]["pid"], signal.SIGSTOP)
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 4, output
    assert "server is unhealthy: 3 checks in a row failed" in output
    unhealthy = next(e for e in _events(place, "hangs") if e.get("phase") == "unhealthy")
    assert unhealthy["time"] - stopped_at < 3 * 0.4 + 1.0
    assert not place.living_pids()


def test_a_job_never_starts_if_its_server_answers_and_cannot_complete(place: FleetPlace) -> None:
    text = SERVICE.replace('"${ports.http}"]', '"${ports.http}", broken]').replace("60s", "2s")
    place.write(f"""
name: broken
{text}
jobs:
  trainer:
    command: [touch, started]
    depends_on: {{server: service_healthy}}
""")
    code, output = place.run("up", "fleet.yaml")
    assert code == 4
    assert "was not ready after 2 s: /v1/completions: status 500" in output
    assert not (place.path / "started").exists()


def test_a_server_that_dies_before_it_is_ready_ends_the_wait_at_once(place: FleetPlace) -> None:
    text = SERVICE.replace('server.py, "${ports.http}"', "-c, \"raise SystemExit('no model')\"")
    place.write(f"""
name: early
{text}
jobs:
  trainer: {{command: [touch, started], depends_on: {{server: service_healthy}}}}
""")
    began = time.monotonic()
    code, output = place.run("up", "fleet.yaml")
    assert code == 4
    assert "ended with exit code 1 before it was ready" in output
    assert "no model" in output  # the end of its log
    assert time.monotonic() - began < 30


STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(100)"


@pytest.mark.parametrize("signals", [1, 2])
def test_ctrl_c_asks_and_a_second_one_kills(place: FleetPlace, signals: int) -> None:
    grace = 2 if signals == 1 else 60
    place.write(f"""
name: stops
matrix: {{seed: [1, 2]}}
jobs:
  stubborn:
    command: [python3, -c, "{STUBBORN}"]
    stop: {{grace: {grace}s}}
""")
    launcher = place.start("up", "fleet.yaml")
    logs = [place.path / f"fleets/stops/logs/stops-{i}/stubborn.log" for i in range(2)]
    place.wait("stops", lambda _: all("up\n" in log.read_text() for log in logs))
    began = time.monotonic()
    launcher.send_signal(signal.SIGINT)
    if signals == 2:
        place.wait(
            "stops",
            lambda status: all(phase_of(status, "stubborn", n) == "stopping" for n in (0, 1)),
        )
        launcher.send_signal(signal.SIGINT)
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 75, output
    assert time.monotonic() - began < (grace if signals == 1 else 0) + 2 + 1
    assert not place.living_pids()
    assert {instance["phase"] for instance in place.status("stops")["instances"].values()} == {
        "stopped"
    }


def test_a_fleet_under_nohup_goes_on_when_its_terminal_closes(place: FleetPlace) -> None:
    place.write("""
name: nohup
jobs:
  trainer: {command: [sh, -c, "until test -e go; do sleep 0.1; done"]}
""")
    before = signal.signal(
        signal.SIGHUP, signal.SIG_IGN
    )  # inherited by what is started, as from nohup
    try:
        launcher = replace(place, new_interpreters=True).start("up", "fleet.yaml")
    finally:
        signal.signal(signal.SIGHUP, before)
    place.wait("nohup", lambda snapshot: phase_of(snapshot, "trainer") == "running")
    launcher.send_signal(signal.SIGHUP)
    time.sleep(0.5)  # longer than the launcher needs to begin to stop
    (place.path / "go").touch()
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, output


def test_nothing_outlives_a_killed_launcher_and_resume_runs_the_rest_once(
    place: FleetPlace,
) -> None:
    """Instance 0 is done, 1 and 2 run, 3 waits; daemons that left their session run too."""
    place.write("""
name: killed
matrix: {seed: [0, 1, 2, 3]}
max_parallel: 2
jobs:
  trainer:
    command: [sh, -c, "echo ${seed} >> began; test ${seed} = 0 -o -e go && { echo ${seed} >> done; exit 0; }; (setsid sleep 100 &); sleep 100"]
    stop: {grace: 2s}
""")
    launcher = place.start("up", "fleet.yaml")
    place.wait(
        "killed",
        lambda status: (
            [phase_of(status, "trainer", i) for i in range(3)] == ["exited", "running", "running"]
            and status["instances"]["0"]["phase"] == "succeeded"
        ),
    )
    assert place.living_pids()
    launcher.kill()
    launcher.communicate()
    deadline = time.monotonic() + 2 + 2
    while place.living_pids() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not place.living_pids()
    code, output = place.run("status", "killed")
    assert code == 0
    assert "launcher died" in output
    (place.path / "go").touch()
    code, output = place.run("resume", "killed")
    assert code == 0, output
    done_seeds = (place.path / "done").read_text().split()
    assert sorted(done_seeds) == ["0", "1", "2", "3"]


def test_one_instance_is_stopped_and_the_others_go_on(place: FleetPlace) -> None:
    place.write("""
name: part
matrix: {seed: [0, 1]}
jobs:
  trainer: {command: [sh, -c, "until test -e go; do sleep 0.1; done"]}
""")
    launcher = place.start("up", "fleet.yaml")
    place.wait("part", lambda status: phase_of(status, "trainer", 1) == "running")
    assert place.run("stop", "part", "0")[0] == 0
    place.wait("part", lambda status: status["instances"]["0"]["phase"] == "stopped")
    folder = place.path / "fleets/part"
    shutil.copytree(folder, folder.with_name("copy"))
    for words in (["stop", "copy", "1"], ["down", "copy"], ["down", "copy", "--kill"]):
        assert "fleet copy is not running" in place.run(*words)[1]
    folder.rename(new_folder := folder.with_name("moved"))
    assert "part-1" not in place.run("reap", "--dry-run")[1]  # its launcher is not gone
    new_folder.rename(folder)
    assert phase_of(place.status("part"), "trainer", 1) == "running"
    (place.path / "go").touch()
    assert launcher.wait(60) == 4
    assert place.status("part")["instances"]["1"]["phase"] == "succeeded"
    launcher.communicate()


def test_stopping_takes_no_instance_that_is_not_there_and_a_second_request_leaves_no_server(
    place: FleetPlace,
) -> None:
    """Instance 1 waits; instance 0 takes its time, in which it is asked again."""
    place.write("""
name: twice
matrix: {seed: [0, 1]}
max_parallel: 1
services: {server: {command: [sleep, "100"]}}
jobs:
  trainer:
    command: [sh, -c, "trap 'sleep 3; exit 1' TERM; touch begun-${seed}; while :; do sleep 0.1; done"]
    depends_on: {server: service_started}
""")
    launcher = place.start("up", "fleet.yaml")
    place.wait("twice", lambda _: (place.path / "begun-0").exists())
    code, output = place.run("stop", "twice", "1", "2")
    assert code == 2, output
    assert "twice has no instance '2'" in output
    assert place.run("stop", "twice", "1")[0] == 0
    place.wait("twice", lambda snapshot: snapshot["instances"]["1"]["phase"] == "stopped")
    assert place.run("stop", "twice", "0")[0] == 0
    place.wait("twice", lambda snapshot: phase_of(snapshot, "trainer") == "stopping")
    (place.path / "fleets/twice/control/0.stop").touch()
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 4, output
    assert output.count("stopping twice-0") == 2
    status = place.status("twice")
    assert [instance["phase"] for instance in status["instances"].values()] == ["stopped"] * 2
    assert phase_of(status, "server") == "exited"
    assert not (place.path / "begun-1").exists()


def test_a_job_that_succeeds_while_its_server_is_lost_has_succeeded(place: FleetPlace) -> None:
    place.write("""
name: finishes
services:
  server:
    command: [sleep, "100"]
    healthcheck: {command: "test ! -e down", interval: 0.2s, retries: 1, start_period: 6s}
    restart: {policy: on-failure, max: 1, backoff: 0.1s}
jobs:
  trainer:
    command: [sh, -c, "touch down; sleep 2"]
    depends_on: {server: service_healthy}
    on_dependency_failure: wait
""")
    code, output = place.run("up", "fleet.yaml")
    assert code == 0, output
    assert place.status("finishes")["instances"]["0"]["processes"]["server"]["attempt"] == 2


def test_a_gpu_whose_process_has_just_ended_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its driver may list the process a moment longer."""
    monkeypatch.setenv(placement.LOCKS_VARIABLE, str(tmp_path / "locks"))
    free, busy = Gpu(0, "GPU-a", "GPU-a"), Gpu(0, "GPU-a", "GPU-a", processes=(1234,))
    looks = iter([free, busy, free])
    monkeypatch.setattr(placement, "_real_gpus", lambda: (next(looks),))
    text = """
name: next
matrix: {seed: [0, 1]}
max_parallel: 1
jobs: {job: {command: ["true"], resources: {gpus: 1}}}
"""
    plan, messages = plan_fleet(tmp_path, text), list[str]()
    with (tmp_path / "trees").open("w") as trees:
        launcher = Launcher(plan, tmp_path, trees.fileno(), [free], {}, (), messages.append)
        assert launcher.run(plan.instances, FleetStatus()) == 0
    assert messages == ["waiting: 1 GPUs are needed and 0 are free; GPU 0: used by process 1234"]


def test_gpus_of_the_fleet_itself_are_waited_for_while_a_stranger_uses_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Instance 0 ends at once, and a stranger takes its GPU; the third runs where instance 1 was."""
    monkeypatch.setenv(placement.LOCKS_VARIABLE, str(tmp_path / "locks"))
    monkeypatch.setattr("instar.extensions.fleet.launcher._FREED_S", 0.1)
    gpus = [Gpu(index, f"GPU-{index}", f"GPU-{index}") for index in range(2)]
    looks = iter([gpus, gpus])
    used = [replace(gpus[0], processes=(1234,)), gpus[1]]
    monkeypatch.setattr(placement, "_real_gpus", lambda: next(looks, used))
    text = """
name: night
matrix: {seed: [0, 1, 2]}
max_parallel: 2
jobs: {job: {command: [sh, -c, "sleep $((2 * ${seed} % 4))"], resources: {gpus: 1}}}
"""
    plan, messages = plan_fleet(tmp_path, text), list[str]()
    with (tmp_path / "trees").open("w") as trees:
        launcher = Launcher(plan, tmp_path, trees.fileno(), gpus, {}, (), messages.append)
        assert launcher.run(plan.instances, FleetStatus()) == 0
    (message,) = messages
    assert message.startswith("waiting: 1 GPUs are needed and 0 are free")


def test_a_failed_job_is_retried_and_its_end_shown(place: FleetPlace) -> None:
    place.write("""
name: retries
matrix: {seed: [0, 1]}
jobs:
  trainer:
    command: [sh, -c, "echo attempt ${attempt} of ${seed}; test ${seed} = 1 -a ${attempt} = 2"]
    retry: {max: 1, backoff: 0.1s}
""")
    code, output = place.run("up", "fleet.yaml")
    assert code == 4
    assert "retries-0 failed: trainer ended with exit code 1" in output
    assert "attempt 2 of 0" in output
    instances = place.status("retries")["instances"]
    assert [instances[index]["phase"] for index in "01"] == ["failed", "succeeded"]


def test_failures_beyond_the_policy_stop_the_rest(place: FleetPlace) -> None:
    place.write("""
name: fast
matrix: {seed: [0, 1, 2]}
max_parallel: 1
failure: {policy: fail_fast}
jobs:
  trainer: {command: [sh, -c, "exit ${seed}0"]}
""")
    code, output = place.run("up", "fleet.yaml")
    assert code == 4, output
    phases = [instance["phase"] for instance in place.status("fast")["instances"].values()]
    assert phases == ["succeeded", "failed", "stopped"]


def test_two_launchers_never_hold_the_same_gpu(place: FleetPlace) -> None:
    for name in ("one", "two"):
        place.write(
            f"""
name: {name}
jobs:
  trainer:
    command: [sh, -c, "until test -e go; do sleep 0.1; done"]
    resources: {{gpus: 2}}
""",
            f"{name}.yaml",
        )
    first = place.start("up", "one.yaml", "--gpus", "3")
    place.wait("one", lambda status: phase_of(status, "trainer") == "running")
    code, output = place.run("up", "two.yaml", "--gpus", "3")
    assert code == 4
    assert "2 GPUs are needed and 1 are free" in output
    assert "one-0 of fleet one" in output  # who holds it
    second = place.start("resume", "two", "--wait")
    (place.path / "go").touch()
    assert first.wait(60) == 0
    assert second.wait(60) == 0
    first.communicate()
    second.communicate()


def _events(place: FleetPlace, name: str) -> list[dict[str, object]]:
    import json

    text = (place.path / "fleets" / name / "state.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


FULL_DISK = """\
case $1 in
  0) head -c 8m /dev/zero || { touch filled; exit 3; } ;;
  1) until grep -q "held in memory" output; do sleep 0.1; done
     rm fleets/full/logs/full-0/job.log
     until grep -q "is written again" output; do sleep 0.1; done ;;
  *) until test -e filled; do sleep 0.1; done ;;
esac
"""


def test_a_full_disk_is_reported_and_costs_no_line_of_the_state(place: FleetPlace) -> None:
    (place.path / "job.sh").write_text(FULL_DISK)
    count = 40  # the lines of so many do not fit into the rest of a page
    place.write(f"""
name: full
matrix: {{seed: {list(range(count))}}}
max_parallel: 4
jobs: {{job: {{command: [sh, job.sh, "${{index}}"]}}}}
""")
    (place.path / "fleets").mkdir()
    (place.path / "mount.sh").write_text(
        "mount -t tmpfs -o size=1m tmpfs fleets\n"
        '"$@" > output 2>&1\n'
        "cp fleets/full/state.jsonl state.jsonl\n"
    )
    private = ["unshare", "-m" if os.geteuid() == 0 else "-rm"]
    up = [forks().command, "fleet", "up", "fleet.yaml"]
    subprocess.run(
        [*private, "sh", "mount.sh", *up], cwd=place.path, env=place.env(), timeout=120, check=True
    )
    output = (place.path / "output").read_text()
    assert "full-0 failed: job ended with exit code 3; the disk of fleets/full is full" in output
    assert "state.jsonl cannot be written: No space left on device" in output
    assert output.index("cannot be written") < output.index("is written again")
    assert f"1 failed, {count - 1} succeeded" in output
    lines = (place.path / "state.jsonl").read_text().splitlines()
    exit_events = [json.loads(line) for line in lines if '"exited"' in line]
    assert sorted(line["instance"] for line in exit_events) == list(range(count))


def test_a_process_has_nothing_of_its_launchers_rank_and_what_is_visible_to_it(
    place: FleetPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "SLURM_PROCID"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("MASTER_PORT", "1")
    place.write(
        """
name: env
jobs:
  job: {command: [sh, -c, "env > env.txt"], env: {MASTER_PORT: "2"}}
"""
    )
    assert place.run("up", "fleet.yaml")[0] == 0
    lines = (place.path / "env.txt").read_text().splitlines()
    env = dict(line.split("=", 1) for line in lines if "=" in line)
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "SLURM_PROCID"} & env.keys()
    assert (env["MASTER_PORT"], env["CUDA_VISIBLE_DEVICES"]) == ("2", "")
