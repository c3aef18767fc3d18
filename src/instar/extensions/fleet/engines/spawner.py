"""Starts process trees that end with their launcher, through a small forking helper (`shim.py`)."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instar.extensions.fleet.engines import shim
from instar.processes.child import Child

_PACKET_BYTES = 1 << 16


@dataclass(frozen=True)
class Command:
    """A command, where it runs, and how it is stopped."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    log: Path
    """stdout and stderr are appended to it"""
    result: Path
    """file that receives the exit status, also when the launcher is gone by then"""
    header: str = ""
    """line appended to the log first"""
    stop: signal.Signals = signal.SIGTERM
    grace_s: float = 10.0
    """seconds between `stop` and SIGKILL when the launcher is gone"""
    scratch: bool = False
    """give it a TMPDIR of its own, which is deleted when its tree has ended"""


@dataclass(frozen=True)
class Exit:
    """How a command ended; `status` as in `subprocess`: negative if a signal ended it."""

    status: int
    was_stopped: bool
    """whether it was asked to end before it did"""
    time: float
    cpu_s: float
    peak_bytes: int

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Exit:
        """Raise ValueError if a field is missing or of another type: 0.5 is not the status of a success."""
        try:
            status, was_stopped, peak = data["status"], data["stopped"], data["peak_bytes"]
            seconds = data["time"], data["cpu_s"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"not the result of a command: {error!r}") from None
        if (type(status), type(was_stopped), type(peak)) != (int, bool, int):
            raise ValueError("not the result of a command: a field of another type")
        if not all(type(number) in (int, float) and math.isfinite(number) for number in seconds):
            raise ValueError("not the result of a command: a time that is none")
        return cls(status, was_stopped, float(seconds[0]), float(seconds[1]), peak)


class Tree:
    """A running process tree, until it is closed. Not thread-safe."""

    def __init__(self, link: socket.socket) -> None:
        link.setblocking(False)
        self._link = link

    def fileno(self) -> int:
        """Readable when `receive` has something to return."""
        return self._link.fileno()

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived; the last is {"gone": True} when the tree has ended.

        That is also reported if the shim itself was killed: no status precedes it then.
        """
        messages: list[dict[str, Any]] = []
        with suppress(BlockingIOError):
            while True:
                try:
                    packet = self._link.recv(_PACKET_BYTES)
                except ConnectionResetError:
                    packet = b""
                messages.append(json.loads(packet) if packet else {"gone": True})
                if "gone" in messages[-1]:
                    break
        return messages

    def stop(self, number: signal.Signals, grace_s: float) -> None:
        """Send the signal to the command's session, and SIGKILL to the tree after `grace_s` seconds;
        0: at once."""
        with suppress(OSError):  # it has ended
            self._link.send(json.dumps({"stop": int(number), "grace": grace_s}).encode())

    def close(self) -> None:
        """Forget the tree; if it still runs, this stops it like the end of the launcher."""
        self._link.close()


class Spawner:
    """Starts commands in trees of their own. When this process ends, they are stopped.

    Close it after all trees have ended.
    """

    def __init__(self) -> None:
        self._helper: Child | None = None
        self._control: socket.socket | None = None

    def start(self, command: Command, locks: Sequence[int] = ()) -> Tree:
        """Start a command; `locks` are descriptors that stay open until its tree has ended.

        Raises:
            OSError: the log cannot be opened, or no process can be started.
        """
        command.log.parent.mkdir(parents=True, exist_ok=True)
        request = {
            "argv": command.argv,
            "env": dict(command.env),
            "cwd": str(command.cwd),
            "header": command.header,
            "result": str(command.result),
            "stop": int(command.stop),
            "grace": command.grace_s,
            "scratch": command.scratch,
        }
        parent_socket, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            log = os.open(command.log, flags, 0o644)
            try:
                message = os.memfd_create("request")
                try:
                    os.write(message, json.dumps(request).encode())
                    os.lseek(message, 0, os.SEEK_SET)
                    self._send([message, child_socket.fileno(), log, *locks])
                finally:
                    os.close(message)
            finally:
                os.close(log)
        except BaseException:
            parent_socket.close()
            raise
        finally:
            child_socket.close()
        return Tree(parent_socket)

    def close(self) -> None:
        """Let the helper end."""
        if self._control is not None:
            self._control.close()
        if self._helper is not None:
            self._helper.wait()

    def _send(self, descriptors: Sequence[int]) -> None:
        for retry in (False, True):
            if self._control is None or (self._helper and self._helper.poll() is not None):
                self._start_helper()
            assert self._control is not None
            try:
                socket.send_fds(self._control, [b"\0"], list(descriptors))
                return
            except (BrokenPipeError, ConnectionResetError):  # the helper was killed
                if retry:
                    raise
                self._control.close()
                self._control = None

    def _start_helper(self) -> None:
        self._helper, self._control = Child.connect(
            [sys.executable, "-I", "-S", str(Path(shim.__file__))],
            socket.SOCK_SEQPACKET,
            env={},
            new_session=True,
        )


class RunningProcess:
    """A process tree and the futures of its end."""

    def __init__(self, tree: Tree, on_started: Callable[[int], None]) -> None:
        """`on_started`: called with the command's process id."""
        loop = asyncio.get_running_loop()
        self.exit_future: asyncio.Future[Exit] = loop.create_future()
        self.gone_future: asyncio.Future[None] = loop.create_future()
        self.error = ""
        """why the command could not be started"""
        self.asked_to_stop = False
        self._tree = tree
        self._on_started = on_started
        loop.add_reader(tree.fileno(), self._receive)

    def _receive(self) -> None:
        for message in self._tree.receive():
            if "pid" in message:
                self._on_started(message["pid"])
            elif "error" in message:
                self.error = message["error"]
            elif "status" in message and not self.exit_future.done():
                self.exit_future.set_result(Exit.from_json(message))
            elif "gone" in message:
                asyncio.get_running_loop().remove_reader(self._tree.fileno())
                self._tree.close()
                if not self.exit_future.done():  # its shim was killed, and with it the tree
                    status = 127 if self.error else -9
                    self.exit_future.set_result(
                        Exit(status, self.asked_to_stop, time.time(), 0.0, 0)
                    )
                self.gone_future.set_result(None)

    async def stop(self, number: signal.Signals, grace_s: float) -> None:
        """Ask the tree to end, and wait until it has; see `Tree.stop`."""
        if not self.gone_future.done():
            self.asked_to_stop = True
            self._tree.stop(number, grace_s)
            await asyncio.shield(self.gone_future)

    def kill(self) -> None:
        """Kill the tree at once."""
        if not self.gone_future.done():
            self._tree.stop(signal.SIGKILL, 0.0)
