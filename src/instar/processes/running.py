"""A process tree as futures of an event loop."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable

from instar.processes.spawner import Exit, Tree


class RunningProcess:
    """A process tree and the futures of its end."""

    def __init__(self, tree: Tree, on_started: Callable[[int], None]) -> None:
        """`on_started`: called with the command's process id."""
        loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[Exit] = loop.create_future()
        self.gone: asyncio.Future[None] = loop.create_future()
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
            elif "status" in message and not self.exited.done():
                self.exited.set_result(Exit.from_json(message))
            elif "gone" in message:
                asyncio.get_running_loop().remove_reader(self._tree.fileno())
                self._tree.close()
                if not self.exited.done():  # its shim was killed, and with it the tree
                    status = 127 if self.error else -9
                    self.exited.set_result(Exit(status, self.asked_to_stop, time.time(), 0.0, 0))
                self.gone.set_result(None)

    async def stop(self, number: signal.Signals, grace_s: float) -> None:
        """Ask the tree to end, and wait until it has; see `Tree.stop`."""
        if not self.gone.done():
            self.asked_to_stop = True
            self._tree.stop(number, grace_s)
            await asyncio.shield(self.gone)

    def kill(self) -> None:
        """Kill the tree at once."""
        if not self.gone.done():
            self._tree.stop(signal.SIGKILL, 0.0)
