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
from instar.extensions.fleet.engines.nodes import NODE_VARIABLE, RAY_VARIABLE, NodeCommand
from instar.extensions.fleet.engines.ray import NodeProcess, connect_to_ray, ray_library
from instar.extensions.fleet.engines.spawner import Command
from instar.extensions.fleet.instance import INSTANCE_VARIABLE
from instar.extensions.fleet.state import process_log_path
from instar.processes.child import Child

_POLL_S = 0.2


def run_on_all_nodes(words: list[str]) -> int:
    """Run the words on all nodes; return 0, or the first other exit status, which ends the others.

    Args:
        words: the command; the last is the file of what it starts on each node.
    """
    ray = ray_library()
    connect_to_ray(os.environ[RAY_VARIABLE].split()[0])
    with StopSignal(on_repeat=lambda: None) as stop:
        child = Child(words, env={**os.environ, NODE_VARIABLE: "0"})
        actors = _start(words)  # they end with this process
        pending, exit_code, stopping = list(actors), 0, False
        while pending or child.poll() is None:
            time.sleep(_POLL_S)
            ended_processes, pending = (
                ray.wait(pending, num_returns=len(pending), timeout=0) if pending else ([], [])
            )
            ends = [child.poll() or 0, *ray.get(ended_processes)]
            exit_code = exit_code or next((end for end in ends if end), 0)
            if (exit_code or stop.requested) and not stopping:
                stopping = True
                child.send_signal(signal.SIGTERM)
                for actor in actors.values():
                    actor.stop.remote(kill=False)
        return exit_code


def _start(words: list[str]) -> dict[Any, Any]:
    """Start the words on the other nodes; return the actors by the references of their ends."""
    ray = ray_library()
    from ray.util.placement_group import get_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = get_placement_group(os.environ[RAY_VARIABLE].split()[1])
    instance, file = os.environ[INSTANCE_VARIABLE], Path(words[-1])
    folder, job = file.parents[2], file.name.partition(".")[0]
    node_processes = {}
    for rank, fields in enumerate(json.loads(file.read_bytes())):
        if rank == 0:
            continue
        actor = ray.remote(NodeProcess).options(
            num_cpus=0,
            num_gpus=NodeCommand(**fields).gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank),
        )
        name = f"{job}.node{rank}"
        command = Command(
            tuple(words),
            {**os.environ, NODE_VARIABLE: str(rank)},
            Path.cwd(),
            process_log_path(folder, instance, name),
            file.with_name(f"{file.stem}.node{rank}.json"),
        )
        node_process = actor.remote()
        node_processes[node_process.run.remote(command, holder=f"{name} of {instance}")] = (
            node_process
        )
    return node_processes


if __name__ == "__main__":
    sys.exit(run_on_all_nodes(sys.argv[1:]))
