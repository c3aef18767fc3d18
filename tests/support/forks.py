"""Processes that start in milliseconds: one that has imported everything forks a child for each.

What a child does is a function named as `module:function`, with JSON arguments; what it returns is
its exit code. Nothing of a child is Instar's own way of starting a rank: `children_as_ranks` says
who it is as `torchrun` would, through the environment.

In `Forks.bin` are executables for shells and for `subprocess`: the commands `instar` and `torchrun`,
and `python` with a program, a module or a file, run by such a child with the streams, the environment
and the folder of whoever calls it. A signal reaches the child through them, but for SIGSTOP. What it
starts as `python -m MODULE`, as launchers do, is forked too (`spare`), unless it is run by `warm-python`,
whose own children are new interpreters. The workers of `pytest -n` are run by that (`warm_workers`), and
so is the forking process of each: everything is imported once in all.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import random
import re
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, Self

from interpreter import interpret, put_in, run_and_leave
from spare import fork_interpreters, put, receive

from instar.extensions import built_in, load_target

LIMIT_S = 600.0 if os.environ.get("INSTAR_TORTURE") == "full" else 120.0
"""Hours of `make torture` share the machine with other work."""
START_S = 400.0
"""enough to import everything on the busiest of machines"""
POLL_S = 0.002

MODULES = ["instar.cli.main", "instar.cli.train", "instar.cli.training"]
MODULES += ["instar.run.worker", "instar.run.offline.grow"]
MODULES += ["instar.run.offline.analysis"]
MODULES += ["instar.extensions.graphs.task"] if "graphs" in built_in() else []
MODULES += [
    "torch._dynamo",
    "torch.distributed",
    "torch.nn.parallel",
    "datasets",
    "pyarrow.parquet",
]
MODULES += ["matplotlib.pyplot", "failures", "savers", "science", "states"]
MODULES += ["delta_savers"] if "delta" in built_in() else []
"""What runs and tests of them import; some of it comes late in them, and takes seconds."""
COLLECTED = ["transformers.models.gpt2.modeling_gpt2", "torch._dynamo.testing", "lightning", "peft"]
"""What test files import in addition."""

COMMANDS = {"instar": "instar.cli.main:entry", "torchrun": "torch.distributed.run:main"}
PYTHON, WARM = "python", "warm-python"
WARM_PYTHON = "TESTS_WARM_PYTHON"
"""environment variable: the `warm-python` that runs this process's own forking process"""

INSTAR = "instar.cli.main:main"
"""The body that is the command line itself; its argument is a list of words."""


class Child:
    """One forked process, the leader of its own group; its output is in the file `output_path`."""

    def __init__(self, server: Forks, pid: int, output_path: Path) -> None:
        self._server, self.pid, self.output_path = server, pid, output_path
        self.code: int | None = None

    def output(self) -> str:
        return self.output_path.read_text(encoding="utf-8", errors="replace")

    def signal(self, number: signal.Signals, *, group: bool = False) -> None:
        """Send a signal, to a process that may have ended meanwhile."""
        if self.ended_within(0.0):
            return
        with suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self.pid, number)

    def ended_within(self, seconds: float) -> bool:
        """Whether it ends, waiting so long for it."""
        if self.code is None:
            self.code = self._server.status_of(self.pid, seconds)
        return self.code is not None

    def finish(self, limit_s: float = LIMIT_S) -> int:
        """Wait for the end; the exit code, or minus the number of the signal that ended it."""
        if not self.ended_within(limit_s):
            self.signal(signal.SIGKILL, group=True)
            raise AssertionError(f"not ended within {limit_s} s:\n{self.output()}")
        assert self.code is not None
        return self.code

    def wait_until(self, true: Callable[[], object], limit_s: float = LIMIT_S) -> bool:
        """Wait until `true()`; False where the child ends before."""
        deadline = time.monotonic() + limit_s
        while not true():
            if self.ended_within(POLL_S):
                return bool(true())
            if time.monotonic() > deadline:
                self.signal(signal.SIGKILL, group=True)
                raise AssertionError(f"nothing for {limit_s} s:\n{self.output()}")
        return True

    def wait_for(self, pattern: str) -> bool:
        """Wait until a line of its output matches; False where the child ends before."""
        return self.wait_until(lambda: re.search(pattern, self.output(), re.MULTILINE))


class Forks:
    """The process that forks. Closing it ends every child that is left."""

    def __init__(self, *modules: str) -> None:
        """`modules` are imported once, for all children."""
        self._exit_statuses: dict[int, int] = {}
        self._number = 0
        self._folder = Path(tempfile.mkdtemp(prefix="forks-"))
        self.bin = self._folder / "bin"
        self.bin.mkdir()
        self.command, self.python = self.bin / "instar", self.bin / PYTHON
        calls = self._folder / "calls"
        client = Path(__file__).with_name("forks_client.py").read_text(encoding="utf-8")
        shebang = f"#!{sys.executable} -IS\n"
        for file in map(self.bin.joinpath, (PYTHON, WARM, *COMMANDS)):
            file.write_text(f"{shebang}SERVER = {str(calls)!r}\n{client}", encoding="utf-8")
            file.chmod(0o755)
        self._process = subprocess.Popen(
            [os.environ.get(WARM_PYTHON, sys.executable), __file__, str(calls), *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_bare_environment(),
        )
        assert self._process.stdout is not None
        self._answers = selectors.DefaultSelector()
        self._answers.register(self._process.stdout, selectors.EVENT_READ)
        self._unread = b""
        assert self._answer(START_S) == {"ready": 1}, "the forking process does not start"

    def start(
        self,
        body: str,
        *arguments: Any,
        place: Path,
        environment: Mapping[str, str] | None = None,
        launches: bool = False,
    ) -> Child:
        """Fork a child that runs `body` in the working directory `place`; where it `launches`
        interpreters, these are forked as well."""
        self._number += 1
        output_path = place / f"said-{self._number}"
        output_path.touch()
        request = {
            "body": body,
            "arguments": arguments,
            "place": str(place),
            "said": str(output_path),
        }
        request |= {"environment": dict(environment or {}), "launches": launches}
        line = json.dumps(request)
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()
        while True:
            answer = self._answer(LIMIT_S)
            assert answer is not None, "the forking process does not answer"
            if "started" in answer:
                # numbers come round again after some ten thousand processes
                self._exit_statuses.pop(answer["started"], None)
                return Child(self, answer["started"], output_path)

    def import_now(self, *modules: str) -> None:
        """Import what only few tests need, once for all children that are started from now on."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"modules": modules}).encode() + b"\n")
        self._process.stdin.flush()
        while (answer := self._answer(START_S)) != {"ready": 1}:
            assert answer is not None, "the forking process does not import"

    def status_of(self, pid: int, seconds: float) -> int | None:
        """How a child ended, waiting so long for it; None if it has not."""
        deadline = time.monotonic() + seconds
        while pid not in self._exit_statuses:
            timeout_s = max(0.0, deadline - time.monotonic())
            if self._answer(timeout_s) is None and timeout_s == 0.0:
                return None
        return self._exit_statuses[pid]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(LIMIT_S)
        self._answers.close()
        self._process.stdout.close()
        shutil.rmtree(self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, seconds: float) -> dict[str, Any] | None:
        """The next thing the process says; None if that takes longer."""
        assert self._process.stdout is not None
        while b"\n" not in self._unread:
            if not self._answers.select(seconds):
                return None
            got = os.read(self._process.stdout.fileno(), 1 << 16)
            assert got, "the forking process is gone"
            self._unread += got
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "ended" in answer:
            self._exit_statuses[answer["ended"]] = answer["status"]
        return answer


GRPO = ["trl.trainer.grpo_trainer", "transformers.models.qwen2.modeling_qwen2"]


@cache
def forks_for_grpo() -> Forks:
    """The same process, with what GRPO's trainings and servers import, which takes ten seconds."""
    forks().import_now(*GRPO)
    return forks()


@cache
def forks() -> Forks:
    """The process that forks for all tests of this one."""
    server = Forks(*MODULES)
    atexit.register(server.close)
    return server


def warm_workers(config: Any) -> None:
    """Let the workers of `pytest -n`, and what they start in turn, be forked as well."""
    server = forks()
    server.import_now(*COLLECTED)
    os.environ[WARM_PYTHON] = str(server.bin / WARM)
    config.option.tx = [f"{spec}//python={server.bin / WARM}" for spec in config.option.tx]


def children_as_ranks(
    forks: Forks, size: int, body: str, *arguments: Any, place: Path
) -> list[Child]:
    """`size` children that meet as torchrun's ranks would; one is started as the only process."""
    if size == 1:
        return [forks.start(body, *arguments, place=place)]
    common = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    return [
        forks.start(
            body,
            *arguments,
            place=place,
            environment={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(size)
    ]


def _free_port() -> int:
    """A port below those that the kernel gives to connections, and to whoever asks for any: two tests that asked at once
    have met at the same one."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _bare_environment() -> dict[str, str]:
    instar_names = ("INSTAR_CACHE_DIR", "INSTAR_TORTURE")
    environment = {
        name: value
        for name, value in os.environ.items()
        if (not name.startswith("INSTAR") or name in instar_names) and name != WARM_PYTHON
    }
    return {**environment, "OMP_NUM_THREADS": "1"}


def _serve(listener: socket.socket, modules: Sequence[str]) -> None:
    """Fork for every line of stdin, and say who was started and how each ended; fork for everyone
    who calls at a socket too."""
    _make_what_runs_make_once()
    _import(modules)
    listening, telling = os.pipe()
    os.set_blocking(listening, False)
    os.set_blocking(telling, False)
    signal.set_wakeup_fd(telling)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    living: set[int] = set()
    callers: dict[socket.socket, int] = {}

    def let_go() -> None:
        """In a child: it has nothing to do with all this."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ready.close()
        for file in (listening, telling):
            os.close(file)
        for connection in (listener, *callers):
            connection.close()

    with selectors.DefaultSelector() as ready:
        for file in (0, listening, listener):
            ready.register(file, selectors.EVENT_READ)
        while True:
            events = {key.fileobj for key, _ in ready.select()}
            if listening in events:
                os.read(listening, 1 << 16)
                for pid, status in _reap():
                    living.discard(pid)
                    waiting = [caller for caller, child in callers.items() if child == pid]
                    for caller in waiting:
                        _end_call(ready, caller, status)
                        del callers[caller]
                    if not waiting:
                        _say({"ended": pid, "status": status})
            for caller in [caller for caller in callers if caller in events]:
                with suppress(ProcessLookupError):  # it is gone: nobody waits for the child
                    os.kill(callers[caller], signal.SIGKILL)
                _end_call(ready, caller, None)
                del callers[caller]
            if listener in events:
                caller, _ = listener.accept()
                message = receive(caller)
                assert message is not None
                request, files = message
                pid = os.fork()
                if pid == 0:
                    let_go()
                    peer = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                    caller.close()
                    _become_called(struct.unpack("3i", peer)[0], request, files)
                for file in files:
                    os.close(file)
                caller.sendall(f"{pid}\n".encode())
                living.add(pid)
                callers[caller] = pid
                ready.register(caller, selectors.EVENT_READ)
            if 0 in events:
                line = sys.stdin.buffer.readline()  # the next comes only after the answer
                if not line:
                    break
                request = json.loads(line)
                if "modules" in request:
                    _import(request["modules"])
                    continue
                pid = os.fork()
                if pid == 0:
                    let_go()
                    _become(request)
                with suppress(OSError):  # here as well as there: whoever is first
                    os.setpgid(pid, pid)
                living.add(pid)
                _say({"started": pid})
    for pid in living:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def _import(modules: Sequence[str]) -> None:
    for module in modules:
        import_module(module)
    # TRL imports trackio, which reads its folder when it is imported, and W&B, whose temporary folder
    # the first process to end removes: each child has its own
    for name in [name for name in sys.modules if name.partition(".")[0] in {"trackio", "wandb"}]:
        del sys.modules[name]
    gc.freeze()  # what children do not touch is not copied
    _say({"ready": 1})


def _make_what_runs_make_once() -> None:
    """Each run would take a second for these: how values are written in YAML, and the report. How
    fast the processor is, it measures by small products: a fifth of a second less."""
    from instar.config.load import load_config
    from instar.record import device

    load_config(None, []).to_yaml()
    for extension in built_in().values():
        if extension.at_end:
            load_target(extension.at_end)
    device._CPU_SIDES = (64,)


def _end_call(ready: selectors.BaseSelector, caller: socket.socket, status: int | None) -> None:
    ready.unregister(caller)
    with suppress(OSError):
        if status is not None:
            caller.sendall(f"{status}\n".encode())
    caller.close()


def _reap() -> list[tuple[int, int]]:
    exits = []
    with suppress(ChildProcessError):
        while (result := os.waitpid(-1, os.WNOHANG))[0]:
            exits.append((result[0], os.waitstatus_to_exitcode(result[1])))
    return exits


def _say(answer: Mapping[str, int]) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")


def _become_called(caller: int, request: Mapping[str, Any], files: Sequence[int]) -> NoReturn:
    """Be the installed command or an interpreter, for the process that called."""

    def work() -> int:
        try:
            os.setpgid(0, request["group"])
        except OSError:  # of another session
            os.setpgid(0, 0)
        _enter_namespaces(caller)
        put(files, [0, 1, 2, *request["kept"]])
        if Path(request["words"][0]).name != WARM:
            fork_interpreters()
        put_in(request["place"], request["environment"])
        program, *words = request["words"]
        return _command(program, words)

    run_and_leave(work)


def _enter_namespaces(pid: int) -> None:
    """Share another process's network, host name and mounts."""
    for kind in ("net", "uts", "mnt"):
        target, current = (Path("/proc", str(of), "ns", kind) for of in (pid, "self"))
        if target.readlink() != current.readlink():
            with target.open() as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                    raise OSError(ctypes.get_errno(), f"cannot enter {target}")


def _command(program: str, words: Sequence[str]) -> int:
    """`python`, or a command as it is installed beside it."""
    if (name := Path(program).name) in (PYTHON, WARM):
        return interpret(words)
    module, _, function = COMMANDS[name].partition(":")
    sys.argv[:] = [program, *words]
    sys.path[0] = str(Path(sys.executable).parent)
    getattr(import_module(module), function)()
    return 0


def _become(request: Mapping[str, Any]) -> NoReturn:
    """Do what was asked, as a process that has nothing of its parent but what it imported."""
    code = 1
    try:
        os.setpgid(0, 0)
        output = os.open(request["said"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(request["place"])
        os.environ.update(request["environment"])
        if request["launches"]:
            fork_interpreters()
        module, _, name = request["body"].partition(":")
        code = getattr(import_module(module), name)(*request["arguments"]) or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    with socket.socket(socket.AF_UNIX) as calls:
        calls.bind(sys.argv[1])
        calls.listen(64)
        _serve(calls, sys.argv[2:])
