"""The engine `ray`: each instance runs on a node of a Ray cluster, with what a placement group reserves."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

from instar.config.errors import ConfigError
from instar.extensions.fleet.engines.nodes import RAY_VARIABLE
from instar.extensions.fleet.engines.remote import HostStatus, follow_hosts
from instar.extensions.fleet.engines.spawner import Command, RunningProcess, Spawner, Tree
from instar.extensions.fleet.engines.work import Work, host_command
from instar.extensions.fleet.placement import close_all, given_gpus, lock_gpus
from instar.extensions.fleet.plan import Instance
from instar.extensions.fleet.spec import FleetSpec
from instar.extensions.fleet.state import HOSTS
from instar.processes.child import exit_text

LOCAL = "local"
"""the address of a cluster of this machine that the launcher starts"""
_LEAST_OBJECT_STORE_BYTES = 75 << 20
_REASON_CHARS = 160
_PLACED_S = 0.5
"""how long Ray may take to place a group when there is room"""
_KILLED_S = 5.0
"""how long killed hosts are waited for; a node that does not answer has no more"""
_GRACE_S = 10.0
"""beyond the grace of its processes, how long a host may take to end"""
_NODE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HOSTNAME")
"""not the driver's on other nodes"""


def run_on_ray(work: Work, say: Callable[[str], None]) -> int:
    """Run what there is to do in a Ray cluster; see `run_fleet`.

    Raises:
        ConfigError: see `join_cluster`.
    """
    folder = work.fleet_folder.path / HOSTS
    folder.mkdir(exist_ok=True)
    join_cluster(work.plan.spec, work.fleet_folder.gpus, say)
    # Ray prints what its daemons report to stdout, whatever it is told about logs
    with (
        (folder / "ray.log").open("a") as messages,
        redirect_stdout(messages),
        closing(Placements(work)) as placements,
    ):
        return follow_hosts(work, placements, say)


def join_cluster(spec: FleetSpec, gpus: str | None, say: Callable[[str], None]) -> None:
    """Join the cluster, unless that is done.

    Args:
        gpus: see `bundles`.

    Raises:
        ConfigError: Ray is not installed, there is no such cluster, or no nodes of it have what an
            instance needs.
    """
    ray = ray_library()
    if ray.is_initialized():
        return
    address = spec.ray.address
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or address
    try:
        if address != LOCAL:
            connect_to_ray(address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        if address != "auto":
            message = f"cannot join the Ray cluster at {address}: {error}"
            hint = "the launcher must run on one of its nodes; `ray status` shows them"
            raise ConfigError.of(message, "ray.address", hint) from None
    if not ray.is_initialized():
        say("a Ray cluster of this machine is started for this fleet")
        connect_to_ray(
            LOCAL, include_dashboard=False, object_store_memory=_LEAST_OBJECT_STORE_BYTES
        )
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if problem := misfit(bundles(spec, gpus), nodes):
        raise ConfigError.of(
            problem, where="resources", hint="ask for less, or name another cluster in ray.address"
        )


def bundles(spec: FleetSpec, gpus: str | None) -> list[dict[str, int]]:
    """Return what an instance reserves on each of its nodes, in Ray's units.

    Everything runs on the first; on the others, the jobs of several nodes. Ray places nothing without
    a reservation, so a node has at least one CPU.

    Args:
        gpus: those of each node that are used without asking Ray for them.
    """
    processes = spec.processes.values()
    amounts = []
    for rank in range(max(process.resources.nodes for process in processes)):
        on_node = [process.resources for process in processes if process.resources.nodes > rank]
        needs = {
            "CPU": max(1, sum(need.cpus or 0 for need in on_node)),
            "GPU": sum(need.gpus for need in on_node) if gpus is None else 0,
            "memory": sum(need.memory or 0 for need in on_node),
        }
        amounts.append({name: amount for name, amount in needs.items() if amount})
    return amounts


def strategy(spread: Sequence[Mapping[str, float]]) -> str:
    """Return Ray's name for the placement of bundles: each on another node."""
    return "STRICT_SPREAD" if len(spread) > 1 else "STRICT_PACK"


def misfit(bundles: Sequence[Mapping[str, float]], nodes: Sequence[Mapping[str, float]]) -> str:
    """Return which bundle finds no node of its own, and what the nodes have; "" if all find one."""
    free = sorted(nodes, key=lambda node: (node.get("GPU", 0), node.get("CPU", 0)))
    for bundle in bundles:  # the first is the largest
        fitting = [node for node in free if all(node.get(k, 0) >= n for k, n in bundle.items())]
        if not fitting:
            amounts = "; ".join(sorted({_amounts(node) for node in nodes}))
            on = "one node" if len(bundles) == 1 else f"one of {len(bundles)} nodes"
            has = f"the cluster has {len(nodes)} nodes, with {amounts}"
            return f"an instance needs {_amounts(bundle)} on {on}; {has}"
        free.remove(fitting[0])
    return ""


@dataclass
class _Placement:
    """An instance that has a placement group, or waits for one."""

    instance: Instance
    name: str
    group: Any
    waits_for: Any
    """object reference: that the group is placed, and then the exit code of the host"""
    actor: Any = None


def _amounts(resources: Mapping[str, float]) -> str:
    """Return resources in words, e.g. "8 CPU, 4 GPU, 24.2 GB memory"."""
    amounts = [f"{resources[name]:g} {name}" for name in ("CPU", "GPU") if resources.get(name)]
    memory = resources.get("memory", 0) / 1e9
    return ", ".join([*amounts, *([f"{memory:.1f} GB memory"] if memory else [])]) or "nothing"


@dataclass
class Placements:
    """The scheduler: one placement group per instance, and an actor in it that runs its host.

    Actors end with this process, and the host's tree with its actor. An instance whose node or
    actor is lost begins again in a new placement group.
    """

    work: Work
    survives: bool = False
    _waiting: deque[Instance] = field(default_factory=deque)
    _placements: dict[int, _Placement] = field(default_factory=dict)
    _losses: dict[int, list[str]] = field(default_factory=dict)
    _ends: dict[int, str] = field(default_factory=dict)
    _stopping: bool = False

    def __post_init__(self) -> None:
        spec = self.work.plan.spec
        self._ray = ray_library()
        self._environ = {k: v for k, v in os.environ.items() if k not in _NODE_VARIABLES}
        self._bundles = bundles(spec, self.work.fleet_folder.gpus)
        grace_s = max(process.stop.grace for process in spec.processes.values())
        self._grace_s = 2 * grace_s + _GRACE_S  # jobs, then services

    def submit(self, instances: Sequence[Instance]) -> None:
        self._waiting.extend(instances)
        self._place()

    def hosts(self) -> Mapping[int, HostStatus]:
        self._collect()
        self._place()
        alive = dict.fromkeys(self._placements, "placed")
        alive |= {instance.index: "waits for its turn" for instance in self._waiting}
        last_losses = {index: reasons[-1] for index, reasons in self._losses.items()}
        return {
            **{index: HostStatus(False, text) for index, text in self._ends.items()},
            **{
                index: HostStatus(True, text, last_losses.get(index, ""))
                for index, text in alive.items()
            },
        }

    def stop(self, indices: Collection[int], *, kill: bool) -> None:
        self._stopping = True
        while self._waiting:
            self._ends[self._waiting.pop().index] = "not started"
        placements = [self._placements[index] for index in indices if index in self._placements]
        for placement in placements:
            if placement.actor is None:
                self._release(placement, "not started")
            else:
                placement.actor.stop.remote(kill)
        if kill and (ends := [p.waits_for for p in self._placements.values()]):
            self._ray.wait(ends, num_returns=len(ends), timeout=_KILLED_S)
            self._collect()
            for placement in list(self._placements.values()):
                self._release(placement, "killed; its node does not answer")

    def close(self) -> None:
        """Leave the cluster; it ends what is still there."""
        self._ray.shutdown()

    def _place(self) -> None:
        """Reserve what the next instances need, until the cluster is full: first come, first served."""
        from ray.util.placement_group import placement_group

        limit = 0 if self._stopping else self.work.plan.parallel
        full = any(placement.actor is None for placement in self._placements.values())
        while self._waiting and not full and len(self._placements) < limit:
            instance = self._waiting.popleft()
            name = f"{self.work.plan.spec.name}-{instance.index}-{uuid.uuid4().hex[:8]}"
            group = placement_group(self._bundles, strategy(self._bundles), name)
            placement = _Placement(instance, name, group, group.ready())
            self._placements[instance.index] = placement
            ready, full = self._ray.wait([placement.waits_for], timeout=_PLACED_S)
            if ready:
                self._start(placement)

    def _collect(self) -> None:
        """Start hosts on nodes that were reserved, and take the ends of others."""
        every = {placement.waits_for: placement for placement in self._placements.values()}
        if not every:
            return
        ready_references, _ = self._ray.wait(list(every), num_returns=len(every), timeout=0)
        for reference in ready_references:
            placement = every[reference]
            if placement.actor is None:
                self._start(placement)
                continue
            try:
                status = self._ray.get(reference)
            except self._ray.exceptions.RayTaskError as error:  # of the host's start
                self._release(placement, str(error.cause))
            except self._ray.exceptions.RayError as error:
                reason = str(error).strip().splitlines()[-1]
                self._note_loss(placement, shorten(reason, _REASON_CHARS, placeholder=" …"))
            else:
                log = self._log(placement.instance.index)
                self._release(placement, f"it {exit_text(status)}; see {log}")

    def _start(self, placement: _Placement) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        first = self._bundles[0]
        actor = self._ray.remote(NodeProcess).options(
            num_cpus=first["CPU"],
            num_gpus=first.get("GPU", 0),
            memory=first.get("memory"),
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement.group, 0),
        )
        index, folder = placement.instance.index, self.work.fleet_folder.path.absolute()
        log = self._log(index)
        command = Command(
            tuple(host_command(folder, index)),
            self._environ,
            folder,
            log,
            log.with_suffix(".json"),
            grace_s=self._grace_s,
        )
        placement.actor = actor.remote()
        placement.waits_for = placement.actor.run.remote(command, group=placement.name)

    def _note_loss(self, placement: _Placement, reason: str) -> None:
        index = placement.instance.index
        reasons = self._losses.setdefault(index, [])
        limit = self.work.plan.spec.ray.restarts
        self._release(placement, f"lost: {reason}")
        if self._stopping or len(reasons) >= limit:
            return
        del self._ends[index]
        reasons.append(f"its host was lost, restart {len(reasons) + 1} of {limit}: {reason}")
        self._waiting.appendleft(placement.instance)

    def _release(self, placement: _Placement, end: str) -> None:
        from ray.util.placement_group import remove_placement_group

        self._ends[placement.instance.index] = end
        del self._placements[placement.instance.index]
        remove_placement_group(placement.group)  # and its actor, if it is still there

    def _log(self, index: int) -> Path:
        return self.work.fleet_folder.path.absolute() / HOSTS / f"{index}.log"


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

    def __init__(self) -> None:
        self._tree: Tree | None = None
        self._grace_s = 0.0
        self._stopped_by: signal.Signals | None = None

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
        if self._stopped_by is not None:  # Ray does not promise the order of an actor's calls
            return -self._stopped_by
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
        self._stopped_by = signal.SIGKILL if kill else signal.SIGTERM
        if self._tree is not None:
            self._tree.stop(self._stopped_by, 0.0 if kill else self._grace_s)
