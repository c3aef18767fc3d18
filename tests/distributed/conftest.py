"""Real processes for the tests: `python` runs a program in one, `ranks` in several that may meet,
`launcher` under `launch`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from forks import forks

LIMIT_S = 90

PRELUDE = """
import json, os
from pathlib import Path
from instar.config.schema import DDPConfig, ParallelConfig
from instar.distributed.world import join_group

def answer(**facts):
    Path(os.environ["ANSWER"]).write_text(json.dumps(facts))

def error_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""

LAUNCH = """
import sys
from instar.distributed.launch import launch_ranks
from instar.distributed.placement import LaunchOptions
from instar.distributed.signals import exit_now
module, nproc, *argv = sys.argv[1:]
exit_now(launch_ranks(LaunchOptions(argv, int(nproc), module=module)))
"""


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def environment(**extra: str) -> dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("INSTAR")}
    return {**variables, "OMP_NUM_THREADS": "1", **extra}


def run_ranks(program: str, size: int, folder: Path) -> list[dict[str, Any]]:
    """Run `program` in `size` processes that have imported torch already; each calls
    `answer(**facts)` once. Their facts, by rank."""
    port = str(find_free_port())
    processes = []
    for rank in range(size):
        place = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
        place |= {"MASTER_PORT": port, "ANSWER": str(folder / f"answer-{rank}.json")}
        processes.append(
            subprocess.Popen(
                [forks().python, "-c", PRELUDE + program],
                env=environment(**place),
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        errors = [process.communicate(timeout=LIMIT_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    answers = [folder / f"answer-{rank}.json" for rank in range(size)]
    assert all(file.exists() for file in answers), "\n".join(errors)
    return [json.loads(file.read_text()) for file in answers]


@pytest.fixture
def free_port() -> int:
    return find_free_port()


@pytest.fixture(scope="session")
def ranks_in() -> Callable[[str, int, Path], list[dict[str, Any]]]:
    return run_ranks


@pytest.fixture
def python() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """python(program, *arguments, **variables): a process that has imported torch already, with pipes."""
    processes: list[subprocess.Popen[str]] = []

    def start(program: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [forks().python, "-c", program, *arguments],
            env=environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def ranks(tmp_path: Path) -> Callable[[str, int], list[dict[str, Any]]]:
    return lambda program, size: run_ranks(program, size, tmp_path)


@dataclass
class Launched:
    """A launcher under way with a toy module's ranks, in a session of its own."""

    process: subprocess.Popen[str]
    folder: Path

    def read_until(self, text: str) -> None:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if text in line:
                return
        pytest.fail(f"the ranks never said {text!r}: {self.process.communicate()[1]}")

    def press(self, number: signal.Signals) -> float:
        """Signal the foreground process group, as a terminal does; the time of it."""
        os.killpg(self.process.pid, number)
        return time.time()

    def end(self) -> tuple[int, str, float]:
        """Exit code, stderr, and the time of the end."""
        errors = self.process.communicate(timeout=LIMIT_S)[1]
        return self.process.returncode, errors, time.time()

    def pids(self) -> list[int]:
        return [int(file.read_text()) for file in self.folder.glob("pid-*")]


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Callable[[str, int], Launched]]:
    """launcher(toy, nproc): `launch` running the text `toy` as a module with argument tmp_path."""
    processes: list[subprocess.Popen[str]] = []

    def start(toy: str, nproc: int) -> Launched:
        (tmp_path / "toy.py").write_text(toy)
        path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
        process = subprocess.Popen(
            [forks().python, "-c", LAUNCH, "toy", str(nproc), str(tmp_path)],
            env=environment(PYTHONPATH=path, TMPDIR=str(tmp_path)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
        return Launched(process, tmp_path)

    yield start
    for process in processes:
        process.kill()
        process.communicate()
