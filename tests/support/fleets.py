"""Fleets of small stub processes, started by the real command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from forks import forks

from instar.config.errors import ConfigError
from instar.extensions.fleet.checks import make_plan
from instar.extensions.fleet.folder import FolderLock
from instar.extensions.fleet.plan import FleetPlan, Machine, load_fleet
from instar.extensions.fleet.state import Ended, InstanceChanged, Started, StateLog


def first_port() -> int:
    """Return the first of 500 ports that no other process of the tests uses."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw") or 0)
    return 21000 + 500 * worker


SERVER = """\
import http.server, json, sys

mode = sys.argv[2] if len(sys.argv) > 2 else "sound"


class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, status, data):
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer(200, {"data": [{"id": "stub"}]})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        broken = mode == "broken"
        self.answer(500 if broken else 200, {} if broken else {"choices": [{"text": "2"}]})

    def log_message(self, *_):
        pass


http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


OF_RUNS = """\
import sys, types
from instar.cli.main import entry
from instar.extensions.fleet import plan
plan.sys = types.SimpleNamespace(executable=sys.argv.pop(1))
entry()
"""
"""`instar`, whose first argument is the Python of a fleet's Instar runs"""


@dataclass(frozen=True)
class FleetPlace:
    """A working directory with a folder of locks of its own."""

    path: Path
    first_port: int
    python: Path | None = None
    """of Instar runs, e.g. `forks.python`, which spares them the seconds in which they import torch"""
    new_interpreters: bool = False
    """whether commands are new interpreters, and not forked"""
    started: list[subprocess.Popen[str]] = field(default_factory=list)
    """every command so far, ended or not"""

    def env(self) -> dict[str, str]:
        variables = {"INSTAR_LOCK_DIR": str(self.path / "locks"), "OMP_NUM_THREADS": "1"}
        return {**os.environ, **variables}

    def write(self, text: str, name: str = "fleet.yaml") -> Path:
        (self.path / "server.py").write_text(SERVER)
        path = self.path / name
        path.write_text(f"first_port: {self.first_port}\n{text}")
        return path

    def start(self, *words: object) -> subprocess.Popen[str]:
        """`instar fleet WORDS` in a process of its own."""
        instar = ["-c", OF_RUNS, str(self.python)] if self.python else ["-m", "instar.cli.main"]
        process = subprocess.Popen(
            [
                sys.executable if self.new_interpreters else forks().python,
                *instar,
                "fleet",
                *map(str, words),
            ],
            cwd=self.path,
            env=self.env(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(process)
        return process

    def run(self, *words: object, timeout_s: float = 120) -> tuple[int, str]:
        """Return the exit code and output of `instar fleet WORDS`."""
        process = self.start(*words)
        output, _ = process.communicate(timeout=timeout_s)
        return process.returncode, output

    def status(self, name: str) -> dict[str, Any]:
        from instar.extensions.fleet.folder import launcher_pid
        from instar.extensions.fleet.state import as_json, fold_events, read_fleet_events

        folder = self.path / "fleets" / name
        pid = launcher_pid(folder)  # first: a launcher that has ended has written all
        return {**as_json(fold_events(read_fleet_events(folder))), "launcher": pid}

    def wait(
        self, name: str, condition: Callable[[dict[str, Any]], bool], timeout_s: float = 60
    ) -> dict[str, Any]:
        """Wait until the state of a fleet meets a condition; return it."""
        deadline = time.monotonic() + timeout_s
        state: dict[str, Any] = {}
        while True:
            with suppress(Exception):
                state = self.status(name)
                if condition(state):
                    return state
            if time.monotonic() > deadline:
                raise AssertionError(f"no such state: {json.dumps(state)}; {self._kill()}")
            time.sleep(0.05)

    def _kill(self) -> str:
        """Kill what was started and still runs, lest it disturb the next tests; return its output."""
        output = ""
        for process in self.started:
            if process.poll() is None:
                process.kill()
                output += process.communicate(timeout=30)[0]
        return output

    def living_pids(self) -> list[int]:
        """The living processes of this place's fleets."""
        pids = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal():
                with suppress(OSError):
                    env = (folder / "environ").read_bytes()
                    if f"INSTAR_FLEET={self.path}/".encode() in env:
                        state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                        if state != "Z":
                            pids.append(int(folder.name))
        return pids


PAIR = {
    "name": "two",
    "matrix": {"seed": [1, 2]},
    "run_name": "s${seed}",
    "services": {"server": {"command": ["true"]}},
    "jobs": {"job": {"command": ["true"]}},
}


class RunningFleet:
    """A fleet `two` whose launcher is this process; `changes`: of its file."""

    def __init__(self, path: Path, **changes: object) -> None:
        self.folder = path / "fleets" / "two"
        self.folder.mkdir(parents=True)
        content = {"format": "instar-fleet/1", "spec": PAIR | changes, "configs": {}, "gpus": None}
        (self.folder / "fleet.json").write_text(json.dumps(content | {"cwd": str(path)}))
        self.lock = FolderLock(self.folder, 0.0)
        self.state = StateLog(self.folder)
        self.state.write(Started(1.0, 1, "h", "", (0, 1)))
        self.state.write(InstanceChanged(1.0, 0, "running"))

    def log(self, name: str, text: str, how: str = "a") -> Path:
        path = self.folder / "logs" / "s1" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open(how) as file:
            file.write(text)
        return path

    def end(self) -> None:
        self.state.write(InstanceChanged(2.0, 0, "failed", "no\nreason"))
        self.state.write(Ended(2.0, 4))
        self.state.close()
        self.lock.close()


def phase_of(status: dict[str, Any], process: str, instance: int = 0) -> str:
    """The phase of a process, "" before it is started."""
    processes = status["instances"].get(str(instance), {}).get("processes", {})
    return str(processes.get(process, {}).get("phase", ""))


def starts(folder: Path, process: str) -> list[float]:
    """When a process was started, in all parts of a fleet's state."""
    lines = [
        json.loads(line)
        for path in folder.glob("state*.jsonl")
        for line in path.read_text().splitlines()
    ]
    return sorted(
        event["time"]
        for event in lines
        if (event.get("process"), event.get("phase")) == (process, "starting")
    )


MACHINE = Machine(gpus=8, cpus=64, memory=1 << 40)


def plan_fleet(folder: Path, text: str, *overrides: str, machine: Machine = MACHINE) -> FleetPlan:
    """The plan of a fleet file with this text."""
    path = folder / "fleet.yaml"
    path.write_text(textwrap.dedent(text))
    return make_plan(load_fleet(str(path), overrides), machine)


def fleet_error(folder: Path, text: str, *overrides: str, machine: Machine = MACHINE) -> str:
    """What is said of a fleet file that is refused."""
    with pytest.raises(ConfigError) as caught:
        plan_fleet(folder, text, *overrides, machine=machine)
    assert caught.value.exit_code == 2
    return str(caught.value)
