"""Fleets in a Ray cluster whose nodes, workers and drivers are killed at any moment: only in `make torture`. `make test` kills
one of each in the cluster of tests/extensions/fleet/test_ray.py."""

from __future__ import annotations

import random
import time
from pathlib import Path

import figures
from fleets import FleetPlace, first_port, phase_of
from ray_cluster import running_cluster

TRIALS = 30
INSTANCES = 4
KILLED = ("worker", "driver", "node")
JOB = "trap 'exit 1' TERM; sleep 1 & wait $$!; trap '' TERM; echo ${seed} >> done"


def test_whatever_is_killed_each_run_completes_once(tmp_path: Path) -> None:
    rng = random.Random(7)
    wrong: dict[str, list[str]] = {victim: [] for victim in KILLED}
    with running_cluster() as cluster:
        for trial in range(TRIALS):
            what = KILLED[trial % len(KILLED)]
            folder = tmp_path / str(trial)
            folder.mkdir()
            place = FleetPlace(folder, first_port())
            place.write(f"""
name: killed
engine: ray
ray: {{address: '{cluster.address}'}}
matrix: {{seed: {list(range(INSTANCES))}}}
jobs:
  job:
    command: [sh, -c, "{JOB}"]
    resources: {{gpus: 2}}
    stop: {{grace: 2s}}
""")
            launcher = place.start("up", "fleet.yaml")
            place.wait("killed", lambda status: status["instances"])
            if what == "worker":
                # the first workers of a cold cluster take a minute on two loaded cores
                place.wait("killed", lambda status: phase_of(status, "job"), timeout_s=300)
                time.sleep(rng.uniform(0.0, 1.5))
                cluster.kill_worker(rng)
            else:
                time.sleep(rng.uniform(0.0, 6.0))
                cluster.kill_second_node() if what == "node" else launcher.kill()
            output, _ = launcher.communicate(timeout=120)
            code = launcher.returncode
            if what == "driver":
                code, output = place.run("resume", "killed")
            elif what == "node":
                cluster.start_second_node()
            finished_seeds = sorted((folder / "done").read_text().split())
            if code != 0 or finished_seeds != [*map(str, range(INSTANCES))] or place.living_pids():
                wrong[what].append(
                    f"trial {trial}: {code}, {finished_seeds}, {place.living_pids()}: {output}"
                )
    figures.write(
        "ray-killed",
        [
            figures.none_of(TRIALS // len(KILLED), f"{what} killed: not each run once", problems)
            for what, problems in wrong.items()
        ],
    )
