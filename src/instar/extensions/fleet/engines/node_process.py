"""A process tree on a node of a Ray cluster, as an actor."""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import closing
from dataclasses import replace
from typing import Any

from instar.config.errors import ConfigError
from instar.extensions.fleet.nodes import RAY_VARIABLE
from instar.extensions.fleet.placement import close_all, given_gpus, lock_gpus
from instar.processes.spawner import Command, RunningProcess, Spawner


def ray_library() -> Any:
    """Return the module `ray`; it reports no usage statistics unless the environment says so.

    Raises:
        ConfigError: it is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise ConfigError.of("the engine ray needs Ray", hint="pip install 'instar[ray]'") from None
    return ray


def connect_to_ray(address: str, **options: Any) -> None:
    """Join a cluster quietly; raises what `ray.init` raises."""
    ray_library().init(
        address=address,
        namespace="instar",
        log_to_driver=False,
        logging_level=logging.ERROR,
        **options,
    )


class NodeProcess:
    """Runs one command on the node where Ray has placed this actor.

    Ray does not end what leaves a worker's session; a shim does, when the command has ended, or
    when this actor has, however that came.
    """

    async def run(self, command: Command, *, group: str = "", holder: str = "") -> int:
        """Run a command with this node's Python and the GPUs of this actor; return its exit status.

        Args:
            group: the name of this actor's placement group, if it has more nodes.
            holder: see `lock_gpus`; empty if the command locks its GPUs.

        Raises:
            FileNotFoundError: the folder of its log is not seen from this node.
            Taken: a process that Ray knows nothing of uses the GPUs.
        """
        ray = ray_library()
        if not command.log.parent.is_dir():
            raise FileNotFoundError(
                f"{command.log.parent} is not seen from node {os.uname().nodename}: a fleet's "
                "folder is on a file system that all nodes see"
            )
        context = ray.get_runtime_context()
        env = {
            **command.env,
            "CUDA_VISIBLE_DEVICES": ",".join(context.get_accelerator_ids()["GPU"]),
            RAY_VARIABLE: f"{context.gcs_address} {group} {ray.util.get_node_ip_address()}",
        }
        gpus = given_gpus(env, None)
        locks = [lock for _, lock in lock_gpus(gpus, len(gpus), (), holder)] if holder else []
        with closing(Spawner()) as spawner:
            words = (sys.executable, *command.argv[1:])
            self._tree = spawner.start(
                replace(command, argv=words, env=env), [lock.fileno() for lock in locks]
            )
            close_all(locks)
            self._grace_s = command.grace_s
            process = RunningProcess(self._tree, lambda _: None)
            await process.gone_future
        return process.exit_future.result().status

    async def stop(self, kill: bool) -> None:
        """Ask the command to end, or kill its tree."""
        if kill:
            self._tree.stop(signal.SIGKILL, 0.0)
        else:
            self._tree.stop(signal.SIGTERM, self._grace_s)
