"""Which rank this process is, read from the environment without importing torch."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from instar.config.errors import ConfigError

if TYPE_CHECKING:
    from instar.config.schema import ParallelConfig

DEVICES_VARIABLE = "INSTAR_DEVICES"
LAUNCH_VARIABLE = "INSTAR_LAUNCH"
_PORT_KEY = "parallel.master_port"


@dataclass(frozen=True)
class Placement:
    """One process's place: global and local rank, sizes, and where the ranks meet."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    local_size: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    port_key: str = ""
    """the variable, or key of the config, that the port is from"""
    launch: str = ""
    """what tells this launch from another one that might meet at the same port"""
    told: bool = False
    """whether the environment says which rank this is; else it is the only one by default"""
    own_gpu: bool = False
    """whether each rank sees one GPU, its own"""

    @property
    def one_host(self) -> bool:
        return self.local_size == self.size or is_loopback(self.host)


def placement(environ: Mapping[str, str], parallel: ParallelConfig | None = None) -> Placement:
    """Read torchrun's variables, or SLURM's where torchrun's are absent, or be the only process.

    Args:
        parallel: where the ranks meet, if the environment does not say it; None: who does not
            want to meet them may leave it open.

    Raises ConfigError if variables are missing, not numbers, or contradict each other.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        found = _from_torchrun(environ, parallel)
    elif "SLURM_PROCID" in environ and _number(environ, "SLURM_STEP_NUM_TASKS", 1) > 1:
        # SLURM_NTASKS is also set in a batch script, where one process runs; the step's count
        # is set by srun only.
        found = _from_slurm(environ, parallel)
    else:
        return Placement()
    if not (0 <= found.rank < found.size and 0 <= found.local_rank < found.local_size):
        raise ConfigError.one(
            f"rank {found.rank} of {found.size} (local {found.local_rank} of {found.local_size}) "
            "is not a possible rank",
            where="environment",
        )
    return found


def share_cores(environ: MutableMapping[str, str]) -> None:
    """Let threads that wait for each other sleep soon instead of spinning for milliseconds.

    On a machine with nothing else to do it costs nothing; with one other busy process on two
    cores, training is several times as fast. To be called before torch is imported; what the user
    has set stays.
    """
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", "1000")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _from_torchrun(environ: Mapping[str, str], parallel: ParallelConfig | None) -> Placement:
    size = _number(environ, "WORLD_SIZE")
    rank = _number(environ, "RANK")
    if size == 1:
        # Operators of clusters set RANK and WORLD_SIZE for machines, and no LOCAL_RANK.
        return Placement(rank, told="LOCAL_RANK" in environ)
    local_size = _number(environ, "LOCAL_WORLD_SIZE", size)
    host = environ.get("MASTER_ADDR") or (parallel.master_address if parallel else "")
    if parallel and not environ.get("MASTER_ADDR") and local_size < size and is_loopback(host):
        raise _not_set("MASTER_ADDR", size, "parallel.master_address")
    port, key = _port(environ, parallel)
    if parallel and not key:
        raise _not_set("MASTER_PORT", size, _PORT_KEY)
    return Placement(
        rank=rank,
        local_rank=_number(environ, "LOCAL_RANK", rank),
        size=size,
        local_size=local_size,
        host=host,
        port=port,
        port_key=key,
        launch=environ.get(LAUNCH_VARIABLE) or environ.get("TORCHELASTIC_RUN_ID", ""),
        told=True,
    )


def _from_slurm(environ: Mapping[str, str], parallel: ParallelConfig | None) -> Placement:
    size = _number(environ, "SLURM_STEP_NUM_TASKS")
    per_node = _tasks_per_node(environ)
    nodes = _number(environ, "SLURM_STEP_NUM_NODES", len(per_node))
    node = _number(environ, "SLURM_NODEID", 0)
    host = environ.get("MASTER_ADDR", "")
    if not host and parallel and not is_loopback(parallel.master_address):
        host = parallel.master_address
    if not host and nodes == 1:
        host = "127.0.0.1"
    listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    host = host or _first_host(listed)
    if not host:
        raise ConfigError.one(
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
        told=True,
        own_gpu=environ.get("SLURM_GPUS_PER_TASK") == "1",
    )


def _port(environ: Mapping[str, str], parallel: ParallelConfig | None) -> tuple[int, str]:
    """The port that somebody has named, and where; 0 and "" if nobody has."""
    if environ.get("MASTER_PORT"):
        return _number(environ, "MASTER_PORT"), "MASTER_PORT"
    if parallel and parallel.master_port:
        return parallel.master_port, _PORT_KEY
    return 0, ""


def _slurm_port(job: int, step: int) -> int:
    """The same on every node, below those that systems give out by themselves.

    Jobs that follow each other, and a job's first 13 steps, have ports of their own.
    """
    return 20000 + (job * 13 + step) % 12000


def _tasks_per_node(environ: Mapping[str, str]) -> list[int]:
    """SLURM's run-length form, e.g. "2(x3),1", written out."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    return [
        int(count)
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
        for _ in range(int(times or 1))
    ]


def _first_host(nodes: str) -> str:
    """The first name of a SLURM node list, e.g. node07 of "node[07-12,15],gpu1"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0] if first else "")


def _not_set(variable: str, size: int, key: str) -> ConfigError:
    return ConfigError.one(
        f"{variable} is not set, but WORLD_SIZE is {size}",
        where="environment",
        hint=f"start the ranks with `instar train --nproc N` or torchrun, or give {key}",
    )


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        got = "not set" if text is None else f"{text!r}"
        raise ConfigError.one(f"{name} must be a number, but is {got}", where="environment")
    return int(text)
