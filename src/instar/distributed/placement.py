"""Which rank this process is, read from the environment without importing torch."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from instar.config.errors import ConfigError

DEVICES_VARIABLE = "INSTAR_DEVICES"
LAUNCH_VARIABLE = "INSTAR_LAUNCH"
PORT_KEY = "parallel.master_port"
ADDRESS_KEY = "parallel.master_address"


class Rendezvous(Protocol):
    """What the config says of where ranks meet, and of which there are: `ParallelConfig`."""

    @property
    def master_address(self) -> str: ...
    @property
    def master_port(self) -> int: ...
    @property
    def world_size(self) -> int | None: ...
    @property
    def devices(self) -> Sequence[int]: ...


_OF_A_RANK = re.compile(
    r"(LOCAL_|GROUP_|ROLE_|NODE_)?RANK|((LOCAL|GROUP|ROLE)_)?WORLD_SIZE|ROLE_NAME|MASTER_(ADDR|PORT)"
    r"|TORCHELASTIC_\w+|SLURM_(PROCID|LOCALID|NODEID|GTIDS|TASK_PID|STEP_\w+|STEPID|NTASKS\w*|NPROCS)"
    r"|SLURM_TASKS_PER_NODE|(PMI|PMIX|OMPI_COMM_WORLD)_\w+|INSTAR_(LAUNCH|LAUNCHER_PID|DEVICES|LOADED_CONFIG)"
)
"""variables by which torchrun, SLURM, MPI and Instar tell a process which rank it is"""


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a child that is no rank of this process's launch.

    What says which rank this process is is left out: a child that trains would wait for the others.
    A job of SLURM is still known to its `srun`.
    """
    return {name: value for name, value in environ.items() if not _OF_A_RANK.fullmatch(name)}


@dataclass(frozen=True)
class Placement:
    """The rank of one process: global and local rank and sizes, and the rendezvous address."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    local_size: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    port_key: str = ""
    """the environment variable or config key that gave the port"""
    launch: str = ""
    """identifies this launch among others that might use the same port"""
    is_set: bool = False
    """whether the environment gives the rank; otherwise it is the only one by default"""
    own_gpu: bool = False
    """whether each rank sees exactly one GPU"""

    @property
    def one_host(self) -> bool:
        return self.local_size == self.size or is_loopback(self.host)


def placement(environ: Mapping[str, str], parallel: Rendezvous | None = None) -> Placement:
    """Read the placement from torchrun's variables, else from SLURM's, else a single process.

    Args:
        parallel: gives the rendezvous address if the environment does not; None: the address is
            not needed.

    Raises:
        ConfigError: variables are missing, not numbers, or contradict each other.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        environment = _from_torchrun(environ, parallel)
    elif "SLURM_PROCID" in environ and _number(environ, "SLURM_STEP_NUM_TASKS", 1) > 1:
        # SLURM_NTASKS is also set in a batch script, where one process runs; the step's count
        # is set by srun only.
        environment = _from_slurm(environ, parallel)
    else:
        return Placement()
    if not (
        0 <= environment.rank < environment.size
        and 0 <= environment.local_rank < environment.local_size
    ):
        raise ConfigError.of(
            f"rank {environment.rank} of {environment.size} (local {environment.local_rank} of {environment.local_size}) "
            "is not a possible rank",
            where="environment",
        )
    return environment


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _from_torchrun(environ: Mapping[str, str], parallel: Rendezvous | None) -> Placement:
    size = _number(environ, "WORLD_SIZE")
    rank = _number(environ, "RANK")
    if size == 1:
        # Cluster operators set RANK and WORLD_SIZE per machine, without LOCAL_RANK.
        return Placement(rank, is_set="LOCAL_RANK" in environ)
    local_size = _number(environ, "LOCAL_WORLD_SIZE", size)
    host = environ.get("MASTER_ADDR") or (parallel.master_address if parallel else "")
    if parallel and not environ.get("MASTER_ADDR") and local_size < size and is_loopback(host):
        raise _not_set("MASTER_ADDR", size, ADDRESS_KEY)
    port, key = _port(environ, parallel)
    if parallel and not key:
        raise _not_set("MASTER_PORT", size, PORT_KEY)
    return Placement(
        rank=rank,
        local_rank=_number(environ, "LOCAL_RANK", rank),
        size=size,
        local_size=local_size,
        host=host,
        port=port,
        port_key=key,
        launch=environ.get(LAUNCH_VARIABLE) or environ.get("TORCHELASTIC_RUN_ID", ""),
        is_set=True,
    )


def _from_slurm(environ: Mapping[str, str], parallel: Rendezvous | None) -> Placement:
    size = _number(environ, "SLURM_STEP_NUM_TASKS")
    per_node = _tasks_per_node(environ)
    nodes = _number(environ, "SLURM_STEP_NUM_NODES", len(per_node))
    node = _number(environ, "SLURM_NODEID", 0)
    host = environ.get("MASTER_ADDR", "")
    if not host and parallel and not is_loopback(parallel.master_address):
        host = parallel.master_address
    if not host and nodes == 1:
        host = "127.0.0.1"
    node_list = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    host = host or _first_host(node_list)
    if not host:
        raise ConfigError.of(
            "neither MASTER_ADDR nor SLURM_STEP_NODELIST is set", where="environment"
        )
    job, step = (_number(environ, name, 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    port, key = _port(environ, parallel)
    return Placement(
        rank=_number(environ, "SLURM_PROCID"),
        local_rank=_number(environ, "SLURM_LOCALID"),
        size=size,
        local_size=per_node[node] if node < len(per_node) else size,
        host=host,
        port=port or _slurm_port(job, step),
        port_key=key or "SLURM_JOB_ID",
        launch=f"slurm-{job}.{step}",
        is_set=True,
        own_gpu=environ.get("SLURM_GPUS_PER_TASK") == "1",
    )


def _port(environ: Mapping[str, str], parallel: Rendezvous | None) -> tuple[int, str]:
    """Return the configured port and where it was set; 0 and "" if it is not set."""
    if environ.get("MASTER_PORT"):
        return _number(environ, "MASTER_PORT"), "MASTER_PORT"
    if parallel and parallel.master_port:
        return parallel.master_port, PORT_KEY
    return 0, ""


def _slurm_port(job: int, step: int) -> int:
    """Derive a port, the same on every node, below the ephemeral range.

    Consecutive jobs, and the first 13 steps of a job, get different ports.
    """
    return 20000 + (job * 13 + step) % 12000


def _tasks_per_node(environ: Mapping[str, str]) -> list[int]:
    """Expand SLURM's run-length form, e.g. "2(x3),1"."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    return [
        int(count)
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
        for _ in range(int(times or 1))
    ]


def _first_host(nodes: str) -> str:
    """Return the first name of a SLURM node list, e.g. node07 of "node[07-12,15],gpu1"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0] if first else "")


def _not_set(variable: str, size: int, key: str) -> ConfigError:
    return ConfigError.of(
        f"{variable} is not set, but WORLD_SIZE is {size}",
        where="environment",
        hint=f"start the ranks with `instar train --nproc N` or torchrun, or set {key}",
    )


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        got = "not set" if text is None else f"{text!r}"
        raise ConfigError.of(f"{name} must be a number, but is {got}", where="environment")
    return int(text)


@dataclass(frozen=True)
class RankCount:
    """`ranks` on all machines; `devices` for the ranks of this machine, () for 0, 1, 2 …"""

    ranks: int
    devices: tuple[int, ...] = ()


@dataclass(frozen=True)
class LaunchOptions:
    """What is launched: `python -m <module> <argv>` in each of `ranks` ranks."""

    argv: Sequence[str]
    ranks: int
    devices: Sequence[int] | None = None
    """GPUs of the ranks; None: 0, 1, 2 …"""
    module: str = "instar.train"
    device: str = "auto"
    """the device type of the ranks; its GPUs must exist"""
    host: str = "127.0.0.1"
    """an address of this machine, where the ranks meet"""
    port: int = 0
    """at which they meet; 0: any free one"""
    max_restarts: int = 0
    """how many times all ranks are restarted after a failure"""
    stop_timeout_s: float = 60.0
    """that ranks have to stop when they are told to"""
    grace_s: float = 1.0
    """that ranks have to notice the failure of another"""
    resumable: bool = False
    """the same command resumes the run, or starts again in its folder"""
    config: str = ""
    """the loaded config (`Loaded.packed`), which the ranks then do not read again"""


def resolve_ranks(
    parallel: Rendezvous,
    place: Placement,
    nproc: int | None = None,
    devices: Sequence[int] | None = None,
) -> RankCount:
    """Resolve ranks and devices from the environment, else the arguments, else the config, else 1.

    Args:
        nproc: ranks requested on the command line; None: not given.
        devices: GPUs requested on the command line, one per rank unless `nproc` is given too.

    Raises:
        ConfigError: they contradict each other.
    """
    indices = tuple(parallel.devices if devices is None else devices)
    if place.is_set:
        ranks = place.size
        if nproc is not None:
            raise ConfigError.of(
                f"--nproc {nproc}, but the environment already sets {ranks} "
                f"rank{'' if ranks == 1 else 's'}, of which this process is rank {place.rank}",
                where="--nproc",
                hint="leave it out if torchrun or srun has started them; else take RANK, WORLD_SIZE and "
                "SLURM_PROCID out of the environment: env -u RANK -u WORLD_SIZE -u SLURM_PROCID …",
            )
    elif devices is not None:
        ranks = nproc or len(devices)
    else:
        ranks = nproc or parallel.world_size or len(indices) or 1
    local_ranks = place.local_size if place.is_set else ranks
    limit = max(256, 32 * (os.cpu_count() or 1))
    if not place.is_set and local_ranks > limit:
        raise ConfigError.of(
            f"{local_ranks:,} ranks on this machine, which has {os.cpu_count()} processors; at most {limit:,} "
            "are started",
            where="parallel.world_size" if nproc is None and devices is None else "--nproc",
            hint="on several machines, each starts its own ranks with torchrun or srun",
        )
    if indices and len(indices) < local_ranks:
        raise ConfigError.of(
            f"{local_ranks} ranks on this machine, but devices {','.join(map(str, indices))} only",
            where="parallel.devices" if devices is None else "--devices",
            hint="one per rank",
        )
    return RankCount(ranks, indices[:local_ranks])
