"""A job of several nodes of a Ray cluster: its host starts this module, which runs the command behind its
name here, and on each other node of the placement group."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from instar.distributed.signals import StopSignal
from instar.fleet.engines.node_process import NodeProcess, init, ray_library
from instar.fleet.instance import INSTANCE_VARIABLE
from instar.fleet.nodes import NODE_VARIABLE, RAY_VARIABLE, NodeCommand
from instar.fleet.state import log_path
from instar.processes.child import Child
from instar.processes.spawner import Command

_POLL_S = 0.2


def main(words: list[str]) -> int:
    """Run the words on all nodes; return 0, or the first other exit status, which ends the others.

    Args:
        words: the command; the last is the file of what it starts on each node.
    """
    ray = ray_library()
    init(os.environ[RAY_VARIABLE].split()[0])
    with StopSignal(on_repeat=lambda: None) as stop:
        here = Child(words, env={**os.environ, NODE_VARIABLE: "0"})
        others = _start(words)  # they end with this process
        left, failed, stopping = list(others), 0, False
        while left or here.poll() is None:
            time.sleep(_POLL_S)
            done, left = ray.wait(left, num_returns=len(left), timeout=0) if left else ([], [])
            ends = [here.poll() or 0, *ray.get(done)]
            failed = failed or next((end for end in ends if end), 0)
            if (failed or stop.requested) and not stopping:
                stopping = True
                here.send_signal(signal.SIGTERM)
                for actor in others.values():
                    actor.stop.remote(kill=False)
        return failed


def _start(words: list[str]) -> dict[Any, Any]:
    """Start the words on the other nodes; return the actors by the references of their ends."""
    ray = ray_library()
    from ray.util.placement_group import get_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = get_placement_group(os.environ[RAY_VARIABLE].split()[1])
    instance, file = os.environ[INSTANCE_VARIABLE], Path(words[-1])
    folder, job = file.parents[2], file.name.partition(".")[0]
    started = {}
    for rank, given in enumerate(json.loads(file.read_bytes())):
        if rank == 0:
            continue
        actor = ray.remote(NodeProcess).options(
            num_cpus=0,
            num_gpus=NodeCommand(**given).gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank),
        )
        name = f"{job}.node{rank}"
        command = Command(
            tuple(words),
            {**os.environ, NODE_VARIABLE: str(rank)},
            Path.cwd(),
            log_path(folder, instance, name),
            file.with_name(f"{file.stem}.node{rank}.json"),
        )
        each = actor.remote()
        started[each.run.remote(command, holder=f"{name} of {instance}")] = each
    return started


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
