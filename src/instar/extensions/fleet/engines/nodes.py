"""A job of several nodes: its host starts this module once on each of them, with the file of commands."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

NODE_VARIABLE = "INSTAR_NODE_RANK"
"""environment variable with the number of a node, where the engine does not set SLURM_NODEID"""

RAY_VARIABLE = "INSTAR_RAY"
"""environment variable of a host in a Ray cluster: its address, the placement group, the node's IP"""


@dataclass(frozen=True)
class Nodes:
    """The hosts that an engine gave to an instance."""

    address: str
    """the name or number under which the others reach this one, the first"""
    launcher: Callable[[int], Sequence[str]]
    """words that start the command behind them once on each of the first n hosts"""


@dataclass(frozen=True)
class NodeCommand:
    """What a job runs on one of its nodes."""

    argv: Sequence[str]
    env: Mapping[str, str]
    """added to the environment there"""
    cwd: str
    gpus: int
    """how many GPUs of those that the node has been given, if it is not the first"""


def nodes_of(engine: str, environ: Mapping[str, str]) -> Nodes | None:
    """Return the hosts that an engine gave to the instance of this host; None: only this one."""
    if engine == "ray":
        client = [sys.executable, "-m", "instar.extensions.fleet.engines.ray_nodes"]
        return Nodes(environ[RAY_VARIABLE].split()[-1], lambda _: client)
    if engine != "slurm":
        return None
    cpus = environ.get("SLURM_CPUS_PER_TASK", "")

    def srun(count: int) -> list[str]:
        words = [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--overlap"]
        words += [f"--cpus-per-task={cpus}"] if cpus else []  # srun does not take it from sbatch
        return ["srun", *words, "--kill-on-bad-exit=1", "--cpu-bind=none"]

    return Nodes(socket.gethostname(), srun)


def on_all(nodes: Nodes, commands: Sequence[NodeCommand], file: Path) -> list[str]:
    """Write the commands to a file that all nodes read; return the words that start them."""
    file.write_text(json.dumps([asdict(command) for command in commands]), encoding="utf-8")
    words = [sys.executable, "-m", "instar.extensions.fleet.engines.nodes", str(file.absolute())]
    return [*nodes.launcher(len(commands)), *words]


def program_path(environ: Mapping[str, str]) -> str:
    """Return PATH with the folder of this interpreter in front.

    `python` in a command then has what the launcher has, though its environment is not activated.
    """
    return os.pathsep.join((str(Path(sys.executable).parent), environ.get("PATH", os.defpath)))


def run_on_node() -> None:
    """Become the command of this node."""
    rank = int(os.environ.get(NODE_VARIABLE) or os.environ["SLURM_NODEID"])
    command = NodeCommand(**json.loads(Path(sys.argv[1]).read_bytes())[rank])
    env = {**os.environ, "PATH": program_path(os.environ), **command.env}
    if not Path(env.get("TMPDIR", "/")).is_dir():  # that of the first node
        del env["TMPDIR"]
    if rank and command.gpus:
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[: command.gpus])
    os.chdir(command.cwd)
    try:
        os.execvpe(command.argv[0], list(command.argv), env)
    except OSError as error:
        sys.exit(f"cannot start {command.argv[0]}: {error.strerror}")


if __name__ == "__main__":
    run_on_node()
