"""Processes that a forked one starts with `subprocess` as `python -m MODULE` or `python FILE`, or with
`multiprocessing`, are forked as well.

The forked process keeps a spare child aside, forked before it did anything, which forks them in turn. It is their
parent all the same: it takes them over from the spare, and can wait for them, and dies as their parent would.
"""

from __future__ import annotations

import array
import ctypes
import inspect
import json
import multiprocessing.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from interpreter import interpret, put_in, run_and_leave

PR_SET_CHILD_SUBREAPER = 36
ANSWER_S = 60.0
LAUNCHERS = {"instar.cli.main", "torch.distributed.run", "torch.distributed.launch"}


def send(line: socket.socket, request: Mapping[str, Any], files: Sequence[int]) -> None:
    """Send JSON, with its length before it, and open files."""
    text = json.dumps(request).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
    line.sendmsg([len(text).to_bytes(8, "little")], rights)
    line.sendall(text)


def receive(line: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """What `send` sent; None where nobody will send any more."""
    size = array.array("i").itemsize
    first, ancillary, _, _ = line.recvmsg(8, socket.CMSG_LEN(64 * size))
    if not first:
        return None
    files = array.array("i")
    for _, _, data in ancillary:
        files.frombytes(data[: len(data) - len(data) % size])
    length, text = int.from_bytes(first, "little"), b""
    while len(text) < length:
        text += line.recv(length - len(text))
    return json.loads(text), list(files)


def fork_interpreters() -> None:
    """From now on, interpreters that this process starts are forked. It has no other thread yet."""
    line, other = socket.socketpair()
    caller = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    if os.fork() == 0:
        _serve(other, caller)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    other.close()
    execute, lock = subprocess.Popen._execute_child, threading.Lock()  # type: ignore[attr-defined]
    signature = inspect.signature(execute)

    def fork(
        words: Sequence[str],
        files: Sequence[int],
        pass_fds: Sequence[int],
        place: str | os.PathLike[str] | None = None,
        environment: Mapping[str, str] | None = None,
        session: bool = False,
    ) -> int:
        request = {
            "words": words,
            "place": os.fspath(place or Path.cwd()),
            "environment": dict(os.environ if environment is None else environment),
            "kept": pass_fds,
            "session": session,
            "blocked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
        }
        with lock:
            _take_over_orphans(True)
            send(line, request, [*files, *pass_fds])
            pid = int(line.recv(32))
            _take_over_orphans(False)
        return pid

    def execute_by_fork(self: Any, *arguments: Any) -> None:
        options = signature.bind(self, *arguments).arguments
        if not (words := _words(options)):
            execute(self, *arguments)
            return
        streams = [options["p2cread"], options["c2pwrite"], options["errwrite"]]
        files = [number if file < 0 else file for number, file in enumerate(streams)]
        self.pid = fork(
            words,
            files,
            sorted(options["pass_fds"]),
            options["cwd"],
            options["env"],
            options["start_new_session"],
        )
        self._child_created = True
        self._close_pipe_fds(*(options[name] for name in PIPES))

    spawn = multiprocessing.util.spawnv_passfds

    def spawn_by_fork(path: bytes, arguments: Sequence[Any], pass_fds: Sequence[int]) -> int:
        words = arguments[arguments.index("-c") :]
        if "resource_tracker" in words[1]:  # imports nothing
            return spawn(path, arguments, pass_fds)
        return fork(words, [0, 1, 2], sorted(map(int, pass_fds)))

    subprocess.Popen._execute_child = execute_by_fork  # type: ignore[attr-defined]
    multiprocessing.util.spawnv_passfds = spawn_by_fork


PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def _words(options: Mapping[str, Any]) -> list[str]:
    """What is behind `python` in a command to be forked; empty for any other."""
    if (
        isinstance(options["args"], str | bytes | os.PathLike)
        or options["shell"]
        or options["preexec_fn"]
    ):
        return []
    program, *words = map(os.fspath, options["args"])
    if program == str(Path(sys.executable).with_name("instar")):
        return ["-m", "instar.cli.main", *words]
    first = next((word for word in words if word != "-u"), "-")
    is_forked = program == sys.executable and (first == "-m" or not first.startswith("-"))
    return words if is_forked else []


def _take_over_orphans(take: bool) -> None:
    """Whether this process becomes the parent of descendants whose parent ends."""
    assert ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(take), 0, 0, 0) == 0


def _serve(line: socket.socket, caller: int) -> None:
    """Be the spare process, until its caller has ended. All signals are blocked."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    _close_all_but(line.fileno())
    while (message := receive(line)) is not None:
        request, files = message
        middle = os.fork()
        if middle == 0:
            if os.fork() == 0:
                _become(line, caller, request, files)
            os._exit(0)
        os.waitpid(middle, 0)
        for file in files:
            os.close(file)
    os._exit(0)


def _become(
    line: socket.socket, caller: int, request: Mapping[str, Any], files: Sequence[int]
) -> NoReturn:
    """Be the interpreter that was asked for, once the caller is this process's parent."""
    deadline = time.monotonic() + ANSWER_S
    while os.getppid() != caller:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.001)
    try:
        if request["session"]:
            os.setsid()
        line.sendall(str(os.getpid()).encode())
        line.close()
        put(files, [0, 1, 2, *request["kept"]])
        if LAUNCHERS & set(request["words"]):
            fork_interpreters()
        put_in(request["place"], request["environment"])
        signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    except BaseException:
        os._exit(1)
    run_and_leave(lambda: interpret(request["words"]))


def put(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Give open files these numbers, and close all others."""
    free = max([*files, *numbers]) + 1
    spare_numbers = list(range(free, free + len(files)))
    for file, number in zip(files, spare_numbers, strict=True):
        os.dup2(file, number)
    for file, number in zip(spare_numbers, numbers, strict=True):
        os.dup2(file, number)
    _close_all_but(*numbers)


def _close_all_but(*numbers: int) -> None:
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        if int(name) > 2 and int(name) not in numbers:
            with suppress(OSError):
                os.close(int(name))
