"""A Ray cluster of two nodes, both on this machine, with four pretended GPUs each.

As a program (`python ray_cluster.py FOLDER`) it serves until stdin is closed; a line on stdin kills
the second node, or starts it again.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

GPUS = 4
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_metrics_collection": "0",
}
_DEAD_SOON = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "300",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "3",
}


class Cluster:
    """The program, from outside."""

    def __init__(self, folder: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C of a test is not for it
            env={**os.environ, **_QUIET, **_DEAD_SOON, "RAY_TMPDIR": folder},
        )
        self.address = self._answer()

    def kill_worker(self, rng: random.Random) -> bool:
        """Kill the actor of a host; False: there is none yet."""
        workers = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # Ray's own helpers come and go
                if process.name().startswith("ray::NodeProcess"):
                    workers.append(process)
        if workers:
            rng.choice(workers).kill()
        return bool(workers)

    def kill_second_node(self) -> None:
        """Return when its daemons are killed; its workers find that out."""
        self._toggle()

    def start_second_node(self) -> None:
        self._toggle()

    def end(self) -> None:
        self.process.communicate(timeout=60)

    def _toggle(self) -> None:
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)
        self._answer()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    folder = tempfile.mkdtemp(prefix="ray-")  # sockets are in it, whose paths must be short
    cluster = Cluster(folder)
    try:
        yield cluster
    finally:
        cluster.end()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    from ray.cluster_utils import Cluster as Nodes

    nodes = Nodes()

    def add(first_gpu: int) -> Any:
        gpus = range(first_gpu, first_gpu + GPUS)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        return nodes.add_node(
            num_cpus=8,
            num_gpus=GPUS,
            object_store_memory=75 << 20,
            no_monitor=True,
            include_dashboard=False,
            include_log_monitor=False,
            dashboard_agent_listen_port=0,
        )

    add(0)
    second = add(GPUS)
    print(nodes.address, flush=True)
    while sys.stdin.readline():
        if second is None:
            second = add(GPUS)
        else:
            nodes.remove_node(second, allow_graceful=False)
            second = None
        print("done", flush=True)
    nodes.shutdown()


if __name__ == "__main__":
    main()
