"""Which rank this process is, read from the environment without importing torch."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from instar.config.errors import ConfigError

DEVICES_VARIABLE = "INSTAR_DEVICES"


@dataclass(frozen=True)
class Placement:
    """One process's place: global and local rank, sizes, and where the ranks meet."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    local_size: int = 1
    host: str = "127.0.0.1"
    port: int = 0

    @property
    def one_host(self) -> bool:
        return self.local_size == self.size or is_loopback(self.host)


def placement(environ: Mapping[str, str]) -> Placement:
    """Read torchrun's variables, or SLURM's where torchrun's are absent, or be the only process.

    Raises ConfigError if variables are missing, not numbers, or contradict each other.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        found = _from_torchrun(environ)
    elif "SLURM_PROCID" in environ and _number(environ, "SLURM_STEP_NUM_TASKS", 1) > 1:
        # SLURM_NTASKS is also set in a batch script, where one process runs; the step's count
        # is set by srun only.
        found = _from_slurm(environ)
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


def _from_torchrun(environ: Mapping[str, str]) -> Placement:
    size = _number(environ, "WORLD_SIZE")
    rank = _number(environ, "RANK")
    if size == 1:
        return Placement(rank)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environ.get(name):
            raise ConfigError.one(
                f"{name} is not set, but WORLD_SIZE is {size}",
                where="environment",
                hint="start the ranks with `instar train --nproc N` or torchrun",
            )
    return Placement(
        rank=rank,
        local_rank=_number(environ, "LOCAL_RANK", rank),
        size=size,
        local_size=_number(environ, "LOCAL_WORLD_SIZE", size),
        host=environ["MASTER_ADDR"],
        port=_number(environ, "MASTER_PORT"),
    )


def _from_slurm(environ: Mapping[str, str]) -> Placement:
    size = _number(environ, "SLURM_STEP_NUM_TASKS")
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    host = environ.get("MASTER_ADDR") or _first_host(nodes)
    if not host:
        raise ConfigError.one(
            "neither MASTER_ADDR nor SLURM_STEP_NODELIST is set", where="environment"
        )
    # The same port on every node, and another one for another job on the same node.
    port = 20000 + _number(environ, "SLURM_JOB_ID", 0) % 10000
    return Placement(
        rank=_number(environ, "SLURM_PROCID"),
        local_rank=_number(environ, "SLURM_LOCALID"),
        size=size,
        local_size=_tasks_here(environ, size),
        host=host,
        port=_number(environ, "MASTER_PORT", port),
    )


def _tasks_here(environ: Mapping[str, str], size: int) -> int:
    """The count of this node from SLURM's run-length form, e.g. "2(x3),1"."""
    counts = [
        int(count)
        for count, times in re.findall(
            r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "")
        )
        for _ in range(int(times or 1))
    ]
    node = _number(environ, "SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else size


def _first_host(nodes: str) -> str:
    """The first name of a SLURM node list, e.g. node07 of "node[07-12,15],gpu1"."""
    match = re.match(r"([^,\[\]]+)(?:\[(\w+)[^\]]*\]([^,\[\]]*))?", nodes)
    if match is None:
        return ""
    stem, number, tail = match.groups()
    return f"{stem}{number or ''}{tail or ''}"


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        got = "not set" if text is None else f"{text!r}"
        raise ConfigError.one(f"{name} must be a number, but is {got}", where="environment")
    return int(text)
